"""Functions of arrays, of sums over their last axis, and of parameters along that.

A kernel has blocks of some rows and columns. So a value of the function is told from
others by what it varies over: an entry by both; a sum, and what is made of sums, by
rows alone; a parameter by columns. It is evaluated in that form and broadcast where it
meets another. A sum is known after a pass over the arrays, or after several if its
terms are made of others' sums, as a variance's of a mean. Numbers that vary over
nothing are evaluated beforehand.

Sums are made in another order than XLA's. To first order, with u = 2^-24 of float32 and
n terms t, each rounded, a sum in any order is within ``n u sum|t|`` of the exact one.
Else operations are rounded one by one, as in `operations`. So, of the exact values,

    RMSNorm    y = x r w, r = 1 / sqrt(mean(x^2) + e): the terms are not negative, so
               the mean is within (n + 2) u of itself, and r, which takes half of that
               and its root's own error, within (n / 2 + 4) u
    LayerNorm  y = z w + b, z = (x - m) r, r = 1 / sqrt(mean((x - m)^2) + e): the mean
               m is within d = (n + 1) u mean|x|, which moves the mean square by d^2
               alone, as differences from a mean add up to zero; so r is within
               (n / 2 + 4) u again, and z within (n / 2 + 6) u |z| + d r

and y within as much, times |w|, and the roundings of its own dtype, which are XLA's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxcompact.kernels.explicit import sharding_of, typed
from jaxcompact.kernels.functions import operations
from jaxcompact.kernels.functions.operations import (
    CALLS,
    applied,
    closes_over_arrays,
    inside,
    is_near_enough,
    narrow,
    refused_dtype,
    refused_operation,
)

_MOVES = frozenset("broadcast_in_dim reshape squeeze".split())
TAKEN = operations.TAKEN | _MOVES | {"reduce_sum"}

Form = tuple[bool, bool]  # whether a value varies over rows, and over columns
ENTRIES, ROWS, COLUMNS, NUMBER = (
    (True, True),
    (True, False),
    (False, True),
    (False,) * 2,
)


class Refused(Exception):
    """The rule that keeps a kernel from a function."""


@dataclass(frozen=True, eq=False)
class Value:
    """One value of a function, as a kernel evaluates it.

    Attributes:
        form: what it varies over.
        dtype: its dtype.
        eqn: the operation that makes it; None of inputs and numbers.
        ins: what that reads.
        number: what it is, if it varies over nothing.
        passes: over xs, after which it can be evaluated.
    """

    form: Form
    dtype: Any
    eqn: Any = None
    ins: tuple["Value", ...] = ()
    number: Any = None
    passes: int = 0

    @property
    def is_sum(self) -> bool:
        return self.eqn is not None and self.eqn.primitive.name == "reduce_sum"


@dataclass(frozen=True)
class Function:
    """Attributes:
    xs, parameters: the inputs.
    y, statistics: the outputs, entries and values of rows.
    kept: of each statistic, whether it has the last axis, of one.
    sums: of each pass over xs those that it makes.
    of_rows: values of rows, no sums, in an order in which they can be evaluated.
    may_approximate: by ``approx_math``, all that it is made of.
    """

    xs: tuple[Value, ...]
    parameters: tuple[Value, ...]
    y: Value
    statistics: tuple[Value, ...]
    kept: tuple[bool, ...]
    sums: tuple[tuple[Value, ...], ...] = field(init=False)
    of_rows: tuple[Value, ...] = field(init=False)
    may_approximate: bool = field(init=False)

    def __post_init__(self):
        found = _below((self.y, *self.statistics), {})
        sums = [v for v in found if v.is_sum]
        passes = range(1, 1 + max((v.passes for v in sums), default=0))
        by_pass = (tuple(v for v in sums if v.passes == n) for n in passes)
        object.__setattr__(self, "sums", tuple(by_pass))
        rows = (v for v in found if v.form == ROWS and not v.is_sum)
        object.__setattr__(self, "of_rows", tuple(rows))
        near = all(is_near_enough(v.eqn) for v in found if v.eqn is not None)
        object.__setattr__(self, "may_approximate", near)


def _below(values: Sequence[Value], found: dict[Value, None]) -> dict[Value, None]:
    """These and what they are made of, which comes first, beside what was found."""
    for value in values:
        if value not in found:
            _below(value.ins, found)
            found[value] = None
    return found


def evaluated(
    value: Value, known: dict[Value, Any], over: Callable[[Any, Form, Form], Any]
) -> Any:
    """A value from ``known`` ones, which those on the way to it join.

    ``over`` broadcasts what has the first form to what has the second.
    """
    if value in known:
        return known[value]
    if value.form == NUMBER:
        return value.number
    kind = value.eqn.primitive.name
    ins = []
    for source in value.ins:
        found = evaluated(source, known, over)
        # Else a number is taken as it is.
        if source.form != value.form and (source.form != NUMBER or kind == "select_n"):
            found = over(found, source.form, value.form)
        ins.append(found)
    known[value] = applied(value.eqn, ins)
    return known[value]


def function_of(
    f: Callable[..., Any], xs: Sequence[Any], parameters: Sequence[Any] = ()
) -> Function:
    """``f(*xs, *parameters)``, of arrays or what describes them.

    xs are of one kind, parameters ``[width]`` along its last axis, or ``[1, width]``.
    Raises `Refused` for a function that a kernel can't evaluate.
    """
    jaxpr = _traced(f, *[xs[0]] * len(xs), *parameters)
    shape, own = xs[0].shape, len(xs)
    if closes_over_arrays(jaxpr):
        raise Refused("f must close over no arrays")
    every, env, inputs = tuple(range(len(shape))), {}, []
    for n, v in enumerate(jaxpr.invars):
        alone = [1] * (v.aval.ndim - 1)
        along = len(alone) < len(shape) and v.aval.shape == (*alone, shape[-1])
        if n >= own and not along:
            raise Refused(f"parameters must be ({shape[-1]},), got {v.aval.shape}")
        _require_narrow(v.aval)
        inputs.append(Value(ENTRIES if n < own else COLUMNS, v.aval.dtype))
        env[v] = inputs[n], every[-v.aval.ndim :]
    reader = _Reader(shape)
    reader.enter(jaxpr, env)
    (y, axes), *statistics = (reader.read(env, v) for v in jaxpr.outvars)
    of_y, *avals = (v.aval for v in jaxpr.outvars)
    if y.form != ENTRIES or axes != every or not narrow(y.dtype):
        raise Refused(f"f must make floats of {shape} first, got {of_y.str_short()}")
    for (value, _), aval in zip(statistics, avals, strict=True):
        if value.form != ROWS or aval.size * shape[-1] != math.prod(shape):
            kind = aval.str_short()
            raise Refused(f"f must make statistics of rows after y, got {kind}")
        _require_narrow(aval)
    kept = tuple(aval.ndim == len(shape) for aval in avals)
    statistics = tuple(value for value, _ in statistics)
    return Function(tuple(inputs[:own]), tuple(inputs[own:]), y, statistics, kept)


def _traced(f: Callable[..., Any], *arrays: Any) -> Any:
    def kind(a: Any) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(a) if typed(a) else None
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    return jax.make_jaxpr(f)(*map(kind, arrays)).jaxpr


def broken_rows(f: Function, width: int) -> str | None:
    """Why the copy engine can't write y, or read the arrays; None if it can.

    Longer rows, as `dequantize` writes, a product that reads y would copy.
    """
    for dtype in (*(x.dtype for x in f.xs), f.y.dtype):
        if dtype.itemsize * width % 16:
            return f"rows must be multiples of 16 bytes, got {dtype}[{width}]"
    return None


class _Reader:
    """Makes values of a jaxpr's variables; the same operation twice is one value.

    Beside each the axes of x that its own ones stand for; None of a number.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.shape, self.every = shape, tuple(range(len(shape)))
        self.made: dict[Any, Value] = {}

    def enter(self, jaxpr: Any, env: dict[Any, Any]) -> None:
        for eqn in jaxpr.eqns:
            ins = [self.read(env, v) for v in eqn.invars]
            if eqn.primitive.name in CALLS:
                inner = inside(eqn)
                within = dict(zip(inner.invars, ins, strict=True))
                self.enter(inner, within)
                outs = [self.read(within, v) for v in inner.outvars]
            else:
                if broken := refused_operation(eqn, TAKEN):
                    raise Refused(broken)
                outs = [self.of(eqn, ins)]
            env.update(zip(eqn.outvars, outs, strict=True))

    def read(self, env: Mapping[Any, Any], v: Any) -> tuple[Value, Any]:
        if isinstance(v, Literal):
            return self.number(v.val, v.aval.dtype), None
        return env[v]

    def number(self, x: Any, dtype: Any) -> Value:
        x = np.asarray(x).astype(dtype)
        value = Value(NUMBER, dtype, number=x[()])
        return self.made.setdefault((x.tobytes(), dtype), value)

    def of(self, eqn: Any, ins: list) -> tuple[Value, Any]:
        """What an operation makes."""
        kind, aval = eqn.primitive.name, eqn.outvars[0].aval
        values = tuple(value for value, _ in ins)
        places = {axes for value, axes in ins if value.form != NUMBER}
        if not places:
            return self.evaluated_now(eqn, values), None
        if kind in _MOVES:
            return values[0], self.moved(eqn, *ins[0])
        if len(places) > 1:
            raise Refused(f"f's arrays must lie along {self.shape}, got {kind} across")
        (axes,) = places
        if kind == "select_n" and values[0].form == NUMBER:
            return values[1 + int(values[0].number)], axes
        if broken := refused_dtype(aval.dtype):
            raise Refused(broken)
        passes = max(value.passes for value in values)
        if kind == "reduce_sum":
            shape = eqn.invars[0].aval.shape
            if eqn.params["axes"] != self.every[-1:] or shape != self.shape:
                raise Refused(f"f must sum over the last axis of {self.shape} alone")
            if aval.dtype != jnp.float32:
                raise Refused(f"f's sums must be of float32, got {aval.dtype}")
            form, axes, passes = ROWS, axes[:-1], passes + 1
        else:
            form = tuple(any(value.form[i] for value in values) for i in range(2))
        value = Value(form, aval.dtype, eqn, values, passes=passes)
        key = eqn.primitive, values, aval.dtype, repr(eqn.params)
        return self.made.setdefault(key, value), axes

    def evaluated_now(self, eqn: Any, values: Sequence[Value]) -> Value:
        if eqn.primitive.name in _MOVES:
            return values[0]
        if eqn.primitive.name == "reduce_sum":
            raise Refused(f"f must sum over the last axis of {self.shape} alone")
        with jax.ensure_compile_time_eval():
            numbers = [jnp.asarray(v.number, v.dtype) for v in values]
            found = applied(eqn, numbers)
        return self.number(found, eqn.outvars[0].aval.dtype)

    def moved(self, eqn: Any, value: Value, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The axes after one moved them."""
        kind, new, shape = eqn.primitive.name, eqn.outvars[0].aval.shape, self.shape
        if kind == "broadcast_in_dim":
            if len(new) == len(shape) and eqn.params["broadcast_dimensions"] == axes:
                return self.every
        elif value.form == ROWS and new in ((*shape[:-1], 1), shape[:-1]):
            return self.every[: len(new)]
        elif value.form == COLUMNS and new == (*[1] * (len(new) - 1), shape[-1]):
            if len(new) <= len(shape):
                return self.every[-len(new) :]
        if new == eqn.invars[0].aval.shape:
            return axes
        raise Refused(f"f's arrays must lie along {shape}, got {kind} to {new}")


def _require_narrow(aval: Any) -> None:
    if not narrow(aval.dtype):
        raise Refused(f"f's arrays must be floats of 16 or 32 bits, got {aval.dtype}")
