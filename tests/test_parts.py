"""Tensors of which a part is read are stored in part."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from tests.candidates import W, X, candidates


@jax.custom_vjp
def summed(x):
    return x @ jnp.tri(x.shape[1]).T


summed.defvjp(lambda x: (summed(x), x), lambda x, ct: (ct * x,))


@pytest.mark.parametrize(
    ("fun", "name", "shape"),
    [
        (lambda w, x: (x @ w)[:, 4:8], "dot_general.0", (8, 4)),
        (lambda w, x: (x @ w).reshape(2, 4, 16).sum(1) / 4, "dot_general.0", (2, 16)),
        (lambda w, x: -(x @ w).T[::2].reshape(4, 16).sum(0), "dot_general.0", (16,)),
        (lambda w, x: jnp.sort(x @ w, stable=False)[:, -2:], "sort.0", (8, 2)),
        (lambda w, x: jnp.fft.fft(x @ w).real[:2], "fft.0", (2, 16)),
        (lambda w, x: checkpoint_name((x @ w)[0], "cls"), "cls", (1, 16)),
        (lambda w, x: (x @ w + x @ w.T)[0], "add.0", (1, 16)),
        (
            lambda w, x: jax.lax.scan(lambda x, _: (x @ w, x @ w), x, length=3)[1][-1],
            "scan.0.1",
            (1, 8, 16),
        ),
        # All of it is read, or its numbers are.
        (lambda w, x: (y := x @ w)[:2] @ y.T, "dot_general.0", (8, 16)),
        (lambda w, x: (x @ w).max(1), "dot_general.0", (8, 16)),
        (lambda w, x: x[jnp.arange(8), (x @ w).argmax(1).sum()], "argmax.0", (8,)),
        (lambda w, x: x[(x @ w)[:, 0].astype(jnp.int8)], "dot_general.0", (8, 1)),
        (lambda w, x: summed(x @ w)[0], "custom_vjp_call.0", (8, 16)),
        (lambda w, x: jnp.exp(x @ w).sum(1), "dot_general.0", (8, 16)),
    ],
)
def test_what_is_read_in_part_is_stored_in_part(fun, name, shape):
    found = candidates(lambda w, x: jnp.sin(fun(w, x)), W, X)
    assert found[name].shape == shape


def test_attention_in_float32_that_is_read_as_bfloat16():
    """What a `jax.custom_vjp` returns and what it keeps go together."""

    @jax.custom_vjp
    def product(x):
        return x @ x.T

    product.defvjp(lambda x: (x @ x.T, 2 * x), lambda twice, ct: (ct @ twice,))

    def fun(w, x):
        y = product((x @ w).astype(jnp.float32)).astype(jnp.bfloat16)
        return jnp.sin(y) @ x

    w, x = (jnp.ones(a.shape, jnp.bfloat16) for a in (W, X))
    small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    grads = [jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in (small, fun)]
    assert jnp.allclose(*grads, rtol=0.1)
