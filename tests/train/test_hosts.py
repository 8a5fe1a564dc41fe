"""Runs over many devices, of one process and of several that talk over loopback."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

import metrics
from tests.train.processes import Fork

# A new P each third step, a checkpoint each fourth.
RUN = "--batch-size 8 --seq-len 16 --eval-batches 2 --method compact --period 3"
RUN += " --checkpoint-every 4 --eval-every 6 --log-every 4 --steps 12"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arguments(words) -> list[str]:
    return ["--data", str(words), *RUN.split()]


def losses_of(out: Path) -> dict[int, float]:
    rows = metrics.read(out / "compact/metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def end(processes: list[Fork], code: int | None = 0) -> list[str]:
    """What they printed, after all have ended with that code."""
    printed = [process.communicate(timeout=300)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert code is None or codes == [code] * len(codes), (codes, "\n".join(printed))
    return printed


def until_save(process: Fork, count: int) -> None:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if lines.count("@ save\n") == count:
            return
    pytest.fail("".join(lines))


@pytest.fixture
def start(pretrain_process, arguments):
    """``(count, mesh, out, *more, devices=1) -> processes``; none outlives the test.

    ``each`` are options of one process each.
    """
    started = []

    def processes(
        count: int, mesh: str, out: Path, *more, devices: int = 1, each: Any = None
    ) -> list[Fork]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        these = []
        for process in range(count):
            who = ["--coordinator", f"localhost:{port}", "--processes", count]
            who = [*who, "--process", process] if count > 1 else []
            own = each[process] if each else []
            options = ["--mesh", mesh, "--out", out, *who, *more, *own]
            these.append(pretrain_process(*arguments, *options, devices=devices))
        started.extend(these)
        return these

    yield processes
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def alone(pretrain_process, arguments, tmp_path_factory) -> dict[int, float]:
    """The losses of one device."""
    out = tmp_path_factory.mktemp("alone")
    end([pretrain_process(*arguments, "--out", out)])
    return losses_of(out)


def close(losses: dict[int, float]):
    """float32 sums in another order, 12 times after one another.

    A loss is a sum of 128 terms, each of which comes from sums of up to 64: about
    sqrt(128 * 64) / 2 roundings of 2^-24, 3e-6; updates add as much.
    """
    return pytest.approx(losses, rel=1e-5)


def test_eight_devices_find_what_one_finds(start, alone, tmp_path):
    [printed] = end(start(1, "data=2,fsdp=2,tensor=2", tmp_path, devices=8))
    assert "on 8 x cpu (data=2 fsdp=2 tensor=2)" in printed
    assert losses_of(tmp_path) == close(alone)


def test_two_processes_stop_together_and_go_on_with_twice_the_devices(
    start, alone, tmp_path
):
    first, second = start(2, "fsdp=2", tmp_path)
    until_save(first, 1)
    second.terminate()
    printed, silent = end([first, second], 128 + signal.SIGTERM)
    last = max(losses_of(tmp_path))
    assert f"SIGTERM: saving step {last}" in printed and "step" not in silent
    assert (tmp_path / "compact/checkpoints" / str(last)).is_dir()
    assert 4 <= last < 12

    again = start(2, "fsdp=2,tensor=2", tmp_path, "--resume", devices=2)
    printed, _ = end(again)
    assert "on 4 x cpu (fsdp=2 tensor=2)" in printed
    assert losses_of(tmp_path) == close(alone)
    summary = json.loads((tmp_path / "compact/summary.json").read_text())
    assert summary["valid_loss"] < alone[1]


@pytest.mark.parametrize("killed", [0, 1], ids=["the coordinator", "another"])
def test_a_killed_process_stops_the_others_and_nothing_is_lost(
    start, alone, tmp_path, killed
):
    processes = start(2, "fsdp=2", tmp_path)
    until_save(processes[0], 2)
    processes[killed].kill()
    printed = end(processes, None)[1 - killed]
    told = f"stopped: process {1 - killed} of 2: "
    if killed or told in printed:
        assert processes[1 - killed].returncode == 1, printed
        assert told in printed
        assert "the last good checkpoint is step " in printed
    else:  # jax itself may notice first that its coordinator has gone
        assert processes[1].returncode not in (0, None), printed
        assert "coordination service" in printed.lower()
    before = losses_of(tmp_path)
    assert max(before) >= 7

    end(start(2, "fsdp=2", tmp_path, "--resume"))
    after = losses_of(tmp_path)
    assert {step: after[step] for step in before} == before
    assert after == close(alone)


def test_processes_with_different_options_do_not_start(start, tmp_path):
    processes = start(2, "fsdp=2", tmp_path, each=(["--seed", "0"], ["--seed", "1"]))
    for printed in end(processes, 2):
        told = "all processes must have the same options_and_data; those of process 0"
        assert f"error: {told} and process 1 differ" in printed
    assert not (tmp_path / "compact").exists()
