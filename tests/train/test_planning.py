"""Plans of a run: measured on its weights, looked at again, found again on resume."""

import copy
import dataclasses
import functools
import gc
import re
import shutil
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcompact as jc
import plan_files
import planning
from attention import flash
from configs import GPT2Config, ModelConfig
from jaxcompact.planner.block import block_of
from methods import Method
from plan_options import PlanOptions
from tests.cases import slow
from tests.errors import relative
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, cfg",
    [
        ("exact", CONFIG),
        slow("compact", CONFIG),
        slow("exact", GPT2),  # with dropout
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


@pytest.mark.slow
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


@pytest.mark.parametrize("saved", [False, True])
def test_a_plan_holds_for_the_run_that_a_checkpoint_goes_on(tmp_path, saved):
    """Without one the run begins anew, with the plan that is asked for now."""
    old, new = (
        jc.Plan("b", {"x": jc.Save()}, "h200", size, 0, 0, 0, 0) for size in (1, 2)
    )
    old.save(plan_files.file_of(tmp_path, 0))
    if saved:
        (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    made = planner(plan_device="h200")
    made.measure = lambda params, batch: None
    made.plan = lambda found, say: new
    state = lambda: SimpleNamespace(params=None)  # noqa: E731
    plans = planning.Plans.first(made, tmp_path, True, state, None)
    assert plans.plan.budget == (1 if saved else 2)


def write_plans(folder) -> dict[int, list[int]]:
    """Of several numbers of updates, and what seals say of each."""
    plans = {}
    for updates in (0, 16, 64, 128):
        plan = jc.Plan("b", {"x": jc.Save()}, "h200", updates + 1, 0, 0, 0, 0)
        plan.save(plan_files.file_of(folder, updates))
        plans[updates] = plan_files.sealed(plan, updates)
    return plans


def test_the_plan_in_force(tmp_path):
    seals = write_plans(tmp_path)
    for step, updates in ((100, 64), (64, 16), (20, 16), (15, 0)):
        plan, number = plan_files.in_force(tmp_path, step, seals[updates])
        assert (plan.budget, number) == (updates + 1, updates)
    for step, updates in ((100, 64), (64, 64), (15, 0)):  # of an older version
        assert plan_files.in_force(tmp_path, step, None)[1] == updates
    assert len(list(tmp_path.iterdir())) == 4  # to look changes nothing
    plan_files.drop_after(tmp_path, 16)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.16.json", "plan.json"]


@pytest.mark.parametrize("content", [None, "", "[]", "[" * 100_000, b"\xff", "other"])
def test_a_plan_that_is_gone_or_another_is_refused(tmp_path, content):
    seals = write_plans(tmp_path)
    path = plan_files.file_of(tmp_path, 16)
    if content is None:
        path.unlink()
    elif content == "other":
        shutil.copy(plan_files.file_of(tmp_path, 64), path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        plan_files.in_force(tmp_path, 20, seals[16])
    assert f"{tmp_path} cannot be resumed from step 20: {path}" in str(error.value)
    with pytest.raises(ValueError, match="the seal.json of step 20 in .* is damaged"):
        plan_files.in_force(tmp_path, 20, {"16": 3})


def test_a_card_that_is_not_planned_for(tmp_path):
    """What a plan cannot be made for, or not be measured, leaves the one there is."""
    made = planner()

    def refuse(*_):
        raise NotImplementedError("not on this card")

    made.measure = refuse
    assert made.again("plan", None, TOKENS)[0] == "plan"
    plan = jc.Plan("b", {}, "h200", 1, 0, 0, 0.01, 0)
    own = SimpleNamespace(error=lambda actions: 1.0)  # where it makes tensors again
    made.measure = lambda *_: SimpleNamespace(under=lambda actions: own)
    made.plan = refuse
    kept, said = made.again(plan, None, TOKENS)
    assert kept is plan and said.endswith("for want of another: not on this card")
    assert said.startswith("gradient error of the plan 100.00%, planned 1.00%")


@pytest.mark.slow
def test_a_resumed_plan_that_takes_more_than_its_budget_is_told(
    optax_promotion, tmp_path, capsys
):
    """As on fewer devices than it was made for."""
    for budget in ("1GiB", "1MiB"):
        made = planner(memory_budget=budget, plan_device="h100")
        planning.Plans(made, tmp_path / "exact", None, 2).tell_size()
    said = capsys.readouterr().out
    assert re.fullmatch(
        r"exact: of the budget of 1MiB its plan takes [\d.]+ MiB .*\n", said
    )
