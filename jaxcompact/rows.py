"""Which entries of a tensor a norm sets to one scale: groups are best made of these.

A batch norm's are the tokens of a channel, a head's its entries in one token. Beside
those of another, that is larger, little is left of a small one's in few bits, and the
norm makes it as large as the others.
"""

from collections.abc import Collection, Iterable
from itertools import takewhile
from math import prod
from operator import itemgetter

from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import ELEMENTWISE, expensive, renames

# Numbers of entries, in the order of memory, and whether a norm sums them up.
Parts = list[tuple[int, bool]]


def find_rows(
    graph: Graph, sums: Iterable[Op], stored: Collection[int]
) -> dict[int, int]:
    """Of values to be stored that norms read, the last axis's entries in one group.

    One where the norm sums over what is before the last axis, channel by channel; as
    many as a head has where it sums over a part of that axis. Others are left out.

    ``sums``: the norms' reductions.
    """
    found: dict[int, int] = {}
    for op in sums:
        if "axes" not in op.eqn.params:
            continue
        for source in op.reads:
            shape, axes = graph.avals[source].shape, op.eqn.params["axes"]
            parts = [(size, i in axes) for i, size in enumerate(shape) if size > 1]
            for value, here in _behind(source, parts, graph, stored).items():
                row = _row(graph.avals[value].shape, here) if value in stored else None
                if row is not None:
                    found[value] = min(row, found.get(value, row))
    return found


def _behind(
    value: int, parts: Parts, graph: Graph, stored: Collection[int]
) -> dict[int, Parts]:
    """What a value is made of, entry by entry, to what is stored."""
    found = {value: parts}
    todo = [value]
    for value in todo:
        op = graph.made_by.get(value)
        if op is None or expensive(op) or value in stored:
            continue
        parts = _before(op, found[value], graph)
        size = graph.avals[value].size
        for source in op.reads if parts is not None else ():
            if source not in found and graph.avals[source].size == size:
                found[source] = parts
                todo.append(source)
    return found


def _before(op: Op, parts: Parts, graph: Graph) -> Parts | None:
    """As they lie in what an operation reads; None where that is not known."""
    if op.kind == "transpose":
        axes = op.eqn.params["permutation"]
        by_axis = _split(graph.avals[op.outs[0]].shape, parts)
        return by_axis and sum((by_axis[axes.index(i)] for i in range(len(axes))), [])
    same = op.kind in ELEMENTWISE or op.kind == "custom_jvp_call" or renames(op)
    return parts if same else None


def _split(shape: tuple[int, ...], parts: Parts) -> list[Parts] | None:
    """Axis by axis; None where a part is of two that it is no whole number of."""
    left, by_axis = [*parts], []
    for size in reversed(shape):
        by_axis.insert(0, [])
        while size > 1:
            count, summed = left.pop()
            taken = min(count, size)
            if count % taken or size % taken:
                return None
            by_axis[0].insert(0, (taken, summed))
            size //= taken
            if count > taken:
                left.append((count // taken, summed))
    return by_axis


def _row(shape: tuple[int, ...], parts: Parts) -> int | None:
    by_axis = _split(shape, parts)
    if len(shape) < 2 or not by_axis or not all(shape):
        return None
    *before, last = by_axis
    whole = sum(by_axis, [])
    row = _last(whole)
    if row >= shape[-1]:
        return row if row < prod(shape) else None
    if _last(sum(before, [])) > 1:
        return 1
    return row if row > 1 else None


def _last(parts: Parts) -> int:
    """How many entries, the last ones, are summed up."""
    counts = (count for count, _ in takewhile(itemgetter(1), reversed(parts)))
    return prod(counts)
