"""The operations that kernels evaluate on blocks, one by one, in whatever function.

Each rounded to its dtype, as it is written and as XLA compiles it. So two compilers'
values differ where their exp, tanh, log round to different neighbours, or one of them
adds a product without rounding that first. With n roundings of a unit u (bfloat16 2^-8,
float16 2^-11, float32 2^-24) on the way to y, if no sum cancels, both are within
n u |y| of the exact y, to first order: SwiGLU has 5.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxcompact.kernels.functions.error_function import erf, erfc
from jaxcompact.kernels.functions.exponential import exp, exp2, logistic

TAKEN = frozenset(
    """abs add broadcast_in_dim clamp convert_element_type copy div eq erf erfc exp exp2
    ge gt integer_pow le log logistic lt max min mul ne neg rsqrt select_n sqrt square
    sub tanh""".split()
)
CALLS = frozenset("jit pjit closed_call custom_jvp_call custom_vjp_call".split())
_EXPONENTIALS = {"exp": exp, "exp2": exp2, "logistic": logistic}
# Those that Mosaic does not have, or makes of more instructions.
_OURS = {"copy": lambda x: x, "erf": erf, "erfc": erfc, **_EXPONENTIALS}
# Whose approximations by the card are too coarse.
_CAREFUL = frozenset("erf erfc log rsqrt sqrt tanh".split())


def applied(eqn: Any, ins: Sequence[Any]) -> Any:
    """What one of the operations that are taken makes of arrays or numbers."""
    if ours := _OURS.get(eqn.primitive.name):
        return ours(*ins)
    return eqn.primitive.bind(*ins, **eqn.params)


def is_near_enough(eqn: Any) -> bool:
    """Whether ``approx_math`` of Mosaic's compiler leaves the operation as exact.

    Not of float32's exp: of large numbers its error is too many of float32's units.
    """
    kind = eqn.primitive.name
    wide = eqn.outvars[0].aval.dtype == jnp.float32
    return kind not in _CAREFUL and not (kind in _EXPONENTIALS and wide)


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


def closes_over_arrays(jaxpr: Any) -> bool:
    calls = (eqn for eqn in jaxpr.eqns if eqn.primitive.name in CALLS)
    return bool(jaxpr.constvars) or any(closes_over_arrays(inside(c)) for c in calls)


def inside(call: Any) -> Any:
    inner = call.params.get("jaxpr", call.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner)


def narrow(dtype: jnp.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize in (2, 4)
