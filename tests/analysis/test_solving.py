"""Loops that solve for their state: optimal transport's, Newton's.

Scalings fit one kernel. Beside another, made again of rounded points, gradients
were 0.2 (8 bits) and 1.6 (4 bits) off, and 0.1 to 0.5 by potentials, the logarithms of
scalings: such a loop is made again with its kernel. Errors of Newton's inverses and
roots, 0.6 and 0.8 after 14 steps with 4 bits, were 300 and 10 after 40.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.cases import slow
from tests.draws import normal
from tests.residuals import crossing, nbytes

pytestmark = pytest.mark.usefixtures("any_rank")

POINTS, WIDTH, STEPS = 64, 16, 20
EPSILON = 1.0  # of potentials; scalings would underflow
W, X, Y = (
    normal(i, *shape) / scale
    for i, (shape, scale) in enumerate(
        [((WIDTH, WIDTH), 4), ((POINTS, WIDTH), 1), ((POINTS, WIDTH), 1)]
    )
)


def costs_of(w, x, y):
    x, y = jnp.tanh(x @ w), y @ w
    return ((x[:, None] - y) ** 2).sum(-1)


def transport(scale, *args):
    """The cost of a plan; ``scale(kernel)`` makes its scalings."""
    costs = costs_of(*args)
    kernel = jnp.exp(-costs / 5)
    u, v = scale(kernel)
    return jnp.sum(u[:, None] * kernel * v * costs)


def transport_in_logarithms(scale, *args):
    """``scale(costs)`` makes its potentials."""
    costs = costs_of(*args)
    f, g = scale(costs)
    return jnp.sum(jnp.exp((f[:, None] + g - costs) / EPSILON) * costs)


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


def potentials(costs):
    def step(state, _):
        f, g = state
        f = -EPSILON * jax.nn.logsumexp((g - costs) / EPSILON, 1)
        g = -EPSILON * jax.nn.logsumexp((f[:, None] - costs) / EPSILON, 0)
        return (f, g), None

    zeros = jnp.zeros(POINTS)
    return jax.lax.scan(step, (zeros, zeros), None, length=STEPS)[0]


def as_it_cools(costs):
    """Both added before, the costs in the state, no largest term, half a step."""

    def step(state, epsilon):
        f, g, costs = state
        left = jnp.log(jnp.exp((f[:, None] + g - costs) / epsilon).sum(1))
        f = f - epsilon * (left + jnp.log(float(POINTS)))
        right = jnp.exp(f / epsilon) @ jnp.exp(-costs / epsilon)
        g = (g - epsilon * jnp.log(right * POINTS)) / 2
        return (f, g, costs), None

    zeros = jnp.zeros(POINTS)
    epsilons = jnp.linspace(2 * EPSILON, EPSILON, STEPS)
    return jax.lax.scan(step, (zeros, zeros, costs), epsilons)[0][:2]


LOOPS = {
    transport: [divisions, a_guarded_kernel_in_the_state, unbalanced],
    transport_in_logarithms: [potentials, as_it_cools],
}
each_loop = pytest.mark.parametrize(
    "fun",
    [
        pytest.param(functools.partial(cost, scale), id=scale.__name__)
        for cost, loops in LOOPS.items()
        for scale in loops
    ],
)


@each_loop
@pytest.mark.parametrize("policy", [slow("int8"), "int4"])
def test_gradients_are_near(fun, policy):
    """The rounding of points, 0.5 and 7 %, of which a difference is squared."""
    small = jc.checkpoint(fun, policy=getattr(jc.policies, policy)(), params=0)
    found, exact = (jax.jit(jax.grad(f, (0, 1, 2)))(W, X, Y) for f in (small, fun))
    for got, want in zip(found, exact, strict=True):
        off = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
        assert off < {"int8": 0.03, "int4": 0.2}[policy]


@each_loop
def test_nothing_of_the_loop_is_stored(fun):
    small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    points = jc.Quantized(4).nbytes(X.shape)
    products = X.nbytes  # whole: distances of all pairs are made of them
    assert nbytes(crossing(small, W, X, Y)) == 2 * (points + products)


def covariances(w, x):
    m = jnp.tanh(x @ w).reshape(4, 16, WIDTH)
    return m, m @ m.mT / WIDTH + 0.5 * jnp.eye(16)


def inverse(steps, w, x, y):
    """Newton's, of each of a batch."""
    m, c = covariances(w, x)
    begin = c / jnp.abs(c).sum(-1).max(-1)[:, None, None] ** 2
    z = jax.lax.fori_loop(0, steps, lambda _, z: z @ (2 * jnp.eye(16) - c @ z), begin)
    return jnp.mean((z @ m) ** 2)


