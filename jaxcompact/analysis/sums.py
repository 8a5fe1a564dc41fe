"""Sums whose terms nothing else reads: one tensor to store in place of several."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from jax.extend.core import Literal

from jaxcompact.arrays import is_inexact
from jaxcompact.graph import Graph, Op, Value
from jaxcompact.kinds import ADDITIONS, BLOCKS, CUTS

_SUMS = ADDITIONS | {"convert_element_type", "neg"}
# Of what they make a few entries may be far larger than all others.
_STEEP = frozenset("exp exp2 integer_pow log log1p pow square tan".split())


@dataclass(frozen=True)
class _Sum:
    """``op`` made its last addition; ``streamed``: a stream is in it."""

    op: Op
    terms: tuple[int, ...]
    streamed: bool = False


def find_sums(
    graph: Graph,
    fixed: Collection[int],
    candidates: Collection[int],
    streams: Collection[int],
) -> dict[Op, tuple[int, ...]]:
    """The last addition of each sum, and the candidates in it.

    Terms, as of products, may be multiplied by what has no cotangent, dropped out,
    converted to other floats, and added to each other and to ``fixed`` values. All that
    reads one of them is linear: no gradient needs it.

    There are two or more of them, or one that is added to one of ``streams``, values
    made of candidates, as a residual stream is. Made again of its terms such a sum is
    made of those of all layers before it, in each layer.
    """
    # What no float is given for has no cotangent, whatever is differentiated.
    still = {*graph.constants}
    still.update(v for v in graph.inputs if not is_inexact(graph.avals[v]))
    zeros: set[int] = set()
    sums: dict[int, _Sum] = {}

    for op in graph.ops:
        if op.kind == "broadcast_in_dim" and _is_zero(op.ins[0]):
            zeros.update(op.outs)
        if still.issuperset(op.reads):
            still.update(op.outs)
        if op.kind in CUTS:  # of what is stored in parts
            sums |= {v: _Sum(op, (v,)) for v in op.outs if v in candidates}
        single = len(op.outs) == 1 and op.kind not in BLOCKS
        if single and op.outs[0] in candidates:
            sums[op.outs[0]] = _Sum(op, op.outs)
            continue
        terms = {v for v in op.reads if v in sums and len(graph.readers[v]) == 1}
        if not (terms and single):
            continue
        carried = {v for v in op.reads if v not in terms and v not in fixed} - still
        carried -= zeros
        if op.kind == "select_n":
            carried.discard(op.ins[0])
        if not streams.issuperset(carried):
            continue
        if not _is_linear(op, graph, (*terms, *carried), still, zeros):
            continue
        given = tuple(term for v in sorted(terms) for term in sums[v].terms)
        if carried and not (op.kind in ADDITIONS and _fits(op, given, graph)):
            continue
        joined = [sums.pop(v) for v in terms]
        # What is done to the whole of it, as to add a mask, is done again.
        adds = carried or len(joined) > 1
        sums[op.outs[0]] = _Sum(
            op if adds else joined[0].op,
            given,
            bool(carried) or any(each.streamed for each in joined),
        )
    return {s.op: s.terms for s in sums.values() if s.streamed or len(s.terms) > 1}


def find_streams(
    graph: Graph, stored: Collection[int], expensive: Collection[Op]
) -> set[int]:
    """Values made of the candidates that are stored, as even as these are."""
    found = set(stored)
    for op in graph.ops:
        even = op.reads
        if op.kind == "div":
            even = [v for v in op.ins[:1] if isinstance(v, int)]
        if op.kind not in _STEEP and op not in expensive and not found.isdisjoint(even):
            found.update(op.outs)
    return found


def _is_zero(value: Value) -> bool:
    return isinstance(value, Literal) and not np.any(value.val)


def _fits(op: Op, terms: Collection[int], graph: Graph) -> bool:
    """Whether what it makes takes no more than the terms."""
    given = sum(graph.avals[v].dtype.itemsize for v in terms)
    return graph.avals[op.outs[0]].dtype.itemsize <= given


def _is_linear(
    op: Op,
    graph: Graph,
    moving: Iterable[int],
    still: Collection[int],
    zeros: Collection[int],
) -> bool:
    """Whether it makes one array, a sum of multiples of those that move."""
    avals = [graph.avals[v] for v in (*moving, *op.outs)]
    if any(a.shape != avals[0].shape or not is_inexact(a) for a in avals):
        return False

    def constant(value: Value) -> bool:
        return isinstance(value, Literal) or value in still

    if op.kind in ("div", "mul"):
        x, y = op.ins
        return constant(y) or (op.kind == "mul" and constant(x))
    if op.kind == "select_n":
        return not any(
            constant(v) and not (_is_zero(v) or v in zeros) for v in op.ins[1:]
        )
    return op.kind in _SUMS
