"""Limit how fast an update may grow from one step to the next."""

from numbers import Real
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class LimitNormGrowthState(NamedTuple):
    """State of `limit_norm_growth`."""

    norms: optax.Updates  # shape=(), float32 per leaf: norm of the last update


def limit_norm_growth(gamma: float = 1.01) -> optax.GradientTransformation:
    """Scales each leaf's update down to ``gamma`` times the norm of its last one.

    ``u_t <- u_t min(1, gamma |u_{t-1}| / |u_t|)``, with the limited norm remembered; no
    limit where the last norm is zero. Damps the spike at a new projection.

    Memory: one float32 per leaf. Raises ValueError if ``gamma`` is below 1.

    Source: Fira (arXiv 2410.01623), section 4.2.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> tx = jc.limit_norm_growth(gamma=2.0)
    >>> state = tx.init(jnp.zeros(1))
    >>> _, state = tx.update(jnp.array([1.0]), state)
    >>> updates, state = tx.update(jnp.array([5.0]), state)
    >>> updates.tolist()
    [2.0]
    """
    number = isinstance(gamma, Real) and not isinstance(gamma, bool)
    if not number or not gamma >= 1:
        raise ValueError(f"gamma must be at least 1, got {gamma!r}")
    gamma = float(gamma)

    def init(params):
        norms = jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params)
        return LimitNormGrowthState(norms)

    def update(updates, state, params=None):
        del params
        norms = jax.tree.map(_norm, updates)
        limits = jax.tree.map(
            lambda last: jnp.where(last > 0, gamma * last, jnp.inf), state.norms
        )
        updates = jax.tree.map(
            lambda u, norm, limit: (
                u * jnp.where(norm > limit, limit / norm, 1.0).astype(u.dtype)
            ),
            updates,
            norms,
            limits,
        )
        norms = jax.tree.map(jnp.minimum, norms, limits)
        return updates, LimitNormGrowthState(norms)

    return optax.GradientTransformation(init, update)


def _norm(update: jax.Array) -> jax.Array:
    """Of which no square overflows."""
    sizes = jnp.abs(update).astype(jnp.float32)
    largest = jnp.max(sizes, initial=0.0)
    finite = jnp.isfinite(largest) & (largest > 0)
    parts = sizes / jnp.where(finite, largest, 1.0)
    return largest * jnp.sqrt(jnp.sum(jnp.square(parts)))
