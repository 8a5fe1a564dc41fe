"""Norms of tensors that are stored, whose sums are found where they are encoded.

A kernel does both from one reading of such a tensor. Others may read it as well: unlike
what an elementwise function reads, it is in memory anyway, for its sums to be known.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxcompact.graph import Graph, Op, graph_of, read
from jaxcompact.kernels.functions.rows import TAKEN
from jaxcompact.transform.regions import is_along, is_written


@dataclass(frozen=True)
class Norm:
    """A value made, entry by entry, of a stored tensor, its rows' sums and parameters.

    Attributes:
        source: the tensor.
        parameters: vectors along its last axis.
        statistics: values of rows that are stored as well, as they are.
        read_on: values of rows that other operations read, as those that find which of
            a mean square and zero is the larger.
        ops: the operations, in order. What else they make they alone read.
        later: the others that read such values, or what is made of them.
    """

    source: int
    parameters: tuple[int, ...]
    statistics: tuple[int, ...]
    read_on: tuple[int, ...]
    ops: tuple[Op, ...]
    later: tuple[Op, ...]

    @property
    def sources(self) -> tuple[int, ...]:
        return (self.source,)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.source, *self.parameters

    @property
    def makes(self) -> tuple[int, ...]:
        return self.ops[-1].outs[0], *self.statistics, *self.read_on

    def __call__(self, *arrays: Any) -> list[Any]:
        env = dict(zip(self.reads, arrays, strict=True))
        for op in self.ops:
            (env[op.outs[0]],) = op.bind(*(read(env, v) for v in op.ins))
        return [env[v] for v in self.makes]


def find_norms(
    graph: Graph,
    codecs: Mapping[int, Any],
    stored: Collection[int],
    elsewhere: Collection[int],
) -> list[Norm]:
    """Those that are written, as a product reads them; of each tensor one.

    ``codecs``: of the values that may be sources; ``stored``: those that are stored as
    they are; ``elsewhere``: those that are read outside the graph otherwise.
    """
    made: dict[int, tuple[int, tuple[Op, ...]]] = {}
    for op in graph.ops:
        # What is stored is read as it is, however it was made.
        of = {
            v: v if v in codecs else made[v][0]
            for v in op.reads
            if v in codecs or v in made
        }
        if len({*of.values()}) == 1 and _is_taken(op):
            (source,) = {*of.values()}
            if all(is_along(v, source, graph) for v in op.reads if v not in of):
                before = [o for v in of if v != source for o in made[v][1]]
                made[op.outs[0]] = source, tuple(dict.fromkeys([*before, op]))

    def norm(value: int) -> Norm | None:
        source, ops = made[value]
        inside = set(ops)
        inner = [op.outs[0] for op in ops[:-1]]
        if not any(op.kind == "reduce_sum" for op in ops):
            return None
        if not {*inner}.isdisjoint(elsewhere):
            return None
        known = {source, *inner}
        parameters = dict.fromkeys(v for op in ops for v in op.reads if v not in known)
        statistics = tuple(v for v in inner if v in stored)
        read_on = [v for v in inner if not inside.issuperset(graph.readers[v])]
        later = _readers_of(read_on, graph, inside)
        rows = math.prod(graph.avals[source].shape[:-1])
        values = [*read_on, *(v for op in later for v in op.outs)]
        if any(graph.avals[v].size > rows for v in values):
            return None
        if not ({*values} - {*read_on}).isdisjoint(parameters):
            return None
        read_on = tuple(v for v in read_on if v not in stored)
        return Norm(source, tuple(parameters), statistics, read_on, ops, later)

    found: dict[int, Norm] = {}
    for value, (source, _) in made.items():
        entries = graph.avals[value].shape == graph.avals[source].shape
        written = entries and is_written(value, graph, {*stored, *elsewhere})
        if written and source not in found and (one := norm(value)) is not None:
            before = {op for norm in found.values() for op in (*norm.later, *norm.ops)}
            if before.isdisjoint(one.later):
                found[source] = one
    return list(found.values())


def _readers_of(
    values: Collection[int], graph: Graph, inside: Collection[Op]
) -> tuple[Op, ...]:
    """The operations, but these, that read the values or what is made of them."""
    found: list[Op] = []
    made = set(values)
    for op in graph.ops:
        if op not in inside and not made.isdisjoint(op.reads):
            found.append(op)
            made.update(op.outs)
    return tuple(found)


def _is_taken(op: Op) -> bool:
    """Whether a kernel may evaluate it, by its kind."""
    if op.kind == "custom_jvp_call":
        (body,) = map(graph_of, op.jaxprs)
        return len(op.outs) == 1 and all(map(_is_taken, body.ops))
    return op.kind in TAKEN
