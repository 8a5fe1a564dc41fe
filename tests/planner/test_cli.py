"""python -m jaxcompact plan, as a user runs it."""

import os
import subprocess
import sys

import pytest

import jaxcompact as jc

MODULE = """
import jax, jax.numpy as jnp

def make_block():
    def block(params, x):
        return x + jnp.tanh(x @ params["up"]) @ params["down"]

    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return block, ({"up": of(256, 1024), "down": of(1024, 256)}, of(4096, 256))

def nothing():
    pass
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "my_module.py").write_text(MODULE)

    def run(*arguments):
        root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        cache = str(tmp_path / "cache")
        env = os.environ | {"PYTHONPATH": root, "JAXCOMPACT_CACHE": cache}
        env.pop("JAX_PLATFORMS", None)
        command = [sys.executable, "-m", "jaxcompact", "plan", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True
        )

    return run


def test_a_table_and_a_file(run, tmp_path):
    arguments = ["my_module:make_block", "--layers", "4", "--budget", "60MiB"]
    done = run(*arguments, "--device", "a100", "--save", "plan.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("block: ") and "on NVIDIA A100" in done.stdout
    assert "MiB a layer" in done.stderr  # progress
    plan = jc.Plan.load(tmp_path / "plan.json")
    assert plan.device == "a100" and plan.peak_bytes <= 60 * 2**20
    assert all(name in done.stdout for name in plan.actions)
    exact = run(*arguments, "--device", "a100", "--max-error", "0", "--json")
    assert jc.Plan.from_json(exact.stdout).error == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_module:nothing"], "must return (block, args), got NoneType"),
        (["my_module:make_block", "--budget", "1MiB"], "budget must be "),
        (["my_module:make_block", "--layers", "0"], "layers must be a positive int"),
    ],
)
def test_errors_are_one_line(run, arguments, message):
    done = run(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("python -m jaxcompact plan: ") and message in last
