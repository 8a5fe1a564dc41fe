"""Outputs that nothing reads which is differentiated: metrics, statistics, states.

As in `jax.checkpoint` no zeros take their way through them: zero times what is infinite
is none, and what JAX can't differentiate is no matter.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.custom_derivatives import SymbolicZero

import jaxcompact as jc
from jaxcompact import linen as clinen
from jaxcompact import nnx as cnnx
from tests.draws import normal

POLICIES = [jc.Policy(), jc.policies.int8()]
policies = pytest.mark.parametrize("policy", POLICIES, ids=["recompute", "int8"])
# 8 bits: what is rounded is off by 0.4 % of its group's largest entry at most.
BOUND = dict(zip(POLICIES, (1e-5, 0.02), strict=True))
W = normal(0, 64, 64) / 8
X = normal(1, 4, 16, 64)


def block(w, x):
    return jnp.tanh(x @ w)


def steep(w, x):
    """The norm's slope at zero is infinite."""
    y = block(w, x)
    return y, jnp.linalg.norm(0 * y)


def checkpointed(fun, policy):
    return jc.checkpoint(fun, policy=policy, params=0)


def near(found, exact, bound=1e-5):
    """To float32's rounding, of sums in another order."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * jnp.abs(b).max())


def mapped(fun):
    return lambda w, x: jax.vmap(fun, (None, 0))(w, x)


def scanned(fun):
    def call(w, x):
        def layer(x, w):
            y, norm = fun(w, x)
            return y, norm

        return jax.lax.scan(layer, x, jnp.stack([w, w]))

    return call


def carried(fun):
    """The norms are added up."""

    def call(w, x):
        def layer(carry, w):
            y, norm = fun(w, carry[0])
            return (y, carry[1] + norm), None

        start = x, jnp.float32(0)
        return jax.lax.scan(layer, start, jnp.stack([w, w]))[0]

    return call


def summed(fun):
    """As `carried`, where the sum is made inside of ``fun``."""

    def call(policy):
        def body(w, x, total):
            y, norm = fun(w, x)
            return y, total + norm

        small = checkpointed(body, policy)

        def loop(w, x):
            def layer(carry, w):
                return small(w, *carry), None

            start = x, jnp.float32(0)
            return jax.lax.scan(layer, start, jnp.stack([w, w]))[0]

        return loop

    return call


def branched(fun):
    return lambda w, x: jax.lax.cond(w[0, 0] < 9, fun, lambda w, x: (x, 0.0), w, x)


@policies
@pytest.mark.parametrize(
    "around",
    [
        lambda fun, policy: checkpointed(fun, policy),
        lambda fun, policy: mapped(checkpointed(fun, policy)),
        lambda fun, policy: scanned(checkpointed(fun, policy)),
        lambda fun, policy: carried(checkpointed(fun, policy)),
        lambda fun, policy: summed(fun)(policy),
        lambda fun, policy: branched(checkpointed(fun, policy)),
        lambda fun, policy: checkpointed(mapped(fun), policy),
        lambda fun, policy: checkpointed(scanned(fun), policy),
        lambda fun, policy: checkpointed(branched(fun), policy),
    ],
    ids=[
        "alone",
        "vmap",
        "scan",
        "sum",
        "carry",
        "cond",
        "of vmap",
        "of scan",
        "of cond",
    ],
)
def test_a_slope_that_is_infinite(around, policy):
    def gradient(fun):
        return jax.jit(jax.grad(lambda w: jnp.sum(around(fun, policy)(w, X)[0] ** 2)))

    found = gradient(steep)(W)
    assert np.isfinite(found).all()
    without = gradient(lambda w, x: (block(w, x), jnp.zeros(())))(W)
    near(found, without)


@policies
def test_it_costs_what_its_forward_pass_costs(policy):
    """As what `stop_gradient` is of: no product backwards, nothing stored for them."""

    def layer(stop, w, x):
        y = block(w, x)
        seen = jax.lax.stop_gradient((w, y)) if stop else (w, y)
        return y, jnp.mean(block(*seen))

    def cost(stop):
        fun = scanned(checkpointed(partial(layer, stop), policy))
        gradient = jax.grad(lambda w: jnp.sum(fun(w, X)[0]), has_aux=False)
        compiled = jax.jit(gradient).lower(W).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        return compiled.cost_analysis()["flops"], memory

    flops, memory = cost(stop=False)
    with_stop, memory_with_stop = cost(stop=True)
    assert flops <= 1.01 * with_stop and memory <= 1.01 * memory_with_stop


def solved(w, x):
    """An equilibrium; how far from it the loop has ended is for the log."""

    def step(carry):
        _, z, _ = carry
        new = jnp.tanh(z @ w / 2 + x)
        return carry[0] + 1, new, jnp.abs(new - z).max()

    start = 0, jnp.zeros_like(x), jnp.float32(jnp.inf)
    _, z, left = jax.lax.while_loop(lambda c: (c[2] > 1e-3) & (c[0] < 9), step, start)
    return jnp.tanh(jax.lax.stop_gradient(z) @ w), left


def counted(w, x):
    """A state that is made of nothing that is differentiated, in such a loop."""
    y = block(w, x)
    count, z = jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] / 2), (0 * x[0, 0, 0], y)
    )
    return y + jax.lax.stop_gradient(z), count


@jax.custom_vjp
def without_rule(y):
    return jnp.mean(y)


def _refuse(*_):
    raise NotImplementedError("a metric has no gradient")


without_rule.defvjp(lambda y: (jnp.mean(y), None), _refuse)


def measured(w, x):
    y = block(w, x)
    return y, without_rule(y)


@jax.custom_jvp
def constant(t):
    return t


@constant.defjvp
def _(*_):
    raise NotImplementedError("a clock has no tangent")


def timed(w, x):
    """In a loop a clock that is made of constants alone."""

    def step(state):
        t, y = state
        return t + 0.25, block(w, y) + jnp.cos(constant(t))

    t, y = jax.lax.scan(lambda s, _: (step(s), None), (0.0, x), length=3)[0]
    return y, t


def timed_in_a_branch(w, x):
    def step(state, _):
        def go(state):
            t, y = state
            return t + 0.25, block(w, y) + jnp.cos(constant(t))

        return jax.lax.cond(state[0] < 0.4, go, lambda s: s, state), None

    t, y = jax.lax.scan(step, (0.0, x), length=3)[0]
    return y, t


def until(w, x):
    """What a loop in the loop has begun with."""

    def step(state, _):
        t, y = state
        s = jax.lax.while_loop(lambda s: s < 0.6, lambda s: s + 0.2, t)
        return (t + 0.25, block(w, y) + s), None

    t, y = jax.lax.scan(step, (0.0, x), length=3)[0]
    return y, t


@jax.custom_vjp
def stepped(w, x):
    return jnp.sum(x), block(w, x)


def _stepped(w, x):
    y = block(w.value, x.value)
    return (jnp.sum(x.value), y), (w.value, x.value, y)


def _refuse_the_first(residuals, cts):
    """As of an output that a vmap found to be the same of all examples."""
    if not isinstance(cts[0], SymbolicZero):
        raise ValueError("the clock is read")
    w, x, y = residuals
    d = 0 * y if isinstance(cts[1], SymbolicZero) else cts[1] * (1 - y**2)
    return jnp.einsum("...i,...j->ij", x, d), d @ w.T


stepped.defvjp(_stepped, _refuse_the_first, symbolic_zeros=True)


@jax.custom_jvp
def paired(t, y):
    return t, y


@paired.defjvp
def _(primals, tangents):
    return primals, tangents


def handed_on(w, x):
    """Of both results, through a rule, of which the one alone is read."""
    t, y = paired(*stepped(w, x))
    return y, jax.lax.stop_gradient(t)


def handed_on_twice(w, x):
    t, y = paired(*stepped(w, x))
    return y + paired(*stepped(w, y))[1], jax.lax.stop_gradient(t)


@policies
@pytest.mark.parametrize(
    "fun",
    [
        solved,
        counted,
        measured,
        timed,
        timed_in_a_branch,
        until,
        handed_on,
        handed_on_twice,
    ],
)
def test_what_has_no_gradient(fun, policy):
    def gradient(fun):
        return jax.grad(lambda w: jnp.sum(fun(w, X)[0] ** 2))(W)

    exact, found = gradient(fun), gradient(checkpointed(fun, policy))
    near(found, exact, BOUND[policy])


@policies
@pytest.mark.parametrize(
    ("fun", "error"), [(solved, ValueError), (measured, NotImplementedError)]
)
def test_that_is_said_where_something_reads_it(fun, error, policy):
    small = checkpointed(fun, policy)
    with pytest.raises(error) as raised:
        jax.grad(lambda w: sum(map(jnp.sum, small(w, X))))(W)
    assert f"checkpoint of {fun.__name__!r}" in "".join(raised.value.__notes__)


def read(outputs, fun):
    """The gradient of what is made of some of the outputs."""

    def loss(w):
        made = fun(w, X)
        return sum(jnp.sum(made[i] ** 2) for i in outputs)

    return jax.grad(loss)(W)


def test_what_is_refused_holds_no_trace():
    small = checkpointed(solved, POLICIES[0])
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda w: jnp.sum(small(w, X)[0])))(W)


@jax.custom_vjp
def two(w, x):
    return jnp.sin(x @ w), jnp.cos(x @ w)


def _two(w, x):
    w, x = w.value, x.value
    a = x @ w
    one = jnp.exp(0 * a) + 0 * jnp.tanh(a)
    return (jnp.sin(a), jnp.cos(a)), (w, x, jnp.sin(a), jnp.cos(a), one)


def _two_backward(residuals, cts):
    """It reads ``one`` where the cosine has no cotangent."""
    w, x, sin, cos, one = residuals
    of_sin, of_cos = (not isinstance(ct, SymbolicZero) for ct in cts)
    d = cts[0] * cos if of_sin else 0.0
    d = d - cts[1] * sin if of_cos else d * one
    return jnp.einsum("...i,...j->ij", x, d), d @ w.T


two.defvjp(_two, _two_backward, symbolic_zeros=True)


@pytest.mark.parametrize("outputs", [[0], [1]], ids=str)
@pytest.mark.parametrize("policy", [*POLICIES, jc.Policy(default=jc.Save())], ids=str)
def test_a_rule_that_asks_what_is_read(outputs, policy):
    near(read(outputs, checkpointed(two, policy)), read(outputs, two), 0.02)


def test_a_state_without_gradient_may_be_read():
    near(read([0, 1], checkpointed(counted, POLICIES[0])), read([0, 1], counted))


@pytest.mark.parametrize("outputs", [[0], [1], [2], [0, 2], [0, 1, 2]], ids=str)
def test_some_of_the_outputs(outputs):
    def three(w, x):
        y = block(w, x)
        return y, jnp.sin(y) @ w, y[0]

    near(read(outputs, checkpointed(three, POLICIES[0])), read(outputs, three))


class Sown(nn.Module):
    @nn.compact
    def __call__(self, x):
        branch = nn.Dense(64, kernel_init=nn.initializers.zeros)(x)
        self.sow("metrics", "norm", jnp.linalg.norm(branch))
        return nn.Dense(64)(x) + branch


@policies
def test_linens_metrics(policy):
    variables = Sown().init(jax.random.key(0), X)

    def gradient(module):
        def loss(params):
            out, metrics = module().apply({"params": params}, X, mutable=["metrics"])
            return jnp.sum(out**2), metrics

        return jax.grad(loss, has_aux=True)(variables["params"])

    found, _ = gradient(clinen.checkpoint(Sown, policy=policy))
    exact, _ = gradient(Sown)
    near(found, exact, BOUND[policy])


class Kept(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(64, 64, rngs=rngs)
        self.branch = nnx.Linear(64, 64, rngs=rngs, kernel_init=nnx.initializers.zeros)
        self.norm = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        branch = self.branch(x)
        self.norm[...] = jnp.linalg.norm(branch)
        return self.layer(x) + branch


@policies
def test_nnxs_state(policy):
    small = cnnx.checkpoint(lambda module, x: module(x), policy=policy)
    found = nnx.grad(lambda m: jnp.sum(small(m, X) ** 2))(Kept(nnx.Rngs(0)))
    exact = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(Kept(nnx.Rngs(0)))
    near(found, exact, BOUND[policy])
