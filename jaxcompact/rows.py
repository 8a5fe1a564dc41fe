"""Which entries of a tensor a norm sets to one scale: groups are best made of these.

A batch norm's are the tokens of a channel, a head's its entries in one token. Beside
those of another, that is larger, little is left of a small one's in few bits, and the
norm makes it as large as the others.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, compress, takewhile
from math import prod
from operator import itemgetter

from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import ELEMENTWISE, LAYOUT, expensive, renames

# Numbers of entries, in the order of memory, and whether a norm sums them up.
Parts = list[tuple[int, bool]]
# So many entries, one after another; or axes over which channels are summed up.
Row = int | tuple[int, ...]
_LEAST = 8  # entries of a channel: its two moments take no more than codes of 4 bits


def find_rows(
    graph: Graph, sums: Iterable[Op], stored: Collection[int]
) -> dict[int, Row]:
    """Of values to be stored that norms read, what each of their scales is of.

    The axes that are summed up, none of which is the last, where channels are apart; as
    many entries as a head has where a part of the last axis is summed up. Others are
    left out. What is scaled by known deviations of channels is as what is summed up.

    ``sums``: the norms' reductions.
    """
    summed = [
        (source, op.eqn.params["axes"])
        for op in sums
        if "axes" in op.eqn.params
        for source in op.reads
    ]
    found: dict[int, Row] = {}
    for source, axes in (*summed, *_by_deviations(graph)):
        shape = graph.avals[source].shape
        parts = [(size, i in axes) for i, size in enumerate(shape) if size > 1]
        for value, here in _behind(source, parts, graph, stored).items():
            row = _row(graph.avals[value].shape, here) if value in stored else None
            if row is not None:
                found[value] = _finer(row, found.get(value, row))
    return found


def _by_deviations(graph: Graph) -> Iterator[tuple[int, range]]:
    """Images less a known row, over a known deviation of each channel, as by a batch
    norm of running averages; and the axes before the last. Not tokens, of which some
    may be there to fill up alone."""
    known = {*graph.inputs}  # and what is made of them, entry by entry
    by: dict[str, set[int]] = {"mul": set(), "div": set()}  # what gives that, known
    for op in graph.ops:
        shape = graph.avals[op.outs[0]].shape if op.outs else ()  # of what prints
        if (op.kind in ELEMENTWISE or op.kind in LAYOUT) and known.issuperset(op.reads):
            known.update(op.outs)
            row = prod(shape) == prod(shape[-1:]) > 1
            for kind, root in ("mul", "rsqrt"), ("div", "sqrt"):
                made = op.kind == root or not by[kind].isdisjoint(op.reads)
                if made and (row or op.kind == "broadcast_in_dim"):
                    by[kind].update(op.outs)
        elif op.kind in by and len(shape) > 3:
            if by[op.kind].isdisjoint(op.reads):
                continue
            for value in op.reads[:1] if op.kind == "div" else op.reads:
                made = graph.made_by.get(value)
                if made and made.kind == "sub" and not known.isdisjoint(made.reads):
                    yield value, range(len(shape) - 1)


def _finer(a: Row, b: Row) -> Row:
    channels = [row for row in (a, b) if isinstance(row, tuple)]
    return min(channels, key=len) if channels else min(a, b)


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
        for source, parts in _before(op, value, found[value], graph):
            if source not in found and parts is not None:
                found[source] = parts
                todo.append(source)
    return found


def _before(
    op: Op, value: int, parts: Parts, graph: Graph
) -> Iterator[tuple[int, Parts | None]]:
    """What an operation reads, with its parts there; None where they aren't known."""
    given, shape = op.eqn.params, graph.avals[value].shape
    by_axis = _split(shape, parts)
    if op.kind == "transpose":
        axes = given["permutation"]
        turned = by_axis and (by_axis[axes.index(i)] for i in range(len(axes)))
        yield op.reads[0], turned and sum(turned, [])
    elif op.kind in ELEMENTWISE or op.kind == "custom_jvp_call" or renames(op):
        size = graph.avals[value].size
        if by_axis is None or not _weighs_rows(op, by_axis, graph):
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


def _weighs_rows(op: Op, by_axis: list[Parts], graph: Graph) -> bool:
    """Whether it multiplies or masks what is then summed up by what is known otherwise,
    not channel by channel: what a norm leaves out may be of any size."""
    weights = {"mul": op.reads, "select_n": op.reads[:1], "div": op.reads[1:]}
    for value in weights.get(op.kind, ()):
        others = [v for v in op.reads if v != value]
        if not others or not _varies(value, by_axis, graph):
            continue
        origins = _origins([value], graph)
        own = origins.issuperset(_origins(others, graph))  # as x in x * sigmoid(x)
        if not own and graph.made_by.keys().isdisjoint(origins):
            return True
    return False


def _varies(value: int, by_axis: list[Parts], graph: Graph) -> bool:
    """Whether it may differ along what is summed up."""
    made = graph.made_by.get(value)
    while made and made.kind == "convert_element_type" and made.reads:
        value = made.reads[0]
        made = graph.made_by.get(value)
    sizes = graph.avals[value].shape
    axes: Iterable[int] = range(len(sizes))
    if made and made.kind == "broadcast_in_dim":
        sizes = made.eqn.invars[0].aval.shape
        axes = made.eqn.params["broadcast_dimensions"]
    over = (by_axis[a] for a, n in zip(axes, sizes, strict=True) if n > 1)
    return any(summed for parts in over for _, summed in parts)


def _origins(values: Iterable[int], graph: Graph) -> set[int]:
    """Inputs and what is expensive to make, of which the values are made."""
    found: set[int] = set()
    todo, seen = [*values], set()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        op = graph.made_by.get(value)
        if op is None or expensive(op):
            found.add(value)
        else:
            todo += op.reads
    return found


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


def _row(shape: tuple[int, ...], parts: Parts) -> Row | None:
    by_axis = _split(shape, parts)
    if len(shape) < 2 or not by_axis or not all(shape):
        return None
    row = _last(sum(by_axis, []))
    if row >= shape[-1]:
        return row if row < prod(shape) else None
    whole = (all(summed for _, summed in parts) for parts in by_axis[:-1])
    axes = tuple(compress(range(len(shape)), whole))
    if prod(shape[i] for i in axes) >= _LEAST:
        return axes
    return row if row > 1 else None


def _last(parts: Parts) -> int:
    """How many entries, the last ones, are summed up."""
    counts = (count for count, _ in takewhile(itemgetter(1), reversed(parts)))
    return prod(counts)
