"""Features whose normal equations are solved: of these nothing may be rounded."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.analysis.candidates import candidates
from tests.cases import slow
from tests.draws import normal

N = 16
PARAMS = {"a": normal(0, N, 64) / 4}
X, QUERIES = normal(1, 32, N), normal(2, 32, N)
TRUE = normal(3, N, 8) / 4
Y = X @ TRUE + 0.1 * normal(4, 32, 8)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def primal(h, y):
    return jnp.linalg.solve(h.T @ h + 0.5 * jnp.eye(64), h.T @ y)


def of_factors(h, y):
    factors = jax.scipy.linalg.cho_factor(h.T @ h / 32 + 0.5 / 32 * jnp.eye(64))
    return jax.scipy.linalg.cho_solve(factors, h.T @ y / 32)


def dual(h, y):
    return h.T @ jnp.linalg.solve(h @ h.T + 0.5 * jnp.eye(32), y)


def log_determinant(params, x, y):
    """Of a Gaussian process with these features."""
    h = jnp.tanh(x @ params["a"])
    return jnp.linalg.slogdet(h.T @ h + 0.5 * jnp.eye(64))[1] / 64


def held_out(solve):
    def loss(params, x, queries):
        weights = solve(jnp.tanh(x @ params["a"]), Y)
        found = jnp.tanh(queries @ params["a"]) @ weights
        return jnp.mean((found - queries @ TRUE) ** 2)

    return loss


@pytest.mark.parametrize("solve", [primal, slow(of_factors), slow(dual)])
def test_gradients_of_a_ridge_regression(solve):
    """What is left, 0.16, is of the queries' features, in 4 bits. Where those of the
    equations are rounded it is 0.8 to 1.7."""
    loss = held_out(solve)
    small = jc.checkpoint(loss, policy=jc.policies.int4(), params=0)
    exact, found = (
        jax.jit(jax.grad(f))(PARAMS, X, QUERIES)["a"] for f in (loss, small)
    )
    assert jnp.linalg.norm(found - exact) < 0.25 * jnp.linalg.norm(exact)
    assert jc.explain(small, PARAMS, X, QUERIES).stored < 0.9 * 57_600


def test_gradients_of_a_log_determinant():
    """Of rounded features the gradient is 3 times its size off."""
    small = jc.checkpoint(log_determinant, policy=jc.policies.int4(), params=0)
    exact, found = (
        jax.jit(jax.grad(f))(PARAMS, X, Y)["a"] for f in (log_determinant, small)
    )
    assert jnp.linalg.norm(found - exact) < 1e-4 * jnp.linalg.norm(exact)


@pytest.mark.parametrize(
    ("solve", "whole"),
    [
        (primal, True),
        (lambda h, y: jnp.linalg.solve(jnp.eye(32) + jnp.tril(h @ h.T, -1), y), False),
        (lambda h, y: jnp.linalg.solve((h * y[:, :1]) @ h.T, y), False),
    ],
    ids=["ridge", "delta rule", "weighted"],
)
def test_which_features_are_whole(solve, whole):
    def fun(params, x, y):
        h = jnp.tanh(x @ params["a"])
        return solve(h, y)

    found = candidates(fun, PARAMS, X, Y)
    assert found["dot_general.0"].divisor is whole
