"""Plans of a run: measured on its weights, looked at again, found again on resume."""

import copy
import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcompact as jc
import planning
from attention import flash
from configs import GPT2Config, ModelConfig
from jaxcompact.planner.block import block_of
from methods import Method
from pretrain_options import PlanOptions
from training import State, Training

CONFIG = ModelConfig(vocab_size=64, width=64, ff=128, layers=2, heads=2)
GPT2 = GPT2Config(vocab_size=64, width=64, ff=128, layers=2, heads=2)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 17), dtype=np.int32)


def planner(method="exact", cfg=CONFIG, **options):
    make_training = functools.partial(
        Training, cfg, Method(method), optax.constant_schedule(1e-3)
    )

    def make_step(policy):
        training = make_training(policy=policy)
        tokens = jax.ShapeDtypeStruct((1, 8, 17), jnp.int32)
        return jax.jit(training.step), (training.abstract, tokens)

    options = PlanOptions(**{"memory_budget": "1GiB"} | options)
    return planning.Planner(options, make_training, make_step, CONFIG.layers)


@pytest.fixture(scope="module", autouse=True)
def one_codec():
    """What is compiled to measure it is much less than for all."""
    measuring = functools.partial(jc.planner.measuring, codecs=[jc.Quantized(4)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jc.planner, "measuring", measuring)
        yield


@pytest.fixture(scope="module")
def measured(one_codec):
    """A planner that has measured, and so compiled it; weights, what it found."""
    with jax.numpy_dtype_promotion("standard"):
        made = planner()
        params = jax.jit(made.make_training().init)().params
        return made, params, made.measure(params, TOKENS)


def relative(a, b):
    norm = optax.tree.norm
    return float(norm(jax.tree.map(jnp.subtract, a, b)) / norm(b))


@pytest.mark.parametrize(
    "method, cfg",
    [
        ("exact", CONFIG),
        pytest.param("compact", CONFIG, marks=pytest.mark.slow),
        pytest.param("exact", GPT2, marks=pytest.mark.slow),  # with dropout
    ],
)
def test_what_it_measures_is_the_methods_gradient(method, cfg, optax_promotion):
    made = planner(method, cfg)
    training = made.make_training()
    params = jax.jit(training.init)().params
    found = made.measure(params, TOKENS)
    codec = jc.Quantized(4)
    rules = dict.fromkeys(found.effects, codec)
    lossy = made.make_training(policy=jc.Policy(rules, default=found.base))

    def gradient(training):
        state = State(jnp.int32(0), params, None)
        return jax.jit(training.gradients)(state, jnp.asarray(TOKENS)[None])[1]

    error = relative(gradient(lossy), gradient(training))
    assert found.error(rules) == pytest.approx(error, rel=0.15)
    # Once compiled, it goes on with other weights.
    other = jax.tree.map(lambda x: 2 * x, params)
    assert made.measure(other, TOKENS) != found


def test_names_under_flash_are_those_under_cudnn():
    """What is measured with one is used for the other."""
    pytest.importorskip("nvidia.cudnn", reason="700 MB that no other test needs")

    def names(attention):
        def make(policy):
            training = Training(
                CONFIG,
                Method("exact"),
                optax.constant_schedule(1e-3),
                dtype=jnp.bfloat16,
                attention=attention,
                policy=policy,
            )
            tokens = jax.ShapeDtypeStruct((8, 17), jnp.int32)
            return jax.grad(training.loss), (training.abstract.params, tokens)

        slots = block_of(make, jc.policies.int4(), "make").replay.slots
        return [(s.tensor.name, s.tensor.size, s.action) for s in slots]

    assert names(flash) == names("cudnn")


@pytest.mark.slow
def test_looking_again(optax_promotion, measured):
    made, params, found = measured
    made = copy.copy(made)
    traces = block_of(made.make_step, found.base, "make_step")
    actions = {t.name: a for t, a, _ in traces.replay.chosen.values()}
    rounded = jc.Plan("layer", actions, "h200", 2**30, 0.0, 1, found.error(actions), 1)
    exact = dataclasses.replace(
        rounded, actions={n: jc.Recompute() for n in actions}, error=0.0
    )
    made.plan = lambda found: exact
    assert made.again(rounded, params, TOKENS)[0] is rounded
    slightly = dataclasses.replace(rounded, error=rounded.error / 1.05)
    assert made.again(slightly, params, TOKENS)[0] is slightly
    worse = dataclasses.replace(rounded, error=rounded.error / 1.2)
    plan, said = made.again(worse, params, TOKENS)
    assert plan is exact
    assert said.endswith("a new one has 0.00%")
    made.plan = lambda found: dataclasses.replace(worse, error=1.0)
    assert made.again(worse, params, TOKENS)[0] is worse  # the same actions

    def refused(found):
        raise ValueError("no")

    made.plan = refused
    plan, said = made.again(worse, params, TOKENS)
    assert plan is worse and said.endswith("for want of another: no")


@pytest.mark.slow
def test_the_first_weights_are_not_kept(optax_promotion):
    made = planner()
    params = jax.jit(made.make_training().init)().params
    leaves = [weakref.ref(x) for x in jax.tree.leaves(params)]
    made.measure(params, TOKENS)
    del params
    gc.collect()
    assert not any(leaf() is not None for leaf in leaves)


def test_a_gradient_that_is_not_finite(optax_promotion, measured):
    """The plan stays; that the loss is none is for the log to say."""
    made, params, _ = measured
    params = jax.tree.map(lambda x: x * jnp.nan, params)
    plan, said = made.again("plan", params, TOKENS)
    assert plan == "plan" and "was not measured: sensitivity of" in said


def test_no_memory_to_measure():
    made = planner()

    def measure(params, tokens):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    made.measure = measure
    plan, said = made.again("plan", None, TOKENS)
    assert plan == "plan" and "no memory" in said


def test_the_plan_in_force(tmp_path):
    plans = {}
    for updates in (0, 16, 64, 128):
        plans[updates] = jc.Plan("b", {"x": jc.Save()}, "h200", updates + 1, 0, 0, 0, 0)
        plans[updates].save(planning.file_of(tmp_path, updates))
    for updates, budget in ((100, 65), (64, 65), (20, 17), (15, 1)):
        assert planning.in_force(tmp_path, updates).budget == budget
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]  # later ones are gone
