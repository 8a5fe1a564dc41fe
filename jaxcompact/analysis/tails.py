"""Functions that are flat on one side: GELU, SiLU, ELU, one-sided clips.

Most of what trained networks give to these lies there, and of a group what lies
furthest sets the step: it is stored within a bound. What a function makes of a tensor
is seen by its values, along a grid.
"""

import math
from collections.abc import Callable, Collection, Mapping

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxcompact.analysis.spans import CORNERS, Span, find_spans, span_of
from jaxcompact.codecs.codec import is_float
from jaxcompact.graph import Graph, Op
from jaxcompact.kernels.quantize.levels import Bound
from jaxcompact.kinds import ADDITIONS, renames

_GRID = 0.1 * np.sinh(np.linspace(-9, 9, 2049))  # up to 405, 1 % apart at the end
_USUAL, _GROWS = 8.0, 1.5  # where the usual slope is met, and how much larger any is
_FLAT = 0.03  # of the usual slope: by the gradients of a trained GPT-2 and LLaMA
_LEFT = 0.05  # that all of what is flat may differ by, of where that slope is 1
_LEAST = 1.0  # of an end, within a third of which what lies beyond is stored
_OF_NUMBERS: dict[str, Callable[..., np.ndarray]] = CORNERS | {
    "add_any": np.add,
    "convert_element_type": np.asarray,
    "erf": np.vectorize(math.erf),
    "erfc": np.vectorize(math.erfc),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "log1p": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "lt": np.less,
    "pow": np.power,
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
    "square": np.square,
    "tanh": np.tanh,
}


def find_tails(
    graph: Graph, fixed: Collection[int], candidates: Collection[int]
) -> dict[int, Bound]:
    """Of those of which functions alone are read that are flat on a side: where that
    side begins. A bias is taken for small: of GELU up to 2 costs little."""
    places = {op: i for i, op in enumerate(graph.ops)}
    spans, found = find_spans(graph), {}
    for value in candidates:
        with np.errstate(all="ignore"):
            read = _read_of(value, graph, places, fixed, spans)
            ends = [*map(_ends, read)]
        low = min((low for low, _ in ends), default=-np.inf)
        high = max((high for _, high in ends), default=np.inf)
        if low < high and (low, high) != (-np.inf, np.inf):
            low, high = (end if abs(end) < np.inf else None for end in (low, high))
            found[value] = low, high
    return found


def _read_of(
    value: int,
    graph: Graph,
    places: Mapping[Op, int],
    fixed: Collection[int],
    spans: Mapping[int, Span],
) -> list[np.ndarray]:
    """What is made of a value alone, if it is the grid, and read by others or given."""
    made, read = {value: _GRID}, set()
    given = [v for v in graph.outputs if isinstance(v, int)]
    todo = {places[op] for op in graph.readers[value]}
    while todo and value not in read:
        op = graph.ops[min(todo)]
        todo.remove(places[op])
        y = _evaluated(op, made, fixed, spans)
        if y is None:
            read.update(made.keys() & op.reads)
        else:
            (out,) = op.outs
            made[out] = y
            todo.update(places[reader] for reader in graph.readers[out])
            if out in given:
                read.add(out)
    return [made[v] for v in read]


def _evaluated(
    op: Op,
    made: Mapping[int, np.ndarray],
    fixed: Collection[int],
    spans: Mapping[int, Span],
) -> np.ndarray | None:
    """What it makes of these and of numbers; None of others, but of a bias."""
    values = []
    for v in op.ins:
        span = span_of(v, spans)
        if not isinstance(v, Literal) and v in made:
            values.append(made[v])
        elif span is not None and span[0] == span[1]:
            values.append(span[0])
        elif op.kind in ADDITIONS and v in fixed:
            values.append(0.0)
        else:
            return None
    if op.kind == "integer_pow":
        return values[0] ** op.eqn.params["y"]
    evaluate = np.asarray if renames(op) else _OF_NUMBERS.get(op.kind)
    dtype = getattr(op.eqn.outvars[0].aval, "dtype", jnp.int32)
    mask = jnp.issubdtype(dtype, jnp.bool_)
    if evaluate is None or not (mask or is_float(dtype)):
        return None
    return np.asarray(evaluate(*values), bool if mask else float)


def _ends(y: np.ndarray) -> Bound:
    """Between which values of the grid it is not flat; infinite where it goes on."""
    y = y.astype(float)
    slopes = np.abs(np.diff(y) / np.diff(_GRID))
    usual = slopes[np.abs(_GRID[1:]) < _USUAL].max()
    if not np.isfinite(y).all() or slopes.max() > _GROWS * usual:
        return -np.inf, np.inf
    steep = np.flatnonzero(slopes > _FLAT * usual)
    if not steep.size:
        return np.inf, -np.inf
    sides = y[: steep[0] + 1], y[steep[-1] + 1 :]
    ends = _GRID[steep[0]], _GRID[steep[-1] + 1]
    flat = [
        np.ptp(side) <= _LEFT * usual and abs(end) >= _LEAST and len(side) > 1
        for side, end in zip(sides, ends, strict=True)
    ]
    low, high = (float(f"{end:.2g}") for end in ends)
    return low if flat[0] else -np.inf, high if flat[1] else np.inf
