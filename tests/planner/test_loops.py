"""Plans of blocks with loops and branches."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.planner import search
from jaxcompact.planner.effects import noise
from jaxcompact.planner.milp import solve
from jaxcompact.planner.problem import CODECS, problem_of, problems_of
from tests.cases import slow
from tests.draws import normal
from tests.errors import relative
from tests.planner.blocks import of


def recurrent(w, x):
    """Time, batch and width; what is kept of its scan depends on what moves."""

    def cell(h, x):
        h = jnp.tanh(x @ w["in"] + h @ w["state"])
        return h, h

    _, hs = jax.lax.scan(cell, jnp.zeros_like(x[0]), x)
    return x + hs


def chunked(w, x):
    return x + jax.lax.map(lambda rows: jnp.sin(rows @ w["in"]) @ w["state"], x)


def branched(w, x):
    def other(x):
        return x + jnp.sin(x @ w["state"])

    return jax.lax.cond(x[0, 0, 0] > 0, lambda x: x + jnp.tanh(x @ w["in"]), other, x)


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "fun",
    [slow(recurrent), slow(chunked), branched],
)
@pytest.mark.parametrize("max_error", [0.0, *(slow(e) for e in (0.02, 0.2))])
def test_blocks_with_loops_and_branches(fun, max_error, monkeypatch, tmp_path):
    """The layers of a scan, and one whose input is data; loops store the least."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    monkeypatch.setattr(search, "problems_of", lambda *args: [problem_of(*args)])
    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        n: jax.random.normal(k, (64, 64)) / 8
        for n, k in zip(["in", "state"], keys[:2], strict=True)
    }
    x = jax.random.normal(keys[2], (16, 4, 64))
    found = jc.plan(
        fun, w, x, layers=3, max_error=max_error, progress=lambda line: None
    )
    assert found.error <= max_error
    inside = {type(a) for n, a in found.actions.items() if "/" in n}
    assert (jc.Quantized in inside) == (max_error > 0)

    def gradients(policy, wrt):
        small = jc.checkpoint(fun, policy=policy, params=0)
        loss = lambda w, x: jnp.square(small(w, small(w, x))).mean()  # noqa: E731
        return jax.grad(loss, wrt)(w, x)

    for wrt in (0, 1, (0, 1)):
        error = relative(gradients(found, wrt), gradients(jc.Policy(), wrt))
        assert error < (2 * max_error or 1e-6), wrt


def test_without_error_loops_inside_are_exact_too():
    def looped(w, x):
        def step(y, _):
            return jnp.sin((x + y) @ w), None

        y, _ = jax.lax.scan(step, jnp.zeros_like(x), length=2)
        return x + y

    def make_step(policy):
        wrapped = jc.checkpoint(looped, policy=policy, params=0)
        loss = lambda w, x: wrapped(w, x).sum().astype(jnp.float32)  # noqa: E731
        return jax.grad(loss, (0, 1)), (of(64, 64), of(512, 64))

    def planned(max_error):
        card = jc.memory.devices()["h200"]
        _, asked = problem_of(make_step, card, max_error, None, CODECS)
        return asked, solve(asked, noise=max_error**2, smallest=True)

    exact, lossy = planned(0.0), planned(0.2)
    assert not any(isinstance(a, jc.Quantized) for a in exact[0].actions.values())
    assert any(isinstance(a, jc.Quantized) for a in lossy[0].actions.values())
    inside = [a for a in lossy[0].actions.values() if isinstance(a, jc.Quantized)]
    assert lossy[0].noise == pytest.approx(sum(map(noise, inside)))  # of each once
    assert exact[1].noise == 0 < lossy[0].noise <= lossy[1].noise
    assert solve(lossy[0], noise=lossy[0].noise / 2) is None


def growing(w, x):
    """What is rounded in its loop grows with each of its steps."""

    def step(h, _):
        h = jnp.tanh(2 * h @ w["in"]) @ w["state"]
        return h / jnp.sqrt(jnp.square(h).mean(-1, keepdims=True)), None

    h, _ = jax.lax.scan(step, x, length=8)
    return h + jnp.tanh(h @ w["in"])


