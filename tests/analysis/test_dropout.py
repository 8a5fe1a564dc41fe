"""The mask of the forward pass is that of the backward pass, whatever is decoded."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcompact as jc
from jaxcompact import nnx as cnnx
from tests.analysis.decision_cases import COARSE, W, X


@pytest.mark.parametrize(
    "policy",
    [COARSE, jc.Policy({"x": jc.Save()}), jc.policies.compress(jc.Quantized(8))],
)
@pytest.mark.parametrize("seed", [jax.random.key, jax.random.PRNGKey])
def test_dropout_has_one_mask(policy, seed):
    def fun(w, x, key):
        y = x @ w
        return jnp.where(jax.random.bernoulli(key, 0.5, y.shape), y, jnp.zeros_like(y))

    small = jc.checkpoint(fun, policy=policy, params=0)
    for f in (small, jax.jit(small), jax.vmap(small, in_axes=(None, 0, 0))):
        x, key = X, seed(0)
        if f is not small and not hasattr(f, "lower"):
            x, key = X[:, None], jax.random.split(key, 8)
        y, backward = jax.vjp(lambda x, f=f, key=key: f(jnp.eye(64), x, key), x)
        assert 0 < (y == 0.0).sum() < y.size
        (dx,) = backward(jnp.ones_like(y))
        assert ((dx != 0.0) == (y != 0.0)).all()


def test_dropout_of_nnx_has_one_mask_and_a_new_one_every_call():
    small = cnnx.checkpoint(
        lambda drop, x: drop(x), policy=jc.policies.uniform(jc.Quantized(8))
    )
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    masks = []
    for _ in range(2):
        twin = nnx.clone(drop)
        y = small(drop, X)
        dx = jax.grad(lambda x, twin=twin: small(nnx.clone(twin), x).sum())(X)
        assert ((dx != 0.0) == (y != 0.0)).all()
        masks.append(y != 0.0)
    assert (masks[0] != masks[1]).any()


@pytest.mark.parametrize(
    "policy", [jc.policies.int4(), jc.Policy(), jc.policies.uniform(jc.Offload())]
)
@pytest.mark.parametrize("loop", [False, True])
def test_keys_of_dropout_are_used_once(policy, loop):
    """As `jax.debug_key_reuse` counts: what the backward pass reads is no use."""

    def fun(w, x, key):
        for k in jax.random.split(key):
            x = jnp.tanh(x @ w)
            x = jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0.0)
        return x

    small = jc.checkpoint(fun, policy=policy, params=0)

    def loss(w, x, key):
        if not loop:
            return small(w, x, key).sum()
        keys = jax.random.split(key, 3)
        return jax.lax.scan(lambda x, k: (small(w, x, k), None), x, keys)[0].sum()

    with jax.debug_key_reuse(True):
        for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
            assert gradient(W, X, jax.random.key(0)).any()
        with pytest.raises(jax.errors.KeyReuseError):  # it counts
            jax.jit(lambda w, x, k: small(w, small(w, x, k), k))(
                W, X, jax.random.key(0)
            )
