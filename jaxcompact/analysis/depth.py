"""Chains of sums, of which each layer would make those of all before it again."""

from collections.abc import Collection

from jaxcompact.arrays import is_inexact
from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import ADDITIONS

_MOST = 4  # tensors that one of their size is made again of


def find_deep(
    graph: Graph, candidates: Collection[int], expensive: Collection[Op]
) -> list[Op]:
    """Additions that would be made again of more than four candidates of their size.

    Not those that are only added to others: of these the last one is enough.
    """
    made_of: dict[int, frozenset[int]] = {v: frozenset((v,)) for v in candidates}
    found = []
    for op in graph.ops:
        each = [made_of[v] for v in op.reads if v in made_of]
        if not each or op in expensive:
            continue
        of = frozenset().union(*each) if len(each) > 1 else each[0]
        for value in op.outs:
            if value in candidates:
                continue
            made_of[value] = of
            if len(of) <= _MOST or not _is_read(op, value, graph):
                continue
            size = graph.avals[value].size
            if sum(graph.avals[v].size == size for v in of) > _MOST:
                found.append(op)
                made_of[value] = frozenset((value,))
    return found


def _is_read(op: Op, value: int, graph: Graph) -> bool:
    """Whether it is an addition that others than additions read."""
    return (
        op.kind in ADDITIONS
        and is_inexact(graph.avals[value])
        and any(reader.kind not in ADDITIONS for reader in graph.readers[value])
    )
