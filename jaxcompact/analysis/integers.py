"""Whole numbers, and between which values they lie: indices, and what is rounded beside
a clip, as the activations of a network that trains for few bits."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxcompact.analysis.spans import Span, made_of, span_of, spans_of
from jaxcompact.arrays import is_float
from jaxcompact.codecs.exact import holds
from jaxcompact.graph import Graph, Op, Value, bodies, number, of_no_number
from jaxcompact.kinds import LAYOUT, ORDERS

_ANY = -math.inf, math.inf
_SLACK = 1 / 128  # of ends that may be rounded, in bfloat16
_BOUNDS = frozenset("clamp max min".split())
_BETWEEN = dict.fromkeys("cos erf sign sin tanh".split(), (-1.0, 1.0))
_BETWEEN |= {"logistic": (0.0, 1.0)}
_ROUNDS = frozenset("ceil floor round sign".split())
# Of whole numbers. What is gathered out of bounds may be none.
_KEEPS = (LAYOUT - {"empty", "gather"}) | ORDERS | _BOUNDS
_KEEPS |= frozenset(
    """abs add add_any convert_element_type mul neg reduce_max reduce_min select_n
    stop_gradient sub""".split()
)


def find_integers(graph: Graph) -> dict[int, tuple[int, int]]:
    """Values that are whole numbers, with the least and the largest that they may be.

    Of those whose range is known, and held exactly by their dtype.
    """
    spans, whole = _find(graph, [_ANY] * len(graph.inputs), set())
    found = {v: spans[v] for v in whole if not _is(graph.avals[v], jnp.bool_)}
    return {
        v: (math.ceil(low), math.floor(high))
        for v, (low, high) in found.items()
        if not (math.isinf(low) or math.isinf(high))
    }


def find_whole(graph: Graph) -> set[int]:
    """Values that are whole numbers, of whatever range."""
    return _find(graph, [_ANY] * len(graph.inputs), set())[1]


def within_bounds(value: int, graph: Graph, integers: Collection[int]) -> int:
    """It, or the first whose range is known of what bounds make of it, where nothing
    else reads it."""
    at = value
    while at not in integers and len(graph.readers[at]) == 1:
        (op,) = graph.readers[at]
        if op.kind not in (*_BOUNDS, "stop_gradient"):
            break
        (at,) = op.outs
    return at if at in integers else value


def _find(
    graph: Graph, inputs: Sequence[Span], whole: set[int]
) -> tuple[dict[int, Span], set[int]]:
    """Between which values each lies, and which are whole, as some inputs are."""
    spans = dict(zip(graph.inputs, inputs, strict=True))
    spans |= spans_of(graph.constants) | graph.spans
    whole |= {v for v in spans if _is_integer(graph.avals[v])}
    nan = of_no_number(graph)
    for op in graph.ops:
        read = op.ins
        if op.kind == "select_n" and not nan.isdisjoint(op.reads[:1]):
            read = (*op.ins[:2], op.ins[1])
        ins = [span_of(v, spans) or _ANY for v in read]
        are_whole = [_is_whole(v, graph, whole) for v in read]
        kept = op.kind in _ROUNDS or (op.kind in _KEEPS and all(are_whole))
        outs, made = _spans(op, ins), op.outs if kept else ()
        if op.kind in ("custom_jvp_call", "custom_vjp_call"):
            for body, _ in bodies(op):
                given = {v for v, w in zip(body.inputs, are_whole, strict=True) if w}
                inside, known = _find(body, ins, given)
                outs = [span_of(v, inside) or _ANY for v in body.outputs]
                pairs = zip(op.outs, body.outputs, strict=True)
                made = [v for v, out in pairs if _is_whole(out, body, known)]
        whole |= {v for v in op.outs if v in made or _is_integer(graph.avals[v])}
        spans |= {
            v: tuple(span) if _is_held(span, graph.avals[v]) else _ANY
            for v, span in zip(op.outs, outs, strict=True)
        }
    return spans, whole


def _spans(op: Op, ins: Sequence[Span]) -> Sequence[Span]:
    """Between which values its outputs lie."""
    params = op.eqn.params
    match op.kind:
        case "argmax" | "argmin":
            shape = op.eqn.invars[0].aval.shape
            return [(0, math.prod(shape[axis] for axis in params["axes"]) - 1)]
        case "top_k":
            shape = op.eqn.invars[0].aval.shape
            return [ins[0], (0, shape[params.get("axis", -1)] - 1)]
        case "iota":
            return [(0, params["shape"][params["dimension"]] - 1)]
        case "sort":
            return ins
        case "max":
            return [np.maximum(*ins)]
        case "min":
            return [np.minimum(*ins)]
        case "clamp":
            return [np.minimum(np.maximum(*ins[:2]), ins[2])]
        case "round":
            ((low, high),) = ins
            return [(np.ceil(low - 0.5), np.floor(high + 0.5))]
        case "ceil" | "convert_element_type" | "floor":
            ((low, high),) = ins
            if op.kind == "convert_element_type" and _is_as_fine(op.eqn):
                return ins
            return [(np.floor(low), np.ceil(high))]
        case "div" | "gather":  # by zero, or out of bounds, integers are anything
            return [_ANY]
    if op.kind in _BETWEEN:
        return [_BETWEEN[op.kind]]
    known = [None if any(map(math.isinf, span)) else span for span in ins]
    found = made_of(op, known)
    if found is None or any(map(math.isinf, found)):
        return [_ANY] * len(op.outs)
    exact = all(float(x).is_integer() for x in found)
    slack = 0.0 if exact else _SLACK * max(map(abs, found))
    return [(found[0] - slack, found[1] + slack)]


def _is_as_fine(cast: JaxprEqn) -> bool:
    """Whether it rounds nothing."""
    before, after = cast.invars[0].aval, cast.outvars[0].aval
    floats = is_float(before) and is_float(after)
    return floats and jnp.finfo(after.dtype).nmant >= jnp.finfo(before.dtype).nmant


def _is_held(span: Span, aval: Any) -> bool:
    """Whether rounding to its dtype moves no end, so that none is beyond it."""
    if _is(aval, jnp.bool_):
        return True
    ends = [x for x in span if not math.isinf(x)]
    number = is_float(aval) or _is_integer(aval)
    return number and all(holds(aval.dtype, x, x) for x in ends)


def _is_whole(value: Value, graph: Graph, whole: Collection[int]) -> bool:
    if isinstance(value, Literal):
        written = number(value)
        return written is not None and written.is_integer()
    return value in whole or _is(graph.avals[value], jnp.bool_)


def _is_integer(aval: Any) -> bool:
    return _is(aval, jnp.integer)


def _is(aval: Any, kind: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, kind)
