"""What blocks keep for themselves, and which entries were taken, as tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jaxcompact.analysis.decisions import decided, steps
from jaxcompact.analysis.divisors import steeply_read
from jaxcompact.analysis.integers import find_integers
from jaxcompact.analysis.loops import infinities
from jaxcompact.analysis.rules import find_steep
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.graph import graph_of
from jaxcompact.kinds import LINEAR_ALGEBRA, is_any
from jaxcompact.transform.choices import choices
from jaxcompact.transform.recording import Recording
from jaxcompact.transform.sources import Choice, Residual, Source


def find_residuals(recording: Recording) -> Iterator[tuple[Residual | Choice, Tensor]]:
    """Those that a policy decides of: the others are values of the graph, or made of
    parameters alone."""
    known = _known(recording)
    steep, decides = _read_by_rules(recording)
    for source in recording.sources:
        if source in recording.fixed:
            continue
        value = recording.links.get(source, source)
        if isinstance(source, Choice):
            yield source, _choice(recording, source)
        elif isinstance(source, Residual):
            special = {"divisor": value in steep, "discrete": value in decides}
            special["discrete"] |= recording.avals[source].dtype == bool
            # One that is a value of the graph is decided of there.
            if source not in recording.links:
                special = {**special, **known.get(source, {})}
            elif not any(special.values()):
                continue
            yield source, _residual(recording, source, special)


def _residual(recording: Recording, source: Residual, known: dict[str, Any]) -> Tensor:
    """``known``: fields that are told by how it is made, and how a rule reads it."""
    aval, op = recording.avals[source], source.op
    tensors = recording.tensors
    value = recording.links.get(source, source)
    again = op in tensors.solving
    known = known | ({"divisor": True, "cheap": True} if again else {})
    known = {name: value for name, value in known.items() if value}
    if value in tensors.found:
        return replace(tensors.found[value], **known)
    largest = max(recording.graph.avals[v].size for v in op.reads)
    out = tensors.found.get(op.outs[0])  # of a loop a part may be stored
    tensor = Tensor.of(
        aval,
        name=f"{op.name}.residual{source.k}",
        kind="residual",
        where=op.where,
        statistic=16 * aval.size <= largest,
        fused=out and out.fused,
        divisor=is_any(op, LINEAR_ALGEBRA)
        or not tensors.fixed.issuperset(steeply_read(op)),
    )
    return replace(tensor, **known)


def _choice(recording: Recording, source: Choice) -> Tensor:
    aval, op = recording.avals[source], source.op
    return Tensor.of(
        aval,
        name=f"{op.name}.choice",
        kind="choice",
        where=op.where,
        discrete=True,
        limit=choices(op),
    )


def _known(recording: Recording) -> dict[Source, dict[str, Any]]:
    """What is told by how residuals are made: that infinities are written into them,
    that they are whole numbers, or steps."""
    if not recording.trees:
        return {}
    graph, outer = graph_of(recording.program.jaxpr), recording.graph
    same = graph.inputs[len(recording.program.consts) :]
    inner = dict(zip(outer.inputs, same, strict=True))
    graph.spans = {inner[v]: span for v, span in outer.spans.items()}
    graph.infinite = {inner[v] for v in outer.infinite}
    infinite, stepped, ranges = infinities(graph), steps(graph), find_integers(graph)
    made = graph.outputs[len(outer.outputs) :]
    found: dict[Source, dict[str, Any]] = {}
    for source, value in zip(recording.sources, made, strict=True):
        if isinstance(source, Residual) and isinstance(value, int):
            found[source] = known = {}
            if value in infinite:
                known["divisor"] = True
            if value in stepped:
                known["discrete"] = True
            if value in ranges:
                least, most = ranges[value]
                known |= {"discrete": True, "least": least, "limit": most + 1}
    return found


def _read_by_rules(recording: Recording) -> tuple[set[Source], set[Source]]:
    """What rules of one's own divide by or subtract, and what they decide by."""
    steep: set[Source] = set()
    decides: set[Source] = set()
    for op, graph, residuals in recording.rules:
        sources = (Residual(op, k) for k in range(len(residuals)))
        named = dict(zip(residuals, sources, strict=True))
        for found, inside in (
            (steep, find_steep(graph, residuals)),
            (decides, decided(graph, residuals)),
        ):
            read = {named[v] for v in named if v in inside} - recording.fixed
            found.update(recording.links.get(source, source) for source in read)
    # What labels alone give is exact when it is made again.
    data = recording.tensors.data
    exact = {v for v in steep | decides if isinstance(v, int) and v not in data}
    return steep - exact, decides - exact
