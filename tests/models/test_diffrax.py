"""Differential equations of Diffrax, solves of Lineax, modules of Equinox."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import jaxcompact as jc
from tests.cases import slow
from tests.draws import normal

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
# Exact: float32's rounding. In 8 and 4 bits an entry is off by 1/254 and 1/14 of its
# group's largest, some 2.5 deviations, at most: by 0.006 and 0.1 of one on average.
BOUNDS = {"exact": 1e-5, "int8": 0.015, "int4": 0.25}
POLICIES = {
    "exact": jc.Policy(),
    "int8": jc.policies.int8(),
    "int4": jc.policies.int4(),
}
policies = pytest.mark.parametrize("policy", BOUNDS)
W = normal(0, 4, 4) / 2
X = normal(1, 64, 4)


@pytest.fixture(autouse=True)
def ordinary_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def distance(a, b):
    norms = [
        jnp.sqrt(sum(jnp.vdot(v, v) for v in jax.tree.leaves(t)))
        for t in (jax.tree.map(jnp.subtract, a, b), b)
    ]
    return norms[0] / norms[1]


def near(loss, policy, *args):
    small = jc.checkpoint(loss, policy=POLICIES[policy], params=0)
    exact = jax.jit(jax.grad(loss))(*args)
    found = jax.jit(jax.grad(small))(*args)
    assert distance(found, exact) < BOUNDS[policy]


def solved(terms, adjoint, w, y):
    steps = {"max_steps": 8, "adjoint": adjoint}
    return dfx.diffeqsolve(terms, dfx.Euler(), 0.0, 1.0, 0.25, y, args=w, **steps).ys


def ordinary(adjoint, w, y):
    return solved(dfx.ODETerm(lambda t, y, w: jnp.tanh(w @ y)), adjoint, w, y)


def stochastic(adjoint, w, y):
    path = dfx.VirtualBrownianTree(0.0, 1.0, 0.1, (4,), jax.random.key(0))
    terms = dfx.MultiTerm(
        dfx.ODETerm(lambda t, y, w: jnp.tanh(w @ y)),
        dfx.ControlTerm(
            lambda t, y, w: lx.DiagonalLinearOperator(jnp.cos(w @ y)), path
        ),
    )
    return solved(terms, adjoint, w, y)


@pytest.mark.parametrize(
    ("equation", "adjoint", "policy"),
    [
        (ordinary, dfx.RecursiveCheckpointAdjoint, "exact"),
        slow(ordinary, dfx.RecursiveCheckpointAdjoint, "int4"),
        slow(ordinary, dfx.DirectAdjoint, "exact"),
        slow(ordinary, dfx.DirectAdjoint, "int4"),
        slow(stochastic, dfx.RecursiveCheckpointAdjoint, "exact"),
        slow(stochastic, dfx.RecursiveCheckpointAdjoint, "int4"),
        slow(stochastic, dfx.DirectAdjoint, "exact"),
        (stochastic, dfx.DirectAdjoint, "int4"),
    ],
)
def test_solvers_of_differential_equations(equation, adjoint, policy):
    """Their loops hold clocks that refuse tangents, and share them among examples."""

    def loss(w, x):
        ends = jax.vmap(lambda y: equation(adjoint(), w, y))(x)
        return jnp.mean(ends**2)

    near(loss, policy, W, X)


def monotone(w, z):
    """Of little slope where its units are saturated."""
    return 0.01 * z + jnp.tanh(z @ w) @ w.T + jnp.tanh(2 * z)


@jax.custom_jvp
def inverse(w, y):
    def step(_, z):
        return z - 0.1 * (monotone(w, z) - y)

    return jax.lax.stop_gradient(jax.lax.fori_loop(0, 300, step, y))


@inverse.defjvp
def _(primals, tangents):
    """By the theorem of implicit functions."""
    w, y = primals
    z = inverse(w, y)
    _, residual = jax.jvp(lambda w, y: monotone(w, z) - y, primals, tangents)
    jacobian = lx.JacobianLinearOperator(lambda z, _: monotone(w, z), z)
    return z, lx.linear_solve(jacobian, -residual).value


def test_a_solver_that_chooses_its_steps():
    """Its rule takes them again: with others, of rounded numbers, it may not come to
    the end, and what is differentiated is nothing."""
    controller = dfx.PIDController(1e-3, 1e-3)
    terms = dfx.ODETerm(lambda t, y, w: jnp.tanh(y @ w) - y)

    def loss(w, x):
        ends = dfx.diffeqsolve(
            terms,
            dfx.Tsit5(),
            0.0,
            1.0,
            0.25,
            x,
            args=w,
            max_steps=64,
            stepsize_controller=controller,
        ).ys
        return jnp.sum(ends**2)

    near(loss, "int4", normal(2, 64, 64) / 8, normal(3, 32, 64))


@policies
def test_what_a_rule_solves_with_is_whole(policy):
    """As where `jnp.linalg` solves: also what LU has made of the matrix."""

    def loss(w, x):
        return jnp.mean(jnp.log1p(jax.vmap(inverse, (None, 0))(w, x) ** 2))

    near(loss, policy, W, X)


def test_a_step_of_modules():
    """Of an argument functions are leaves as well, that are no arrays."""
    model = eqx.nn.MLP(4, 4, 16, 1, key=jax.random.key(0))

    def make_gradient(policy):
        @eqx.filter_jit
        @eqx.filter_grad
        def gradient(model, x):
            params, static = eqx.partition(model, eqx.is_inexact_array)

            def call(params, x):
                return jax.vmap(eqx.combine(params, static))(x)

            small = jc.checkpoint(call, policy=policy, params=0)
            return jnp.mean(small(params, x) ** 2)

        return gradient, (model, X)

    effects = jc.sensitivity(make_gradient)
    assert "dot_general.0" in str(effects)
