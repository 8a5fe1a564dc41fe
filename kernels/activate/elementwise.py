"""Functions of arrays, entry by entry, and how a kernel evaluates them on blocks.

Operation by operation, each rounded to its dtype, as it is written and as XLA compiles
it. So two compilers' values differ where their exp, tanh, log round to different
neighbours, or one of them adds a product without rounding that first. With n roundings
of a unit u (bfloat16 2^-8, float16 2^-11, float32 2^-24) on the way to y, if no sum
cancels, both are within n u |y| of the exact y, to first order: SwiGLU has 5.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.kernels.activate.error_function import erf, erfc

TAKEN = frozenset(
    """abs add broadcast_in_dim clamp convert_element_type copy div eq erf erfc exp exp2
    ge gt integer_pow le log logistic lt max min mul ne neg rsqrt select_n sqrt square
    sub tanh""".split()
)
_OURS = {"copy": lambda x: x, "erf": erf, "erfc": erfc}  # that Mosaic does not have
CALLS = frozenset("jit pjit closed_call custom_jvp_call custom_vjp_call".split())


def refused(jaxpr: Any, shape: tuple[int, ...]) -> str | None:
    """Why a kernel can't evaluate it on blocks of ``shape``; None if it can."""
    if closes_over_arrays(jaxpr):
        return "f must close over no arrays"
    for eqn in _operations(jaxpr):
        if broken := refused_operation(eqn, TAKEN):
            return broken
        kind = eqn.primitive.name
        if kind == "broadcast_in_dim" and eqn.invars[0].aval.shape:
            return f"f must broadcast scalars alone, got {eqn.invars[0].aval.shape}"
        for aval in (v.aval for v in (*eqn.invars, *eqn.outvars)):
            if aval.shape not in ((), shape):
                return f"f's arrays must be {shape} or scalars, got {aval.shape}"
            if broken := refused_dtype(aval.dtype):
                return broken
    [y, *others] = [v.aval for v in jaxpr.outvars]
    if others or y.shape != shape or not narrow(y.dtype):
        return f"f must make one array of floats of {shape}, got {[y, *others]}"
    return None


def refused_operation(eqn: Any, taken: frozenset[str]) -> str | None:
    """Why a kernel that takes such operations can't evaluate this one."""
    kind = eqn.primitive.name
    if kind not in taken:
        return f"f must be made of {', '.join(sorted(taken))}, got {kind}"
    if eqn.params.get("accuracy") is not None:
        return f"f's {kind} must ask for no accuracy of its own"
    if kind == "integer_pow" and eqn.params["y"] not in (2, 3):
        return f"f's integer_pow must be of 2 or 3, got {eqn.params['y']}"
    return None


def refused_dtype(dtype: jnp.dtype) -> str | None:
    if dtype != jnp.bool and not narrow(dtype):
        return f"f's dtypes must be floats of 16 or 32 bits, got {dtype}"
    return None


def evaluated(jaxpr: Any, xs: Sequence[jax.Array]) -> jax.Array:
    """The function on blocks, of another shape than it was traced for."""
    return _values(jaxpr, xs, xs[0].shape)[0]


def _values(jaxpr: Any, ins: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    env = dict(zip(jaxpr.invars, ins, strict=True))
    for eqn in jaxpr.eqns:
        ins = [_read(env, v) for v in eqn.invars]
        if eqn.primitive.name in CALLS:
            outs = _values(inside(eqn), ins, shape)
        elif eqn.primitive.name == "broadcast_in_dim":
            outs = [jnp.broadcast_to(*ins, shape)]
        else:
            outs = [applied(eqn, ins)]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_read(env, v) for v in jaxpr.outvars]


def applied(eqn: Any, ins: Sequence[Any]) -> Any:
    """What one of the operations that are taken makes of arrays or numbers."""
    if ours := _OURS.get(eqn.primitive.name):
        return ours(*ins)
    return eqn.primitive.bind(*ins, **eqn.params)


def _read(env: dict[Any, Any], variable: Any) -> Any:
    return variable.val if isinstance(variable, Literal) else env[variable]


def _operations(jaxpr: Any) -> Iterator[Any]:
    """Those of the functions that it calls in their place."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS:
            yield from _operations(inside(eqn))
        else:
            yield eqn


def closes_over_arrays(jaxpr: Any) -> bool:
    calls = (eqn for eqn in jaxpr.eqns if eqn.primitive.name in CALLS)
    return bool(jaxpr.constvars) or any(closes_over_arrays(inside(c)) for c in calls)


def inside(call: Any) -> Any:
    inner = call.params.get("jaxpr", call.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner)


def narrow(dtype: jnp.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize in (2, 4)
