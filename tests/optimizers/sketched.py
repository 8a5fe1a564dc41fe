"""A kernel in a subspace and a bias beside it: their sketches and their matrices."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxcompact as jc
from tests.draws import normal

N, M, R = 12, 5, 4


def params(layers=()):
    kernel = normal(0, *layers, N, M)
    return {"a": {"kernel": kernel}, "bias": jnp.ones(M)}


def gradients(step, layers=()):
    ka, kb = jax.random.split(jax.random.key(100 + step))
    return {
        "a": {"kernel": jax.random.normal(ka, (*layers, R, M))},
        "bias": jax.random.normal(kb, (M,)),
    }


def subspace(period=3, **kwargs) -> jc.Subspace:
    rules = {"a/kernel": jc.Projection(**({"rank": R} | kwargs))}
    return jc.Subspace(rules, jax.random.key(4), period)


def matrix(space, tree, step, layer=None):
    slot = space.slots(tree)["a/kernel"]
    keys = slot.keys(space.key, space.generation(step))
    return np.asarray(slot.projection.matrix(keys if layer is None else keys[layer], N))


def updates_of(tx, steps, tree=None):
    tree = params() if tree is None else tree
    state, update = tx.init(tree), jax.jit(tx.update)
    for step in range(steps):
        updates, state = update(gradients(step), state, tree)
        yield updates
