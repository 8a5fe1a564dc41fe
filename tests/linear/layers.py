"""A layer, its input and its subspace."""

import jax
import jax.numpy as jnp

import jaxcompact as jc

N, M = 24, 10
KINDS = ("gaussian", "rademacher", "sparse", "countsketch", "orthonormal")


def layer_params(dtype=jnp.float32, n=N, m=M):
    kw, kb = jax.random.split(jax.random.key(1))
    return {
        "kernel": jax.random.normal(kw, (n, m), dtype),
        "bias": jax.random.normal(kb, (m,), dtype),
    }


def layer_input(dtype=jnp.float32, n=N):
    return jax.random.normal(jax.random.key(2), (4, 6, n), dtype)


def loss(params, x):
    y = jc.linear(x, params["kernel"], params["bias"])
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


def subspace(rules="kernel", period=10, rank=8, **kwargs) -> jc.Subspace:
    rules = {rules: jc.Projection(rank=rank, **kwargs)}
    return jc.Subspace(rules, key=jax.random.key(7), period=period)


def matrix_of(space: jc.Subspace, params, path="kernel", step=0):
    """P itself, for a kernel without layer axes."""
    slot = space.slots(params)[path]
    key = slot.keys(space.key, space.generation(step))
    return slot.projection.matrix(key, slot.width)