@pytest.fixture(scope="module")
def grown():
    """``policy -> (gradient, args)`` of two such blocks, and its sensitivity."""
    of_in, of_state, of_x = jax.random.split(jax.random.key(0), 3)
    w = {"in": jax.random.normal(of_in, (64, 64)) / 8}
    w["state"] = jax.random.normal(of_state, (64, 64)) / 8
    x = jax.random.normal(of_x, (512, 64))

    def make_gradient(policy):
        block = jc.checkpoint(growing, policy=policy, params=0)
        loss = lambda w, x: jnp.square(block(w, block(w, x))).mean()  # noqa: E731
        return jax.grad(loss), (w, x)

    return make_gradient, jc.sensitivity(make_gradient, probes=2)


def inside(plan):
    return {type(a) for n, a in plan.actions.items() if "/" in n}


def plan_of(grown, monkeypatch, tmp_path, **options):
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    make_gradient, found = grown
    return jc.plan_step(
        make_gradient,
        device="h200",
        sensitivity=found,
        progress=lambda line: None,
        **options,
    )


@pytest.mark.slow
def test_loops_are_exact_where_there_is_room(grown, monkeypatch, tmp_path):
    whole = plan_of(grown, monkeypatch, tmp_path, max_error=0.5)
    assert whole.seconds == whole.error == 0
    assert jc.Quantized not in inside(whole)


@pytest.mark.slow
def test_a_plans_error_is_also_that_of_its_loops(grown, monkeypatch, tmp_path):
    """As measured: by the noise of their three tensors 4 bits would do."""
    make_gradient, found = grown
    card = jc.memory.devices()["h200"]
    asked = [p for _, p in problems_of(make_gradient, card, 0.2, found, CODECS)]
    assert [p.noise > 0 for p in asked] == [True, False]  # 8 bits, exact

    def gradient(policy):
        fun, args = make_gradient(policy)
        return fun(*args)

    exact = gradient(jc.Policy())
    assert relative(gradient(jc.policies.int4()), exact) > 0.2
    assert (3 * noise(jc.Quantized(4))) ** 0.5 < 0.2
    whole = plan_of(grown, monkeypatch, tmp_path, max_error=0.0)
    budget = int(0.7 * whole.peak_bytes)
    plan = plan_of(grown, monkeypatch, tmp_path, max_error=0.2, budget=budget)
    assert jc.Quantized in inside(plan) and plan.peak_bytes <= budget
    error = relative(gradient(plan), exact)
    assert plan.error == pytest.approx(error, rel=1e-3)  # by the same arithmetic
    assert error < 0.2


@pytest.mark.slow
def test_a_block_that_is_a_loop(monkeypatch, tmp_path):
    """Nothing has an effect of its own; a plan's error is measured all the same."""
    w = {"in": normal(0, 64, 64) / 6, "state": normal(1, 64, 64) / 6}

    def make_gradient(policy):
        block = jc.checkpoint(recurrent, policy=policy, params=0)
        loss = lambda w, x: jnp.square(block(w, x)).mean()  # noqa: E731
        return jax.grad(loss), (w, normal(2, 32, 16, 64))

    def gradient(policy):
        fun, args = make_gradient(policy)
        return fun(*args)

    found = jc.sensitivity(make_gradient)
    assert not found.effects and found.bits({}) == 0
    with pytest.raises(ValueError, match="bits must be of what 'recurrent' encodes"):
        found.policy(bits=4)
    whole = plan_of((make_gradient, found), monkeypatch, tmp_path, max_error=0.0)
    budget = int(0.7 * whole.peak_bytes)
    plan = plan_of((make_gradient, found), monkeypatch, tmp_path, budget=budget)
    assert jc.Quantized in inside(plan) and plan.peak_bytes <= budget
    error = relative(gradient(plan), gradient(jc.Policy()))
    assert plan.error == pytest.approx(error, rel=0.02) and 0 < error < 0.2
