"""Tensors of which a part is read, or sums of entries: that is less to store."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.graph import Graph, Op, is_float

# One operand, whatever it holds: no gradient reads it.
_PARTS = frozenset(
    """copy expand_dims imag neg real reduce_sum reshape rev slice squeeze
    transpose""".split()
)


def find_parts(graph: Graph, candidates: Collection[int]) -> dict[int, int]:
    """The smallest of what follows from a candidate alone, and all that reads it reads.

    A slice of it, sums of its entries, its entries in a narrower float.
    """
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in {*op.reads}:
            readers.setdefault(value, []).append(op)
    outputs = {v for v in graph.outputs if not isinstance(v, Literal)}
    found = {}
    for candidate in candidates:
        value = smallest = candidate
        while value not in outputs and len(readers.get(value, [])) == 1:
            (op,) = readers[value]
            if not _is_part(op, graph):
                break
            (value,) = op.outs
            if _nbytes(graph.avals[value]) < _nbytes(graph.avals[smallest]):
                smallest = value
        if smallest != candidate:
            found[candidate] = smallest
    return found


def _is_part(op: Op, graph: Graph) -> bool:
    (aval,) = (graph.avals[v] for v in op.outs) if len(op.outs) == 1 else (None,)
    if len(op.reads) != 1 or aval is None:
        return False
    if op.kind == "convert_element_type":
        return is_float(aval) and is_float(graph.avals[op.reads[0]])
    exact = jnp.issubdtype(aval.dtype, jnp.inexact) or op.kind != "reduce_sum"
    return op.kind in _PARTS and exact


def _nbytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize
