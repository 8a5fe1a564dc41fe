"""pretrain.py as a process of its own, on a model that compiles in no time."""

import os
import random
from pathlib import Path

import jax
import pytest

from tests.train.processes import Fork, Forks

TRAIN = Path(__file__).resolve().parents[2] / "train"

# It says what it begins and has done, so that a test can end it between the two.
CHILD = """
import os, sys
import configs, pretrain

def announced(name, function):
    def wrapped(*args, **kwargs):
        print("@", name, flush=True)
        result = function(*args, **kwargs)
        print("@", name, "done", flush=True)
        return result
    return wrapped

configs.MODELS["tiny"] = configs.ModelConfig(
    width=32, ff=64, layers=2, heads=4, max_seq=64)
pretrain.read_batch = announced("step", pretrain.read_batch)
pretrain.evaluate = announced("evaluation", pretrain.evaluate)
pretrain.Checkpoints.save = announced("save", pretrain.Checkpoints.save)
pretrain.curves.plot = lambda out: None  # a second a run
"""


@pytest.fixture(scope="session")
def pretrain_process(tmp_path_factory):
    """``(*arguments, devices=1, cache=..., code=...) -> Fork``.

    ``cache`` is where tokens are; ``code`` runs after `CHILD`; what is printed is to be
    read from ``stdout``.
    """
    folder = tmp_path_factory.mktemp("processes")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "OPENBLAS_NUM_THREADS": "1",  # or a process that forks has threads
        "PYTHONPATH": f"{TRAIN}:{TRAIN.parent}",
    }
    server = Forks(CHILD, environment)

    def start(
        *arguments,
        devices: int = 1,
        cache: Path = folder,
        code: str = "sys.exit(pretrain.main())",
    ) -> Fork:
        code = (
            f"import jax; jax.config.update('jax_num_cpu_devices', {devices})\n{code}"
        )
        return server.start(
            code, [*map(str, arguments)], {"XDG_CACHE_HOME": str(cache)}
        )

    yield start
    server.close()


@pytest.fixture
def one_device(request, monkeypatch):
    """For runs in this process: programs of one compile in two thirds of the time."""
    if "several_devices" not in request.fixturenames:
        monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture
def several_devices():
    """For tests that need them where `one_device` is for all."""


@pytest.fixture(scope="session")
def words(tmp_path_factory) -> Path:
    """A text of 400 lines of ten words, in an order that no two lines share."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    known = "the a of to and cat dog tree house river sees makes finds".split()
    order = random.Random(0)
    path.write_text("\n".join(" ".join(order.choices(known, k=10)) for _ in range(400)))
    return path
