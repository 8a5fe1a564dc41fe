"""What lies in the folder of a run is neither lost nor taken for something else."""

import fcntl
import shutil

import jax
import pytest

import pretrain
from tests.train.pretraining.runs import losses_of, refused, rows_of, text

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_runs_of_other_data_are_not_compared(finished, arguments, capsys, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text(300))
    (finished / "theirs").mkdir()
    (finished / "theirs" / "config.json").write_text("[]")
    only = [*arguments, "--data", str(other), "--method", "compact", "--steps", "1"]
    assert pretrain.main([*only, "--out", str(finished), "--overwrite"]) == 0
    table = capsys.readouterr().out.partition("validation loss  ")[2]
    assert "\ncompact" in table and "\nexact" not in table
