import json
import math
import time

import jax.numpy as jnp
import pytest

import curves
import metrics
from metrics import Log, NotFinite
from readers import DataError


def measured(loss: float, norm: float = 1.0):
    return {"loss": jnp.float32(loss), "gradient_norm": jnp.float32(norm)}


def make_log(folder, start=0, steps=6, every=2, **keywords):
    return Log(folder, start=start, steps=steps, every=every, tokens=100, **keywords)


def rows_of(folder):
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_has_a_row_and_each_interval_a_line(tmp_path, capsys):
    with make_log(tmp_path) as log:
        for step in range(1, 7):
            log.train(step, measured(8.0 - step))
        log.flush()
        log.validation(6, 1.5)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 6]
    assert [row["loss"] for row in rows[:6]] == [7, 6, 5, 4, 3, 2]
    assert [row["step"] for row in rows if "tokens_per_second" in row] == [2, 4, 6]
    assert rows[3]["perplexity"] == pytest.approx(math.exp(4.5))
    assert rows[-1] == {
        "step": 6,
        "valid_loss": 1.5,
        "valid_perplexity": pytest.approx(math.exp(1.5)),
    }
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for part in ("step      4/6", "loss 4.5000", "ppl 90.02", "tokens/s", "ms/step"):
        assert part in lines[1]
    assert "MiB" in lines[1] and "eta 0:0" in lines[1]


def test_scores_have_a_row_and_losses_that_are_not_of_words_no_perplexity(
    tmp_path, capsys
):
    with Log(tmp_path, start=0, steps=2, every=2, tokens=100, perplexity=False) as log:
        log.train(1, measured(3.0))
        log.train(2, measured(2.0))
        log.flush()
        log.scores(2, {"accuracy": 0.75, "f1": 0.5})
    rows = rows_of(tmp_path)
    assert "perplexity" not in rows[1] and rows[1]["tokens_per_second"] > 0
    assert rows[-1] == {"step": 2, "accuracy": 0.75, "f1": 0.5}
    printed = capsys.readouterr().out
    assert "ppl" not in printed and "accuracy 0.7500  f1 0.5000" in printed


def test_a_step_is_recorded_when_the_next_one_is_under_way(tmp_path):
    with make_log(tmp_path) as log:
        log.train(1, measured(2.0))
        assert rows_of(tmp_path) == []
        log.train(2, measured(2.0))
        assert [row["step"] for row in rows_of(tmp_path)] == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_or_gradient_that_is_not_finite_stops_and_names_the_step(tmp_path, bad):
    with make_log(tmp_path) as log:
        log.train(1, measured(2.0))
        log.train(2, measured(bad))
        with pytest.raises(NotFinite, match=f"loss of step 2 is {bad}"):
            log.train(3, measured(2.0))
        log.train(4, measured(2.0, norm=bad))
        with pytest.raises(NotFinite, match="gradient norm of step 4"), log.paused():
            pytest.fail("a pause begins when the last step is known to be good")
        with pytest.raises(NotFinite, match="validation loss of step 4"):
            log.validation(4, bad)
    assert all(math.isfinite(row["loss"]) for row in rows_of(tmp_path))


def test_skipped_steps_are_counted_up_to_a_limit_also_across_a_resume(tmp_path, capsys):
    with make_log(tmp_path, max_skipped=2) as log:
        for step, loss in enumerate([math.nan, 2.0, math.nan, 4.0, math.inf], 1):
            log.train(step, measured(loss))
        log.flush()
    rows = rows_of(tmp_path)
    assert [row.get("skipped") for row in rows] == [1, None, 1, None, 1]
    assert [row.get("loss") for row in rows] == [None, 2, None, 4, None]
    printed = capsys.readouterr().out
    assert "loss of step 5 is inf: no update, 1 in a row of at most 2" in printed
    assert "step      4/6  loss 4.0000" in printed  # the mean of those that count
    with make_log(tmp_path, start=5, max_skipped=2) as log:
        log.train(6, measured(1.0, norm=math.nan))
        log.train(7, measured(math.nan))
        with pytest.raises(NotFinite, match="loss of step 7 is nan, after 2 skipped"):
            log.flush()
    assert rows_of(tmp_path)[-1]["skipped"] == 2
    assert rows_of(tmp_path)[-1]["loss"] == 1


