"""What loops and branches are given and give: activations, and what stays exact."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from jax.extend.core import Literal

from jaxcompact.analysis.solving import solves_for_state
from jaxcompact.analysis.spans import Span, find_spans, is_large, span_of
from jaxcompact.arrays import is_float
from jaxcompact.graph import Graph, Op, Value, bodies, state_of
from jaxcompact.kinds import EXPONENTIALS, LAYOUT, expensive, is_any

_SMALL = 16  # times smaller: the maxima and sums of an attention, beside its output
_SHIFTS = frozenset("add add_any convert_element_type max neg select_n sub".split())
_EXTREMES = frozenset("reduce_max reduce_min".split())


def inputs_of_body(
    graph: Graph, names: Collection[int], op: Op, body: Graph
) -> tuple[dict[int, str], dict[int, str]]:
    """Names of a body's inputs that are activations; which are not encoded, and why.

    ``names``: the graph's inputs that are activations, no parameters; ``body``: with
    what is known of its inputs.
    """
    state, outer = state_of(op), op.ins[1:] if op.kind == "cond" else op.ins
    fixed = graph.independent_of(names)
    begins = [isinstance(v, int) and v not in fixed for v in outer]
    found = _new(body, begins, state)
    solves = solves_for_state(op, fixed)
    sizes = {i: body.avals[body.inputs[i]].size for i in found if i in state}
    keep = {}
    for i in found:
        # What runs through a loop is new every time; all else belongs to the arrays
        # outside, and is not stored again.
        if i not in state:
            keep[i] = "belongs to a tensor outside"
        elif solves:
            keep[i] = "it must fit what the loop is run on"
        elif body.inputs[i] in body.infinite:
            keep[i] = "it holds an infinity, or what is as good as one"
        elif _is_logarithm(body, body.inputs[i]):
            keep[i] = "a logarithm: its exponential is taken"
        elif _SMALL * sizes[i] <= max(sizes.values()):
            keep[i] = "small beside the loop's state"
    return (
        {body.inputs[i]: f"input.{i}" for i in found},
        {body.inputs[i]: reason for i, reason in keep.items()},
    )


def _new(body: Graph, begins: Sequence[bool], state: Mapping[int, int]) -> list[int]:
    """Which inputs are not made of parameters and constants alone.

    ``begins``: which are not, as it is first run. A loop's state may begin as zeros.
    """
    while True:
        new = [v for v, b in zip(body.inputs, begins, strict=True) if b]
        fixed = body.independent_of(new)
        ends = [isinstance(v, int) and v not in fixed for v in body.outputs]
        found = [b or (i in state and ends[state[i]]) for i, b in enumerate(begins)]
        if found == begins:
            return [i for i, b in enumerate(begins) if b]
        begins = found


def exact_outputs(graph: Graph) -> set[int]:
    """What holds infinities, and logarithms that loops give.

    A group that holds an infinity decodes to NaN; what stands for one, as -1e9, leaves
    nothing of its neighbours.
    """
    given = {v for op in graph.ops if op.kind == "scan" for v in op.outs}
    return infinities(graph) | {v for v in given if _is_logarithm(graph, v)}


def infinities(graph: Graph) -> set[int]:
    """Values that an infinity is written into, or what stands for one, as -1e9."""
    spans = find_spans(graph)
    large = {v for v, span in spans.items() if is_large(span)}
    found = {v for v in large if is_float(graph.avals[v])}.union(graph.infinite)
    for op in graph.ops:
        infinite = [_is_infinite(v, found) for v in op.ins]
        if op.kind in ("max", "min"):
            outs = op.outs if all(infinite) else ()
        elif op.kind in LAYOUT | _SHIFTS | _EXTREMES or op.kind == "scatter-add":
            outs = op.outs if any(infinite) else ()
        else:
            outs = [op.outs[i] for i in _infinite_outputs(op, infinite, spans)]
        found.update(v for v in outs if is_float(graph.avals[v]))
    return found


def known_inside(graph: Graph, op: Op, body: Graph) -> Graph:
    """A loop's or branch's body, with what the graph tells of its inputs."""
    found, spans = infinities(graph), find_spans(graph)
    outer = op.ins[1 if op.kind == "cond" else 0 :]
    infinite = [_is_infinite(v, found) for v in outer]
    body, _ = _told(op, body, infinite, [span_of(v, spans) for v in outer])
    return body


def _is_infinite(value: Value, found: Collection[int]) -> bool:
    if isinstance(value, Literal):
        span = span_of(value, {})
        return is_float(value.aval) and span is not None and is_large(span)
    return value in found


def _infinite_outputs(
    op: Op, infinite: Sequence[bool], spans: Mapping[int, Span]
) -> set[int]:
    """Which they are, of an operation with bodies."""
    found = set()
    for body, first in bodies(op):
        outer = [span_of(v, spans) for v in op.ins[first:]]
        found |= _told(op, body, infinite[first:], outer)[1]
    return found


def _told(
    op: Op, body: Graph, infinite: Sequence[bool], spans: Sequence[Span | None]
) -> tuple[Graph, set[int]]:
    """A body with what is known of its inputs; which of its outputs are infinite."""
    state = state_of(op)
    inputs = {v for v, i in zip(body.inputs, infinite, strict=True) if i}
    outer = enumerate(zip(body.inputs, spans, strict=True))
    same = {v: span for i, (v, span) in outer if span and i not in state}
    while True:
        body = replace(body, spans=same, infinite=inputs)
        inside = infinities(body)
        ends = {i for i, v in enumerate(body.outputs) if _is_infinite(v, inside)}
        again = {body.inputs[i] for i, end in state.items() if end in ends}
        if again <= inputs:
            return body, ends
        inputs = inputs | again


def _is_logarithm(graph: Graph, value: int) -> bool:
    """Whether exp is taken of it, with a constant factor and something added to it.

    As of the log-probabilities of a hidden Markov model, of CTC, of optimal transport:
    an absolute error of one is a relative one of what they stand for. Not of softplus,
    the sum of an exponential and a constant.
    """
    constants, found = graph.independent_of(graph.inputs), {value}
    for op in graph.ops:
        if found.isdisjoint(op.reads):
            continue
        scale = op.ins[1:] if op.kind == "div" else op.ins
        scaled = op.kind in ("div", "mul") and any(
            isinstance(v, Literal) or v in constants for v in scale
        )
        if op.kind in LAYOUT or op.kind in _SHIFTS or scaled:
            found.update(op.outs)
        elif is_any(op, EXPONENTIALS) and not expensive(op):
            if not any(isinstance(v, Literal) or v in constants for v in op.ins):
                return True
    return False
