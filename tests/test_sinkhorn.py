"""Loops whose state is made of inverses of its products with data: optimal transport.

Their scalings fit one kernel. Beside another, made again of rounded points, gradients
were 0.2 (8 bits) and 1.6 (4 bits) off: such a loop is made again with its kernel.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.test_replay import crossing, nbytes

pytestmark = pytest.mark.usefixtures("any_rank")

POINTS, WIDTH, STEPS = 64, 16, 20
W, X, Y = (
    jax.random.normal(jax.random.key(i), shape) / scale
    for i, (shape, scale) in enumerate(
        [((WIDTH, WIDTH), 4), ((POINTS, WIDTH), 1), ((POINTS, WIDTH), 1)]
    )
)


def transport(scale, w, x, y):
    """The cost of a plan; ``scale(kernel)`` makes its scalings."""
    x, y = jnp.tanh(x @ w), y @ w
    costs = ((x[:, None] - y) ** 2).sum(-1)
    kernel = jnp.exp(-costs / 5)
    u, v = scale(kernel)
    return jnp.sum(u[:, None] * kernel * v * costs)


def divisions(kernel):
    def step(state, _):
        u, v = state
        v = 1 / (kernel.T @ u)
        return (1 / (kernel @ v), v), None

    ones = jnp.ones(POINTS)
    return jax.lax.scan(step, (ones, ones), None, length=STEPS)[0]


def a_guarded_kernel_in_the_state(kernel):
    def step(_, state):
        u, v, kernel = state
        v = jnp.reciprocal(jnp.maximum(kernel.T @ u, 1e-9))
        return jnp.reciprocal(kernel @ v + 1e-9), v, kernel

    ones = jnp.ones(POINTS)
    return jax.lax.fori_loop(0, STEPS, step, (ones, ones, kernel))[:2]


def unbalanced(kernel):
    """Its second scaling is what the steps give, of which the last is read."""

    def step(u, _):
        v = jnp.einsum("ij,i->j", kernel, u) ** -1 / POINTS
        return (1 / jnp.einsum("ij,j->i", kernel, v) / POINTS) ** 0.9, v

    u, v = jax.lax.scan(step, jnp.ones(POINTS), None, length=STEPS)
    return u, v[-1]


LOOPS = [divisions, a_guarded_kernel_in_the_state, unbalanced]


@pytest.mark.parametrize("policy", ["int8", "int4"])
@pytest.mark.parametrize("scale", LOOPS)
def test_gradients_are_near(scale, policy):
    """The rounding of points, 0.5 and 7 %, of which a difference is squared."""

    def fun(*args):
        return transport(scale, *args)

    small = jc.checkpoint(fun, policy=getattr(jc.policies, policy)(), params=0)
    found, exact = (jax.jit(jax.grad(f, (0, 1, 2)))(W, X, Y) for f in (small, fun))
    for got, want in zip(found, exact, strict=True):
        off = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
        assert off < {"int8": 0.03, "int4": 0.2}[policy]


@pytest.mark.parametrize("scale", LOOPS)
def test_nothing_of_the_loop_is_stored(scale):
    small = jc.checkpoint(
        lambda *args: transport(scale, *args), policy=jc.policies.int4(), params=0
    )
    codes = [jc.Quantized(4), jc.Quantized(8, symmetric=False)]  # points and products
    assert nbytes(crossing(small, W, X, Y)) == 2 * sum(c.nbytes(X.shape) for c in codes)


def stored(fun, *args):
    rows = jc.explain(fun, *args, policy=jc.policies.int4(), params=0).rows
    return {r.name for r in rows if r.stored and r.name.startswith("scan.0.")}


def normalized(w, x, y):
    """The forward recursion of a hidden Markov model: numerator and divisor fit."""

    def step(state, seen):
        state = (state @ jax.nn.softmax(w)) * seen
        total = state.sum()
        return state / total, jnp.log(total)

    start = jnp.ones(WIDTH) / WIDTH
    state, logs = jax.lax.scan(step, start, jnp.exp(x @ w))
    return logs.sum() + state @ y[0]


def given(w, x, y):
    """A product of the state is inverted, but the state is not made of that."""

    def step(state, row):
        state = 0.9 * state + row
        return state, state / (1 + (state @ jnp.exp(row)) ** 2) + 1 / (state @ row)

    return jnp.sum(jax.lax.scan(step, jnp.ones(WIDTH), x @ w)[1] * y)


def of_parameters(w, x, y):
    """Parameters are as they were: the scalings fit."""

    def step(u, _):
        v = 1 / (jnp.exp(w).T @ u)
        return 1 / (jnp.exp(w) @ v), None

    start = jnp.exp(x[0] @ w)
    return jax.lax.scan(step, start, None, length=STEPS)[0] @ y[0]


def printed(w, x, y):
    """An operation without a result."""

    def step(state, row):
        jax.debug.callback(lambda state: None, state)
        return jnp.tanh(state @ w) + row, None

    return jax.lax.scan(step, x[0], x)[0] @ y[0]


@pytest.mark.parametrize("fun", [normalized, given, of_parameters, printed])
def test_other_loops_are_stored(fun):
    assert stored(fun, W, X, Y)
