"""Strict mode: an accidental upcast or broadcast is a memory bug here, so it fails."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxcompact import cli

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Else a tenth of the time goes to looking for garbage among all that JAX has traced,
# and to writing down ten callers of each operation.
gc.set_threshold(50_000, 50, 100)
jax.config.update("jax_traceback_in_locations_limit", 1)
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


@pytest.fixture(scope="session", autouse=True)
def fonts_listed_once(tmp_path_factory):
    """By matplotlib, in seconds: else once for each XDG_CACHE_HOME."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")


@pytest.fixture
def compiled():
    """``compiled()``: the number of programs since it was last asked for."""
    names = []

    def note(name, seconds, **_):
        if "backend_compile" in name:
            names.append(name)

    def asked():
        count = len(names)
        names.clear()
        return count

    jax.monitoring.register_event_duration_secs_listener(note)
    yield asked
    jax.monitoring.unregister_event_duration_listener(note)


ORDINARY = jax.config.read("jax_disable_most_optimizations")


@pytest.fixture(scope="session")
def optimized():
    """Compiled as users' programs are: bits that are promised are promised of those."""


@pytest.fixture(autouse=True)
def optimizations(request):
    """Those that the test asks for. From one to the next all is compiled anew."""
    disabled = ORDINARY and "optimized" not in request.fixturenames
    if jax.config.read("jax_disable_most_optimizations") != disabled:
        jax.config.update("jax_disable_most_optimizations", disabled)
        jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data, which is not in the repository."""
    path = Path(os.environ.get("JAXCOMPACT_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"real data not found at {path}: set JAXCOMPACT_DATA")
    return path


@pytest.fixture
def any_rank():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def optax_promotion():
    """optax computes ``decay ** count`` of a float and an int: not strict."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
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


@pytest.fixture
def jaxcompact_main(tmp_path, monkeypatch, capsys):
    """As `jaxcompact_command`, in this process: to start one takes seconds.

    Returns what it ends with, or None, and what it prints to stdout and stderr.
    """

    def run(module, *arguments):
        (tmp_path / "my_module.py").write_text(module)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(sys, "path", sys.path.copy())
        monkeypatch.delitem(sys.modules, "my_module", raising=False)
        try:
            said = cli.main(arguments)
        except SystemExit as ended:
            said = ended.code
        return said, *capsys.readouterr()

    return run
