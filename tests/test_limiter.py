"""The norm-growth limiter against Fira's rule written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc


def test_equals_firas_rule():
    gamma, tx = 1.2, jc.limit_norm_growth(gamma=1.2)
    params = {"a": jnp.zeros(4), "b": jnp.zeros((2, 3))}
    state, last = tx.init(params), {"a": None, "b": None}
    for step in range(12):
        keys = jax.random.split(jax.random.key(step))
        updates = {
            "a": jax.random.normal(keys[0], (4,)) * 2.0 ** (step % 5),
            "b": jax.random.normal(keys[1], (2, 3)),
        }
        got, state = jax.jit(tx.update)(updates, state)
        for name, u in updates.items():
            u = np.asarray(u, np.float64)
            norm = np.linalg.norm(u)
            if last[name] is not None and norm > gamma * last[name]:
                u, norm = u * gamma * last[name] / norm, gamma * last[name]
            last[name] = norm
            np.testing.assert_allclose(got[name], u, rtol=1e-5)


def test_a_zero_update_does_not_freeze_the_parameter():
    tx = jc.limit_norm_growth()
    state = tx.init(jnp.zeros(2))
    _, state = tx.update(jnp.zeros(2), state)
    updates, _ = tx.update(jnp.ones(2), state)
    np.testing.assert_array_equal(updates, 1.0)


def test_complex_updates_have_their_size():
    tx = jc.limit_norm_growth(gamma=2.0)
    state = tx.init(jnp.zeros(1, jnp.complex64))
    _, state = tx.update(jnp.array([3j]), state)
    updates, _ = tx.update(jnp.array([9j]), state)
    np.testing.assert_allclose(updates, [6j])


def test_the_square_of_a_large_update_does_not_overflow():
    tx = jc.limit_norm_growth(gamma=2.0)
    _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
    updates, _ = tx.update(jnp.array([3e25, 4e25]), state)
    np.testing.assert_allclose(updates, [6.0, 8.0], rtol=1e-6)


def test_keeps_dtypes():
    tx = jc.limit_norm_growth()
    params = jnp.ones(3, jnp.bfloat16)
    updates, state = tx.update(params, tx.init(params))
    assert updates.dtype == jnp.bfloat16
    assert state.norms.dtype == jnp.float32


@pytest.mark.parametrize("gamma", [0.99, float("nan")])
def test_bad_gamma(gamma):
    with pytest.raises(ValueError, match=f"gamma must be at least 1, got {gamma}"):
        jc.limit_norm_growth(gamma)
