"""What goes wrong stops a run with words, before any training where it can."""

import json
import signal

import jax.numpy as jnp
import pytest

import curves
import pretrain
from tests.train.pretraining.runs import SMALL, losses_of, refused, rows_of, text

pytestmark = pytest.mark.usefixtures("optax_promotion")


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
        if step == 2 and not stopped:
            stopped.append(step)  # a second signal would kill
            signal.raise_signal(signal.SIGTERM)
        return whole(config, dataset, step, *rows) + 1000 * (step in (2, 3, 5))

    monkeypatch.setattr(pretrain, "read_batch", read_batch)
    arguments = ["--data", str(book), *SMALL, "--method", "compact", "--steps", "8"]
    arguments += ["--checkpoint-every", "3", "--period", "2", "--keep", "3"]
    arguments += ["--out", str(tmp_path)]
    stopped, again = [], [*arguments, "--resume"]
    assert pretrain.main(arguments) == 128 + signal.SIGTERM  # after the third step
    assert pretrain.main([*again, "--max-skipped", "1"]) == 1
    told = "loss of step 4 is nan, after 1 skipped in a row; the last good checkpoint"
    assert told in capsys.readouterr().err
    assert pretrain.main(again) == 0
    rows = rows_of(tmp_path / "compact")
    assert sorted(losses_of(tmp_path / "compact")) == [1, 2, 5, 7, 8]
    assert {row["step"]: row["skipped"] for row in rows if "skipped" in row} == {
        3: 1,
        4: 2,
        6: 1,
    }
    # After two updates and after four, whatever number of steps these took.
    assert curves.new_projections(rows) == [3, 8]
    # Nothing is saved when a batch was skipped, as the sixth, but at the end of a run.
    kept = sorted(p.name for p in tmp_path.glob("compact/checkpoints/*"))
    assert kept == ["3", "8"]


@pytest.mark.usefixtures("several_devices")
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
        (["--method", "remat", "--checkpoint", "int4"], "is not an option of remat"),
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
        (["--memory-budget", "7Gi"], "--memory-budget must be bytes, or a number and"),
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
        (
            ["--explain-plan", "--memory-budget", "1GiB", "--plan-plot", "front.png"],
            "--plan-plot needs one --method: each has its own plans",
        ),
        (["--memory-budget", "1GiB", "--checkpoint", "int4"], "a plan exclude each"),
        (
            ["--memory-budget", "1GiB", "--method", "exact,remat"],
            "--method remat and a plan exclude each other",
        ),
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


def test_no_memory_for_a_batch_is_said(book, tmp_path, capsys, monkeypatch):
    def read_batch(*_):
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr(pretrain, "read_batch", read_batch)
    given = ["--data", str(book), *SMALL, "--out", str(tmp_path / "out")]
    told = "8.00 TiB; less memory takes a smaller --batch-size, a larger --accumulate"
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
