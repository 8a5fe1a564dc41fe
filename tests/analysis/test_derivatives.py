"""A function's derivative is stored in the place of what it is of."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc

Q8 = jc.Quantized(8)
W = jnp.eye(16)
X = jnp.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16)


def test_a_derivative_whose_codec_cannot_store_it_is_refused():
    """`BitMask` of tanh's derivative would make a one of every slope."""
    policy = jc.Policy({"tanh.0": jc.Derivative(jc.BitMask())})
    with pytest.raises(ValueError, match=r"BitMask\(\) can't store tanh.0"):
        jc.explain(lambda w, x: jnp.tanh(x @ w) @ w, W, X, policy=policy, params=0)


@pytest.mark.parametrize("codec", [jc.BitMask(), jc.Quantized(4, axis=-3)])
def test_a_value_beside_a_derivative_that_its_codec_does_not_take(codec):
    policy = jc.Policy({"tanh.*": jc.Derivative(Q8, value=codec)})
    with pytest.raises(ValueError, match=r"can't store tanh.0"):
        jc.explain(lambda w, x: jnp.tanh(x @ w) ** 2 @ w, W, X, policy=policy, params=0)


def test_a_derivative_leaves_the_gradients_of_biases_and_scales():
    """In front of the function, not in it, though they are parameters."""
    params = {"w": W + 0.1, "scale": jnp.full((1, 16), 1.3), "bias": X[:1]}
    policy = jc.Policy({"tanh.*": jc.Derivative(Q8)}, default=jc.Save())

    def fun(p, x):
        return jnp.tanh((x @ p["w"]) * p["scale"] + p["bias"])

    check_gradients(fun, policy, params)


def test_a_derivative_of_a_function_that_changes_the_dtype():
    policy = jc.Policy({"tanh.*": jc.Derivative(Q8)}, default=jc.Save())
    check_gradients(lambda w, x: jnp.tanh(x @ w).astype(jnp.bfloat16), policy, W + 0.1)


def check_gradients(fun, policy, params):
    """Near those of the function itself: a slope is rounded to one of 254 steps."""

    def loss(fun):
        weights = (2 + jnp.cos(9 * X)) * X
        return lambda p: (fun(p, X).astype(jnp.float32) * weights).sum()

    exact = jax.grad(loss(fun))(params)
    found = jax.grad(loss(jc.checkpoint(fun, policy=policy, params=0)))(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert jnp.linalg.norm(b) > 0
        assert jnp.linalg.norm(a - b) < 0.02 * jnp.linalg.norm(b)
