"""What rounding does to gradients, as plans count it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from jaxcompact.memory import devices
from jaxcompact.planner import search
from jaxcompact.planner.block import block_of
from jaxcompact.planner.effects import noise
from jaxcompact.planner.problem import problem
from jaxcompact.planner.scan import scan_step
from jaxcompact.planner.sensitivity import CODECS
from tests.planner.gradients import D, X, flat, make_gradient


# To first order, which the larger error leaves: see below.
@pytest.mark.slow
@pytest.mark.parametrize(("limit", "near"), [(0.03, 0.1), (0.2, 0.25)])
def test_what_is_made_again_of_what_is_encoded(limit, near, tmp_path, monkeypatch):
    """Seven sums of a block come of x: as it is encoded, so are they, which moves the
    gradient five times as far as x alone; a plan's error is that of all."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (8, D, D)) * 0.12
    x, target = (jax.random.normal(key, (256, D)) for key in keys[1:])
    layers = jnp.stack([w] * 3)

    def deep(w, x):
        for each in w:
            x = x + jnp.tanh(x @ each)
        return x

    def make(policy):
        wrapped = jc.checkpoint(deep, policy=policy, params=0, prevent_cse=False)

        def loss(layers, x):
            x, _ = jax.lax.scan(lambda x, w: (wrapped(w, x), None), x, layers)
            return jnp.square(x - target).mean()

        return jax.grad(loss), (layers, x)

    def error(policy):
        g, e = (flat(jax.jit(make(p)[0])(layers, x)) for p in (policy, jc.Policy()))
        return float(jnp.linalg.norm(g - e) / jnp.linalg.norm(e))

    found = jc.sensitivity(make)
    only = {"x": jc.Quantized(4), "*": jc.Recompute()}
    real = error(jc.Policy(only))
    names = dict.fromkeys(found.effects, jc.Recompute()) | {"x": jc.Quantized(4)}
    assert real > 4 * found.error(names)
    # The noise is far from small here: to first order it is no less.
    assert found.under(names).error(names) == pytest.approx(real, rel=0.25)

    step, args = scan_step(deep, (w, x), 3, 0)(jc.Policy())
    plan = jc.plan(
        deep,
        w,
        x,
        layers=3,
        budget=jc.memory.peak(step, *args).peak_bytes,  # of making all again
        sensitivity=found,
        max_error=limit,
        progress=lambda line: None,
    )
    assert any(isinstance(a, jc.Quantized) for a in plan.actions.values())
    assert error(plan) == pytest.approx(plan.error, rel=near)
    assert 0 < plan.error <= limit


@pytest.mark.slow
def test_what_a_card_without_a_host_is_offered():
    """No offloading, also where it was measured; every other codec that was."""
    base = jc.policies.uniform(jc.Offload())
    found = jc.sensitivity(make_gradient, policy=base, codecs=CODECS[:2])
    assert all(jc.Offload() in e.errors for e in found.effects.values())
    traces = block_of(make_gradient, base, "make_gradient")
    card = devices()["tpu-v5e"]
    assert card.host_bandwidth is None
    for item in problem(traces, base, (), card, found).items:
        assert not any(option.away for option in item.options)
        if item.tensor.name in found.effects:
            offered = {o.action for o in item.options} - {jc.Save()}
            assert offered == set(found.effects[item.tensor.name].errors) - {
                jc.Offload()
            }


@pytest.mark.slow
def test_noise_of_one_name_is_shared():
    """Each of two tensors has half of what was measured, all of what was not."""

    def named(w, x):
        for key in ("q", "k"):
            x = x + checkpoint_name(jnp.sin(x @ w[key]), "y") @ w["o"]
        return x

    base = jc.Policy({"y": jc.Quantized(4)})
    make = lambda policy: make_gradient(policy, named)  # noqa: E731
    traces = block_of(make, base, "make")
    known = jc.sensitivity(make, policy=base)
    for found, whole in ((known, known.effects["y"].errors), (None, None)):
        asked = problem(traces, base, CODECS, devices()["h200"], found)
        each = [item for item in asked.items if item.tensor.name == "y"]
        assert len(each) == 2
        for option in (o for item in each for o in item.options if o.lossy):
            one = noise(option.action) if whole is None else whole[option.action] / 2
            assert option.noise == pytest.approx(one)


