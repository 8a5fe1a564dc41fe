"""What options are by default, and what is refused before any training."""

import shutil

import pytest

import finetune
import finetune_options
import pretrain
from tests.train.finetuning.runs import WORDS, refused, sentences
from tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("optax_promotion")

GIVEN = ["--task", "cola", "--task-data", "x", "--weights", "y"]


def test_the_defaults_are_the_papers():
    exact, compact, galore = finetune_options.parse(
        [*GIVEN, "--method", "exact,compact,galore"]
    )
    assert (compact.method.rank, compact.method.alpha) == (8, 2)
    assert (compact.method.period, compact.method.kind) == (500, "gaussian")
    assert (galore.method.rank, galore.method.alpha) == (8, 2)
    assert exact.method.alpha == 1
    assert (exact.optimizer.lr, exact.optimizer.epochs) == (2e-5, 30)
    assert exact.batch_size == 32  # of CoLA alone
    (rank_4,) = finetune_options.parse([*GIVEN, "--method", "compact", "--rank", "4"])
    assert rank_4.method.alpha == 4
    assert exact.threshold is None
    (tag,) = finetune_options.parse(["--task", "tag", *GIVEN[2:], "--method", "exact"])
    assert tag.threshold == 0.5
    (part,) = finetune_options.parse([*GIVEN, "--method", "compact", "--rank", "0.5"])
    assert part.method.alpha == 1
    (own,) = finetune_options.parse([*GIVEN, "--method", "compact", "--alpha", "3"])
    assert own.method.alpha == 3


@pytest.mark.usefixtures("several_devices")
@pytest.mark.parametrize(
    "change, told",
    [
        (["--task", "wnli"], "argument --task: invalid choice: 'wnli'"),
        (["--task-data", "nowhere"], "--task-data must exist, got"),
        (["--weights", "nowhere"], "No such file or directory: 'nowhere/config.json'"),
        (["--tokenizer", "nowhere.json"], "nowhere.json: no such file"),
        (["--dropout", "1"], "--dropout must be in [0, 1), got 1.0"),
        (["--seq-len", "4"], "--seq-len must be at least 8, got 4"),
        (["--threshold", "0.3"], "--threshold is an option of tag, not of sst2"),
        (["--text-columns", "a"], "--text-columns is an option of classify, tag, rate"),
        (["--label-column", "a"], "--label-column is an option of classify, tag, rate"),
        (
            ["--task", "tag", "--threshold", "1"],
            "--threshold must be in (0, 1), got 1.0",
        ),
        (["--epochs", "0"], "--epochs must be positive, got 0.0"),
        (["--epochs", "inf"], "--epochs must be finite, got inf"),
        (["--epochs", "1e30"], "steps must be below 2^31, got"),
        (["--batch-size", str(2**63)], "--batch-size must be below 2^31, got 92233720"),
        (["--batch-size", "6"], "--batch-size must be divisible by --accumulate times"),
        (["--method", "lora"], "--method must be one or several of exact"),
        (["--method", "exact", "--rank", "8"], "--rank is not an option of exact"),
        (["--rank", "64"], "rank must not be above the layer's input width 32, got 64"),
        (["--checkpoint", "int5"], "argument --checkpoint: invalid choice: 'int5'"),
        (["--checkpoint", "int4", "--plan", "p.json"], "a plan exclude each other"),
        (["--method", "remat", "--plan", "p.json"], "--method remat and a plan excl"),
        (["--plan", "nowhere.json"], "--plan nowhere.json: "),
    ],
)
def test_wrong_options_are_refused(arguments, tmp_path, capsys, change, told):
    assert told in refused(capsys, [*arguments, "--out", str(tmp_path / "x"), *change])


def test_what_is_needed_is_said(capsys):
    assert "--task and --task-data are needed" in refused(capsys, ["--task", "rte"])
    assert "--weights is needed" in refused(capsys, GIVEN[:4])


def test_no_memory_for_a_batch_is_said(arguments, tmp_path, capsys, monkeypatch):
    def read_batch(*_):
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr(finetune, "read_batch", read_batch)
    told = "8.00 TiB; less memory takes a smaller --batch-size, a larger --accumulate"
    assert told in refused(capsys, [*arguments, "--out", str(tmp_path)])


def test_weights_without_their_tokenizer(arguments, weights, tmp_path, capsys):
    bare = shutil.copytree(weights, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    error = refused(capsys, [*arguments, "--weights", str(bare)])
    assert "bare/tokenizer.json: no such file; --tokenizer names" in error
    many = " ".join(f"{a}{b}ly" for a in WORDS for b in WORDS)
    other = load_tokenizer("roberta:320", [many])
    other.save(bare)
    error = refused(capsys, [*arguments, "--weights", str(bare)])
    assert "must be of the weights' vocabulary, 300 ids with padding 1" in error


def test_masked_words_need_robertas_tokens(tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text("\n".join(sentences(600, 3)))
    given = ["--model", "roberta-tiny", "--data", str(book), "--seq-len", "16"]
    assert pretrain.main(given) == 2
    assert "has no <s>, <pad>, </s>, <mask>" in capsys.readouterr().err
