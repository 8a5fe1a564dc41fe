"""Dropout: a function of seed, step, microbatch and place, with no state of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcompact.kernels.explicit import like


def noise_of(seed: int, step: Any, microbatches: int) -> Any:
    """What a step's microbatches draw from, int32 (a,): no two steps' are alike.

    >>> noise_of(0, 3, 4), noise_of(1, 0, 1)
    (array([12, 13, 14, 15], dtype=int32), array([1000003], dtype=int32))
    """
    noise_a = step * microbatches + np.arange(microbatches, dtype=np.int32)
    return noise_a + np.int32(seed * 1_000_003 % 2**30)


def dropout(rate: float, noise: jax.Array | None, place: int | jax.Array) -> Callable:
    """``(x, n) -> x``: the n-th of a place, which is a layer or what is outside them.

    Without ``noise``, an int32, nothing drops out.

    >>> drop = dropout(0.5, jnp.int32(3), place=0)
    >>> sorted(set(drop(jnp.ones(99), 0).tolist()))
    [0.0, 2.0]
    """
    if noise is None or rate == 0:
        return lambda x, n: x
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), noise), place)

    def drop(x, n):
        kept = jax.random.bernoulli(
            jax.random.fold_in(key, n), 1 - rate, x.shape, out_sharding=like(x)
        )
        return jnp.where(kept, x / (1 - rate), jnp.zeros((), x.dtype))

    return drop
