"""The planner: which tensors to keep, encode, move or make again, under a budget."""

from jaxcompact.planner.effects import Sensitivity as Sensitivity
from jaxcompact.planner.front import Front as Front
from jaxcompact.planner.front import front as front
from jaxcompact.planner.plan import Plan as Plan
from jaxcompact.planner.scan import scan_step as scan_step
from jaxcompact.planner.search import budget_bytes as budget_bytes
from jaxcompact.planner.search import plan as plan
from jaxcompact.planner.search import plan_step as plan_step
from jaxcompact.planner.sensitivity import measuring as measuring
from jaxcompact.planner.sensitivity import sensitivity as sensitivity
