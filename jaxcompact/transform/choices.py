"""Operations that choose among their operands' entries, or a sign: max, sort, sign.

Made again of decoded operands they might choose others, and the gradient would flow to
entries that the forward pass did not take. The choice, a small integer, can be stored
instead; it is all that their derivatives read. Of the largest of up to 64 it is a bit
for each: those that are equal share the gradient, as jax has it. Of more, whose bits
would be as large as what is stored, and of a running maximum the first has all.

Pooling with dilation, or of more than 64 entries, is made again: it may choose others.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcompact.arrays import pinned
from jaxcompact.graph import Op

_WINDOW = 64  # entries of the largest pooling window whose choice is taken
_SHARED = 64  # entries of the longest row whose equal ones share


def choices(op: Op) -> int | None:
    """How many there are to choose from; None for operations that do not choose."""
    params, aval = op.eqn.params, op.eqn.invars[0].aval
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return None
    shape = aval.shape
    match op.kind:
        case "abs":
            return 2
        case "max" | "min" | "sign":
            return 3
        case "clamp":
            return 4
        case "sort":
            return shape[params["dimension"]]
        case "top_k":
            return shape[params.get("axis", -1)]
        case "approx_top_k":
            return shape[params["reduction_dimension"]]
        case "cummax" | "cummin":
            return shape[params["axis"]]
        case "reduce_max" | "reduce_min":
            if not aval.size:
                return None
            return 2 if _shares(op) else _length(op)
        case "reduce_window_max" | "reduce_window_min":
            size = math.prod(params["window_dimensions"])
            dilated = {1} != {*params["window_dilation"], *params["base_dilation"]}
            return None if dilated or size > _WINDOW else size
        case "scatter-max" | "scatter-min":
            return 3 if op.eqn.invars[2].aval.size else None
    return None


def choose(op: Op, values: Sequence[Any]) -> tuple[list[Any], jax.Array]:
    """What the operation makes, and its choice: integers below `choices`."""
    params, x = op.eqn.params, values[0]
    if op.kind == "sort":
        index = _index(x, params["dimension"])
        *outs, choice = lax.sort([*values, index], **params)
        return outs, choice
    outs = op.bind(*values)
    match op.kind:
        case "max" | "min":  # 0 the first, 2 the second, 1 both
            x, y = values if op.kind == "max" else reversed(values)
            choice = 1 + (x < y).astype(jnp.int32) - (x > y).astype(jnp.int32)
        case "abs":
            choice = x >= 0
        case "sign":
            choice = outs[0] + 1
        case "clamp":  # 0 low, 1 x, 2 high, 3 none: at a bound
            low, x, high = values
            choice = jnp.where((low < x) & (x < high), 1, 3)
            choice = jnp.where(low > x, 0, jnp.where(high < x, 2, choice))
        case "top_k" | "approx_top_k":
            choice = outs[1]
        case "cummax" | "cummin":
            sign, axis = (1 if op.kind == "cummax" else -1), params["axis"]
            _, choice = lax.associative_scan(
                lambda a, b: _larger(a, b, sign),
                (x, _index(x, axis)),
                params["reverse"],
                axis,
            )
        case "reduce_max" | "reduce_min" if _shares(op):
            x = lax.optimization_barrier(x)  # or XLA may make it with other rounding
            outs = op.bind(x)
            choice = x == jnp.expand_dims(outs[0], params["axes"])
        case "reduce_max" | "reduce_min":
            index_of = jnp.argmax if op.kind == "reduce_max" else jnp.argmin
            choice = index_of(_in_a_row(x, params["axes"]), axis=-1)
        case "scatter-max" | "scatter-min":  # 0 less, 1 the extreme, 2 as x is too
            x, indices, updates = lax.optimization_barrier(tuple(values))
            outs = op.bind(x, indices, updates)
            before, after = (_at_updates(op, v, indices, updates) for v in (x, *outs))
            both = (before == after).astype(jnp.int32)
            choice = jnp.where(updates == after, 1 + both, 0)
        case _:  # not where it equals the output: XLA may make that with other rounding
            sign = 1 if op.kind == "reduce_window_max" else -1
            parts = zip(_in_window(op, x), itertools.count())
            _, choice = functools.reduce(lambda a, b: _larger(a, b, sign), parts)
            choice = jnp.broadcast_to(choice, outs[0].shape)
    return outs, choice.astype(jnp.int32)


def follow(
    op: Op, choice: jax.Array, values: Sequence[Any], *, rounded: bool
) -> list[Any]:
    """What the operation makes of other operands if it chooses so.

    Its derivative is linear in them; of a max of two, a clamp, a size the value is
    their own, where they are ``rounded``.
    """
    params, x = op.eqn.params, values[0]
    held = pinned if rounded else lambda value, chosen: chosen
    match op.kind:
        case "max" | "min":
            x, y = values
            both = x / 2 + y / 2
            chosen = jnp.where(choice == 0, x, jnp.where(choice == 2, y, both))
            # A bound, as what is divided by may have, is one of the value as well.
            return [held(lax.stop_gradient(op.bind(*values)[0]), chosen)]
        case "abs":  # never below zero: it may be divided by
            size = lax.stop_gradient(jnp.abs(x))
            return [held(size, jnp.where(choice == 1, x, -x))]
        case "sign":
            return [(choice - 1).astype(x.dtype)]
        case "clamp":
            low, x, high = values
            clamped = lax.stop_gradient(lax.clamp(*values))
            inside = jnp.where(choice == 1, x, clamped)
            chosen = jnp.where(choice == 2, high, inside)
            return [held(clamped, jnp.where(choice == 0, low, chosen))]
        case "sort":
            axis = params["dimension"]
            return [jnp.take_along_axis(v, choice, axis) for v in values]
        case "top_k" | "approx_top_k":
            axis = params.get("reduction_dimension", params.get("axis", -1))
            return [jnp.take_along_axis(x, choice, axis), choice]
        case "cummax" | "cummin":
            return [jnp.take_along_axis(x, choice, params["axis"])]
        case "reduce_max" | "reduce_min" if not _shares(op):
            rows = _in_a_row(x, params["axes"])
            return [jnp.take_along_axis(rows, choice[..., None], -1)[..., 0]]
        case "reduce_max" | "reduce_min":  # of equals the mean, without overflow
            wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32
            count = choice.sum(params["axes"], keepdims=True).astype(wide)
            share = jnp.where(count > 0, 1 / count, jnp.nan)  # NaN is equal to none
            taken = (choice > 0) | (count == 0)
            mean = jnp.where(taken, x.astype(wide) * share, 0).sum(params["axes"])
            return [mean.astype(x.dtype)]
        case "scatter-max" | "scatter-min":  # of equals the mean
            x, indices, updates = values
            total = _add_at(op, indices, jnp.where(choice > 0, updates, 0), x)
            count, both = (
                _add_at(op, indices, taken.astype(jnp.float32), x)
                for taken in (choice > 0, choice == 2)
            )
            total += jnp.where(both > 0, x, 0)
            count += jnp.where(both > 0, 1, 0)
            mean = total / jnp.maximum(count, 1).astype(x.dtype)
            return [jnp.where(count > 0, mean, x)]
    out, *parts = _in_window(op, x)
    for i, part in enumerate(parts):
        out = jnp.where(choice == i + 1, part, out)
    return [out]


def _length(op: Op) -> int:
    shape = op.eqn.invars[0].aval.shape
    return math.prod(shape[axis] for axis in op.eqn.params["axes"])


def _shares(op: Op) -> bool:
    return _length(op) <= _SHARED


def _larger(a: tuple[Any, Any], b: tuple[Any, Any], sign: int) -> tuple[Any, Any]:
    """Of two values and their indices the larger, or smaller; the first of equals."""
    better = b[0] > a[0] if sign > 0 else b[0] < a[0]
    return jnp.where(better, b[0], a[0]), jnp.where(better, b[1], a[1])


def _index(x: jax.Array, axis: int) -> jax.Array:
    """Each entry's place along an axis, laid out over the devices as the array is."""
    others = [i for i in range(x.ndim) if i != axis]
    places = jnp.expand_dims(jnp.arange(x.shape[axis], dtype=jnp.int32), others)
    return jnp.zeros_like(x, jnp.int32) + places


