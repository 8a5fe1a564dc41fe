"""Tensors of which a part is read, or sums of entries: that is less to store.

And tensors that are read part by part, as one product's dt, B, C, x and z in Mamba-2.
"""

from collections.abc import Collection

import jax.numpy as jnp

from jaxcompact.arrays import nbytes_of
from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import ADDITIONS, BLOCKS, CUTS

# Of one operand, whose numbers no gradient reads.
_LAYOUTS = frozenset("copy reshape transpose".split())
_PLACES = _LAYOUTS | frozenset("expand_dims rev slice squeeze".split())
_SLICES = CUTS | {"slice"}
_NUMBERS = frozenset("convert_element_type imag neg real reduce_sum".split())


def find_parts(graph: Graph, candidates: Collection[int]) -> dict[int, int]:
    """The smallest of what follows from a candidate alone, and all that reads it reads.

    A slice of it, sums of its entries, its entries in a narrower float. Not of what a
    block returns: what it keeps for itself goes with it. A loop's is of its body.
    """
    found, readers = {}, graph.readers
    for candidate in _made(graph, candidates):
        value = smallest = candidate
        while len(readers[value]) == 1:
            (op,) = readers[value]
            if not _is_part(op, graph):
                break
            (value,) = op.outs
            if nbytes_of(graph.avals[value]) < nbytes_of(graph.avals[smallest]):
                smallest = value
        if smallest != candidate:
            found[candidate] = smallest
    return found


def find_slices(
    graph: Graph, candidates: Collection[int], fixed: Collection[int]
) -> dict[int, list[int]]:
    """What each candidate is cut into, of those that are read as slices alone, once
    ``fixed`` values are added."""

    def is_whole(op: Op, at: int) -> bool:
        if op.kind not in ADDITIONS:
            return op.kind in _LAYOUTS
        same = graph.avals[op.outs[0]].dtype == graph.avals[at].dtype
        return same and all(v == at or v in fixed for v in op.reads)

    found, readers = {}, graph.readers
    for value in _made(graph, candidates):
        at = value
        while len(readers[at]) == 1 and is_whole(readers[at][0], at):
            (at,) = readers[at][0].outs
        ops = readers[at]
        slices = [v for op in ops for v in op.outs]
        once = sum(graph.avals[v].size for v in slices) <= graph.avals[at].size
        if len(slices) > 1 and once and all(op.kind in _SLICES for op in ops):
            found[value] = slices
    return found


def _made(graph: Graph, candidates: Collection[int]) -> list[int]:
    """Those that no block returns, except a loop."""
    ops = (op for op in graph.ops if op.kind not in BLOCKS - {"scan"})
    return [v for op in ops for v in op.outs if v in candidates]


def _is_part(op: Op, graph: Graph) -> bool:
    if len(op.reads) != 1 or len(op.outs) != 1:
        return False
    dtypes = [graph.avals[v].dtype for v in (*op.reads, *op.outs)]
    numbers = all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    return op.kind in _PLACES or (numbers and op.kind in _NUMBERS)
