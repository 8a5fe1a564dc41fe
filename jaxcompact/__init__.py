"""Train neural networks in a fraction of the memory."""

from jaxcompact import memory as memory
from jaxcompact import policies as policies
from jaxcompact.actions import Derivative as Derivative
from jaxcompact.actions import Recompute as Recompute
from jaxcompact.actions import Save as Save
from jaxcompact.checkpoint import checkpoint as checkpoint
from jaxcompact.codecs import BitMask as BitMask
from jaxcompact.codecs import Chain as Chain
from jaxcompact.codecs import Codec as Codec
from jaxcompact.codecs import Float8 as Float8
from jaxcompact.codecs import Hadamard as Hadamard
from jaxcompact.codecs import Narrow as Narrow
from jaxcompact.codecs import Offload as Offload
from jaxcompact.codecs import OutlierQuantized as OutlierQuantized
from jaxcompact.codecs import Quantized as Quantized
from jaxcompact.explain import explain as explain
from jaxcompact.limiter import limit_norm_growth as limit_norm_growth
from jaxcompact.linear import linear as linear
from jaxcompact.optimizers import in_subspace as in_subspace
from jaxcompact.optimizers import scale_by_subspace_adam as scale_by_subspace_adam
from jaxcompact.optimizers import subspace_adamw as subspace_adamw
from jaxcompact.optimizers import update_count as update_count
from jaxcompact.planner import Plan as Plan
from jaxcompact.planner import Sensitivity as Sensitivity
from jaxcompact.planner import plan as plan
from jaxcompact.planner import plan_step as plan_step
from jaxcompact.planner import sensitivity as sensitivity
from jaxcompact.policy import Policy as Policy
from jaxcompact.projection import Projection as Projection
from jaxcompact.subspace import Subspace as Subspace
from jaxcompact.subspace import value_and_grad as value_and_grad

__version__ = "0.1.0"
