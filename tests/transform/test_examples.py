"""Sums over examples, taken in the products that make their terms."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcompact.transform.examples import summed
from tests.draws import normal

X, Y = normal(0, 8, 16, 64), normal(1, 8, 16, 32)


def product(x, y):
    return jnp.einsum("bti,bto->bio", x, y)


def held(x, y):
    """As `schedule` ties a weight's cotangent to the next layer's."""
    made, x = jax.lax.optimization_barrier((product(x, y), x))
    return [made.swapaxes(1, 2), x]


def read_elsewhere(x, y):
    made, _ = jax.lax.optimization_barrier((product(x, y), x))
    return [made, 2 * made]


def absent(x, y):
    return [product(x, y), None, x]


def check(fun, shared):
    def sums(*args):
        return summed(fun, args, shared)

    pairs = zip(fun(X, Y), shared, strict=True)
    expected = [x.sum(0) if s and x is not None else x for x, s in pairs]
    for found in sums(X, Y), jax.jit(sums)(X, Y):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-4), found, expected
        )
    return str(jax.make_jaxpr(sums)(X, Y))


def test_what_a_barrier_holds_is_the_sum():
    text = check(held, (True, False))
    assert "8,64,32" not in text and "optimization_barrier" in text


def test_what_is_read_elsewhere_is_made_for_each():
    check(read_elsewhere, (True, False))
    check(read_elsewhere, (True, True))


def test_what_is_not_there_stays_so():
    assert "8,64,32" not in check(absent, (True, True, False))
