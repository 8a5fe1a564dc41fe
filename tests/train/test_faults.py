"""Nothing is lost: real processes that are killed, starved and lied to.

Each goes on from its last good step, to the bit, or stops and says what and where.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

import metrics
from tests.train.processes import Fork

# A new P each third step, a checkpoint each fourth, an evaluation each fifth.
RUN = "--batch-size 4 --seq-len 16 --eval-batches 2 --method compact --period 3"
RUN += " --checkpoint-every 4 --eval-every 5 --log-every 50"
STEPS = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arguments(words) -> list[str]:
    return ["--data", str(words), *RUN.split(), "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def whole_run(pretrain_process, arguments, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    process = pretrain_process(*arguments, "--out", out)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    return out


@pytest.fixture(scope="module")
def undisturbed(whole_run) -> dict:
    losses = losses_of(whole_run)
    assert sum(kind == "loss" for _, kind in losses) == STEPS
    return losses


def losses_of(out: Path) -> dict[tuple[int, str], float]:
    """Every training and validation loss by its step."""
    return {
        (row["step"], kind): row[kind]
        for row in metrics.read(out / "compact/metrics.jsonl")
        for kind in ("loss", "valid_loss")
        if kind in row
    }


def until(process: Fork, event: str, count: int = 1) -> None:
    """Reads what the process prints until it begins something for the n-th time."""
    printed = []
    for line in process.stdout:
        printed.append(line)
        count -= line == f"@ {event}\n"
        if not count:
            return
    pytest.fail(f"ended before: {''.join(printed)}")


def resumed(pretrain_process, arguments, out, *step, **keywords) -> dict:
    """The losses in a folder after its run has gone on to its end."""
    arguments = [*arguments, "--out", out, "--resume", *step]
    process = pretrain_process(*arguments, **keywords)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    return losses_of(out)


@pytest.mark.parametrize("kills", [3, 20])  # one of each event; and many
def test_a_run_killed_many_times_repeats_the_undisturbed_one(
    pretrain_process, arguments, undisturbed, tmp_path, kills
):
    """In steps, saves and evaluations; each goes on from what the one before left."""
    moments = random.Random(0)
    checkpoints = tmp_path / "compact/checkpoints"
    inside = dict.fromkeys(("save", "evaluation"), 0)
    for number in range(kills):
        process = pretrain_process(*arguments, "--out", tmp_path, "--resume")
        event = ("step", "save", "evaluation")[number % 3]
        until(process, event, moments.randint(1, 5 if event == "step" else 2))
        time.sleep(moments.uniform(0, 0.03))
        process.kill()
        printed = process.communicate()[0]
        assert process.returncode == -signal.SIGKILL, printed
        inside["save"] += any(checkpoints.glob("*.unfinished"))
        done = f"@ {event} done" in printed.splitlines()
        inside["evaluation"] += event == "evaluation" and not done
    # Or the moments are too late to mean anything.
    assert kills < 20 or all(inside.values()), inside
    assert resumed(pretrain_process, arguments, tmp_path) == undisturbed


# The kernel lets no file grow beyond so many bytes.
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))
sys.exit(pretrain.main())
"""


@pytest.mark.parametrize("what", ["checkpoint", "metrics"])
def test_a_full_disk_is_said_and_nothing_is_lost(
    pretrain_process, arguments, undisturbed, tmp_path, what
):
    process = pretrain_process(*arguments, "--out", tmp_path)
    until(process, "save", 2)
    process.terminate()
    process.communicate()
    folder = tmp_path / "compact"
    last = max(int(p.name) for p in (folder / "checkpoints").iterdir())

    room = 2**16
    if what == "metrics":
        room = (folder / "metrics.jsonl").stat().st_size + 100
    starved = pretrain_process(
        *arguments, "--out", tmp_path, "--resume", code=FULL_DISK.format(room)
    )
    printed = starved.communicate()[0]
    assert starved.returncode == 1, printed
    told = printed.splitlines()[-1]
    reason = {
        "checkpoint": f"checkpoint {folder / 'checkpoints' / str(last // 4 * 4 + 4)} "
        "could not be written",
        "metrics": f"the metrics of step {last + 1} could not be written to {folder}: ",
    }
    assert f"stopped: {reason[what]}" in told
    assert f"last good checkpoint is step {last}" in told
    assert resumed(pretrain_process, arguments, tmp_path) == undisturbed


def test_tokens_that_shrink_stop_the_run_and_nothing_is_lost(
    pretrain_process, arguments, undisturbed, tmp_path
):
    out = tmp_path / "out"
    process = pretrain_process(*arguments, "--out", out, cache=tmp_path)
    until(process, "save", 2)
    [tokens] = tmp_path.glob("jaxcompact/*/train.bin")
    whole = tokens.read_bytes()
    os.truncate(tokens, len(whole) // 2)
    printed = process.communicate()[0]
    assert process.returncode == 1, printed
    told = f"{tokens} has shrunk to {len(whole) // 2} bytes of {len(whole)}"
    assert told in printed and "last good checkpoint is step" in printed

    process = pretrain_process(*arguments, "--out", out, "--resume", cache=tmp_path)
    printed = process.communicate()[0]
    assert process.returncode == 2, printed
    assert f"{tokens} holds {len(whole) // 2} bytes and must hold" in printed
    shutil.rmtree(tokens.parent)
    assert resumed(pretrain_process, arguments, out, cache=tmp_path) == undisturbed


def test_a_damaged_checkpoint_is_refused(
    pretrain_process, arguments, whole_run, undisturbed, tmp_path
):
    shutil.copytree(whole_run, tmp_path, dirs_exist_ok=True)
    last, before = (tmp_path / "compact/checkpoints" / str(STEPS - n) for n in (0, 4))
    data = max(last.rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 16
    for damaged in (whole[:-1], bytes(flipped)):
        data.write_bytes(damaged)
        process = pretrain_process(*arguments, "--out", tmp_path, "--resume")
        printed = process.communicate()[0]
        assert process.returncode == 2, printed
        name = data.relative_to(last)
        assert f"{last} is damaged: the content of {name} has changed" in printed
        assert f"continue from it with --resume {before.name}" in printed
    repeated = resumed(pretrain_process, arguments, tmp_path, before.name)
    assert repeated == undisturbed
