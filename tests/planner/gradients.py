"""Gradients of a small transformer, under any policy."""

import jax
import jax.numpy as jnp

import jaxcompact as jc

D, FF, LAYERS = 64, 160, 3
SHAPES = {
    **dict.fromkeys(("q", "k", "v", "o"), (D, D)),
    **dict.fromkeys(("gate", "up"), (D, FF)),
    "down": (FF, D),
}
KEYS = jax.random.split(jax.random.key(0), len(SHAPES) + 2)
PARAMS = {
    name: jax.random.normal(key, (LAYERS, *shape)) / shape[0] ** 0.5
    for key, (name, shape) in zip(KEYS, SHAPES.items(), strict=False)
}
X, TARGET = (jax.random.normal(key, (4, 64, D)) for key in KEYS[-2:])


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(w, x):
    y = norm(x)
    q, k, v = y @ w["q"], y @ w["k"], y @ w["v"]
    x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8) @ v @ w["o"]
    y = norm(x)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def make_gradient(policy, block=block):
    return jax.grad(loss_of(policy, block)), (PARAMS, X)


def loss_of(policy, block=block):
    wrapped = jc.checkpoint(block, policy=policy, params=0)

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (wrapped(w, x), None), x, params)
        return jnp.square(x - TARGET).mean()

    return loss


def gradient(policy):
    of, args = make_gradient(policy)
    return flat(jax.jit(of)(*args))


def flat(tree):
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
