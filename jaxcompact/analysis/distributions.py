"""Cumulative distributions: `sigmoid((y - mean) * scale)` of data ``y``.

As a mixture of discretized logistics has them (PixelCNN++). Where one is narrow, which
it learns to be, a mean that is rounded is beside the data.
"""

from collections.abc import Set

from jaxcompact.analysis.differences import pair
from jaxcompact.graph import Graph, Op, behind
from jaxcompact.kinds import ADDITIONS, LAYOUT, renames

_SIGMOIDS = frozenset("erf erfc logistic tanh".split())


def find_means(graph: Graph, moving: Set[int], fixed: Set[int]) -> set[int]:
    """The differences of data and what is learned that are scaled by what is learned,
    and read by a sigmoid."""

    def scales(op: Op) -> bool:
        return op.kind in ("mul", "div") and len(moving.intersection(op.reads)) == 2

    def shifts(op: Op) -> bool:
        return (op.kind in ADDITIONS and len(op.reads) == 1) or (
            op.kind in LAYOUT or renames(op) or op.kind == "convert_element_type"
        )

    def is_difference(value: int) -> bool:
        op = graph.made_by.get(value)
        if op is None or op.kind != "sub" or not pair(op, graph):
            return False
        learned = moving.intersection(op.reads)
        return len(learned) == 1 and learned.isdisjoint(fixed)

    sigmoids = (v for op in graph.ops if op.kind in _SIGMOIDS for v in op.reads)
    scaled = (graph.made_by.get(v) for v in behind(sigmoids, graph, shifts))
    terms = (v for op in scaled if op and scales(op) for v in op.reads)
    return {*filter(is_difference, behind(terms, graph, shifts))}
