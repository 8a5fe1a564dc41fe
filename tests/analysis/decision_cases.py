"""Two coarse bits, functions of a product, and how far their gradients are off."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxcompact as jc
from tests.draws import normal
from tests.residuals import weighted

COARSE = jc.Policy({"x": jc.Save()}, default=jc.policies.uniform(jc.Quantized(2)))
W, X = normal(7, 64, 64, scale=0.15), normal(3, 8, 64)
NODES = jnp.array([0, 1, 1, 3, 0, 1, 9, 3])
# x^T dy has 8 terms; in another order they differ in the last bits of float32.
ULPS = 1e-6


def errors(fun, *args, policy=COARSE):
    """Of the weights' gradient, relative to its norm."""
    small = jc.checkpoint(fun, policy=policy, params=0)
    gradients = (jax.jit(jax.grad(weighted(f))) for f in (fun, small))
    exact, lossy = (np.asarray(gradient(*args)) for gradient in gradients)
    assert exact.any()
    return np.linalg.norm(lossy - exact) / np.linalg.norm(exact)
