"""A made task, and weights to begin with."""

from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from roberta import Roberta
from roberta_weights import save_roberta
from tests.train.finetuning.runs import MICRO, sentences
from tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    save_roberta(Roberta(MICRO, dtype=jnp.float32, rngs=nnx.Rngs(0)), folder)
    load_tokenizer("roberta:300", sentences(200, 0)).save(folder)
    return folder


@pytest.fixture(scope="session")
def sst2(tmp_path_factory) -> Path:
    """Good is what has a cat in it."""
    folder = tmp_path_factory.mktemp("sst2")
    for name, count, seed in (("train", 320, 1), ("dev", 90, 2)):
        rows = [f"{text} \t{int('cat' in text)}" for text in sentences(count, seed)]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows, ""]))
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, one_device):
    """Runs without --out write below the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def arguments(weights, sst2):
    return [
        *("--task", "sst2", "--task-data", str(sst2), "--weights", str(weights)),
        *("--lr", "1e-2", "--epochs", "12", "--log-every", "60", "--dropout", "0.1"),
    ]
