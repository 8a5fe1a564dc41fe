"""The error function of operations that a kernel has, which Mosaic lacks.

erf is ``x T(x^2)`` within [-1, 1]; beyond it erfc is ``exp(-x^2) / |x|`` times a
polynomial of ``1 / x^2``, and of a negative x 2 less that: as XLA expands erfc, whose
bits these are, but where a product is added unrounded. XLA's erf is another. Source:
Cephes, ndtr.c, single precision.
"""

import jax
import jax.numpy as jnp

_WITHIN_1 = (
    *(7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3),
    *(-2.685381193529856e-2, 1.128358514861418e-1, -3.761262582423300e-1),
    1.128379165726710,
)
_WITHIN_2 = (
    *(2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1),
    *(-5.824733027278666e-1, 6.210004621745983e-1, -4.944515323274145e-1),
    *(3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1),
)
_BEYOND = (
    *(-1.047766399936249e1, 1.297719955372516e1, -7.495518717768503),
    *(2.921019019210786, -1.015265279202700, 4.218463358204948e-1),
    *(-2.820767439740514e-1, 5.641895067754075e-1),
)
_LEAST = -88.72283905206835  # exp of less is no float32


def erf(x: jax.Array) -> jax.Array:
    """``1 - erfc(x)``, of x's dtype; evaluated in float32."""
    within, beyond = _parts(x.astype(jnp.float32))
    return jnp.where(jnp.abs(x) > 1, 1 - beyond, within).astype(x.dtype)


def erfc(x: jax.Array) -> jax.Array:
    """``2 / sqrt(pi)`` times the integral of ``exp(-t^2)`` from x on, of x's dtype.

    Evaluated in float32. Within ``(16 + 2 x^2) 2^-24`` of itself, before it is rounded:
    erf's three units are 16 of what is left of 1 at x = 1, and exp makes of x^2's
    rounding a relative error.
    """
    within, beyond = _parts(x.astype(jnp.float32))
    return jnp.where(jnp.abs(x) > 1, beyond, 1 - within).astype(x.dtype)


def _parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """erf of what lies within [-1, 1], erfc of what lies beyond it."""
    size, power = jnp.abs(x), -x * x
    inverse = 1 / size
    square = inverse * inverse
    beyond = jnp.exp(power) * inverse
    beyond *= jnp.where(
        size < 2, _polynomial(_WITHIN_2, square), _polynomial(_BEYOND, square)
    )
    beyond = jnp.where(power < _LEAST, 0.0, beyond)
    beyond = jnp.where(x < 0, 2 - beyond, beyond)
    return x * _polynomial(_WITHIN_1, x * x), beyond


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    y = coefficients[0] * x
    for c in coefficients[1:-1]:
        y = (y + c) * x
    return y + coefficients[-1]
