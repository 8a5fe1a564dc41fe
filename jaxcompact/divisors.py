"""Which tensors others are divided by: near zero, a rounded one is no substitute."""

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.graph import Graph, Op, graph_of, inner_jaxprs
from jaxcompact.kinds import LAYOUT, SOLVES, renames

# A small absolute error in what these read is a large one in what they make.
_STEEP = frozenset("log sqrt rsqrt cbrt pow".split())
# What these make can only be zero, or have another sign, if what they read has.
_THROUGH = frozenset(
    """abs add clamp convert_element_type div integer_pow max min mul neg select_n
    square sub""".split()
)
_TERMS = 8  # of the longest sum that might vanish as a whole
_GUARD = 0.1  # a constant that keeps what it is added to from zero, as in 1 + x^2


def find_divisors(graph: Graph, fixed: set[int]) -> set[int]:
    """Values that are divided by, as numbers or matrices, or in a logarithm or a root.

    Followed back through layout, sums of a few terms and powers, not through longer
    sums: a norm's square root says nothing of the tensor that is normalized.
    """
    made_by = {value: op for op in graph.ops for value in op.outs}
    found: set[int] = set()

    def follow(value: int) -> None:
        floating = jnp.issubdtype(graph.avals[value].dtype, jnp.inexact)
        if value in found or value in fixed or not floating:
            return
        found.add(value)
        op = made_by.get(value)
        if op is not None and _passes(op, graph):
            for source in op.reads:
                follow(source)

    for op in graph.ops:
        for value in _steeply_read(op):
            follow(value)
    return found


def _steeply_read(op: Op) -> list[int]:
    if op.kind == "div":
        return [v for v in op.reads if v == op.ins[1]]
    if op.kind == "atan2" or op.kind in SOLVES:
        return op.reads
    if op.kind == "custom_jvp_call":  # jnp.hypot
        (body,) = map(graph_of, inner_jaxprs(op))
        steep = find_divisors(body, set(body.constants))
        pairs = zip(op.ins, body.inputs, strict=True)
        return [v for v, inside in pairs if inside in steep and v in op.reads]
    negative = op.kind == "integer_pow" and op.eqn.params["y"] < 0
    return op.reads[:1] if negative or op.kind in _STEEP else []


def _passes(op: Op, graph: Graph) -> bool:
    if op.kind == "reduce_sum":
        (value,) = op.reads
        terms = graph.avals[value].size // max(graph.avals[op.outs[0]].size, 1)
        return terms <= _TERMS
    if op.kind in ("add", "max", "clamp"):
        constants = [v.val for v in op.ins if isinstance(v, Literal)]
        if any(abs(x) >= _GUARD for x in constants):
            return False
    return op.kind in LAYOUT or op.kind in _THROUGH or renames(op)
