"""Which values of a graph have tangents, and which of these cotangents."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress

from jaxcompact.arrays import is_inexact
from jaxcompact.graph import Graph, Op, bodies, state_of


def moving_values(graph: Graph, perturbed: Sequence[bool]) -> set[int]:
    """The values on a path from the differentiated inputs to the outputs."""
    reaching = {v for v in graph.outputs if isinstance(v, int)}
    for op in reversed(graph.ops):
        if op.kind != "stop_gradient" and not reaching.isdisjoint(op.outs):
            reaching.update(op.reads)
    return reaching & _with_tangents(graph, perturbed)


def _with_tangents(graph: Graph, perturbed: Iterable[bool]) -> set[int]:
    def floating(values: Iterable[int]) -> Iterator[int]:
        return (v for v in values if is_inexact(graph.avals[v]))

    found = set(floating(compress(graph.inputs, perturbed)))
    for op in graph.ops:
        if not found.isdisjoint(op.reads):
            found.update(floating(_moved(op, found)))
    return found


def _moved(op: Op, moving: Collection[int]) -> Collection[int]:
    """Its outputs with a tangent: of a loop's state and of branches' not all. What a
    rule makes of tangents is not told from the function that it is of."""
    if op.kind == "stop_gradient":
        return ()
    known = op.kind in ("checkpoint", "cond", "remat2", "scan", "shard_map")
    each = [*bodies(op)] if known else []
    found: set[int] = set()
    for body, first in each:
        given = [isinstance(v, int) and v in moving for v in op.ins[first:]]
        before: list[bool] = []
        while given != before:
            before, inside = [*given], _with_tangents(body, given)
            ends = [isinstance(v, int) and v in inside for v in body.outputs]
            for i, o in state_of(op).items():
                given[i] |= ends[o]
        found.update(compress(op.outs, ends))
    return found if known and len(each) == len(op.jaxprs) else op.outs
