"""Runs of a tiny model on made tasks: what they reach, repeat, resume and refuse."""

import dataclasses
import functools
import json
import random
import shutil
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import configs
import finetune
import finetune_options
import folders
import jaxcompact as jc
import planning
import pretrain
from configs import RobertaConfig
from jaxcompact.planner.block import block_of
from roberta import Roberta
from roberta_weights import load_roberta, save_roberta
from tests.train.refusals import refused_by
from tokenizer import load_tokenizer

pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")
pytestmark = pytest.mark.usefixtures("optax_promotion")

WORDS = "the a of to and cat dog tree house river sees makes".split()
MICRO = RobertaConfig(
    vocab_size=300, width=32, ff=64, layers=1, heads=4, max_seq=32, init_std=0.1
)


def sentences(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 7))) for _ in range(count)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    save_roberta(Roberta(MICRO, dtype=jnp.float32, rngs=nnx.Rngs(0)), folder)
    load_tokenizer("roberta:300", sentences(200, 0)).save(folder)
    return folder


@pytest.fixture(scope="module")
def sst2(tmp_path_factory) -> Path:
    """Good is what has a cat in it."""
    folder = tmp_path_factory.mktemp("sst2")
    for name, count, seed in (("train", 320, 1), ("dev", 90, 2)):
        rows = [f"{text} \t{int('cat' in text)}" for text in sentences(count, seed)]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows, ""]))
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs without --out write below the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def arguments(weights, sst2):
    return [
        *("--task", "sst2", "--task-data", str(sst2), "--weights", str(weights)),
        *("--lr", "1e-2", "--epochs", "12", "--log-every", "60", "--dropout", "0.1"),
    ]


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in rows_of(folder) if "loss" in row]


def run(arguments, out, *more) -> int:
    return finetune.main([*arguments, "--out", str(out), *more])


@pytest.mark.slow
def test_a_made_task_is_learned_by_exact_and_compact(arguments, tmp_path, capsys):
    methods = ["--method", "exact,compact", "--rank", "8", "--period", "50"]
    assert run(arguments, tmp_path, *methods) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("task: 320 examples train, 90 dev")
    table = printed[printed.index("accuracy  tokens/s") :].splitlines()
    names = [line.split()[0] for line in table[1:3]]
    assert names == ["compact", "exact"]
    found = {}
    for name, line in zip(names, table[1:3], strict=True):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        accuracy = summary["scores"]["accuracy"]
        assert accuracy > 0.9, name  # 0.65 by chance: as often as there is no cat
        assert accuracy == rows_of(tmp_path / name)[-1]["accuracy"]
        assert f"{100 * accuracy:.2f}" in line
        found[name] = summary
    for held in ("gradient_bytes", "optimizer_bytes", "linear_input_bytes"):
        assert found["compact"][held] < found["exact"][held]


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
    assert summary["linear_input_bytes"] == 0  # they are the policy's to keep
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
    assert summary["linear_input_bytes"] == 0  # they are the plan's to keep

    losses = losses_of(whole)
    for resumed in (3, 1):
        again = ["--resume", str(resumed)]
        assert run([*given, *planned], whole.parent, *again) == 0
        assert losses_of(whole) == losses
    assert run([*given, "--plan", str(whole / "plan.2.json")], other) == 0
    assert run([*given], tmp_path / "exact") == 0
    exact, followed = (
        losses_of(tmp_path / "exact" / "exact"),
        losses_of(other / "exact"),
    )
    assert exact[0] == followed[0] == losses[0]
    assert len({exact[2], followed[2], losses[2]}) == 3
    np.testing.assert_allclose(losses, exact, rtol=0.2)


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


def prepared(arguments):
    (config,) = finetune_options.parse(arguments)
    data = finetune.load_data(config)
    return finetune.prepare(config, data, finetune.load_params(config, data))


def test_steps_without_a_finite_gradient_are_counted_to_the_limit(
    arguments, tmp_path, capsys, monkeypatch
):
    """Three pass, as it was asked; the limit is no part of what a run is."""
    monkeypatch.setattr(Roberta, "loss", lambda model, batch: jnp.float32(jnp.nan))
    limited = [*arguments, "--method", "exact", "--max-skipped", "3"]
    assert finetune.main([*limited, "--out", str(tmp_path)]) == 1
    assert "loss of step 4 is nan, after 3 skipped in a row" in capsys.readouterr().err
    assert "max_skipped" not in json.loads((tmp_path / "exact/config.json").read_text())


