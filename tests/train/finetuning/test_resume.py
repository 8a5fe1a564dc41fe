"""Runs go on as if nothing had been between, and other runs are told apart."""

import functools
import json
import shutil

import numpy as np
import pytest

import folders
import jaxcompact as jc
import planning
from jaxcompact.planner.block import block_of
from roberta_weights import load_roberta, save_roberta
from tests.train.finetuning.runs import losses_of, prepared, refused, rows_of, run
from tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.mark.slow
def test_compact_with_int4_learns_and_resumes_to_the_same_losses(
    arguments, tmp_path, capsys
):
    """Bit by bit, with dropout, across changes of P, one each 50th step."""
    given = [
        *(*arguments, "--method", "compact", "--checkpoint", "int4", "--period", "50"),
        *("--checkpoint-every", "120"),
    ]
    whole, again = tmp_path / "whole" / "compact", tmp_path / "again" / "compact"
    assert run(given, tmp_path / "whole") == 0
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["scores"]["accuracy"] > 0.9
    assert summary["linear_input_bytes"] is None  # they are the policy's to keep
    assert len(losses_of(whole)) == 240

    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "240")  # as if it had been killed
    assert run(given, tmp_path / "again", "--resume") == 0
    assert losses_of(again) == losses_of(whole)
    assert rows_of(again)[-1]["accuracy"] == rows_of(whole)[-1]["accuracy"]

    assert run(given, tmp_path / "again", "--resume", "--export") == 0
    assert "is finished: step 240 of 240" in capsys.readouterr().out
    assert load_roberta(again / "weights").cfg.labels == 2
    tokenizer = load_tokenizer(again / "weights" / "tokenizer.json")
    assert tokenizer.encode(["a cat"])[0].size
    config = json.loads((again / "weights" / "config.json").read_text())
    assert config["id2label"] == {"0": "0", "1": "1"}


@pytest.mark.slow
def test_a_run_under_a_budget_resumes_to_the_same_losses(
    arguments, tmp_path, capsys, monkeypatch
):
    """With dropout, and under each of the plans that were made on its way."""
    four, plans = jc.Quantized(4), []

    def plan_step(make_step, *, sensitivity, **_):
        traces = block_of(make_step, sensitivity.base, "make_step", True)
        actions = {t.name: a for t, a, _ in traces.replay.chosen.values()}
        actions |= dict.fromkeys(sensitivity.effects, four)
        if plans:
            actions["x_btd"] = jc.Save()
        error = sensitivity.error(actions) / 2  # so that another is asked for
        plans.append(jc.Plan("layer", actions, "h200", 2**30, 0.0, 0, error, 0))
        return plans[-1]

    measuring = functools.partial(jc.planner.measuring, codecs=[four])
    monkeypatch.setattr(jc.planner, "measuring", measuring)
    monkeypatch.setattr(jc, "plan_step", plan_step)
    monkeypatch.setattr(planning, "FIRST", 2)
    monkeypatch.setattr(planning.Plans, "tell_size", lambda self: None)  # 10 s each
    given = [*arguments, "--method", "exact", "--epochs", "0.2"]  # 4 steps
    planned = ["--memory-budget", "1GiB", "--checkpoint-every", "1", "--keep", "9"]
    whole, other = tmp_path / "whole" / "exact", tmp_path / "other"
    assert run([*given, *planned], whole.parent) == 0
    said = capsys.readouterr().out
    assert "exact: planning for 1GiB of h200" in said
    assert "step 2: gradient error of the plan" in said and len(plans) == 2
    for plan, name in zip(plans, ("plan.json", "plan.2.json"), strict=True):
        assert jc.Plan.load(whole / name) == plan
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["linear_input_bytes"] is None  # they are the plan's to keep

    losses = losses_of(whole)
    assert run([*given, *planned], whole.parent, "--resume", "1") == 0
    assert losses_of(whole) == losses
    assert run([*given, "--plan", str(whole / "plan.2.json")], other) == 0
    followed = losses_of(other / "exact")
    assert followed[0] == losses[0] and followed[2] != losses[2]
    np.testing.assert_allclose(losses, followed, rtol=0.2)


def test_a_plan_of_another_function_is_refused(arguments, tmp_path, capsys):
    plan = jc.Plan("layer", {"y": jc.Save()}, "h200", 2**30, 0.0, 0, 0.0, 0)
    plan.save(tmp_path / "other.json")
    told = refused(capsys, [*arguments, "--plan", str(tmp_path / "other.json")])
    assert f"--plan {tmp_path / 'other.json'}: " in told


@pytest.mark.parametrize(
    "change, told",
    [
        (["--seed", "1"], "seed was 0 and is 1 now"),
        (["--epochs", "0.2"], "epochs was 0.1 and is 0.2 now"),
        (["--rank", "4"], "rank was 8 and is 4 now; alpha was 2.0 and is 4.0 now"),
    ],
)
def test_another_run_is_not_resumed(arguments, tmp_path, capsys, change, told):
    folder = tmp_path / "compact"
    short = [*arguments, "--method", "compact", "--epochs", "0.1"]
    job = prepared([*short, "--out", str(tmp_path)])
    folder.mkdir()
    folders.begin_folder(folder, job.fixed)
    (folder / "checkpoints" / "2").mkdir(parents=True)
    assert told in refused(
        capsys, [*short, "--out", str(tmp_path), "--resume", *change]
    )


def test_other_weights_are_known_by_their_content(arguments, weights, tmp_path):
    """Methods begin with the same weights, whatever the folder's name is."""
    moved = shutil.copytree(weights, tmp_path / "moved")
    single = [*arguments, "--method", "exact"]
    here, there = prepared(single), prepared([*single, "--weights", str(moved)])
    assert here.fixed == there.fixed
    config = json.loads((moved / "config.json").read_text())
    other = json.dumps(config | {"layer_norm_eps": 0.1})
    (moved / "config.json").write_text(other)
    assert here.fixed != prepared([*single, "--weights", str(moved)]).fixed
    (moved / "config.json").write_text(json.dumps(config))
    model = load_roberta(moved)
    model.embed.embedding[...] *= 2
    save_roberta(model, moved)
    assert here.fixed != prepared([*single, "--weights", str(moved)]).fixed


def test_arrays_of_other_shapes_have_another_checksum():
    x = np.arange(6, dtype=np.int32)
    arrays = [[x], [x.reshape(2, 3)], [x[:2], x[2:]], [x.astype(np.float32)]]
    assert len({folders.crc(a) for a in arrays}) == 4
    assert folders.crc([np.float32(3)]) != folders.crc([np.zeros((0, 3))])


def test_a_folder_that_holds_a_run_is_not_overwritten(arguments, tmp_path, capsys):
    (tmp_path / "exact").mkdir()
    (tmp_path / "exact" / "config.json").write_text("{}")
    given = [*arguments, "--method", "exact", "--out", str(tmp_path)]
    assert "holds a run already" in refused(capsys, given)
