"""Chains of sums, of which each layer would make those of all before it again."""

from collections.abc import Collection, Mapping

from jaxcompact.graph import Graph, Op, is_float
from jaxcompact.kinds import expensive

_MOST = 4  # tensors that one of their size is made again of


def find_deep(
    graph: Graph, readers: Mapping[int, list[Op]], candidates: Collection[int]
) -> list[Op]:
    """Additions that would be made again of more than four candidates of their size.

    Not those that are only added to others: of these the last one is enough.
    """
    made_of: dict[int, frozenset[int]] = {v: frozenset((v,)) for v in candidates}
    found = []
    for op in graph.ops:
        of = frozenset().union(*(made_of.get(v, ()) for v in op.reads))
        for value in op.outs if not expensive(op) else ():
            if value in candidates:
                continue
            size = graph.avals[value].size
            same = sum(graph.avals[v].size == size for v in of)
            made_of[value] = of
            if same > _MOST and _is_read(op, value, graph, readers):
                found.append(op)
                made_of[value] = frozenset((value,))
    return found


def _is_read(op: Op, value: int, graph: Graph, readers: Mapping[int, list[Op]]) -> bool:
    """Whether it is an addition that others than additions read."""
    sums = ("add", "add_any", "sub")
    return (
        op.kind in sums
        and is_float(graph.avals[value])
        and any(reader.kind not in sums for reader in readers[value])
    )