def root(steps, w, x, y):
    """Newton and Schulz's, of both signs: all that is read is the state."""
    m, c = covariances(w, x)
    size = jnp.trace(c, axis1=1, axis2=2)[:, None, None]

    def step(state, _):
        y, z = state
        half = (3 * jnp.eye(16) - z @ y) / 2
        return (y @ half, half @ z), None

    begin = c / size, jnp.broadcast_to(jnp.eye(16), c.shape)
    (_, z), _ = jax.lax.scan(step, begin, None, length=steps)
    return jnp.mean((z / jnp.sqrt(size) @ m) ** 2)


@pytest.mark.parametrize("policy", ["int8", "int4"])
@pytest.mark.parametrize("fun", [inverse, root])
def test_errors_do_not_grow_with_the_steps_of_newton(fun, policy):
    """A covariance has twice the rounding of its factors, in its root or inverse."""
    for steps in (14, 40):
        off = error(functools.partial(fun, steps), getattr(jc.policies, policy)())
        assert off < {"int8": 0.03, "int4": 0.3}[policy]


def error(fun, policy):
    small = jc.checkpoint(fun, policy=policy, params=0)
    found, exact = (jax.jit(jax.grad(f))(W, X, Y) for f in (small, fun))
    return jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)


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


def logarithms_of_steps(w, x, y):
    """`normalized` in logarithms: each step adds another row."""

    def step(state, seen):
        state = jax.nn.logsumexp((state + seen)[:, None] + jax.nn.log_softmax(w), 0)
        return state - jax.nn.logsumexp(state), None

    return jax.lax.scan(step, jnp.zeros(WIDTH), x @ w)[0] @ y[0]


def attention_to_what_is_shared(w, x, y):
    """Exponentials, but no logarithm."""

    def step(state, row):
        seen = jax.nn.softmax(x @ (state + x[0]))
        return jnp.tanh(state + row + seen @ x), None

    return jax.lax.scan(step, x[1], x @ w)[0] @ y[0]


def of_a_constant(w, x, y):
    """A part of the state is one number after each step."""

    def step(state, row):
        h, size = state
        return (jnp.tanh(h @ w * size) + row, 1.0), None

    return jax.lax.scan(step, (x[0], 0.5), x)[0][0] @ y[0]


def attention_to_itself(w, x, y):
    """Products of the state with itself, of which parameters are factors."""

    def step(state, row):
        q, k = state @ w, state @ (w + 1)
        return q @ k.T @ state / WIDTH**3 + row, None

    return jax.lax.scan(step, x[:4] @ w, x.reshape(-1, 4, WIDTH))[0].sum()


def of_a_conjugate_gradient(w, x, y):
    """Products of vectors, of which there is one number."""
    m = x @ w
    a = m.T @ m / POINTS + jnp.eye(WIDTH)

    def step(state, _):
        z, r, p = state
        size = (r @ r) / (p @ a @ p)
        new = r - size * (a @ p)
        return (z + size * p, new, new + (new @ new) / (r @ r) * p), None

    begin = jnp.zeros(WIDTH), y[0], y[0]
    return jax.lax.scan(step, begin, None, length=4)[0][0] @ y[1]


OTHERS = [
    normalized,
    given,
    of_parameters,
    printed,
    logarithms_of_steps,
    attention_to_what_is_shared,
    of_a_constant,
    attention_to_itself,
    of_a_conjugate_gradient,
]


@pytest.mark.parametrize("fun", OTHERS)
def test_other_loops_are_stored(fun):
    assert stored(fun, W, X, Y)
