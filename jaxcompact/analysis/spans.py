"""Between which values constants lie: those of a graph, and what it closes over."""

from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxcompact.arrays import is_float, on_host
from jaxcompact.graph import Graph, Op, Value, number
from jaxcompact.kinds import LAYOUT, renames

LARGE = 1e4  # what masks are filled with, or larger
_ONE_OF = LAYOUT | frozenset(
    "convert_element_type pvary reduce_max reduce_min select_n stop_gradient".split()
)
CORNERS = {
    "abs": np.abs,
    "add": np.add,
    "div": np.divide,
    "log": np.log,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "sub": np.subtract,
}
Span = tuple[float, float]


def find_spans(graph: Graph) -> dict[int, Span]:
    """Value -> the least and the largest that it may have, where that is known.

    Of booleans, of numbers written in place, and of what is simply made of these.
    """
    found = spans_of(graph.constants) | graph.spans
    for op in graph.ops:
        span = made_of(op, [span_of(v, found) for v in op.ins])
        found |= {v: span for v in op.outs if span}
    return found


def span_of(value: Value, spans: Mapping[int, Span]) -> Span | None:
    if not isinstance(value, Literal):
        return spans.get(value)
    written = number(value)
    return None if written is None else (written, written)


def is_large(span: Span) -> bool:
    return max(map(abs, span)) >= LARGE


def spans_of(arrays: Mapping[int, Any]) -> dict[int, Span]:
    """Of arrays that a function closes over, unless their large values are several:
    data then, and not what is filled in."""
    found = {}
    for value, x in arrays.items():
        if isinstance(x, jax.core.Tracer) or not is_float(jax.typeof(x)):
            continue
        if not x.size or on_host(jax.typeof(x)):
            continue
        with jax.ensure_compile_time_eval():
            least, most, *large = map(float, _extremes(x))
        if least <= most and large[0] >= large[1]:
            found[value] = least, most
    return found


@jax.jit
def _extremes(x: jax.Array) -> list[jax.Array]:
    """The least and the largest entry; of large ones the least and the largest size."""
    x = x.astype(jnp.float32)
    size, large = jnp.abs(x), jnp.abs(x) >= LARGE
    among = [jnp.where(large, size, fill) for fill in (jnp.inf, 0.0)]
    return [x.min(), x.max(), among[0].min(), among[1].max()]


def made_of(op: Op, spans: Collection[Span | None]) -> Span | None:
    """Of what an operation makes of values between such, where that is known."""
    if len(op.outs) != 1:
        return None
    dtype = getattr(op.eqn.outvars[0].aval, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.bool_):
        return 0.0, 1.0
    if op.kind in _ONE_OF or renames(op):
        if op.kind != "convert_element_type":  # leave out what it is indexed by
            pairs = zip(spans, op.eqn.invars, strict=True)
            spans = [s for s, v in pairs if v.aval.dtype == dtype]
        corners = [x for span in spans for x in span or (np.nan,)]
        known = bool(corners) and None not in spans
    elif known := op.kind in CORNERS and None not in spans:
        with np.errstate(all="ignore"):
            ends = [(*span, 0.0) if _turns(op, span) else span for span in spans]
            corners = [CORNERS[op.kind](*xs) for xs in product(*ends)]
        corners = [float(x) for x in corners if not np.isnan(x)]
    return (min(corners), max(corners)) if known and corners else None


def _turns(op: Op, span: Span) -> bool:
    """Whether a span has zero inside, where a size is least and logarithms begin."""
    return op.kind in ("abs", "log") and span[0] < 0 < span[1]
