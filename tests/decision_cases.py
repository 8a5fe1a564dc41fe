"""Two coarse bits, functions of a product, and how far their gradients are off."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxcompact as jc

COARSE = jc.Policy({"x": jc.Save()}, default=jc.policies.uniform(jc.Quantized(2)))


def normal(seed, *shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


W, X = normal(7, 64, 64, scale=0.15), normal(3, 8, 64)
NODES = jnp.array([0, 1, 1, 3, 0, 1, 9, 3])
# x^T dy has 8 terms; in another order they differ in the last bits of float32.
ULPS = 1e-6


def weighted(fun):
    """A loss whose gradient with respect to the output is no function of it."""

    def loss(*args):
        y = fun(*args)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()

    return loss


def errors(fun, *args, policy=COARSE):
    """Of the weights' gradient, relative to its norm."""
    small = jc.checkpoint(fun, policy=policy, params=0)
    gradients = (jax.jit(jax.grad(weighted(f))) for f in (fun, small))
    exact, lossy = (np.asarray(gradient(*args)) for gradient in gradients)
    assert exact.any()
    return np.linalg.norm(lossy - exact) / np.linalg.norm(exact)
