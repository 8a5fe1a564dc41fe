import contextlib
import dataclasses
import fcntl
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import configs
import curves
import jaxcompact as jc
import planning
import pretrain
from checkpoint import Checkpoints
from configs import ModelConfig
from jaxcompact import Quantized
from jaxcompact.planner.block import block_of
from jaxcompact.planner.sensitivity import Effect
from methods import Method
from summary import linear_input_bytes
from training import Training
from weights import load_llama

pytestmark = pytest.mark.usefixtures("optax_promotion")

SMALL = ["--batch-size", "4", "--seq-len", "16", "--eval-batches", "2"]
TINY = configs.MODELS["tiny"]
MICRO = ModelConfig(width=32, ff=48, layers=2, heads=4, max_seq=64)


def text(lines: int = 400) -> str:
    """Lines of ten words, in an order that no two lines share."""
    words = "the a of to and cat dog tree house river sees makes finds".split()
    order = random.Random(0)
    return "\n".join(" ".join(order.choices(words, k=10)) for _ in range(lines))


@pytest.fixture(autouse=True)
def micro_model(monkeypatch):
    monkeypatch.setitem(configs.MODELS, "tiny", MICRO)
    monkeypatch.setattr(curves, "plot", lambda out: None)  # a second a run


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(text())
    return path


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows_of(folder) if "loss" in row}


@pytest.fixture(scope="module")
def arguments(book) -> list[str]:
    return [
        *("--data", str(book), *SMALL, "--steps", "10", "--log-every", "5"),
        *("--eval-every", "4", "--checkpoint-every", "4", "--period", "3"),
    ]


@pytest.fixture(scope="module")
def example(tmp_path_factory, arguments):
    """The folder and the printed text of a run of ten steps, exact beside compact."""
    out = tmp_path_factory.mktemp("example")
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        contextlib.redirect_stdout(printed),
    ):
        patch.setitem(configs.MODELS, "tiny", MICRO)
        assert pretrain.main([*arguments, "--out", str(out)]) == 0
    return out, printed.getvalue()


def test_a_spike_at_a_new_projection_is_in_the_log(book, tmp_path, monkeypatch, capsys):
    """A run whose weights are quadrupled as its second projection begins."""
    compile_step = pretrain.compile_step

    def disturbed(job):
        step = compile_step(job)

        def run(state, tokens):
            if state.step == 40:
                wrong = jax.tree.map(lambda w: 4 * w, state.params)
                state = state._replace(params=wrong)
            return step(state, tokens)

        return run

    monkeypatch.setattr(pretrain, "compile_step", disturbed)
    given = ["--data", str(book), *SMALL, "--method", "compact", "--period", "40"]
    given += ["--steps", "45", "--log-every", "45", "--out", str(tmp_path)]
    assert pretrain.main(given) == 0
    [spike] = [x for x in capsys.readouterr().out.splitlines() if "a spike" in x]
    assert spike.endswith("before the new projection of step 41")


@pytest.fixture
def finished(example, tmp_path) -> Path:
    """A copy of the example to change."""
    return shutil.copytree(example[0], tmp_path / "finished")


# --- one run ---------------------------------------------------------------------


def test_both_methods_learn_and_stand_side_by_side(example):
    out, printed = example
    table = printed[printed.index("validation loss  perplexity") :].splitlines()
    names = [line.split()[0] for line in table[1:3]]
    assert names == ["compact", "exact"]
    summaries = {}
    for name, line in zip(names, table[1:3], strict=True):
        folder = out / name
        summary = summaries[name] = json.loads((folder / "summary.json").read_text())
        valid = [row["valid_loss"] for row in rows_of(folder) if "valid_loss" in row]
        assert valid[-1] == summary["valid_loss"] < valid[0] < math.log(257)
        assert f"{summary['valid_loss']:.4f}" in line
        assert sorted(losses_of(folder)) == list(range(1, 11))
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["10", "8"]
    # The methods begin with the same weights and the same batch.
    first = [losses_of(out / name)[1] for name in names]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    for held in ("gradient_bytes", "optimizer_bytes", "linear_input_bytes"):
        assert summaries["compact"][held] < summaries["exact"][held]


