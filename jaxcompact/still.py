"""What nothing differentiated reaches: data that are made of data.

The backward pass reads it where it ends alone, as an image that was resampled: that, or
something on the way there, may take fewer bytes than all that it is made of.
"""

import math
from collections.abc import Collection, Mapping, Set

from jaxcompact.arrays import is_inexact, nbytes_of
from jaxcompact.graph import Graph, behind
from jaxcompact.tensor import Tensor


def find_ends(
    graph: Graph,
    found: Mapping[int, Tensor],
    moving: Collection[int],
    frozen: Collection[int],
) -> set[int]:
    """Those that are less to store than what is ``found``, and that they are made of.

    ``moving``: values that are differentiated; ``frozen``: inputs that are none, which
    take no bytes.
    """
    stored = {v for v, t in found.items() if not t.cheap} - {*frozen}
    leads, moved = {*stored}, {*moving}  # what is made of these
    for op in graph.ops:
        if found.keys().isdisjoint(op.outs):
            for values in leads, moved:
                if not values.isdisjoint(op.reads):
                    values.update(op.outs)
    ends = {
        value: None
        for op in graph.ops
        if any(v in moving for v in op.outs)
        for value in op.reads
        if value in leads and value not in moved
    }
    groups: list[tuple[set[int], set[int]]] = []  # ends, and what they are made of
    for end in ends:
        of = behind([end], graph, lambda op: found.keys().isdisjoint(op.outs))
        both = {end}, stored.intersection(of)
        apart = [group for group in groups if group[1].isdisjoint(both[1])]
        for group in groups:
            if group not in apart:
                both = both[0] | group[0], both[1] | group[1]
        groups = [*apart, both]
    least = (_least(values, graph, stored, leads) for values, _ in groups)
    return set().union(*least) - stored


def _least(ends: set[int], graph: Graph, stored: Set[int], leads: Set[int]) -> set[int]:
    """Of what a way back from the ends to what is stored crosses, the fewest bytes.

    ``leads``: what is made of what is stored.
    """
    place = {v: i for i, op in enumerate(graph.ops) for v in op.outs}

    def size(values: Set[int]) -> float:
        floating = all(v in stored or is_inexact(graph.avals[v]) for v in values)
        return sum(nbytes_of(graph.avals[v]) for v in values) if floating else math.inf

    crossed = best = ends
    while inner := crossed - stored:
        last = max(inner, key=place.__getitem__)
        crossed = crossed - {last} | leads.intersection(graph.made_by[last].reads)
        if size(crossed) <= size(best):
            best = crossed
    return best
