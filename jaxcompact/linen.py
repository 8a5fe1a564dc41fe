"""Flax Linen: a drop-in `Dense`."""

import jax
from flax import linen as nn

from jaxcompact.linear import SketchedKernel, linear


class Dense(nn.Dense):
    """`flax.linen.Dense` that can train in a subspace.

    The same arguments, parameters and outputs. Inside `jaxcompact.value_and_grad` a
    kernel in the subspace is read through `jaxcompact.linear`; everywhere else this is
    Flax's layer.

    Raises ValueError if a kernel in the subspace meets ``dot_general`` or
    ``dot_general_cls``: the sketch does not know them.

    >>> import jax, jax.numpy as jnp
    >>> from jaxcompact import linen as clinen
    >>> layer = clinen.Dense(4)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> layer.apply(variables, jnp.ones((2, 3))).shape
    (2, 4)
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        kernel = _unboxed(self.get_variable("params", "kernel"))
        if not isinstance(kernel, SketchedKernel):
            return super().__call__(inputs)
        if self.dot_general is not None or self.dot_general_cls is not None:
            raise ValueError(
                f"dot_general and dot_general_cls must be left at their defaults for "
                f"{kernel.path!r}, which is in the subspace"
            )
        bias = _unboxed(self.get_variable("params", "bias"))
        return linear(inputs, kernel, bias, dtype=self.dtype, precision=self.precision)


def _unboxed(param):
    """The value of a parameter that `flax.linen.with_partitioning` put in a box."""
    return param.value if isinstance(param, nn.Partitioned) else param
