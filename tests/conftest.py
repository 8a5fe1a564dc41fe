"""Strict mode: an accidental upcast or broadcast is a memory bug here, so it fails."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if jax.config.jax_platforms == "cpu" or not os.environ.get("JAXCOMPACT_TEST_GPU"):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    # Programs are small here and run few times: LLVM's work on their speed is most of
    # a test's time. XLA's passes are all there. Processes that tests begin take it from
    # the environment; tests of exact bits are `optimized`.
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """What one test has compiled is there for the next ones of its process.

    Not of others: a file that one of them still writes would be read as a program.
    """
    folder = tmp_path_factory.getbasetemp() / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="module")
def optimized():
    """Compiled as users' programs are: bits that are promised are promised of those."""
    before = jax.config.read("jax_disable_most_optimizations")
    compile_anew(False)
    yield
    compile_anew(before)


def compile_anew(disable_optimizations: bool):
    jax.config.update("jax_disable_most_optimizations", disable_optimizations)
    jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data, which is not in the repository."""
    path = Path(os.environ.get("JAXCOMPACT_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"real data not found at {path}: set JAXCOMPACT_DATA")
    return path


@pytest.fixture
def optax_promotion():
    """optax computes ``decay ** count`` of a float and an int: not strict."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def jaxcompact_command(tmp_path):
    """``(module's text, *arguments)``: runs python -m jaxcompact beside that module."""

    def run(module, *arguments):
        (tmp_path / "my_module.py").write_text(module)
        cache = str(tmp_path / "cache")
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAXCOMPACT_CACHE": cache}
        env.pop("JAX_PLATFORMS", None)
        command = [sys.executable, "-m", "jaxcompact", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True
        )

    return run
