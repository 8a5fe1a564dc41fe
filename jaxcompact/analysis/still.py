"""What nothing differentiated reaches: data that are made of data.

The backward pass reads it where it ends alone, as an image that was resampled: that, or
something on the way there, may take fewer bytes than all that it is made of.
"""

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Set
from itertools import islice

from jaxcompact.analysis.tensor import Tensor
from jaxcompact.arrays import is_inexact, nbytes_of
from jaxcompact.graph import Graph


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
    kept = {v for v, t in found.items() if not (t.cheap or t.few_terms)}
    stored = kept - {*frozen}
    leads, moved = {*stored}, {*moving}  # what is made of these
    for op in graph.ops:
        if kept.isdisjoint(op.outs):
            for values in leads, moved:
                if not values.isdisjoint(op.reads):
                    values.update(op.outs)
    leads -= moved
    ends = {
        value: None
        for op in graph.ops
        if any(v in moving for v in op.outs)
        for value in op.reads
        if value in leads and value not in stored
    }
    if not ends:
        return set()
    groups = _joined(graph, stored, leads)
    together: dict[int, list[int]] = {}
    for end in ends:
        together.setdefault(groups[end], []).append(end)
    cuts = (_least(values, graph, stored, leads) for values in together.values())
    return set().union(*cuts) - stored


def _joined(graph: Graph, stored: Set[int], leads: Set[int]) -> dict[int, int]:
    """For each of the values, one that stands for all that are made of the same."""
    above = {v: v for v in leads}

    def top(value: int) -> int:
        while above[value] != value:
            above[value] = above[above[value]]
            value = above[value]
        return value

    for op in graph.ops:
        for made in leads.intersection(op.outs) - stored:
            for value in leads.intersection(op.reads):
                above[top(value)] = top(made)
    return {v: top(v) for v in leads}


def _least(
    ends: Collection[int], graph: Graph, stored: Set[int], leads: Set[int]
) -> set[int]:
    """Of what a way back from the ends to what is stored crosses, the fewest bytes.

    ``leads``: what is made of what is stored.
    """
    sizes = [size for size, _ in _crossed(ends, graph, stored, leads)]
    best = max(i for i, size in enumerate(sizes) if size == min(sizes))
    _, values = next(islice(_crossed(ends, graph, stored, leads), best, None))
    return values


def _crossed(
    ends: Collection[int], graph: Graph, stored: Set[int], leads: Set[int]
) -> Iterator[tuple[float, set[int]]]:
    """On a way back from the ends, what is crossed, and its bytes; infinitely many of
    integers that are not stored anyway."""
    place = {v: i for i, op in enumerate(graph.ops) for v in op.outs}
    crossed, nbytes, others = set[int](), 0, 0
    todo: list[tuple[int, int]] = []

    def count(value: int, sign: int) -> None:
        nonlocal nbytes, others
        if value in stored or is_inexact(graph.avals[value]):
            nbytes += sign * nbytes_of(graph.avals[value])
        else:
            others += sign

    def cross(values: Collection[int]) -> None:
        for value in set(values) - crossed:
            crossed.add(value)
            count(value, 1)
            if value not in stored:
                heapq.heappush(todo, (-place[value], value))

    cross(ends)
    yield (math.inf if others else nbytes), crossed
    while todo:
        _, value = heapq.heappop(todo)
        crossed.remove(value)
        count(value, -1)
        cross(leads.intersection(graph.made_by[value].reads))
        yield (math.inf if others else nbytes), crossed
