"""A backward pass in stages, each with one expensive operation on cotangents."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jaxcompact.graph import Op
from jaxcompact.kinds import expensive
from jaxcompact.planner.roofline import nbytes_of
from jaxcompact.transform.replay import Replay
from jaxcompact.transform.schedule import in_order
from jaxcompact.transform.sources import Residual, Source


@dataclass(frozen=True)
class Stages:
    """The stages of a backward pass that finds everything.

    Attributes:
        cotangents: bytes of them, and of what is made of them, in each stage.
        uses: source -> the stages that read it.
        operands: source -> those whose expensive operation reads it, or something
            elementwise made of it.
        loaded: those of them whose operation has its operands in memory.
        sizes: source -> bytes; of all values of the block, and all residuals.
    """

    cotangents: tuple[int, ...]
    uses: Mapping[Source, frozenset[int]]
    operands: Mapping[Source, frozenset[int]]
    loaded: Mapping[Source, frozenset[int]]
    sizes: Mapping[Source, int]


def stages_of(replay: Replay) -> tuple[Stages, frozenset[Source]]:
    """Of a block, and what its backward pass reads: values and residuals."""
    graph, sources = replay.finding_everything
    cts = graph.inputs[len(sources) :]
    ops, chain, _ = in_order(graph, cts)
    below = {v: {s} for v, s in zip(graph.inputs, sources, strict=False)}
    uses, operands, loaded = (defaultdict(set) for _ in range(3))
    first, last = dict.fromkeys(cts, 0), {}
    stage = 0
    for op in ops:
        if chain.isdisjoint(op.outs):
            made_of = set().union(*(below.get(v, ()) for v in op.reads))
            below.update(dict.fromkeys(op.outs, made_of))
            continue
        there = expensive(op)
        for value in op.reads:
            for source in below.get(value, ()):
                uses[source].add(stage)
                if there:
                    operands[source].add(stage)
                if loads(op):
                    loaded[source].add(stage)
            if value in chain:
                last[value] = stage
                if there and op.kind != "scatter-add":
                    first.setdefault(value, stage)
        if there:
            first.update(dict.fromkeys(op.outs, stage))
        stage += there
    cotangents = [0] * (stage + 1)
    for value, start in first.items():
        for k in range(start, last.get(value, start) + 1):
            cotangents[k] += nbytes_of(graph.avals[value])
    sizes = {v: nbytes_of(aval) for v, aval in enumerate(replay.graph.avals)}
    sizes |= {s: nbytes_of(aval) for s, aval in replay.recording.avals.items()}
    found = uses, operands, loaded
    each = ({s: frozenset(k) for s, k in d.items()} for d in found)
    needed = {s for s in sources if isinstance(s, int)}
    needed |= {s for s in sources if isinstance(s, Residual)} - replay.recording.fixed
    return Stages(tuple(cotangents), *each, sizes), frozenset(needed)


def loads(op: Op) -> bool:
    """Whether an operation's operands are in memory.

    Products and sums of segments are fused with what theirs are elementwise made of.
    """
    return expensive(op) and op.kind not in ("dot_general", "scatter-add")
