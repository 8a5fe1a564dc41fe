"""Programs at random, with an action for each tensor; the same in each process."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcompact as jc
from tests.checkpoint.functions import (
    LOSSY,
    SAVE,
    ULPS,
    W,
    X,
    equal,
    gradients,
)
from tests.errors import relative

UNARY = [jnp.sin, jnp.tanh, jax.nn.silu, jnp.abs, jnp.negative, jnp.cumsum]
BINARY = [
    jnp.add,
    jnp.multiply,
    jnp.maximum,
    lambda a, b: a @ b.T @ a / 32.0,
    lambda a, b: jnp.where(a > b, a, 0.5 * b),
    lambda a, b: jnp.concatenate([a[:, :16], b[:, 16:]], 1),
]
UNARY[-1] = lambda a: jnp.cumsum(a, 0) / 8.0
INSTRUCTIONS = st.tuples(
    st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 9), st.integers(0, 9)
)
ACTIONS = st.sampled_from([jc.Save(), jc.Recompute()])
ROOT = Path(__file__).resolve().parent.parent.parent


def program(code):
    def fun(w, x):
        values = [x, x @ w[0], jnp.sin(x) @ w[1]]
        for kind, i, j in code:
            a, b = values[i % len(values)], values[j % len(values)]
            unary = kind < len(UNARY)
            values.append(UNARY[kind](a) if unary else BINARY[kind - len(UNARY)](a, b))
        return values[-1] + values[-2]

    return fun


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(INSTRUCTIONS, min_size=2, max_size=8), st.data())
def test_programs_at_random(code, data):
    """An action for each tensor: exact ones change nothing, 8 bits little."""
    fun = program(code)
    rows = jc.explain(fun, W, X, policy=SAVE, params=0).rows
    names = [row.name for row in rows if row.kind != "parameter"]
    rules = {name: data.draw(ACTIONS, label=name) for name in names}
    outputs, want = jax.jit(fun)(W, X), gradients(fun, W, X)
    for policy, limit in ((jc.Policy(rules), 10 * ULPS), (LOSSY, 0.2)):
        small = jc.checkpoint(fun, policy=policy, params=0)
        equal(jax.jit(small)(W, X), outputs)
        if any(leaf.any() for leaf in jax.tree.leaves(want)):
            assert relative(gradients(small, W, X), want) < limit


COMPILED = """
import jax
import jaxcompact as jc
from tests.checkpoint.functions import FUNCTIONS, W, X, weighted

subspace = jc.Subspace({"b": jc.Projection(rank=0.5)}, jax.random.key(0))
for fun in FUNCTIONS.values():
    small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    print(jax.jit(jax.grad(weighted(small), (0, 1))).lower(W, X).as_text())
    def loss(p, x):
        return weighted(small)(p["a"], jc.linear(x, p["b"]))
    step = jax.jit(jc.value_and_grad(loss, subspace))
    print(step.lower({"a": W, "b": W[0]}, X, step=0).as_text())
"""


@pytest.mark.slow
def test_the_program_is_the_same_in_each_process():
    """Hosts that train together compile each for itself."""

    def lowered(seed):
        """Objects lie elsewhere in each, and sets of strings have another order."""
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": ROOT}
        code = f"junk = [[] for _ in range({seed}000)]{COMPILED}"
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=env, check=True, capture_output=True).stdout

    one, other = lowered("1"), lowered("7")
    assert one == other and one.count(b"func.func public") > 10