@pytest.mark.slow
def test_scores_are_taken_where_an_epoch_ends(weights, sst2, tmp_path):
    """Of 54 examples by 16: after 3.4, 6.8 and 10.1 steps."""
    for name, count in (("train", 54), ("dev", 20)):
        lines = (sst2 / f"{name}.tsv").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.tsv").write_text("".join(lines[: count + 1]))
    given = ["--task", "sst2", "--task-data", str(tmp_path), "--weights", str(weights)]
    given += ["--method", "exact", "--epochs", "3"]
    assert run(given, tmp_path / "out") == 0
    rows = rows_of(tmp_path / "out" / "exact")
    assert [row["step"] for row in rows if "accuracy" in row] == [4, 7, 11]
    ends = [step for step in range(1, 13) if finetune.ends_epoch(step, 4, 2)]
    assert ends == [2, 4, 6, 8, 10, 12]
    assert all(finetune.ends_epoch(step, 4, 9) for step in range(1, 13))


def test_predictions_that_are_not_finite_are_no_scores(
    arguments, tmp_path, capsys, monkeypatch
):
    whole = Roberta.__call__
    nan = lambda model, tokens: whole(model, tokens) * jnp.nan  # noqa: E731
    monkeypatch.setattr(Roberta, "__call__", nan)
    monkeypatch.setattr(Roberta, "loss", lambda model, batch: jnp.float32(0.0))
    given = [*arguments, "--method", "exact", "--epochs", "0.05"]
    assert finetune.main([*given, "--out", str(tmp_path)]) == 1
    told = "predictions of step 1 are not finite: of 90 of the 90 examples of dev; "
    assert told in capsys.readouterr().err
    assert not (tmp_path / "exact/summary.json").exists()


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


def test_scores_of_two_held_out_sets_and_of_both(weights, tmp_path):
    head = "\t".join(["index", "sentence1", "sentence2", "gold_label"])
    files = {"train": 32, "dev_matched": 20, "dev_mismatched": 13}
    names = ["entailment", "neutral", "contradiction"]
    for name, count in files.items():
        text = [f"{i}\tcat\tdog\t{names[i % 3]}" for i in range(count)]
        (tmp_path / f"{name}.tsv").write_text("\n".join([head, *text]))
    (config,) = finetune_options.parse(
        [
            *("--task", "mnli", "--task-data", str(tmp_path), "--method", "exact"),
            *("--weights", str(weights)),
        ]
    )
    data = finetune.load_data(config)
    job = finetune.prepare(config, data, finetune.load_params(config, data))
    state = job.training.init(job.params)

    def neutral(params, tokens_bt):  # class 2, of batches that are always full
        assert tokens_bt.shape[0] == 16
        return jnp.tile(jnp.array([[0.0, 1.0, 2.0]]), (16, 1))

    assert finetune.evaluate(neutral, state, job, data, 1) == {
        "accuracy": pytest.approx((7 + 4) / 33),
        "accuracy dev_matched": pytest.approx(7 / 20),
        "accuracy dev_mismatched": pytest.approx(4 / 13),
    }