def _in_a_row(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The axes as one, the last."""
    kept = [i for i in range(x.ndim) if i not in axes]
    shape = [x.shape[i] for i in kept]
    length = math.prod(x.shape[i] for i in axes)
    return x.transpose(*kept, *axes).reshape(*shape, length)


def _add_at(op: Op, indices: Any, updates: jax.Array, x: jax.Array) -> jax.Array:
    """Updates added up at the places where the operation puts them in x."""
    names = "dimension_numbers", "indices_are_sorted", "unique_indices", "mode"
    params = {name: op.eqn.params[name] for name in names}
    return lax.scatter_add(jnp.zeros_like(x, updates.dtype), indices, updates, **params)


def _at_updates(op: Op, x: jax.Array, indices: Any, updates: Any) -> jax.Array:
    """The entries of x where the operation puts updates: what adds them, transposed."""
    add = functools.partial(_add_at, op, indices, x=x)
    return jax.linear_transpose(add, updates)(x)[0]


def _in_window(op: Op, x: jax.Array) -> list[jax.Array]:
    """The first entry of every window, the second, and so on."""
    params = op.eqn.params
    worst = -jnp.inf if op.kind == "reduce_window_max" else jnp.inf
    x = lax.pad(x, x.dtype.type(worst), [(*pair, 0) for pair in params["padding"]])
    strides, shape = params["window_strides"], op.eqn.outvars[0].aval.shape
    parts = []
    for start in itertools.product(*map(range, params["window_dimensions"])):
        stop = [
            first + (count - 1) * stride + 1
            for first, count, stride in zip(start, shape, strides, strict=True)
        ]
        parts.append(lax.slice(x, start, stop, strides))
    return parts