def test_tensors_of_one_name_count_together():
    def named(w, x):
        for key in ("q", "k"):
            x = x + checkpoint_name(jnp.sin(x @ w[key]), "y") @ w["o"]
        return x

    base = jc.Policy({"y": jc.Quantized(4)})
    found = jc.sensitivity(lambda p: make_gradient(p, named), policy=base)
    assert found.effects["y"].count == 2
    assert found.effects["y"].entries == 2 * X.size
    assert found.bits({"y": jc.Quantized(8)}) == 8.25

    def wide(w, x):
        checkpointed = checkpoint_name(jnp.sin(x @ w["gate"]), "y") @ w["down"]
        return x + checkpointed + checkpoint_name(jnp.sin(x @ w["q"]), "y") @ w["o"]

    with pytest.raises(ValueError, match="tensors of one name must have one shape"):
        jc.sensitivity(lambda p: make_gradient(p, wide), policy=base)


@pytest.fixture
def planned(monkeypatch):
    """``planned(errs, **options)``: a plan, and what errors were asked for, of a step
    whose gradient is off by ``errs(asked)`` under the plan that was asked for."""

    def run(errs, **options):
        asked = []

        def fastest(trials, problems, max_error):
            asked.append(max_error)
            return jc.Plan("block", {}, "h200", 2**30, 0.0, 0, max_error, 2**20)

        measured = SimpleNamespace(
            measure=True,
            under=lambda actions: measured,
            no_less_than=lambda other, codecs: measured,
            error=lambda actions: errs(asked[-1]),
        )
        monkeypatch.setattr(search, "problems_of", lambda *args: [])
        monkeypatch.setattr(search, "_layers", lambda *args: 1)
        monkeypatch.setattr(search.Trials, "fastest", fastest)
        found = jc.plan_step(
            lambda policy: None,
            device="h200",
            sensitivity=measured,
            progress=lambda line: None,
            **options,
        )
        return found, asked

    return run


def test_after_a_plan_that_errs_by_more_the_next_may_err_by_less(planned):
    """Here by twice what is expected: half of what is allowed is asked for then."""
    found, asked = planned(lambda error: 2 * error)
    assert asked == [0.2, 0.1] and found.error == 0.2 and found.measured


def test_an_exact_plan_has_the_compilers_rounding(planned):
    """In bfloat16, of what is moved to the host and back: none has less."""
    found, asked = planned(lambda error: error + 0.01, max_error=0.005)
    assert asked[-1] == 0 and found.error == 0.01 and found.measured
    found, asked = planned(lambda error: error + 0.01, max_error=0.0)
    assert asked == [0] and found.error == 0.01


@pytest.mark.slow
def test_the_error_of_what_is_stored_within_a_bound():
    """A plan says no bound, the tensor has it: what was measured is what it does."""
    keys = jax.random.split(jax.random.key(1), 3)
    w = {
        "up": jax.random.normal(keys[0], (64, 64)),
        "down": jax.random.normal(keys[1], (64, 64)) / 8,
    }
    x = jax.random.normal(keys[2], (256, 64))

    def make(policy):
        def clipped(w, x):
            return x + jnp.clip(x @ w["up"], -1, 1) @ w["down"]

        wrapped = jc.checkpoint(clipped, policy=policy, params=0)
        return jax.grad(lambda w, x: jnp.square(wrapped(w, x)).mean()), (w, x)

    found = jc.sensitivity(make)
    (effect,) = found.effects.values()
    assert all(codec.bound is None for codec in effect.errors)
    exact = flat(make(jc.Policy())[0](w, x))
    for bits in (8, 4, 3):
        plan = dict.fromkeys(found.effects, jc.Quantized(bits))
        off = flat(make(jc.Policy(plan))[0](w, x)) - exact
        real = float(jnp.linalg.norm(off) / jnp.linalg.norm(exact))
        assert found.under(plan).error(plan) == pytest.approx(real, rel=0.35)