@pytest.mark.slow
def test_several_classes_a_text_are_learned_and_exported(weights, tmp_path):
    """Cat, dog and tree, each said to be there or not; many texts have none."""
    names = ["cat", "dog", "tree"]
    for split, count, seed in (("train", 160, 1), ("dev", 50, 2)):
        rows = [
            {"text": text, "label": [name for name in names if name in text]}
            for text in sentences(count, seed)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(text)
    given = [
        *("--task", "tag", "--task-data", str(tmp_path), "--weights", str(weights)),
        *("--lr", "1e-2", "--epochs", "8", "--log-every", "80", "--dropout", "0"),
        *("--method", "exact", "--export"),
    ]
    assert run(given, tmp_path / "out") == 0
    folder = tmp_path / "out" / "exact"
    losses = losses_of(folder)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 2
    scores = json.loads((folder / "summary.json").read_text())["scores"]
    assert list(scores) == ["macro_f1", "micro_f1"]
    assert min(scores.values()) > 0.9
    config = json.loads((folder / "weights" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert list(config["id2label"].values()) == names
    loaded = load_roberta(folder / "weights").cfg
    assert (loaded.labels, loaded.multi_label) == (3, True)


def test_a_text_has_the_classes_above_the_threshold(weights, tmp_path):
    (tmp_path / "train.tsv").write_text("cat\ta\ndog\tb\n")
    (tmp_path / "dev.tsv").write_text("cat\ta\ndog\ta\n")
    given = [
        *("--task", "tag", "--task-data", str(tmp_path), "--weights", str(weights)),
        *("--text-columns", "1", "--label-column", "2", "--method", "exact"),
    ]
    (config,) = finetune_options.parse(given)
    data = finetune.load_data(config)
    job = finetune.prepare(config, data, finetune.load_params(config, data))
    state = job.training.init(job.params)
    odds = jnp.log(jnp.array([[0.4 / 0.6, 0.2 / 0.8]])).repeat(16, axis=0)

    def scores(threshold):
        task = dataclasses.replace(config.task, threshold=threshold)
        there = dataclasses.replace(config, task=task)
        job_there = dataclasses.replace(job, config=there)
        found = finetune.evaluate(lambda *_: odds, state, job_there, data, 1)
        return found["macro_f1"], found["micro_f1"]

    assert scores(None) == (0, 0)  # a half
    assert scores(0.3) == (1 / 2, 1)  # b is never there
    assert scores(0.1) == (1 / 2, pytest.approx(2 / 3))


def test_the_schedule():
    schedule = finetune.warmup_line(2.0, 100, 0.06)
    rates = np.array([schedule(step) for step in range(100)])
    assert rates.argmax() in (5, 6) and rates.max() == 2.0
    assert (np.diff(rates[6:]) < 0).all() and rates[0] == pytest.approx(2 / 6)
    assert rates[-1] == pytest.approx(2 / 94, rel=1e-4)
    assert float(finetune.warmup_line(2.0, 1, 0.5)(0)) == 2.0


# --- options ---------------------------------------------------------------------

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


refused = partial(refused_by, finetune)


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
    told = "Unable to allocate 8.00 TiB; less memory takes a smaller --batch-size"
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


def test_a_folder_that_holds_a_run_is_not_overwritten(arguments, tmp_path, capsys):
    (tmp_path / "exact").mkdir()
    (tmp_path / "exact" / "config.json").write_text("{}")
    given = [*arguments, "--method", "exact", "--out", str(tmp_path)]
    assert "holds a run already" in refused(capsys, given)


# --- from a text to a task -------------------------------------------------------


@pytest.mark.slow
def test_masked_words_make_weights_that_fine_tuning_begins_with(
    sst2, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(configs.MODELS, "roberta-tiny", MICRO)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    book = tmp_path / "book.txt"
    book.write_text(" ".join(WORDS) + "\n")
    book.write_text(book.read_text() * 300)
    pretraining = [
        *("--model", "roberta-tiny", "--tokenizer", "roberta:300", "--data", str(book)),
        *("--method", "exact", "--steps", "900", "--eval-every", "300"),
        *("--seq-len", "31", "--log-every", "300"),
        *("--lr", "1e-2", "--out", str(tmp_path / "words"), "--export"),
    ]
    assert pretrain.main(pretraining) == 0
    losses = [
        r["valid_loss"] for r in rows_of(tmp_path / "words/exact") if "valid_loss" in r
    ]
    # Words come in one order: a neighbour tells what is missing. Without: log(12).
    assert losses[-1] < losses[0] and losses[-1] < 1
    weights = tmp_path / "words" / "exact" / "weights"
    assert load_roberta(weights).cfg.labels == 0
    given = ["--task", "sst2", "--task-data", str(sst2), "--weights", str(weights)]
    job = prepared([*given, "--method", "exact"])
    trained = safetensors.load_file(weights / "model.safetensors")
    np.testing.assert_array_equal(
        job.params["embed"]["embedding"],
        trained["roberta.embeddings.word_embeddings.weight"],
    )
    assert job.params["head"]["out"]["kernel"].shape == (32, 2)


def test_masked_words_need_robertas_tokens(tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text("\n".join(sentences(600, 3)))
    given = ["--model", "roberta-tiny", "--data", str(book), "--seq-len", "16"]
    assert pretrain.main(given) == 2
    assert "has no <s>, <pad>, </s>, <mask>" in capsys.readouterr().err