def noisy(step: int) -> float:
    """Losses of mean 2 and standard deviation 0.1."""
    return 2 + 0.1 * math.sqrt(2) * math.cos(2 * step)


def spikes(folder, losses, start=0, period=30) -> None:
    folder.mkdir(exist_ok=True)
    with make_log(folder, start=start, steps=1000, every=1000) as log:
        for step, loss in losses.items():
            number = jnp.float32((step - 1) // period)
            log.train(step, measured(loss) | {"projection": number})
        log.flush()


def test_a_loss_that_jumps_at_a_new_projection_is_told_once(tmp_path, capsys):
    losses = {step: noisy(step) for step in range(1, 101)}
    spikes(tmp_path / "none", losses)
    assert capsys.readouterr().out == ""
    spikes(tmp_path / "two", losses | {31: 2.5, 33: 3.0, 34: 3.0, 63: 2.7, 75: 4.0})
    first, second = capsys.readouterr().out.splitlines()
    before = "a spike, from 1.9924 ± 0.1043 before the new projection of step 31"
    assert first == f"step     33  loss 3.0000: {before}"
    assert second.startswith("step     63  loss 2.7000: a spike, from ")
    assert second.endswith(" before the new projection of step 61")


def test_a_jump_after_a_resume_is_told_and_one_of_no_projection_is_not(
    tmp_path, capsys
):
    losses = {step: noisy(step) for step in range(1, 41)}
    spikes(tmp_path, {step: losses[step] for step in range(1, 33)})
    spikes(tmp_path, {33: 3.0} | {step: losses[step] for step in range(34, 41)}, 32)
    assert "step     33  loss 3.0000: a spike" in capsys.readouterr().out
    with make_log(tmp_path, steps=1000, every=1000) as log:
        for step, loss in (losses | {31: 9.0}).items():
            log.train(step, measured(loss))
        log.flush()
    assert capsys.readouterr().out == ""


def test_a_resumed_run_drops_the_rows_after_its_checkpoint(tmp_path):
    with make_log(tmp_path) as log:
        for step in range(1, 5):
            log.train(step, measured(step))
        log.flush()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    with make_log(tmp_path, start=2) as log:
        log.train(3, measured(30.0))
        log.flush()
    assert [row["loss"] for row in rows_of(tmp_path)] == [1, 2, 30]


ROWS = [f'{{"step": {n}, "loss": 2.0}}\n' for n in range(1, 6)]


@pytest.mark.parametrize(
    "content, told",
    [
        (None, "cannot be read, and has the steps before step 3: No such file"),
        ("", "metrics.jsonl ends at step 0, before step 3"),
        ("".join(ROWS[:2]) + ROWS[2][:9], "metrics.jsonl ends at step 2, before step"),
        (ROWS[0] + "{\n" + "".join(ROWS[1:]), "metrics.jsonl:2: not a row of"),
        (ROWS[0] + "\n" + "".join(ROWS[1:]), "metrics.jsonl:2: not a row of"),
        ("".join(ROWS[:4]) + "\0\n", "metrics.jsonl:5: not a row of"),
        (ROWS[0] + "".join(ROWS[2:]), "2: a row of step 3, and that of step 2 is not"),
        (ROWS[0] + '{"step": "2"}\n', "metrics.jsonl:2: not a row of"),
        ('{"step": 1, "loss": null}\n', "metrics.jsonl:1: not a row of"),
        ("[" * 100_000 + "\n", "metrics.jsonl:1: not a row of"),
        (b"\xff\xfe\n", "metrics.jsonl:1: not a row of"),
    ],
)
def test_rows_that_are_gone_or_none_are_told(tmp_path, content, told):
    """And are no rows to a curve."""
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert all(row["loss"] == 2.0 for row in metrics.read(path))
    with pytest.raises(DataError, match=told):
        metrics.require_rows(path, 3)


@pytest.mark.parametrize("last", ["", ROWS[4], ROWS[4][:-1], ROWS[4][:-2], "\xff"])
def test_a_last_row_may_be_unfinished(tmp_path, last):
    path = tmp_path / "metrics.jsonl"
    scored = '{"step": 2, "accuracy": 0.5}\n'
    rows = [*ROWS[:2], scored, '{"step": 3, "skipped": 1}\n', ROWS[3], last]
    path.write_text("".join(rows))
    metrics.require_rows(path, 4)
    metrics.require_rows(path, 0)


def test_skipped_steps_are_counted_across_scores(tmp_path):
    """Of a step that was skipped, and evaluated, and resumed from."""
    with make_log(tmp_path, max_skipped=1) as log:
        log.train(1, measured(math.nan))
        log.flush()
        log.scores(1, {"accuracy": 0.5})
    with (
        make_log(tmp_path, start=1, max_skipped=1) as log,
        pytest.raises(NotFinite, match="after 1 skipped"),
    ):
        log.train(2, measured(math.nan))
        log.flush()


def test_a_closed_output_has_no_bar(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with make_log(tmp_path) as log:
        log.train(1, measured(3.0))
        log.flush()
    assert len(rows_of(tmp_path)) == 1


def test_a_pause_does_not_count_as_training(tmp_path):
    with make_log(tmp_path, every=1) as log:
        log.train(1, measured(1.0))
        with log.paused():
            time.sleep(0.5)
        log.train(2, measured(1.0))
        log.flush()
    assert rows_of(tmp_path)[1]["step_ms"] < 400
    assert log.speed > 2 * 100 / 0.4


def test_a_terminal_has_a_bar_that_lines_do_not_run_into(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with make_log(tmp_path, steps=4, every=4) as log:
        for step in (1, 2):
            log.train(step, measured(3.0))
        log.flush()
        log.say("a line")
    out = capsys.readouterr().out
    assert f"\r\x1b[K[{'#' * 15}{'.' * 15}] 2/4  loss 3.0000" in out
    assert "\r\x1b[Ka line\n" in out


def test_without_a_terminal_there_is_no_bar(tmp_path, capsys):
    with make_log(tmp_path) as log:
        log.train(1, measured(3.0))
        log.flush()
    assert capsys.readouterr().out == ""


def test_tensorboard_gets_the_rows(tmp_path):
    with make_log(tmp_path) as log:
        log.train(1, measured(3.0))
        log.flush()
    [events] = (tmp_path / "tensorboard").iterdir()
    assert b"gradient_norm" in events.read_bytes()


def test_memory_in_use_is_that_of_this_process():
    assert 2**26 < metrics.memory_in_use() < 2**40


def test_perplexities_that_no_float_holds_are_written():
    assert metrics.written(metrics.perplexity(2.0)) == "7.39"
    assert metrics.written(metrics.perplexity(481.6)) == "1.43e+209"
    assert metrics.written(metrics.perplexity(1e4)) == "1.01e+304"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3600 * 30 + 62, "30:01:02")]
)
def test_durations(seconds, text):
    assert metrics.duration(seconds) == text


def test_curves_are_drawn_for_every_method(tmp_path, capsys):
    assert curves.plot([]) is None
    for name in ("exact", "compact"):
        (tmp_path / name).mkdir()
        with make_log(tmp_path / name) as log:
            log.train(1, measured(3.0))
            log.flush()
            log.validation(1, 2.0)
    path = curves.plot([tmp_path / "exact", tmp_path / "compact"])
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    # What is damaged is left out.
    (tmp_path / "exact/metrics.jsonl").write_bytes(b"\xff")
    assert curves.plot([tmp_path / "exact"]) is None
    path.unlink()
    path.mkdir()
    assert curves.plot([tmp_path / "exact", tmp_path / "compact"]) is None
    assert f"{path} cannot be written: Is a directory" in capsys.readouterr().out
