"""A GPT-2 through pretrain.py, and runs that go on from weights of others."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import configs
import pretrain
import pretrained
from configs import GPT2Config, ModelConfig
from folders import compared
from gpt2_weights import load_gpt2
from llama import Llama
from weights import save_llama

pytestmark = pytest.mark.usefixtures("optax_promotion")

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
MICRO = GPT2Config(width=32, ff=48, layers=2, heads=4, max_seq=16)
SMALL = ["--batch-size", "8", "--seq-len", "16", "--eval-batches", "2"]


@pytest.fixture(autouse=True)
def micro_model(monkeypatch, tmp_path):
    monkeypatch.setitem(configs.MODELS, "gpt2-tiny", MICRO)
    monkeypatch.setattr(pretrain.curves, "plot", lambda out: None)  # a second a run
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(words, tmp_path):
    """``(folder's name, *arguments) -> loss by step, validation loss by step``."""

    def of(name: str, *arguments: str):
        folder = tmp_path / name
        given = ["--data", str(words), *SMALL, "--out", str(folder), *arguments]
        assert pretrain.main(given) == 0
        (file,) = folder.glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return tuple(
            {row["step"]: row[kind] for row in rows if kind in row}
            for kind in ("loss", "valid_loss")
        )

    return of


@pytest.mark.slow
def test_a_gpt2_is_trained_resumed_exported_and_gone_on_from(run, tmp_path):
    given = ["--method", "exact", "--model", "gpt2-tiny", "--dropout", "0.3"]
    given += ["--steps", "4", "--checkpoint-every", "2", "--eval-every", "2"]
    whole, valid = run("a", *given)
    again = run("a", *given, "--resume", "2", "--export")
    assert again == (whole, valid)  # bit for bit: the same drops out
    weights = tmp_path / "a" / "exact" / "weights"
    assert load_gpt2(weights).cfg == configs.GPT2Config(
        **vars(MICRO) | {"vocab_size": 257, "dropout": 0.3, "init_std": 0.02}
    )

    given = ["--method", "exact", "--weights", str(weights), "--steps", "1"]
    given += ["--lr", "1e-9"]
    _, gone_on = run("b", *given)
    assert gone_on[1] == pytest.approx(valid[4], rel=1e-5)  # float32 sums reordered
    fixed = json.loads((tmp_path / "b" / "exact" / "config.json").read_text())
    assert fixed["model"] is None and len(fixed["weights"]) == 8


@pytest.mark.slow
def test_weights_are_known_by_what_is_in_them(run, tmp_path):
    """A run is resumed, and compared with others, also where their folder is moved."""
    cfg = ModelConfig(vocab_size=257, width=32, ff=48, layers=1, heads=4)
    here, there = tmp_path / "here", tmp_path / "there"
    save_llama(Llama(cfg, rngs=nnx.Rngs(3)), here)
    given = ["--method", "exact", "--steps", "2", "--weights"]
    first = run("a", *given, str(here))
    here.rename(there)
    assert run("a", *given, str(there), "--resume") == first
    run("b", *given, str(there.rename(here)))
    (tmp_path / "b" / "exact").rename(tmp_path / "a" / "other")
    assert len(compared(tmp_path / "a" / "exact")) == 2


def test_a_llama_is_gone_on_from(tmp_path):
    cfg = ModelConfig(vocab_size=257, width=32, ff=48, layers=1, heads=4, tied=True)
    model = Llama(cfg, rngs=nnx.Rngs(3))
    save_llama(model, tmp_path)
    begin = pretrained.load(str(tmp_path), "float32")
    assert begin.cfg == ModelConfig(**vars(cfg) | {"kv_heads": 4})
    expected = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, begin.params, expected)
    assert begin.tokenizer == "bytes"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert begin.tokenizer == str(tmp_path / "tokenizer.json")
    begin.params["embed"]["embedding"] = begin.params["embed"]["embedding"] + 1
    there = pretrained.load(str(tmp_path), "float32")
    assert begin.name != there.name
    # Nor is a run gone on with what reads the same weights in another way.
    config = json.loads((tmp_path / "config.json").read_text())
    config = json.dumps(config | {"rope_theta": 100.0})
    (tmp_path / "config.json").write_text(config)
    assert pretrained.load(str(tmp_path), "float32").name != there.name


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--weights", "x", "--model", "tiny"], "--model excludes it"),
        (["--weights", "no/such"], "no/such/config.json"),
        (["--weights", "{gpt2}"], "tokenizer.json: no such file; --tokenizer names"),
        (
            ["--weights", "{gpt2}", "--tokenizer", "bytes"],
            "vocabulary, 64 ids, got 257",
        ),
        (["--weights", "{words}"], "must be one of llama, gpt2, got 'roberta'"),
        (["--model", "tiny", "--dropout", "0.1"], "is an option of a GPT-2, got tiny"),
        (["--dropout", "1"], "--dropout must be in [0, 1), got 1.0"),
    ],
)
def test_what_does_not_fit_is_said_before_any_training(
    words, tmp_path, capsys, arguments, told
):
    folders = {"gpt2": GOLDEN / "gpt2", "words": GOLDEN / "roberta_words"}
    arguments = [argument.format(**folders) for argument in arguments]
    out = tmp_path / "out"
    assert pretrain.main(["--data", str(words), "--out", str(out), *arguments]) == 2
    assert told in capsys.readouterr().err and not out.exists()
