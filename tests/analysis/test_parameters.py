"""What is made of parameters is not stored, nor what frozen ones alone would need."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from tests.draws import normal
from tests.errors import relative
from tests.residuals import (
    LAYERS,
    MLP,
    Q4,
    Q8,
    X,
    checkpointed,
    compress,
    crossing,
    mlp,
    nbytes,
    references,
    replay,
    slots,
    uniform,
    weighted,
)

# Sums of float32 in another order: sqrt(128) terms of 2^-24 are 7e-7 of the norm.
ULPS = 2e-6


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w,
        lambda w: w.T,
        lambda w: w[:, ::-1],
        lambda w: jnp.concatenate([w[:32], 2.0 * w[32:]]),
        lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
        lambda w: w / jnp.linalg.norm(w, axis=0, keepdims=True),
        lambda w: checkpoint_name(w @ w, "product"),
        lambda w: jax.lax.scan(lambda a, _: (a @ w, None), w, None, length=2)[0],
    ],
)
def test_no_parameter_is_stored_whatever_is_made_of_it(use):
    def fun(w, x):
        return jnp.tanh(x @ use(w)) @ use(w)

    held = crossing(checkpointed(fun, compress(Q4)), LAYERS[0], X)
    assert nbytes(held) == 2 * Q4.nbytes(X.shape)


def test_parameters_by_type():
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    def fun(x, state):
        return jnp.tanh(nnx.merge(graph, state)(x))

    assert set(slots(fun, uniform(Q4), X, state, params=nnx.Param)) == {
        "x",
        "dot_general.0",
    }
    # Not said to be parameters, they are inputs like any other.
    assert "state/kernel" in slots(fun, uniform(Q4), X, state, params=())


def test_without_params_no_input_is_encoded():
    assert set(slots(mlp, uniform(Q4), MLP, X, params=None)) == {"dot_general.0"}
    small = checkpointed(mlp, uniform(Q4), params=None)
    assert references(small, MLP, X) == [X.shape, (64, 128), (128, 64)]


@pytest.mark.slow
def test_sketched_kernels_are_kept():
    """A compressed linear layer in a checkpointed block: two savings in one."""
    subspace = jc.Subspace({"up": jc.Projection(rank=16)}, key=jax.random.key(1))

    def block(w, x):
        return jax.nn.gelu(jc.linear(x, w["up"])) @ w["down"]

    def loss(block, w):
        return weighted(block)(w, X)

    exact, lossy = (
        jc.value_and_grad(partial(loss, f), subspace)(MLP, step=0)[1]
        for f in (block, checkpointed(block, compress(Q8)))
    )
    assert lossy["up"].shape == (16, 128)
    # gelu' of 8 bits: a step of 2^-7 of a group's largest, a third of it rms: < 1 %.
    assert 0.0 < relative(lossy, exact) < 0.01
    same = jc.value_and_grad(
        partial(loss, checkpointed(block, jc.Policy(default=jc.Save()))), subspace
    )(MLP, step=0)[1]
    assert relative(same, exact) < ULPS


def test_what_only_frozen_weights_would_need_is_not_stored():
    """LoRA: the frozen weight's gradient is what would read x."""

    def fun(frozen, a, b, x):
        return jnp.tanh(x @ frozen + (x @ a) @ b)

    args = LAYERS[0], normal(8, 64, 4), normal(9, 4, 64), X

    def kept(wrt):
        found = replay(fun, uniform(Q8), *args, params=(0, 1, 2), wrt=wrt)
        return {slot.tensor.name for slot in found.slots}, set(found.kept)

    # tanh' is made of the sum of two products; x @ a is for b's gradient alone, x for
    # those of the weights that it meets.
    assert kept((0, 1, 2, 3)) == ({"add.0", "dot_general.1", "x"}, {0, 1, 2})
    assert kept((2,)) == ({"add.0", "dot_general.1"}, set())
    assert kept((1,)) == (
        {"add.0"},
        {2, 3},
    )  # x is nobody's residual: it is kept as it is
    assert kept((3,)) == ({"add.0"}, {0, 1, 2})


def test_no_gradient_no_storage():
    assert slots(mlp, jc.Policy(default=jc.Save()), MLP, X, wrt=()) == {}
