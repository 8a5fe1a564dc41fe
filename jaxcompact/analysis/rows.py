"""Which entries of a tensor a norm sets to one scale: groups are best made of these.

A batch norm's are the tokens of a channel, a head's its entries in one token. Beside
those of another, that is larger, little is left of a small one's in few bits, and the
norm makes it as large as the others.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import compress, takewhile
from math import prod
from operator import itemgetter

from jaxcompact.analysis.layouts import Parts, parts_before, split
from jaxcompact.analysis.tensor import GROUP
from jaxcompact.graph import Graph, Op, behind
from jaxcompact.kinds import ADDITIONS, ELEMENTWISE, LAYOUT, expensive

# So many entries, one after another; or axes over which channels are summed up.
Row = int | tuple[int, ...]
_CASTS = ("convert_element_type",)
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


def find_uneven(
    graph: Graph,
    rows: Mapping[int, Row],
    inputs: Collection[int],
    stored: Collection[int],
) -> tuple[set[int], set[int]]:
    """Of values to be stored, which are read row by row: by a norm, or, if they are
    inputs or sums, by a product or a convolution; and which of these are streams.

    Streams are inputs, and sums, of tokens in batches that a norm makes alike in size
    or a product sums up. Not what else is so read, as nodes of a graph or products: one
    may be far smaller than the next, all of whose channels would hide its own.
    """
    avals = graph.avals
    normed = {v for v, row in rows.items() if avals[v].shape[-1] == row}
    read: dict[str, set[int]] = {"dot_general": set(), "conv_general_dilated": set()}
    for op in graph.ops:
        if op.kind in read:
            read[op.kind].update(_summed(op, graph))
    products, all_read = read["dot_general"], set().union(*read.values())
    streams = normed | _made_of(products, graph, ELEMENTWISE).intersection(inputs)
    sums = _made_of(all_read, graph, _CASTS).intersection(stored)
    found = streams | _made_of(all_read, graph, ELEMENTWISE).intersection(inputs)
    found.update(v for v in sums if _is_sum(v, graph))
    wide = {v for v in found if avals[v].ndim > 1 and avals[v].shape[-1] >= GROUP}
    tokens = {v for v in wide & streams if avals[v].ndim == 3}
    return wide, {v for v in tokens if v in inputs or _is_sum(v, graph)}


def _summed(op: Op, graph: Graph) -> Iterator[int]:
    """What a product or a convolution sums up along the last axis alone."""
    numbers = op.eqn.params["dimension_numbers"]
    axes = numbers[0] if op.kind == "dot_general" else ((numbers.lhs_spec[1],),)
    for value, summed in zip(op.ins, axes, strict=False):  # kernels aside
        if isinstance(value, int) and summed == (graph.avals[value].ndim - 1,):
            yield value


def _made_of(values: Iterable[int], graph: Graph, kinds: Collection[str]) -> set[int]:
    return {*behind(values, graph, lambda op: op.kind in kinds)}


def _is_sum(value: int, graph: Graph) -> bool:
    made = graph.made_by.get(value)
    while made and made.kind in _CASTS and made.reads:
        made = graph.made_by.get(made.reads[0])
    return made is not None and made.kind in ADDITIONS


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
        if _weighs_rows(op, split(graph.avals[value].shape, found[value]), graph):
            continue
        for source, parts in parts_before(op, value, found[value], graph):
            if source not in found and parts is not None:
                found[source] = parts
                todo.append(source)
    return found


def _weighs_rows(op: Op, by_axis: list[Parts] | None, graph: Graph) -> bool:
    """Whether it multiplies or masks what is then summed up by what is known otherwise,
    not channel by channel: what a norm leaves out may be of any size."""
    weights = {"mul": op.reads, "select_n": op.reads[:1], "div": op.reads[1:]}
    for value in weights.get(op.kind, ()) if by_axis else ():
        others = [v for v in op.reads if v != value]
        if not others or not _varies(value, by_axis, graph):
            continue
        of, of_others = _origins([value], graph), _origins(others, graph)
        own = of >= of_others  # as x in x * sigmoid(x)
        if not own and graph.made_by.keys().isdisjoint(of):
            return True
    return False


def _varies(value: int, by_axis: list[Parts], graph: Graph) -> bool:
    """Whether it may differ along what is summed up."""
    made = graph.made_by.get(value)
    while made and made.kind in _CASTS and made.reads:
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
    made_by = graph.made_by

    def is_origin(value: int) -> bool:
        return value not in made_by or expensive(made_by[value])

    found = behind(values, graph, lambda op: not expensive(op))
    return {*filter(is_origin, found)}


def _row(shape: tuple[int, ...], parts: Parts) -> Row | None:
    by_axis = split(shape, parts)
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
