"""Attention in plain JAX against jax.nn's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import flash
from tests.cases import slow


def operands(kv_heads, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 10, 4, 8), *[(2, 10, kv_heads, 8)] * 2, (2, 10, 4, 8)]
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def reference(q, k, v, length_b=None):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=length_b is None,
        key_value_seq_lengths=length_b,
        implementation="xla",
    )


@pytest.mark.parametrize("lengths", [None, (10, 7), (1, 10)])
@pytest.mark.parametrize("kv_heads", [slow(4), 2, slow(1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_output_and_gradients(kv_heads, dtype, lengths, optax_promotion):
    q, k, v, ct = operands(kv_heads, dtype)
    lengths = lengths and jnp.array(lengths, jnp.int32)
    out, back = jax.vjp(lambda *qkv: flash(*qkv, lengths), q, k, v)
    exact, exact_back = jax.vjp(lambda *qkv: reference(*qkv, lengths), q, k, v)
    assert out.dtype == dtype and out.shape == q.shape
    eps = float(jnp.finfo(dtype).eps)
    pairs = [
        (out, exact),
        *zip(back(ct), exact_back(ct.astype(jnp.float32)), strict=True),
    ]
    for found, expected in pairs:
        # Sums of 10 to 40 terms of a third or so in float32, rounded once to dtype; the
        # output, rounded, is used in the backward pass.
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected.astype(jnp.float32), atol=16 * eps
        )


@pytest.mark.slow
def test_it_has_second_derivatives():
    q, k, v, ct = operands(2, jnp.float32)

    def moved(attention):
        grad = jax.grad(lambda q: jnp.sum(attention(q, k, v) * ct))
        return jax.grad(lambda q: jnp.sum(grad(q) * ct))(q)

    np.testing.assert_allclose(moved(flash), moved(reference), atol=1e-5)
