"""python -m jaxcompact memory, as a user runs it."""

import json
import shutil
from functools import partial

import pytest

MODULE = """
import jax, jax.numpy as jnp

def make_step(batch=256):
    x = jax.ShapeDtypeStruct((batch, 1024), jnp.float32)
    return jax.jit(lambda x: 2.0 * x), (x,)

def fixed():
    return make_step()

def nothing():
    pass

def array():
    step, (x,) = make_step()
    return step, x

constant = 3

def broken():
    step, (x,) = make_step()
    return jax.jit(lambda x: jnp.broadcast_to(x, (3, 5))), (x,)
"""


@pytest.fixture
def run(jaxcompact_command):
    return partial(jaxcompact_command, MODULE, "memory")


@pytest.fixture
def here(jaxcompact_main):
    return partial(jaxcompact_main, MODULE, "memory")


@pytest.mark.slow
def test_a_table_and_json(run, here):
    done = run("my_module:make_step", "--device", "l40s")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("NVIDIA L40S: 2.00 MiB, 0% of 44.99 GiB\n")
    said, out, _ = here("my_module:make_step", "--batch", "512", "--json")
    row = json.loads(out)
    assert said is None and row["peak_bytes"] == sum(row["breakdown"].values()) == 2**22
    assert row["device"] == "h200"


@pytest.mark.slow
def test_jaxs_own_cache_is_left_alone(run, tmp_path, monkeypatch):
    """It would keep what is compiled for a card, and without the card not read it."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    for _ in range(2):
        done = run("my_module:make_step")
        assert done.returncode == 0 and done.stderr == ""
        shutil.rmtree(tmp_path / "cache")
    assert not list(tmp_path.glob("jax/*"))


def test_the_largest_batch(here):
    said, out, err = here(
        "my_module:make_step", "--largest-batch", "--budget", "1MiB", "--json"
    )
    row = json.loads(out)
    assert said is None and row["batch"] == 128
    assert row["peak"]["peak_bytes"] == 2**20
    assert err.startswith("batch 1: 0.01 MiB, fits\n")


def test_an_error_ends_the_process(run):
    done = run("my_module:nothing")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("python -m jaxcompact memory: my_module:nothing must")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_module"], "expected MODULE:FUNCTION, as package.module:function, got"),
        (["my_module.py:fixed"], "package.module:function, got 'my_module.py:fixed'"),
        (["./my_module:fixed"], "as package.module:function, got './my_module:fixed'"),
        (["my_module:fixed.f"], "my_module has no 'fixed.f'"),
        (["my_module:other"], "my_module has no 'other'"),
        (["no_module:f"], "No module named 'no_module'"),
        (["my_module:nothing"], "a function and a tuple, got NoneType"),
        (["my_module:array"], "and a tuple, got (PjitFunction, ShapeDtypeStruct)"),
        (["my_module:constant"], "my_module:constant must be a function, got int"),
        (["my_module:fixed", "--batch", "3"], "fixed must take a batch: too many"),
        (["my_module:fixed", "--largest-batch"], "must take a batch: too many"),
        (["my_module:make_step", "--device", "gtx"], "device must be one of"),
        (
            ["my_module:make_step", "--budget", "1GiB"],
            "--budget goes with --largest-batch",
        ),
        (
            ["my_module:make_step", "--multiple", "8"],
            "--multiple goes with --largest-batch",
        ),
        (
            ["my_module:make_step", "--largest-batch", "--batch", "0"],
            "--batch goes without --largest-batch",
        ),
        (["my_module:make_step", "--batch", "-3"], "--batch must be positive, got -3"),
        (
            ["my_module:make_step", "--largest-batch", "--measure"],
            "--measure goes without --largest-batch",
        ),
        (
            ["my_module:make_step", "--largest-batch", "--budget", "1 ton"],
            "budget must be bytes",
        ),
    ],
)
def test_errors_are_one_line(here, arguments, message):
    said, *printed = here(*arguments)
    assert said.startswith("python -m jaxcompact memory: ") and message in said
    assert "\n" not in said and printed == ["", ""]


def test_where_ones_own_code_fails_is_told(here):
    """As by an exception that is not caught; of other errors a line is enough."""
    said, _, err = here("my_module:broken")
    assert "ncompatible" in said and "\n" not in said.strip()
    assert 'my_module.py", line' in err and "jnp.broadcast_to(x, (3, 5))" in err
    for wrong in ("my_module:nothing", "my_module:missing", "no_module:make_step"):
        said, _, err = here(wrong)
        assert said.startswith("python -m jaxcompact memory: ") and err == ""