def test_it_says_what_it_reads_and_where_it_writes(example):
    out, printed = example
    assert printed.startswith("data: 1 document, ")
    assert "compiled in" in printed and str(out / "exact") in printed
    assert "step     10/10  loss" in printed and "tokens/s" in printed


def test_curves_are_drawn(example):
    pytest.importorskip("matplotlib")
    assert (example[0] / "curves.png").exists()


def test_gradients_and_optimizer_state_are_counted_by_hand(example):
    """float32; matrices q, k, v 32x32, gate, up 32x48, down 48x32, at rank n/4."""
    rest = 2 * 257 * 32 + 32 + 2 * (2 * 32 + 32 * 32)  # embedding, head, norms, o
    exact = rest + 2 * (3 * 32 * 32 + 3 * 32 * 48)
    compact = rest + 2 * (3 * 8 * 32 + 2 * 8 * 48 + 12 * 32)
    for name, size in (("exact", exact), ("compact", compact)):
        summary = json.loads((example[0] / name / "summary.json").read_text())
        assert summary["gradient_bytes"] == 4 * size
        # Two moments; Adam's and the schedule's counts, and the subspace's own state.
        assert 0 < summary["optimizer_bytes"] - 2 * 4 * size <= 32


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Method("exact"), 100 * (128 + 128 + 352) * 2),
        (Method("galore"), 100 * (128 + 128 + 352) * 2),
        (Method("remat"), 0),
        # A quarter of 352 is 88, which as a rank becomes a multiple of 64.
        (Method("compact"), 100 * (32 + 32 + 64) * 2),
        (
            Method("compact", rank=0.5, bits=4),
            2 * Quantized(bits=4).nbytes((100, 64)) + Quantized(4).nbytes((100, 192)),
        ),
    ],
)
def test_linear_inputs_are_counted_once_for_those_that_share_them(method, expected):
    job = Training(TINY, method, lambda _: 1e-3, dtype=jnp.bfloat16)
    counted = linear_input_bytes(job, job.abstract.params, tokens=100)
    assert counted == TINY.layers * expected


def judged(arguments, tmp_path, *more):
    """A run that is not begun: its config, data and job."""
    given = [*arguments, "--method", "compact", "--out", str(tmp_path), *more]
    (config,) = pretrain.pretrain_options.parse(given)
    dataset = pretrain.load_data(config)
    return config, dataset, pretrain.prepare(config, dataset)


def test_validation_reads_the_same_text_however_batches_are_cut(arguments, tmp_path):
    made = [
        judged(arguments, tmp_path, "--batch-size", "8", "--accumulate", cut)
        for cut in ("1", "2")
    ]
    whole, cut = (list(pretrain.read_validation(*each[:2])) for each in made)
    assert [len(batch) for batch in whole] == [8, 8]  # of --eval-batches 2
    assert [len(batch) for batch in cut] == [4, 4, 4, 4]
    np.testing.assert_array_equal(np.concatenate(cut), np.concatenate(whole))
    losses = [
        pretrain.evaluate(
            jax.jit(job.training.weighed_loss), pretrain.init(job), job, dataset
        )
        for _, dataset, job in made
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # float32 sums reordered


@pytest.mark.parametrize(
    "pairs, mean", [([(2, 30), (5, 10)], 2.75), ([(0, 0), (0, 0)], 0)]
)
def test_a_microbatch_counts_in_validation_by_what_is_guessed_in_it(
    arguments, tmp_path, pairs, mean
):
    _, dataset, job = judged(arguments, tmp_path)
    found = iter(np.array(pairs, np.float32))
    state = pretrain.init(job)
    assert pretrain.evaluate(lambda *_: next(found), state, job, dataset) == mean


# --- resuming --------------------------------------------------------------------


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
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
        *("--steps", "120", "--checkpoint-every", "4", "--eval-every", "50"),
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
    wait_for_step(stopped, folder, 40)
    stopped.terminate()
    printed = stopped.communicate()[0]
    assert stopped.returncode == 128 + signal.SIGTERM, printed
    last = max(losses_of(folder))
    assert f"SIGTERM: saving step {last}" in printed
    assert (folder / "checkpoints" / str(last)).is_dir()
    assert 40 < last < 120

    finished = run(out, "--resume")
    printed = finished.communicate()[0]
    assert finished.returncode == 0, printed
    expected = losses_of(tmp_path / "undisturbed" / "compact")
    assert len(expected) == 120
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


def refused(capsys, arguments: list[str]) -> str:
    """The error, which comes with exit code 2 and before any training."""
    try:
        code = pretrain.main(arguments)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert "compiled" not in captured.out
    error = captured.err.splitlines()[-1]
    assert error.startswith("pretrain.py: error: ")
    return error


def test_a_folder_that_another_run_writes_to_is_refused(finished, arguments, capsys):
    """And left as it is, whatever is asked; then this one has it."""
    before = losses_of(finished / "exact")
    with (finished / ".exact.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process has it
        for asked in ("--resume", "--overwrite"):
            error = refused(capsys, [*arguments, "--out", str(finished), asked])
            assert error.endswith(f"another run is writing to {finished / 'exact'}")
    assert losses_of(finished / "exact") == before
    assert pretrain.main([*arguments, "--out", str(finished), "--resume"]) == 0
    with (finished / ".exact.lock").open("w") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--seed", "1"], "seed was 0 and is 1 now"),
        (["--rank", "0.5"], "rank was 0.25 and is 0.5 now"),
        (["--kind", "sparse"], "kind was 'countsketch' and is 'sparse' now"),
        (["--period", "4"], "period was 3 and is 4 now"),
        (["--seq-len", "8"], "seq_len was 16 and is 8 now"),
        (["--eval-batches", "3"], "eval_batches was 2 and is 3 now"),
        (["--steps", "20"], "steps was 10 and is 20 now"),
        (["--dtype", "bfloat16"], "dtype was 'float32' and is 'bfloat16' now"),
        (["--model", "60m"], "model was 'tiny' and is '60m' now"),
    ],
)
def test_another_run_is_not_resumed(finished, arguments, capsys, change, told):
    same = [*arguments, "--method", "compact", "--out", str(finished), "--resume"]
    error = refused(capsys, [*same, *change])
    assert str(finished / "compact") in error and told in error


