"""Models from other packages: outputs are exact, gradients as far off as predicted."""

import dataclasses
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import models

# Their own, and those of the packages under them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FEW = "gpt2", "resnet", "mlp", "gcn"  # Hugging Face's, Linen's, NNX's, plain JAX's
pairs = pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "int4") for name in models.MODELS), *((name, "int8") for name in FEW)],
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
    """Twenty steps, from where losses differ most; docs/results.md has all of them."""
    t = dataclasses.replace(task(name, data_dir), steps=20)
    exact, small = (
        models.train(t, policy, 0) for policy in (None, models.POLICIES["int4"])
    )
    assert small["loss"] == pytest.approx(exact["loss"], rel=0.02)
