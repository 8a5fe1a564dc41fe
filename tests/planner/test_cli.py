"""python -m jaxcompact plan, as a user runs it."""

import os
from functools import partial

import pytest

import jaxcompact as jc
from jaxcompact import cli

MODULE = """
import jax, jax.numpy as jnp

def make_block():
    def block(params, x):
        return x + jnp.tanh(x @ params["up"]) @ params["down"]

    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return block, ({"up": of(256, 1024), "down": of(1024, 256)}, of(4096, 256))

def of(layers):
    return make_block()

def nothing():
    pass
"""


@pytest.fixture
def run(jaxcompact_command):
    return partial(jaxcompact_command, MODULE, "plan")


@pytest.mark.slow
def test_a_table_and_a_file(run, tmp_path):
    arguments = ["my_module:make_block", "--layers", "4", "--budget", "60MiB"]
    done = run(*arguments, "--device", "a100", "--save", "plan.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("block: ") and "on NVIDIA A100" in done.stdout
    assert "MiB a layer" in done.stderr  # progress
    plan = jc.Plan.load(tmp_path / "plan.json")
    assert plan.device == "a100" and plan.peak_bytes <= 60 * 2**20
    assert all(name in done.stdout for name in plan.actions)
    exact = run(
        *arguments, "--device", "a100", "--max-error", "0", "--json", "--plot", "f.png"
    )
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert jc.Plan.from_json(exact.stdout).error == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_module:nothing"], "(block, args), a function and a tuple, got NoneType"),
        (["my_module:make_block", "--budget", "1MiB"], "budget must be "),
        (["my_module:make_block", "--layers", "0"], "layers must be a positive int"),
        (["my_module:of"], "of must take no arguments: missing a required argument"),
        (
            ["my_module:make_block", "--save", "no/plan.json"],
            "--save must be in a folder that is there, got 'no/plan.json'",
        ),
        (
            ["my_module:make_block", "--plot", "no/front.png"],
            "--plot must be in a folder that is there, got 'no/front.png'",
        ),
        (
            ["my_module:make_block", "--save", "/"],
            "--save must be a file, got the folder '/'",
        ),
        (
            ["my_module:make_block", "--plot", "front.txt"],
            "--plot must end with .png, .pdf, .svg, got 'front.txt'",
        ),
    ],
)
def test_errors_are_one_line(jaxcompact_main, arguments, message):
    said, out, _ = jaxcompact_main(MODULE, "plan", *arguments)
    assert said.startswith("python -m jaxcompact plan: ") and message in said
    assert "\n" not in said and out == ""


def test_what_was_found_is_printed_before_it_is_written(
    jaxcompact_main, monkeypatch, tmp_path
):
    found = jc.Plan("block", {}, "h200", 2**30, 0.0, 0, 0.0, 2**20)
    monkeypatch.setattr(cli, "plan", lambda *args, **options: found)
    (tmp_path / f"plan.json.{os.getpid()}").mkdir()  # where it is written first
    said, out, _ = jaxcompact_main(
        MODULE, "plan", "my_module:make_block", "--save", str(tmp_path / "plan.json")
    )
    assert out == f"{found}\n" and "directory" in said and "\n" not in said
