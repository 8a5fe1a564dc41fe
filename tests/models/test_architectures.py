"""The papers' models have their sizes, and a narrow form of the same operations."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from benchmarks import architectures
from jaxcompact.planner.block import block_of

# As published; GPT-2 here has no biases, BERT-large no second kind of segment, no
# pooler of its own and three classes.
WEIGHTS = {
    "GPT-2 117M": 124_439_808,
    "GPT-2 345M": 354_823_168,
    "BERT-large": 335_141_888,
    "ResNet-50": 25_557_032,
    "Swin-T": 28_288_354,
}


@pytest.fixture(autouse=True)
def ordinary_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_as_many_weights_as_published(name):
    _, params, _ = architectures.MODELS[name].build(2, None, False)
    count = sum(x.size for x in jax.tree.leaves(params))
    assert count == pytest.approx(WEIGHTS[name], rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2 117M", "BERT-large", "GCN", "GAT"])
def test_a_narrow_model_has_the_same_tensors(name):
    """Those of which sensitivity measures the bits are those that get them."""
    model = architectures.MODELS[name]

    def names(small):
        def make_step(policy):
            loss, params, rest = model.build(2, policy, small)
            return jax.grad(loss), (params, *rest)

        policy = architectures.UNIFORM[4]
        return [s.tensor.name for s in block_of(make_step, policy, "step").replay.slots]

    assert names(small=True) == names(small=False)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 4])
def test_automatic_bits_are_as_many_as_fixed_ones(bits):
    model = architectures.MODELS["GCN"]
    policy = architectures.automatic(model, bits)
    loss, params, rest = model.build(1, policy, False)
    found = jax.eval_shape(jax.grad(loss), params, *rest)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)
    if policy is not architectures.UNIFORM[bits]:
        used = {codec.bits for codec in dict(policy.rules).values()}
        assert used <= {8, 4, 2, 1} and min(used) <= bits <= max(used)


def test_a_rows_figures_are_of_one_commit(tmp_path, monkeypatch):
    """Batches that an older row lacks come with a peak of their own commit."""
    commit, peak = "a", 1
    fake = {
        "RESULTS": tmp_path / "rows.jsonl",
        "provenance": lambda: {"commit": commit},
        "policies": lambda model, row_of: iter([("int4", jc.policies.int4())]),
        "largest": lambda model, policy, budget: 3,
    }
    for name, value in fake.items():
        monkeypatch.setattr(architectures, name, value)
    monkeypatch.setattr(architectures.Model, "step", lambda *_: (None, ()))
    monkeypatch.setattr(
        architectures.memory, "peak", lambda step: SimpleNamespace(peak_bytes=peak)
    )
    architectures.make("GCN", search=False)
    (row,) = architectures.rows_of(architectures.RESULTS)
    assert (row["commit"], row["peak_bytes"]) == ("a", 1)

    commit, peak = "b", 2
    architectures.make("GCN", search=True)
    (row,) = architectures.rows_of(architectures.RESULTS)
    assert (row["commit"], row["peak_bytes"], row["16 GB"]) == ("b", 2, 3)
