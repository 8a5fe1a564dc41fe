"""Models from other packages: outputs are exact, gradients as far off as predicted."""

import dataclasses
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from benchmarks import models
from jaxcompact.memory import devices
from jaxcompact.planner.milp import solve
from jaxcompact.planner.problem import CODECS, named, problem_of, without_host
from tests.cases import slow

# Their own, and those of the packages under them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FEW = "gpt2", "resnet", "mlp", "gcn"  # Hugging Face's, Linen's, NNX's, plain JAX's
pairs = pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "int4") for name in FEW),
        *(
            slow(name, policy)
            for name in models.MODELS
            for policy in ("int4", "int8")
            if (name in FEW) == (policy == "int8")
        ),
    ],
)


@pytest.fixture(autouse=True)
def ordinary_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@cache
def task(name: str, data: Path) -> models.Task:
    return models.MODELS[name](data, 0)


@pairs
def test_logits_and_state_are_equal(name, policy, data_dir):
    """State: batch norm's statistics, the counts of random keys."""
    t = task(name, data_dir)
    args = t.params, t.state, t.batch(0)[0], t.key
    small = models.checkpointed(t, models.POLICIES[policy])

    def arrays(fun):
        out = jax.tree.map(
            lambda x: (
                jax.random.key_data(x)
                if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                else x
            ),
            jax.jit(fun)(*args),
        )
        return jax.tree.leaves(out)

    for got, expected in zip(arrays(small), arrays(t.apply), strict=True):
        np.testing.assert_array_equal(got, expected)


@pairs
@pytest.mark.slow
def test_gradients_are_off_by_what_each_tensor_adds(name, policy, data_dir):
    """Were an error amplified, or a decision another, the sum would not explain it.

    Errors of tensors that follow from each other are not independent, and their
    products are left out of the sum: a fifth covers both.
    """
    found = models.gradient(task(name, data_dir), models.POLICIES[policy])
    assert 0.0 < found["error"] < {"int8": 0.02, "int4": 0.25}[policy]
    assert found["predicted"] / 1.2 < found["error"] < 1.2 * found["predicted"]
    # float32 has 32 bits: 8 and 4 of them, and 8 or 32 for what attention reads.
    assert found["stored"] < {"int8": 0.6, "int4": 0.25}[policy] * found["exact"]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.slow
def test_training_starts_as_without(name, data_dir):
    """Ten steps, from where losses differ most; docs/results.md has all of them."""
    t = dataclasses.replace(task(name, data_dir), steps=10)
    exact, small = (
        models.train(t, policy, 0) for policy in (None, models.POLICIES["int4"])
    )
    assert small["loss"] == pytest.approx(exact["loss"], rel=0.02)


@pytest.mark.parametrize("error", [0.0, 0.2])
@pytest.mark.parametrize("name", ["mlp", "gcn", "gat"])
@pytest.mark.slow
def test_plans_err_no_more_than_they_say(name, error, data_dir):
    """The smallest plan, the fastest, and one between: of dropout, relu and graphs."""
    t = task(name, data_dir)
    inputs, labels, weights = t.batch(0)

    def make_step(policy):
        apply = models.checkpointed(t, policy)

        def loss(params, *rest):
            return models.cross_entropy(apply(params, *rest)[0], labels, weights)

        return jax.jit(jax.grad(loss)), (t.params, t.state, inputs, t.key)

    def gradient(policy):
        step, args = make_step(policy)
        return np.concatenate([np.ravel(g) for g in jax.tree.leaves(step(*args))])

    traces, asked = problem_of(make_step, devices()["h200"], error, None, CODECS)
    asked, exact = without_host(asked), gradient(None)
    ends = [solve(asked, noise=error**2, smallest=k) for k in (True, False)]
    between = sum(end.nbytes for end in ends) / 2
    for found in (*ends, solve(asked, noise=error**2, nbytes=between)):
        actions = asked.actions | named(asked.items, found.chosen)
        plan = jc.Plan(traces.traced.label, actions, "h200", 1, 0.0, 0, 0.0, 0)
        off = np.linalg.norm(gradient(plan) - exact) / np.linalg.norm(exact)
        assert off <= max(found.noise**0.5, 1e-6)
