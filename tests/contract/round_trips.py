"""Arrays through every codec: the bound of its error holds."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.contract.codec_cases import Case, exact, norms


def encoded_and_decoded(codec, x, seed=0):
    encoded = codec.encode(x, seed)
    return encoded, codec.decode(encoded)


round_trip = jax.jit(encoded_and_decoded, static_argnums=0)

# For sweeps, in which compiling is nearly all there is to do.
quick_round_trip = jax.jit(
    encoded_and_decoded,
    static_argnums=0,
    compiler_options={"xla_backend_optimization_level": 0},
)


def check(case: Case, x: jax.Array) -> np.ndarray:
    """Shape, dtype and the bound of the error; returns the decoded values."""
    codec = case.codec
    _, decoded = quick_round_trip(codec, x)
    assert decoded.shape == x.shape and decoded.dtype == x.dtype
    exact_x = np.asarray(x, np.float64)
    found = np.asarray(decoded, np.float64)
    error, bound = abs(found - exact_x), case.bound(codec, exact_x)
    if case.kind == "float" and x.dtype != jnp.float32 and case.bound is not exact:
        # The cast of the result, and of the rotated blocks.
        info = jnp.finfo(x.dtype)
        length = norms(exact_x, 64) if "Hadamard" in repr(codec) else abs(found)
        bound = bound + 2 * float(info.eps) * length + float(info.smallest_subnormal)
    assert (error <= bound).all(), f"by {(error - bound).max()}"
    return found
