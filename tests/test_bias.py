"""Stochastic rounding is unbiased through `jc.checkpoint`, where products read it."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.cases import slow
from tests.draws import normal

DRAWS = 1024


def distance_from_floor(codec: jc.Codec) -> float:
    """|mean error of a weight gradient| over what as many fair draws would leave.

    Noise comes from the data, so each draw shifts x by a millionth: enough for other
    noise, and far below the floor in itself.
    """
    w = normal(0, 64, 8)
    x = normal(1, 32, 64)
    dy = normal(2, 32, 8)
    block = jc.checkpoint(
        lambda w, x: x @ w, policy=jc.policies.uniform(codec), params=0
    )

    def gradient(shift):
        of_both = jax.grad(lambda w, x: jnp.sum(block(w, x) * dy), argnums=(0, 1))
        return of_both(w, x + shift)[0]  # x is encoded if it is differentiated

    shifts = 1e-6 * normal(3, DRAWS, 1, 1)
    errors = jax.jit(jax.vmap(gradient))(shifts) - (x.T @ dy)[None]
    single = jnp.sqrt(jnp.mean(jnp.sum(errors**2, axis=(1, 2))))
    return float(jnp.linalg.norm(errors.mean(axis=0)) / (single / DRAWS**0.5))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [slow(True), False])
def test_bias_is_at_the_sampling_floor(bits, symmetric):
    """512 numbers: of a fair codec the ratio is 1 +- 0.03; 1.3 is ten deviations."""
    codec = jc.Quantized(bits, symmetric=symmetric, stochastic=True)
    assert distance_from_floor(codec) < 1.3


def test_nearest_rounding_would_not_pass():
    assert distance_from_floor(jc.Quantized(4)) > 5
