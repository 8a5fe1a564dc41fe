"""The compressed linear op: what is exact is exact, and the rest is a sketch of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from tests.linear.layers import (
    KINDS,
    M,
    N,
    layer_input,
    layer_params,
    loss,
    matrix_of,
    subspace,
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_output_dx_and_bias_gradient_are_the_plain_layers(kind, dtype):
    params, x = layer_params(dtype), layer_input(dtype)
    value, (exact, dx) = jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    def sketched(x):
        value, grads = jc.value_and_grad(loss, subspace(kind=kind))(params, x, step=0)
        return value, grads

    (got, grads), got_dx = jax.value_and_grad(sketched, has_aux=True)(x)
    np.testing.assert_array_equal(got, value)
    np.testing.assert_array_equal(got_dx, dx)
    np.testing.assert_array_equal(grads["bias"], exact["bias"])
    assert got_dx.dtype == grads["bias"].dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_sketch_is_p_transposed_times_the_full_gradient(kind):
    params, x = layer_params(), layer_input()
    space = subspace(kind=kind)
    _, grads = jc.value_and_grad(loss, space)(params, x, step=0)
    full = jax.grad(loss)(params, x)["kernel"]
    expected = matrix_of(space, params).T @ full
    assert grads["kernel"].shape == (8, M) and grads["kernel"].dtype == jnp.float32
    # Both sum over 24 tokens and 24 inputs, in another order.
    tolerance = (24 + N) * np.finfo(np.float32).eps * float(jnp.abs(full).max()) * N
    np.testing.assert_allclose(grads["kernel"], expected, atol=tolerance)


@pytest.mark.parametrize("bits", [4, 8])
def test_sketch_through_a_codec(bits):
    """Tight: z^T dy, z decoded by hand. Loose: within the codec's error of exact."""
    params, x = layer_params(), layer_input()
    codec = jc.Quantized(bits=bits, group_size=4)
    space = subspace(codec=codec)
    _, grads = jc.value_and_grad(loss, space)(params, x, step=0)
    z = x @ matrix_of(space, params)
    dy = jnp.cos(jc.linear(x, params["kernel"], params["bias"]))
    by_hand = jnp.einsum("btr,btm->rm", codec.decode(codec.encode(z)), dy)
    np.testing.assert_allclose(grads["kernel"], by_hand, rtol=1e-4, atol=1e-4)
    exact = jnp.einsum("btr,btm->rm", z, dy)
    error = jnp.linalg.norm(grads["kernel"] - exact) / jnp.linalg.norm(exact)
    # Uniform rounding error of a step max|z| / q, against the rms of z.
    step = jnp.abs(z).max() / (2 ** (bits - 1) - 1)
    assert 0 < error < float(step / z.std())
