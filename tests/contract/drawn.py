"""What is drawn at random, and compared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import jaxcompact as jc

KINDS = ("gaussian", "rademacher", "sparse", "countsketch", "orthonormal")
FLOATS = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
WIDE_FLOATS = st.sampled_from([jnp.float32, jnp.bfloat16])
# What comes first is in the first example.
LEADING = st.sampled_from([(2, 1, 3), (), (1,), (0,), (3,)])
BOOLS = st.booleans()
KEY = jax.random.key(3)


def few(examples: int):
    return settings(derandomize=True, deadline=None, max_examples=examples)


def integers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, shape)


def array(x: np.ndarray, dtype) -> jax.Array:
    return jnp.asarray(x, jnp.float32).astype(dtype)


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(got, want, absolute, terms: int, dtype) -> None:
    """Sums of so many terms, each rounded: by the sum of their absolute values."""
    info = jnp.finfo(dtype)
    bound = terms * (float(info.eps) * absolute + float(info.tiny))
    assert (abs(np.asarray(got, np.float64) - want) <= bound).all()


def matrix(space: jc.Subspace, tree: Any, path: str, step: int = 0, layer=...):
    """P of a kernel, of one of its layers if it has several."""
    slot = space.slots(tree)[path]
    key = slot.keys(space.key, space.generation(step))[layer]
    return np.asarray(slot.projection.matrix(key, slot.width), np.float64)


def tree_of(stack: tuple[int, ...], n: int, m: int, dtype) -> dict:
    """A kernel for the subspace, one that is none of it, and a bias."""
    return {
        "in": {"kernel": array(integers(0, *stack, n, m), dtype)},
        "out": {"kernel": array(integers(1, m, 2), dtype)},
        "bias": array(integers(2, m), dtype),
    }
