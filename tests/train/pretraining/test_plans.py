"""Runs under a plan: made once, kept beside the run, made anew as the data drifts."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
import planning
import pretrain
from jaxcompact import Quantized
from jaxcompact.planner.block import block_of
from jaxcompact.planner.effects import Effect
from tests.train.pretraining.runs import SMALL, losses_of, refused

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"nosuch.9": {"action": "Save"}}, "it was made for another function"),
        ({"x_btd": "Save"}, "the action of 'x_btd' must be an object"),
    ],
)
def test_a_plan_of_another_function_is_said_before_any_training(
    book, tmp_path, capsys, change, told
):
    plan = jc.Plan("checkpoint", {}, "h200", 2**30, 0.0, 0, 0.0, 0)
    written = json.loads(plan.to_json()) | {"actions": change}
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(written))
    arguments = ["--data", str(book), *SMALL, "--plan", str(file)]
    error = refused(capsys, [*arguments, "--out", str(tmp_path / "out")])
    assert f"--plan {file}: " in error and told in error


@pytest.mark.slow
def test_a_run_under_a_budget(book, tmp_path, capsys, monkeypatch):
    """It is planned once, says so, and goes on under that plan, or an edited one."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path / "compiled"))
    out = tmp_path / "out"
    arguments = ["--data", str(book), *SMALL, "--checkpoint-every", "2"]
    arguments += ["--method", "compact", "--steps", "4", "--out", str(out)]
    planned = [*arguments, "--memory-budget", "1GiB"]
    plans, plan_step = [], jc.plan_step

    def planned_once(*args, **options):  # alike for the same run, and a minute's work
        plans.append(plans[0] if plans else plan_step(*args, **options))
        return plans[0]

    monkeypatch.setattr(jc, "plan_step", planned_once)
    assert pretrain.main([*planned, "--explain-plan"]) == 0
    assert "x_btd" in capsys.readouterr().out and not out.exists()
    assert pretrain.main(planned) == 0
    assert "planning for 1GiB of h200" in capsys.readouterr().out
    assert len(plans) == 2
    file = out / "compact/plan.json"
    plan = jc.Plan.load(file)
    assert plan == plans[0]
    assert plan.peak_bytes < 2**30 and plan.actions["x_btd"] == jc.Save()
    monkeypatch.setattr(jc, "plan_step", None)  # none is made again
    assert pretrain.main([*planned, "--resume"]) == 0

    edited = replace(plan, actions=plan.actions | {"x_btd": jc.Quantized(8)})
    edited.save(tmp_path / "edited.json")
    other = [*arguments, "--plan", str(tmp_path / "edited.json")]
    assert pretrain.main([*other, "--resume"]) == 2
    assert "plan was {" in capsys.readouterr().err
    before = losses_of(out / "compact")
    assert pretrain.main([*other, "--overwrite"]) == 0
    assert jc.Plan.load(file) == edited
    after = losses_of(out / "compact")
    assert before[4] != after[4] and abs(before[4] / after[4] - 1) < 0.05


@pytest.mark.slow
def test_a_plan_is_made_anew_and_found_again(book, tmp_path, capsys, monkeypatch):
    """As the error of its plan grows; the resumed run repeats the whole one."""
    measured, planned, four = [], [], Quantized(4)

    def measure(self, params, tokens):
        measured.append(tokens.shape)
        grown = 1.0 if params_seen(params) else 4.0
        effects = {"x_btd": Effect((1,), jnp.float32, {four: grown})}
        return jc.Sensitivity("layer", jc.policies.int4(), effects)

    first = []

    def params_seen(params):
        value = float(sum(jnp.abs(x).sum() for x in jax.tree.leaves(params)))
        first.append(value)
        return value == first[0]

    def plan_step(make_step, *, sensitivity, budget, max_error, **options):
        assert max_error == 0.08 and budget == "1GiB"
        planned.append(sensitivity)
        traces = block_of(make_step, jc.policies.int4(), "make_step", True)
        actions = {t.name: a for t, a, _ in traces.replay.chosen.values()}
        error = sensitivity.error({"x_btd": four})
        actions["x_btd"] = four if error == 1 else Quantized(2)
        error = sensitivity.error(actions)
        return jc.Plan("layer", actions, "h200", 2**30, 0.0, 0, error, 0)

    monkeypatch.setattr(planning.Planner, "measure", measure)
    monkeypatch.setattr(jc, "plan_step", plan_step)
    monkeypatch.setattr(planning, "FIRST", 2)
    monkeypatch.setattr(planning.Plans, "tell_size", lambda self: None)  # 10 s each
    arguments = ["--data", str(book), *SMALL, "--method", "exact", "--steps", "6"]
    arguments += ["--memory-budget", "1GiB", "--checkpoint-every", "1", "--keep", "9"]
    out = tmp_path / "out"
    assert pretrain.main([*arguments, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "step 2: gradient error of the plan" in said and "a new one has" in said
    assert "step 4: gradient error of the plan" in said and len(measured) == 3
    folder = out / "exact"
    assert sorted(p.name for p in folder.glob("plan*")) == ["plan.2.json", "plan.json"]
    whole = losses_of(folder)

    for other in ("2GiB", "512MiB"):
        changed = [*arguments, "--out", str(out), "--resume", "--memory-budget", other]
        assert pretrain.main(changed) == 2
        assert f"memory_budget was '1GiB' and is '{other}'" in capsys.readouterr().err
    card = [*arguments, "--out", str(out), "--resume", "--plan-device", "h100"]
    assert pretrain.main(card) == 2
    assert "plan_device was 'h200' and is 'h100' now" in capsys.readouterr().err
    plan = (folder / "plan.2.json").read_text()
    (folder / "plan.2.json").write_text(plan[:-9])
    assert pretrain.main([*arguments, "--out", str(out), "--resume", "3"]) == 2
    told = f"{folder} cannot be resumed from step 3: {folder / 'plan.2.json'}: plan: "
    assert told in capsys.readouterr().err
    assert len(list(folder.glob("checkpoints/*"))) == 6  # nothing is dropped
    (folder / "plan.2.json").write_text(plan)
    for resumed in (3, 2, 1):
        again = [*arguments, "--out", str(out), "--resume", str(resumed)]
        assert pretrain.main(again) == 0
        assert losses_of(folder) == whole
        assert (folder / "plan.2.json").exists()
