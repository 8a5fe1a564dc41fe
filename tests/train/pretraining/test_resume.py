"""Runs that were killed, stopped or finished go on as if nothing had been."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import pretrain
from checkpoint import Checkpoints
from tests.train.pretraining.runs import MICRO, SMALL, losses_of, rows_of
from tests.train.processes import Fork
from weights import load_llama

pytestmark = pytest.mark.usefixtures("optax_promotion")


def wait_for_step(process: Fork | subprocess.Popen, folder: Path, step: int) -> None:
    """Until there is a checkpoint of the step or a later one, and rows after it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        saved = [p.name for p in folder.glob("checkpoints/*") if p.name.isdecimal()]
        if any(int(name) >= step for name in saved):
            rows = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
            if json.loads(rows[-1])["step"] > max(map(int, saved)):
                return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"no step after checkpoint {step}: {process.communicate()[0]}")


@pytest.mark.slow
def test_a_killed_and_a_stopped_run_repeat_the_losses_of_an_undisturbed_one(
    book, tmp_path, pretrain_process
):
    """Bit by bit, across changes of P: one each third step, a checkpoint each 4th."""
    arguments = [
        *("--data", str(book), *SMALL, "--method", "compact", "--period", "3"),
        *("--steps", "80", "--checkpoint-every", "4", "--eval-every", "50"),
    ]

    def run(out, *more):
        return pretrain_process(*arguments, *more, "--out", out, devices=2)

    undisturbed = run(tmp_path / "undisturbed")
    printed = undisturbed.communicate()[0]
    assert undisturbed.returncode == 0, printed

    out = tmp_path / "disturbed"
    folder = out / "compact"
    killed = run(out)
    wait_for_step(killed, folder, 8)
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL

    stopped = run(out, "--resume")
    wait_for_step(stopped, folder, 24)
    stopped.terminate()
    printed = stopped.communicate()[0]
    assert stopped.returncode == 128 + signal.SIGTERM, printed
    last = max(losses_of(folder))
    assert f"SIGTERM: saving step {last}" in printed
    assert (folder / "checkpoints" / str(last)).is_dir()
    assert 24 < last < 80

    finished = run(out, "--resume")
    printed = finished.communicate()[0]
    assert finished.returncode == 0, printed
    expected = losses_of(tmp_path / "undisturbed" / "compact")
    assert len(expected) == 80
    assert losses_of(folder) == expected
    assert [row["step"] for row in rows_of(folder) if "loss" in row] == sorted(expected)


@pytest.mark.slow
def test_ctrl_c_saves_and_exits(book, tmp_path):
    """The script itself, as it is typed."""
    script = Path(pretrain.__file__)
    arguments = ["--data", str(book), *SMALL, "--method", "exact", "--steps", "5000"]
    arguments += ["--checkpoint-every", "5", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(script.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_step(process, tmp_path / "out" / "exact", 5)
    process.send_signal(signal.SIGINT)
    printed = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGINT, printed
    assert "SIGINT: saving step" in printed and "Traceback" not in printed


def test_a_run_that_goes_back_is_no_longer_finished(book, tmp_path, monkeypatch):
    arguments = ["--data", str(book), *SMALL, "--method", "exact", "--steps", "3"]
    arguments += ["--checkpoint-every", "1", "--keep", "3", "--out", str(tmp_path)]
    assert pretrain.main(arguments) == 0
    summary, whole = tmp_path / "exact/summary.json", pretrain.read_batch
    assert summary.exists()

    stopped = []

    def read_batch(config, dataset, step, *rows):
        if step == 1 and not stopped:
            stopped.append(step)  # a second signal would kill
            signal.raise_signal(signal.SIGTERM)
        return whole(config, dataset, step, *rows)

    monkeypatch.setattr(pretrain, "read_batch", read_batch)
    assert pretrain.main([*arguments, "--resume", "1"]) == 128 + signal.SIGTERM
    assert not summary.exists()


def test_a_finished_run_is_not_trained_again(finished, arguments, capsys):
    before = rows_of(finished / "exact")
    assert pretrain.main([*arguments, "--out", str(finished), "--resume"]) == 0
    assert rows_of(finished / "exact") == before
    printed = capsys.readouterr().out
    assert f"{finished / 'compact'} is finished: step 10 of 10" in printed
    assert "validation loss  perplexity" in printed


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"valid_loss": []}', "\udcff"])
def test_a_damaged_summary_is_left_out(finished, capsys, damaged):
    path = finished / "exact/summary.json"
    path.write_text(damaged, "utf-8", "surrogateescape")
    table = pretrain.summary.table(
        [finished / "compact", finished / "exact"]
    ).splitlines()
    assert [line.split()[0] for line in table[1:]] == ["compact"]
    printed = capsys.readouterr().out
    assert printed.startswith(f"{path} is left out: it cannot be read (")


def test_weights_are_exported_also_of_a_finished_run(finished, arguments, capsys):
    given = [*arguments, "--out", str(finished), "--resume"]
    assert pretrain.main([*given, "--export"]) == 0
    assert f"weights: {finished / 'exact' / 'weights'}" in capsys.readouterr().out
    model = load_llama(finished / "exact" / "weights")
    # float32, as trained; the tokenizer is bytes, which need no file.
    assert model.cfg == dataclasses.replace(MICRO, vocab_size=257, kv_heads=4)
    saved = Checkpoints(finished / "exact" / "checkpoints")
    config, _ = pretrain.pretrain_options.parse(given)
    job = pretrain.prepare(config, pretrain.load_data(config))
    expected = saved.load(10, job.abstract).params
    found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