def test_other_data_is_not_resumed(finished, arguments, capsys, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text(300))
    same = [*arguments, "--out", str(finished), "--resume", "--data", str(other)]
    assert "be resumed: data was" in refused(capsys, same)
    other.write_text(text().replace("dog", "god"))  # as long
    assert "be resumed: data was" in refused(capsys, same)


def test_a_damaged_checkpoint_is_refused_and_the_good_one_repeats_what_followed(
    finished, arguments, capsys
):
    folder = finished / "compact"
    before = losses_of(folder)
    files = (folder / "checkpoints" / "10").rglob("*")
    largest = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    only = [*arguments, "--method", "compact", "--out", str(finished)]
    error = refused(capsys, [*only, "--resume"])
    assert f"{folder / 'checkpoints' / '10'} is damaged" in error
    assert "the previous good one is step 8" in error and "--resume 8" in error
    assert pretrain.main([*only, "--resume", "8"]) == 0
    assert losses_of(folder) == before
    assert len(rows_of(folder)) == 10 + 3


def test_a_checkpoint_of_another_run_is_refused(finished, arguments, capsys, tmp_path):
    """Of the same shapes, and whole."""
    only = [*arguments, "--method", "compact"]
    assert pretrain.main([*only, "--seed", "1", "--out", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    here, there = (x / "compact/checkpoints/8" for x in (finished, tmp_path / "other"))
    shutil.rmtree(here)
    shutil.copytree(there, here)
    error = refused(capsys, [*only, "--out", str(finished), "--resume", "8"])
    assert f"{here} is of another run by its seal.json" in error


def test_damaged_metrics_are_said_and_left_as_they_are(finished, arguments, capsys):
    path = finished / "compact/metrics.jsonl"
    damaged = path.read_text().replace("{", "<", 1)
    path.write_text(damaged)
    only = [*arguments, "--method", "compact", "--out", str(finished), "--resume", "8"]
    assert f"{path}:1: not a row of a run's metrics" in refused(capsys, only)
    assert path.read_text() == damaged
    assert (finished / "compact/checkpoints/10").exists()


def test_a_file_in_place_of_the_checkpoints_is_said(finished, arguments, capsys):
    checkpoints = finished / "exact/checkpoints"
    shutil.rmtree(checkpoints)
    checkpoints.write_text("")
    error = refused(capsys, [*arguments, "--out", str(finished), "--resume"])
    assert f"--out must be a folder, but {checkpoints} is a file" in error


def test_checkpoints_of_unknown_origin_are_refused(finished, arguments, capsys):
    (finished / "exact" / "config.json").unlink()
    error = refused(capsys, [*arguments, "--out", str(finished), "--resume"])
    assert "which run it holds is unknown" in error


def test_a_run_is_not_overwritten_by_accident(finished, arguments, capsys):
    error = refused(capsys, [*arguments, "--out", str(finished)])
    assert f"{finished / 'exact'} holds a run already" in error
    assert "--resume" in error and "--overwrite" in error and "--out" in error


def test_without_a_config_a_run_is_a_run(finished, arguments, capsys):
    (finished / "exact" / "config.json").unlink()
    error = refused(capsys, [*arguments, "--out", str(finished)])
    assert f"{finished / 'exact'} holds a run already" in error


def test_a_run_is_there_until_the_next_is_compiled(
    finished, arguments, capsys, monkeypatch
):
    """And a step that does not fit says so, and what to do."""

    def fails(job):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(pretrain, "compile_step", fails)
    before = sorted(finished.rglob("*"))
    again = [*arguments, "--method", "compact", "--out", str(finished), "--overwrite"]
    assert pretrain.main(again) == 1
    error = capsys.readouterr().err
    assert error.startswith("pretrain.py: stopped: RESOURCE_EXHAUSTED: Out of memory; ")
    assert "a smaller --batch-size" in error
    assert sorted(finished.rglob("*")) == before


@pytest.mark.parametrize("asked", ["--overwrite", "--resume"])
def test_a_link_to_the_folder_of_a_run_stays_one(finished, arguments, tmp_path, asked):
    """What it leads to is emptied, as what is linked from there is not."""
    elsewhere, linked = tmp_path / "elsewhere", finished / "compact"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    shutil.rmtree(elsewhere / "checkpoints")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("")
    (elsewhere / "notes").symlink_to(kept)
    (elsewhere / "old.txt").write_text("")
    again = [*arguments, "--method", "compact", "--out", str(finished), asked]
    assert pretrain.main(again) == 0
    assert linked.is_symlink() and (elsewhere / "summary.json").exists()
    assert not (elsewhere / "old.txt").exists() and not (elsewhere / "notes").exists()
    assert (kept / "file").exists()


def test_what_is_read_is_not_overwritten(finished, arguments, capsys):
    data = finished / "exact" / "mine.txt"
    data.write_text(text())
    again = [*arguments, "--data", str(data), "--out", str(finished), "--overwrite"]
    error = refused(capsys, again)
    assert f"--data must not be in {finished / 'exact'}, which is emptied" in error
    assert data.exists()


def test_runs_that_are_judged_by_other_text_are_not_compared(
    finished, arguments, capsys
):
    only = [*arguments, "--eval-batches", "3", "--method", "compact", "--steps", "10"]
    assert pretrain.main([*only, "--out", str(finished), "--overwrite"]) == 0
    table = capsys.readouterr().out.partition("validation loss  ")[2]
    assert "\ncompact" in table and "\nexact" not in table


def test_runs_of_other_data_are_not_compared(finished, arguments, capsys, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text(300))
    (finished / "theirs").mkdir()
    (finished / "theirs" / "config.json").write_text("[]")
    only = [*arguments, "--data", str(other), "--method", "compact", "--steps", "1"]
    assert pretrain.main([*only, "--out", str(finished), "--overwrite"]) == 0
    table = capsys.readouterr().out.partition("validation loss  ")[2]
    assert "\ncompact" in table and "\nexact" not in table


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


# --- what goes wrong -------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "skipped", "told", "kept"),
    [
        (4, 0, "loss of step 7 is nan; the last good checkpoint is step 4", ["4"]),
        pytest.param(
            *(2, 9, "step 6 is not finite; the last good checkpoint is step 4"),
            ["2", "4"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(9, 1, "loss of step 8 is nan, after 1 skipped in a row; there is no"),
            [],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_not_finite_stops_the_run_and_is_not_saved(
    book, tmp_path, capsys, monkeypatch, every, skipped, told, kept
):
    """An infinite learning rate from the sixth update on."""

    def schedule(*_):
        return lambda count: jnp.where(count < 5, 1e-3, jnp.inf)

    monkeypatch.setattr(pretrain, "warmup_cosine", schedule)
    arguments = ["--data", str(book), *SMALL, "--method", "exact", "--steps", "20"]
    arguments += ["--checkpoint-every", str(every), "--max-skipped", str(skipped)]
    assert pretrain.main([*arguments, "--out", str(tmp_path)]) == 1
    assert told in capsys.readouterr().err
    assert max(losses_of(tmp_path / "exact")) == 6
    assert sorted(p.name for p in tmp_path.glob("exact/checkpoints/*")) == kept


@pytest.mark.slow
def test_batches_without_a_finite_loss_are_skipped_also_after_a_resume(
    book, tmp_path, capsys, monkeypatch
):
    """Ids outside the vocabulary in the third, fourth and sixth batch."""
    whole = pretrain.read_batch

    def read_batch(config, dataset, step, *rows):
        return whole(config, dataset, step, *rows) + 1000 * (step in (2, 3, 5))

    monkeypatch.setattr(pretrain, "read_batch", read_batch)
    arguments = ["--data", str(book), *SMALL, "--method", "compact", "--steps", "8"]
    arguments += ["--checkpoint-every", "3", "--period", "2", "--keep", "3"]
    arguments += ["--out", str(tmp_path)]
    assert pretrain.main(arguments) == 0
    rows = rows_of(tmp_path / "compact")
    before = losses_of(tmp_path / "compact")
    assert sorted(before) == [1, 2, 5, 7, 8]
    assert {row["step"]: row["skipped"] for row in rows if "skipped" in row} == {
        3: 1,
        4: 2,
        6: 1,
    }
    # After two updates and after four, whatever number of steps these took.
    assert curves.new_projections(rows) == [3, 8]
    again = [*arguments, "--resume", "3"]
    assert pretrain.main([*again, "--max-skipped", "1"]) == 1
    told = "loss of step 4 is nan, after 1 skipped in a row; the last good checkpoint"
    assert told in capsys.readouterr().err
    assert pretrain.main(again) == 0
    assert losses_of(tmp_path / "compact") == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--mesh", "fsdp=3"], "as many places as there are devices, 4, got 'fsdp=3'"),
        (["--mesh", "model=4"], "--mesh must be sizes of data, fsdp, tensor, as"),
        (
            ["--blocks", "5"],
            "blocks must divide the layer's input width 48 and its rank",
        ),
        (["--process", "0"], "--process need --coordinator host:port"),
        (
            ["--coordinator", "here"],
            "--coordinator must be host:port or auto, got 'her",
        ),
        (
            ["--coordinator", "here:1", "--processes", "2", "--process", "2"],
            "--process must be from 0 to --processes less 1, got 2 of 2",
        ),
        (["--max-skipped", "-1"], "--max-skipped must not be negative, got -1"),
        (["--stepz", "3"], "unrecognized arguments: --stepz"),
        (["--step", "3"], "unrecognized arguments: --step"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--model", "2b"], "argument --model: invalid choice: '2b'"),
        (["--method", "exact,adam"], "--method must be one or several of exact, remat"),
        (["--method", "exact,exact"], "got 'exact,exact'"),
        (["--method", "exact", "--bits", "4"], "--bits is not an option of exact"),
        (["--rank", "0.0"], "rank must be a positive int or float of Python"),
        (["--rank", "1.5"], "at most 1.0, got 1.5"),
        (["--rank", "33"], "rank must not be above the layer's input width 32, got 33"),
        (["--bits", "5"], "bits must be one of 16, 8, 4, got 5"),
        (["--kind", "dense"], "argument --kind: invalid choice: 'dense'"),
        (
            ["--mesh", "fsdp=4294967296,tensor=4294967296"],
            "as there are devices, 4, got 'fsdp=4294967296,tensor=4294967296': 1 * 42",
        ),
        (["--tokenizer", "bpe:999999999999"], "a number above 256 (the bytes and the "),
        (
            ["--period", "3000000000"],
            "period must be from 1 to 2^31 - 1, got 3000000000",
        ),
        (
            ["--method", "galore", "--period", "3000000000"],
            "period must be from 1 to 2^31 - 1, got 3000000000",
        ),
        (["--period", "0"], "--period must be positive, got 0"),
        (["--alpha", "-1"], "--alpha must be positive, got -1.0"),
        (["--lr", "nan"], "--lr must be positive, got nan"),
        (["--lr", "inf"], "--lr must be finite, got inf"),
        (["--weight-decay", "inf"], "--weight-decay must be 0 or more, and finite"),
        (["--seed", str(2**32)], "--seed must be in [0, 2^32), got 4294967296"),
        (["--steps", str(2**31)], "steps must be below 2^31, got 2.14748e+09"),
        (["--data", ""], "argument --data: must not be empty"),
        (["--memory-budget", ""], "argument --memory-budget: must not be empty"),
        (["--out", __file__], f"--out must be a folder, but {__file__} is a file"),
        (["--warmup", "1"], "--warmup must be in [0, 1), got 1.0"),
        (
            ["--batch-size", "6"],
            "devices that share a batch, 1 * 4, got 6",
        ),
        (["--batch-size", str(2**31)], "--batch-size must be below 2^31, got 21474836"),
        (["--accumulate", "2"], "2 * 4, got 4"),
        (["--seq-len", "65"], "--seq-len must be at most 64"),
        (["--data", "no/such/file"], "no/such/file: no such file or directory"),
        (["--tokenizer", "no.json"], "no.json"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--resume", "4"], "--resume STEP needs one --method"),
        (["--plan", "no.json"], "--plan no.json: "),
        (["--plan", "p", "--memory-budget", "1GiB"], "--memory-budget exclude each"),
        (["--explain-plan"], "--explain-plan needs --memory-budget or --plan"),
        (["--plan-device", "h100"], "--plan-device needs --memory-budget"),
        (["--max-error", "0.1"], "--max-error needs --memory-budget"),
        (["--plan", "p", "--max-error", "0"], "--max-error needs --memory-budget"),
        (
            ["--explain-plan", "--memory-budget", "1GiB", "--plan-plot", "front.xyz"],
            "--plan-plot must end with .png, .pdf, .svg, got front.xyz",
        ),
        (
            ["--explain-plan", "--memory-budget", "1GiB", "--plan-plot", "no/such.png"],
            "--plan-plot must be in a folder that is there, got no/such.png",
        ),
        (["--memory-budget", "1GiB", "--checkpoint", "int4"], "a plan exclude each"),
        (["--memory-budget", "1 ton"], "budget must be bytes"),
        (["--memory-budget", "1000GiB"], "budget must be within the 140.40 GiB"),
    ],
)
def test_a_wrong_option_is_said_before_any_training(
    book, tmp_path, capsys, arguments, told
):
    defaults = ["--data", str(book), *SMALL, "--out", str(tmp_path / "out")]
    assert told in refused(capsys, [*defaults, *arguments])
    left = [path.name for path in tmp_path.glob("out/*")]
    assert left in ([], [".exact.lock"])  # of the first method, which could begin


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


def test_no_memory_for_a_batch_is_said(book, tmp_path, capsys, monkeypatch):
    def read_batch(*_):
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr(pretrain, "read_batch", read_batch)
    given = ["--data", str(book), *SMALL, "--out", str(tmp_path / "out")]
    told = "Unable to allocate 8.00 TiB; less memory takes a smaller --batch-size"
    assert told in refused(capsys, given)


def test_data_without_text_is_said_before_any_training(tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert f"{empty}: " in refused(capsys, ["--data", str(empty), *SMALL])


def test_a_text_shorter_than_a_sequence_is_said_before_any_training(tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("A few words.\n" * 10)
    error = refused(capsys, ["--data", str(short), *SMALL])
    assert "16 tokens" in error and "need 17" in error


def test_corrupt_lines_are_skipped_and_reported(tmp_path, capsys):
    lines = tmp_path / "lines.jsonl"
    good = [json.dumps({"text": line}) for line in text(60).splitlines()]
    lines.write_text("\n".join([*good, '{"text": "cut']))
    pretrain.main(["--data", str(lines), *SMALL, "--rank", "33"])  # read, then refused
    assert "1 line skipped (corrupt; first: " in capsys.readouterr().out


def test_help_names_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        pretrain.main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "--output-alpha",
        "(default: exact,compact)",
        "then a cosine to 10 % (default: 0.1)",
        "or 4 (default: 16)",
    ):
        assert part in printed
