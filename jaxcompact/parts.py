"""Tensors of which a part is read, or sums of entries: that is less to store."""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import BLOCKS

# Of one operand, whose numbers no gradient reads.
_PLACES = frozenset("copy expand_dims reshape rev slice squeeze transpose".split())
_NUMBERS = frozenset("convert_element_type imag neg real reduce_sum".split())


def find_parts(
    graph: Graph, readers: Mapping[int, list[Op]], candidates: Collection[int]
) -> dict[int, int]:
    """The smallest of what follows from a candidate alone, and all that reads it reads.

    A slice of it, sums of its entries, its entries in a narrower float. Not of what a
    block returns: what it keeps for itself goes with it. A loop's is of its body.
    """
    blocks = BLOCKS - {"scan"}
    found = {}
    for candidate in (v for op in graph.ops if op.kind not in blocks for v in op.outs):
        value = smallest = candidate
        while candidate in candidates and len(readers[value]) == 1:
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
    if len(op.reads) != 1 or len(op.outs) != 1:
        return False
    dtypes = [graph.avals[v].dtype for v in (*op.reads, *op.outs)]
    numbers = all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    return op.kind in _PLACES or (numbers and op.kind in _NUMBERS)


def _nbytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize
