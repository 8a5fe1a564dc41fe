"""Small errors of what is stored are small errors of the gradient.

Functions that a rounded tensor could make infinite, or much larger: steep ones,
decisions, sums that belong together. The bounds are several times what rounding causes
by itself: of 8 bits 0.5 % of a tensor, of 4 bits 7 %.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.analysis.attention_cases import W, X
from tests.analysis.steep_cases import CASES, ONE, errors, posterior
from tests.cases import slow

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("policy", "bound"),
    [slow("int8", 0.02), ("int4", 0.2)],
)
def test_gradients_are_near(name, policy, bound):
    fun, params, x = CASES[name]
    largest = max(errors(fun, params, x, getattr(jc.policies, policy)()))
    assert largest < bound


def test_logarithms_that_a_loop_adds_up_are_not_rounded():
    """Their exponentials take the errors, of numbers in the hundreds, as factors."""
    [error] = errors(posterior, ONE, X, jc.policies.int8())
    assert error < 0.05


GUARDED = {
    "logarithm": lambda h: jnp.log(jnp.maximum(h, 1.0)),
    "reciprocal": lambda h: 1 / jnp.maximum(h, 1.0),
    "clamped": lambda h: jnp.log(jax.lax.clamp(1.0, h, 10.0)),
    "added": lambda h: 1 / (1.0 + jax.nn.relu(h)),
}


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize(("policy", "bound"), [slow("int8", 0.1), ("int4", 0.6)])
def test_a_guard_holds_for_what_is_rounded(name, policy, bound):
    """It was chosen not to be the guard; rounded it may be below, even negative."""
    policy = getattr(jc.policies, policy)()
    [error] = errors(lambda p, x: GUARDED[name](x @ p["w"]), ONE, X, policy)
    assert error < bound


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_a_factor_that_is_made_again_is_a_triangle(policy):
    """Of `cholesky` the primitive leaves the other one as it happens to be."""
    params = {"s": W @ W.T + jnp.eye(32)}

    def fun(p, x):
        return jnp.tanh(x @ jnp.linalg.cholesky(p["s"]).T)

    [error] = errors(fun, params, X, getattr(jc.policies, policy)())
    assert error < (0.02 if policy == "int8" else 0.2)


@pytest.mark.slow
def test_long_chains_are_traced():
    """Sums of sums of quotients, followed once each; chains beyond Python's depth."""

    def normalized(w):
        a = jnp.exp(X @ w)
        for _ in range(14):  # four times as long for each, when followed each way
            a = a / a.sum(1, keepdims=True)
            a = a / a.sum(0, keepdims=True)
        return jnp.sum(a * a)

    def chain(w):
        h = (X @ w) ** 2 + 1.0
        for _ in range(1200):
            h = h + 1e-4 / h
        return jnp.sum(jax.nn.softmax(jnp.log(h)) * X)

    def doubled(w):
        a = c = (X @ w).T @ (X @ w)
        for _ in range(100):
            c = c + c
        for _ in range(40):
            a = jnp.concatenate([a, a])[: len(a)]
        h = jnp.tanh(X @ w)
        for _ in range(100):
            h = h / (h + h)
        of_sums = jnp.sum(c**2) + jnp.sum(jnp.sin(c))
        return of_sums + jnp.sum(a**2) + jnp.sum(jnp.tanh(h @ h.T) @ X)

    for fun in (normalized, chain, doubled):
        wrapped = jc.checkpoint(fun, policy=jc.policies.int8())
        jax.make_jaxpr(jax.grad(wrapped))(W)


def test_what_is_returned_may_be_a_bool():
    wrapped = jc.checkpoint(lambda w, x: (jnp.tanh(x @ w), True), params=0)
    gradient = jax.grad(lambda w: wrapped(w, X)[0].sum())(W)
    assert jnp.isfinite(gradient).all() and bool(wrapped(W, X)[1])
