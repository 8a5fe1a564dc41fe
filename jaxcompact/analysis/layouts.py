"""How entries that belong together lie in memory, in what a value is made of."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import ELEMENTWISE, renames

# Numbers of entries, in the order of memory, and whether they are summed up.
Parts = list[tuple[int, bool]]


def parts_before(
    op: Op, value: int, parts: Parts, graph: Graph
) -> Iterator[tuple[int, Parts | None]]:
    """What an operation reads, with its parts there; None where they aren't known."""
    given, shape = op.eqn.params, graph.avals[value].shape
    by_axis = split(shape, parts)
    if op.kind == "transpose":
        axes = given["permutation"]
        turned = by_axis and (by_axis[axes.index(i)] for i in range(len(axes)))
        yield op.reads[0], turned and sum(turned, [])
    elif op.kind in ELEMENTWISE or op.kind == "custom_jvp_call" or renames(op):
        size = graph.avals[value].size
        yield from ((v, parts) for v in op.reads if graph.avals[v].size == size)
    elif by_axis is None:
        return
    elif op.kind == "broadcast_in_dim":
        sizes = op.eqn.invars[0].aval.shape
        axes = zip(given["broadcast_dimensions"], sizes, strict=True)
        for source in op.reads:
            yield source, sum((by_axis[a] for a, n in axes if n > 1), [])
    else:
        for source, starts in _cuts(op, value, shape):
            sizes = graph.avals[source].shape
            of = map(_resized, by_axis, shape, sizes, starts)
            each = [parts for parts in of if parts is not None]
            yield source, sum(each, []) if len(each) == len(sizes) else None


def _cuts(
    op: Op, value: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, Sequence[int]]]:
    """Of what is cut or put together, what that is of, and where one begins in the
    other along each axis."""
    given, zeros = op.eqn.params, [0] * len(shape)
    if op.kind == "concatenate":
        axis = given["dimension"]
        sizes = (v.aval.shape[axis] for v in op.eqn.invars)
        for source, start in zip(op.ins, accumulate(sizes, initial=0), strict=False):
            if source in op.reads:
                yield source, [*zeros[:axis], start, *zeros[axis + 1 :]]
    elif op.kind == "split":
        axis = given["axis"]
        start = sum(given["sizes"][: op.outs.index(value)])
        yield op.reads[0], [*zeros[:axis], start, *zeros[axis + 1 :]]
    elif op.kind == "slice" and {*(given["strides"] or [1])} <= {1}:
        yield op.reads[0], given["start_indices"]
    elif op.kind == "pad" and not any(inner for *_, inner in given["padding_config"]):
        if op.ins[0] in op.reads:
            yield op.ins[0], [low for low, *_ in given["padding_config"]]


def _resized(parts: Parts, size: int, other: int, start: int) -> Parts | None:
    """An axis's parts in what has another size along it."""
    if size == other:
        return parts
    if size < other and parts and parts[0][1]:
        return None  # what is left out may be of any size
    inner = prod(count for count, _ in parts[1:])
    if not parts or start % inner or other % inner:
        return None
    outer = [(other // inner, parts[0][1])] if other > inner else []
    return outer + parts[1:]


def split(shape: tuple[int, ...], parts: Parts) -> list[Parts] | None:
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
