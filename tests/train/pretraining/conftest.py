"""Each run trains a model so small that it takes a second."""

import contextlib
import io
import shutil
from pathlib import Path

import jax
import pytest

import configs
import curves
import pretrain
from tests.train.pretraining.runs import MICRO, SMALL, text


@pytest.fixture(autouse=True)
def micro_model(monkeypatch, one_device):
    monkeypatch.setitem(configs.MODELS, "tiny", MICRO)
    monkeypatch.setattr(curves, "plot", lambda out: None)  # a second a run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs without --out write below the working directory, where one may lie."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(text())
    return path


@pytest.fixture(scope="session")
def arguments(book) -> list[str]:
    return [
        *("--data", str(book), *SMALL, "--steps", "10", "--log-every", "5"),
        *("--eval-every", "4", "--checkpoint-every", "4", "--period", "3"),
    ]


@pytest.fixture(scope="session")
def example(tmp_path_factory, arguments):
    """The folder and the printed text of a run of ten steps, exact beside compact."""
    out = tmp_path_factory.mktemp("example")
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        contextlib.redirect_stdout(printed),
    ):
        patch.setitem(configs.MODELS, "tiny", MICRO)
        patch.setattr(jax, "device_count", lambda: 1)  # as of the tests that read it
        assert pretrain.main([*arguments, "--out", str(out)]) == 0
    return out, printed.getvalue()


@pytest.fixture
def finished(example, tmp_path) -> Path:
    """A copy of the example to change."""
    return shutil.copytree(example[0], tmp_path / "finished")
