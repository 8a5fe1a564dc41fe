"""Which tensors others are divided by: near zero, a rounded one is no substitute."""

import jax.numpy as jnp

from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import LAYOUT, renames

# A small absolute error in what these read is a large one in what they make.
_STEEP = frozenset("log sqrt rsqrt cbrt pow".split())
# With a constant: ``x + eps``, ``max(x, eps)``.
_GUARDS = frozenset("add sub mul max min clamp select_n".split())


def find_divisors(graph: Graph, fixed: set[int]) -> set[int]:
    """Values that are divided by, or that a logarithm or a root is taken of.

    Followed back through layout, constant factors and guards against zero, not
    through sums: a norm's square root says nothing of the tensor that is normalized.
    """
    made_by = {value: op for op in graph.ops for value in op.outs}
    found: set[int] = set()

    def is_number(value: int) -> bool:
        return jnp.issubdtype(graph.avals[value].dtype, jnp.inexact)

    def follow(value: int) -> None:
        while value not in found and value not in fixed:
            found.add(value)
            op = made_by.get(value)
            if op is None or not _keeps_zeros(op):
                return
            sources = [v for v in op.reads if v not in fixed and is_number(v)]
            if len(sources) != 1:
                return
            (value,) = sources

    for op in graph.ops:
        for value in _steeply_read(op):
            follow(value)
    return found


def _steeply_read(op: Op) -> list[int]:
    if op.kind == "div":
        return [v for v in op.reads if v == op.ins[1]]
    negative = op.kind == "integer_pow" and op.eqn.params["y"] < 0
    return op.reads[:1] if negative or op.kind in _STEEP else []


def _keeps_zeros(op: Op) -> bool:
    return (
        op.kind in LAYOUT
        or op.kind in _GUARDS
        or op.kind == "convert_element_type"
        or renames(op)
    )
