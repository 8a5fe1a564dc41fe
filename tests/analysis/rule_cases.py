"""Functions with rules of their own, and what they are of."""

import jax
import jax.numpy as jnp

from tests.draws import normal

WIDTH, MANY, ROWS = 32, 128, 64
PARAMS = {
    name: normal(i, *shape) / shape[0] ** 0.5
    for i, (name, shape) in enumerate(
        {"up": (WIDTH, MANY), "down": (MANY, WIDTH)}.items()
    )
} | {"at": jnp.full(MANY, 0.3)}
X = normal(7, ROWS, WIDTH)


def keeping(forward, backward, primal=None):
    """``forward`` gives the result and what is kept."""
    fun = jax.custom_vjp(primal or (lambda y: forward(y)[0]))
    fun.defvjp(forward, backward)
    return fun


def tangents(forward, tangent):
    fun = jax.custom_jvp(forward)
    fun.defjvp(lambda y, t: (forward(*y), tangent(*y, *t)))
    return fun


def layer_of(step):
    return lambda p, x: step(x @ p["up"]) @ p["down"]
