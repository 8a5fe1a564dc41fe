"""A module that changes, in all ways that a block must not, or may."""

import jax.numpy as jnp
from flax import nnx


class Counted(nnx.Module):
    def __init__(self, kind: type = nnx.Linear):
        self.linear, self.calls = kind(16, 16, rngs=nnx.Rngs(0)), 0

    def count(self, x):
        self.calls += 1
        return self.linear(x)

    def remember(self, x):
        self.last = nnx.Cache(x)
        return self.linear(x)

    def write(self, x):
        self.linear.bias[...] += 1
        return self.linear(x)

    def overwrite(self, x):
        self.linear.kernel.set_value(jnp.ones((16, 16)))
        return self.linear(x)

    def add(self, x):
        self.scale = nnx.Param(jnp.ones(16))
        return self.linear(x)
