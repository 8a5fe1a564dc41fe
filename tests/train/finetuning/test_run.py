"""Runs of a tiny model on made tasks: what they reach, and how it is judged."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import configs
import finetune
import finetune_options
import pretrain
from roberta import Roberta
from roberta_weights import load_roberta
from tests.train.finetuning.runs import (
    MICRO,
    WORDS,
    losses_of,
    prepared,
    rows_of,
    run,
    sentences,
)

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.mark.slow
@pytest.mark.usefixtures("several_devices")
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


def test_evaluation_is_in_microbatches_with_the_same_scores(arguments):
    (config,) = finetune_options.parse([*arguments, "--method", "exact"])
    data = finetune.load_data(config)
    job = finetune.prepare(config, data, finetune.load_params(config, data))

    def scores(accumulate):
        task = dataclasses.replace(config.task, accumulate=accumulate)
        there = dataclasses.replace(config, task=task)
        job_there, sizes = dataclasses.replace(job, config=there), set()

        def by_first_word(params, tokens_bt):
            sizes.add(len(tokens_bt))
            return jnp.stack([tokens_bt[:, 1] % 3, tokens_bt[:, 1] % 2], axis=-1)

        found = finetune.evaluate(by_first_word, job.abstract, job_there, data, 1)
        return found, sizes

    whole, sizes = scores(1)
    assert sizes == {16} and 0 < whole["accuracy"] < 1
    assert scores(4) == (whole, {4})


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
    said = json.loads((folder / "weights" / "tokenizer_config.json").read_text())
    assert said["model_max_length"] == MICRO.max_seq
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
    trained = load_file(weights / "model.safetensors")
    np.testing.assert_array_equal(
        job.params["embed"]["embedding"],
        trained["roberta.embeddings.word_embeddings.weight"],
    )
    assert job.params["head"]["out"]["kernel"].shape == (32, 2)
