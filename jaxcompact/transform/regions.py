"""Elementwise functions of tensors that are stored, which nothing else reads.

Where a forward pass encodes such tensors and evaluates such a function, a kernel can do
both from one reading of them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxcompact.codecs import Codec, Quantized
from jaxcompact.graph import Graph, Op, graph_of, read
from jaxcompact.kernels.functions.operations import TAKEN
from jaxcompact.kinds import expensive, renames


@dataclass(frozen=True)
class Region:
    """One value as a function of stored tensors, entry by entry, and of parameters.

    Attributes:
        sources: the tensors. No operation but these reads them.
        parameters: vectors along their last axis, as a bias.
        ops: the operations, in order. What they make they alone read, but the last's.
    """

    sources: tuple[int, ...]
    parameters: tuple[int, ...]
    ops: tuple[Op, ...]
    later: tuple[Op, ...] = ()  # as a `norms.Norm` has: none

    @property
    def reads(self) -> tuple[int, ...]:
        return *self.sources, *self.parameters

    @property
    def makes(self) -> tuple[int, ...]:
        return (self.ops[-1].outs[0],)

    def __call__(self, *arrays: Any) -> Any:
        env = dict(zip(self.reads, arrays, strict=True))
        for op in self.ops:
            (env[op.outs[0]],) = op.bind(*(read(env, v) for v in op.ins))
        return env[self.ops[-1].outs[0]]


def find_regions(
    graph: Graph, codecs: Mapping[int, Codec], elsewhere: Collection[int]
) -> list[Region]:
    """Those whose sources have one codec, shape and dtype, and whose value is written.

    It is where a product reads it, say: a value that XLA makes on its way to the next
    elementwise operation takes no memory traffic, by itself it would. Each source may
    have a bound of its own.

    ``codecs``: of the values that may be sources; ``elsewhere``: values that are read
    outside the graph.
    """
    made: dict[int, Region] = {}
    for op in graph.ops:
        own = [v for v in op.reads if v in codecs or v in made]
        others = [v for v in op.reads if v not in own]
        if not _is_elementwise(op) or not own:
            continue
        if all(is_along(v, own[0], graph) for v in others):
            parts = [made[v] for v in own if v not in codecs]
            sources = [v for v in own if v in codecs]
            made[op.outs[0]] = Region(
                tuple(dict.fromkeys([v for p in parts for v in p.sources] + sources)),
                tuple(dict.fromkeys([v for p in parts for v in p.parameters] + others)),
                tuple(dict.fromkeys([o for p in parts for o in p.ops] + [op])),
            )

    def is_closed(region: Region) -> bool:
        inner = {*region.sources, *(op.outs[0] for op in region.ops[:-1])}
        inside = set(region.ops)
        read_inside = all(inside.issuperset(graph.readers[v]) for v in inner)
        return read_inside and inner.isdisjoint(elsewhere)

    def is_of_one_kind(region: Region) -> bool:
        avals = {v: graph.avals[v] for v in region.sources}
        kinds = {(_unbounded(codecs[v]), a.shape, a.dtype) for v, a in avals.items()}
        return len(kinds) == 1

    return [
        region
        for value, region in made.items()
        if is_written(value, graph, elsewhere)
        and is_closed(region)
        and is_of_one_kind(region)
    ]


def _unbounded(codec: Codec) -> Codec:
    return replace(codec, bound=None) if type(codec) is Quantized else codec


def is_written(value: int, graph: Graph, elsewhere: Collection[int]) -> bool:
    """Whether what reads it, a product say, wants it in memory."""
    return value in elsewhere or any(
        is_written(op.outs[0], graph, elsewhere) if renames(op) else expensive(op)
        for op in graph.readers[value]
    )


def is_along(value: int, of: int, graph: Graph) -> bool:
    """Whether it is a vector along the other's last axis."""
    shape, whole = graph.avals[value].shape, graph.avals[of].shape
    before = [1] * (len(shape) - 1)
    return len(before) < len(whole) and shape == (*before, whole[-1])


def _is_elementwise(op: Op) -> bool:
    """Whether a kernel may evaluate it, by its kind."""
    if op.kind == "custom_jvp_call":
        (body,) = map(graph_of, op.jaxprs)
        return len(op.outs) == 1 and all(map(_is_elementwise, body.ops))
    return op.kind in TAKEN and not renames(op)
