"""The tensors of a function that may be stored, by their names."""

import jax
import jax.numpy as jnp

import jaxcompact as jc
from jaxcompact.analysis.moving import moving_values
from jaxcompact.analysis.tensors import Tensors
from jaxcompact.checkpoint import TRACERS

S = jax.ShapeDtypeStruct
W = S((16, 16), jnp.float32)
X = S((8, 16), jnp.float32)


def candidates(fun, *args, params=0, **kwargs):
    """Name -> `Tensor`, of a function whose first argument is its parameters."""
    wrapped = jc.checkpoint(fun, policy=jc.Policy(), params=params)
    traced, _ = TRACERS[wrapped](args, kwargs)
    moving = moving_values(traced.graph, [True] * len(traced.graph.inputs))
    found = Tensors(traced.graph, traced.names, traced.known, moving).found.values()
    names = [tensor.name for tensor in found]
    assert len(set(names)) == len(names), names
    return {tensor.name: tensor for tensor in found}
