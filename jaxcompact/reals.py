"""Complex arrays as the real ones that codecs store: both parts, along a first axis."""

from typing import Any

import jax
import jax.numpy as jnp


def is_complex(x: Any) -> bool:
    """Of an array, or of what describes one."""
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def as_reals(x: jax.Array) -> jax.Array:
    """Real and imaginary parts, ``[2, *shape]``; any other array as it is."""
    return jnp.stack([x.real, x.imag]) if is_complex(x) else x


def from_reals(x: jax.Array) -> jax.Array:
    """The complex array of which `as_reals` gave this."""
    return jax.lax.complex(x[0], x[1])


def reals_of(aval: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of what `as_reals` gives of such an array."""
    if not is_complex(aval):
        return aval.shape, aval.dtype
    return (2, *aval.shape), jnp.finfo(aval.dtype).dtype
