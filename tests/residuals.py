"""Functions, and what is held and stored between their passes."""

import jax
import jax.numpy as jnp
from jax._src.ad_checkpoint import saved_residuals

import jaxcompact as jc
from jaxcompact.checkpoint import TRACERS
from tests.draws import normal

Q4, Q8 = jc.Quantized(4), jc.Quantized(8)
uniform, compress = jc.policies.uniform, jc.policies.compress


def mlp(w, x):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


MLP = {"up": normal(1, 64, 128, scale=0.1), "down": normal(2, 128, 64, scale=0.1)}
X = normal(3, 8, 64)
LAYERS = normal(7, 3, 64, 64, scale=0.15)


def layers(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def weighted(fun):
    """A loss whose gradient with respect to the output is no function of it."""

    def loss(*args):
        y = fun(*args)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()

    return loss


def checkpointed(fun, policy, params=0):
    return jc.checkpoint(fun, policy=policy, params=params)


def crossing(fun, *args):
    """What the backward pass holds, apart from arguments by reference."""
    saved = saved_residuals(fun, *args)
    return [aval for aval, where in saved if not where.startswith("from the argument")]


def references(fun, *args):
    """Shapes of the arguments that it holds as they are."""
    saved = saved_residuals(fun, *args)
    return sorted(
        a.shape for a, where in saved if where.startswith("from the argument")
    )


def replay(fun, policy, *args, params=0, wrt=None):
    """``wrt``: which leaves of the arguments are differentiated, if not all."""
    traced, inputs = TRACERS[checkpointed(fun, policy, params)](args, {})
    first = len(inputs) - len(jax.tree.leaves(args))  # after what it closes over
    mask = tuple(wrt is None or i - first in wrt for i in range(len(inputs)))
    return traced.plan(mask).replay


def slots(*args, **kwargs):
    """Name -> action of what is stored."""
    stored = replay(*args, **kwargs).slots
    assert len({slot.tensor.name for slot in stored}) == len(stored)
    return {slot.tensor.name: slot.action for slot in stored}


def nbytes(avals):
    return sum(aval.size * aval.dtype.itemsize for aval in avals)
