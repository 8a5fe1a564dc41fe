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
    ends = {
        value: None
        for op in graph.ops
        if any(v in moving for v in op.outs)
        for value in op.reads
        if value not in moving
    }
    groups: list[tuple[set[int], set[int]]] = []  # ends, and what they are made of
    for end in ends:
        of = {*behind([end], graph, lambda op: found.keys().isdisjoint(op.outs))}
        if of.isdisjoint(stored) or not of.isdisjoint(moving):
            continue
        both = {end}, of
        apart = [group for group in groups if group[1].isdisjoint(of & stored)]
        for group in groups:
            if group not in apart:
                both = both[0] | group[0], both[1] | group[1]
        groups = [*apart, both]
    return set().union(*(_least(*group, graph, stored) for group in groups)) - stored


def _least(ends: set[int], of: set[int], graph: Graph, stored: Set[int]) -> set[int]:
    """Of what a way back from the ends to what is stored crosses, the fewest bytes."""
    place = {v: i for i, op in enumerate(graph.ops) for v in op.outs}
    leads = {*stored}
    for op in graph.ops:
        if not of.isdisjoint(op.outs) and not leads.isdisjoint(op.reads):
            leads.update(op.outs)

    def size(values: Set[int]) -> float:
        floating = all(v in stored or is_inexact(graph.avals[v]) for v in values)
        return sum(nbytes_of(graph.avals[v]) for v in values) if floating else math.inf

    crossed = best = ends & leads
    while inner := crossed - stored:
        last = max(inner, key=place.__getitem__)
        crossed = crossed - {last} | (leads & {*graph.made_by[last].reads})
        if size(crossed) <= size(best):
            best = crossed
    return best
