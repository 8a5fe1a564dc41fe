"""The forward pass that encodes what it stores as soon as it is made."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from jax.extend.core import Literal

from jaxcompact.actions import Save
from jaxcompact.arrays import tie
from jaxcompact.codecs import Codec
from jaxcompact.graph import Op, graph_of, read
from jaxcompact.transform.hoisting import Broadcasts
from jaxcompact.transform.norms import Norm, find_norms
from jaxcompact.transform.program import Program
from jaxcompact.transform.regions import Region, find_regions


class Forward:
    """Outputs, and what is stored.

    Args:
        program: makes the outputs, and then what is stored.
        reads: which inputs it reads.
        count: of outputs.
        order: which of what the program makes each slot stores.
        actions: each slot's.
        perturbed: which inputs are differentiated.

    Attributes:
        graph: the program's.
        regions: elementwise functions of what is stored encoded, and norms of it.
    """

    def __init__(
        self,
        program: Program,
        reads: Sequence[bool],
        count: int,
        order: Sequence[int],
        actions: Sequence[Save | Codec],
        perturbed: Sequence[bool],
    ):
        self.consts, self.reads = program.consts, reads
        self.count, self.slots = count, len(order)
        graph = self.graph = graph_of(program.jaxpr)
        outputs, made = graph.outputs[:count], graph.outputs[count:]
        self.places: dict[Any, list[int]] = defaultdict(list)
        for k, i in enumerate(order):
            self.places[made[i]].append(k)
        asked = {v: actions[ks[0]] for v, ks in self.places.items()}
        codecs = {
            v: action
            for v, action in asked.items()
            if isinstance(action, Codec) and len(self.places[v]) == 1
        }
        outputs = {v for v in outputs if isinstance(v, int)}
        others = {v for v in self.places if isinstance(v, int) and v not in codecs}
        self.regions: list[Region | Norm]
        self.regions = [*find_regions(graph, codecs, outputs | others)]
        saved = {v for v in others - outputs if asked[v] == Save()}
        self.regions += find_norms(graph, codecs, saved, outputs | others - saved)
        wanted = [v for region in self.regions for v in region.reads]
        self.broadcasts = Broadcasts(
            graph, [*compress(perturbed, reads)], [*graph.outputs, *wanted]
        )

    def slots_of(self, region: Region | Norm) -> list[int]:
        return [self.places[v][0] for v in region.sources]

    def run(
        self,
        inputs: Sequence[Any],
        encode: Callable[[int, Any], Any],
        holds: Sequence[Sequence[int]],
        regions: Sequence[Region | Norm] = (),
        evaluate: Callable[[Any, list[Any]], tuple[list[Any], list[Any]]] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """The outputs, and ``encode(k, value)`` of each slot, made when its value is.

        Left to itself XLA encodes at the end, and keeps what it encodes until then:
        what reads a value waits for those of its slot's leaves that ``holds`` names.
        What one of ``regions`` makes, and its sources' slots, are those of
        ``evaluate``.
        What nothing reads but its encoding (a relu's slope) is not tied to it, and so
        need not be in memory.
        """
        graph, count = self.graph, self.count
        read_on = {v for v in graph.outputs[:count] if not isinstance(v, Literal)}
        read_on.update(v for op in graph.ops for v in op.reads)
        stored: dict[int, Any] = {}
        sources = {v for region in regions for v in region.sources}
        ends = {region.ops[-1]: region for region in regions}
        inside = {op for region in regions for op in region.ops[:-1]}

        def keep(value: int, x: Any) -> Any:
            for k in () if value in sources else self.places.get(value, ()):
                stored[k] = encode(k, x)
                if value in read_on:
                    x, (stored[k],) = held(x, [stored[k]], [holds[k]])
            return x

        def rule(op: Op, values: list[Any], env: dict[int, Any]) -> list[Any]:
            if op in inside or op in self.broadcasts.left_out:
                return [None] * len(op.outs)
            if op not in ends:
                if op in self.broadcasts.readers:
                    values = values_of(op, env)
                return list(map(keep, op.outs, op.bind(*values)))
            region = ends[op]
            outs, encoded = evaluate(region, [env[v] for v in region.reads])
            stored.update(zip(self.slots_of(region), encoded, strict=True))
            outs = list(map(keep, region.makes, outs))
            env.update(zip(region.makes, outs, strict=True))
            return outs[:1]

        given = [*self.consts, *compress(inputs, self.reads)]
        values_of = self.broadcasts.reader(given)
        inputs = map(keep, graph.inputs, given)
        graph = replace(graph, ops=_in_order(graph.ops, ends))
        env = graph.run(list(inputs), rule)
        outs = [read(env, v) for v in graph.outputs[:count]]
        return outs, [stored[k] for k in range(self.slots)]


def held(
    tree: Any, stored: Sequence[Sequence[Any]], holds: Sequence[Sequence[int]]
) -> tuple[Any, list[list[Any]]]:
    """``tree`` tied to those of the leaves that are stored which ``holds`` names."""
    stored = list(map(list, stored))
    pairs = list(zip(stored, holds, strict=True))
    tree, tied = tie((tree, [[leaves[i] for i in names] for leaves, names in pairs]))
    for (leaves, names), own in zip(pairs, tied, strict=True):
        for i, leaf in zip(names, own, strict=True):
            leaves[i] = leaf
    return tree, stored


def _in_order(ops: Sequence[Op], ends: Mapping[Op, Region | Norm]) -> list[Op]:
    """What reads a region's values after the region."""
    later = {op for region in ends.values() for op in region.later}
    found = []
    for op in ops:
        if op not in later:
            found += [op, *(ends[op].later if op in ends else ())]
    return found
