"""jaxcompact.linen beside flax.linen; the shared promises are in contract/."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxcompact as jc
from jaxcompact import linen as clinen
from tests.draws import normal

X = normal(0, 5, 16)
SUBSPACE = jc.Subspace({"params/kernel": jc.Projection(4)}, jax.random.key(1))


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_plain_checkpoint_fits(use_bias):
    plain, ours = nn.Dense(8, use_bias=use_bias), clinen.Dense(8, use_bias=use_bias)
    variables = plain.init(jax.random.key(2), X)
    np.testing.assert_array_equal(ours.apply(variables, X), plain.apply(variables, X))
    grad = jc.value_and_grad(lambda v: jnp.sum(ours.apply(v, X)), SUBSPACE)
    value, grads = grad(variables, step=0)
    np.testing.assert_allclose(value, plain.apply(variables, X).sum(), rtol=1e-5)
    assert grads["params"]["kernel"].shape == (4, 8)
    assert ("bias" in grads["params"]) == use_bias


@pytest.mark.parametrize(
    "given",
    [
        {"dot_general": jax.lax.dot_general},
        {"promote_dtype": lambda *arrays, **_: arrays},
    ],
    ids=["dot_general", "promote_dtype"],
)
def test_what_the_sketch_does_not_know_is_refused(given):
    layer = clinen.Dense(8, **given)
    variables = layer.init(jax.random.key(2), X)
    with pytest.raises(ValueError, match="dot_general.*'params/kernel', which is in"):
        jc.value_and_grad(lambda v: layer.apply(v, X).sum(), SUBSPACE)(
            variables, step=0
        )


def test_partitioned_parameters():
    """Boxes of nn.with_partitioning: the same gradients, in the same boxes."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    layer = clinen.Dense(8, kernel_init=init)
    boxed = layer.init(jax.random.key(2), X)
    assert isinstance(boxed["params"]["kernel"], nn.Partitioned)

    def grads(layer, variables):
        grad = jc.value_and_grad(lambda v: jnp.sum(layer.apply(v, X) ** 2), SUBSPACE)
        return grad(variables, step=0)[1]["params"]

    got, expected = grads(layer, boxed), grads(clinen.Dense(8), nn.unbox(boxed))
    assert got["kernel"].names == (None, "model")
    np.testing.assert_array_equal(got["kernel"].value, expected["kernel"])
    np.testing.assert_array_equal(got["bias"], expected["bias"])


def test_a_checkpointed_cell_of_a_loop_has_parameters():
    """A loop over cells looks for what makes those that it shares."""
    expected = nn.RNN(nn.remat(nn.GRUCell)(8)).init(jax.random.key(0), X)
    got = nn.RNN(clinen.checkpoint(nn.GRUCell)(8)).init(jax.random.key(0), X)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


PLAIN_AND_OURS = nn.remat, clinen.checkpoint


class Shared(nn.Module):
    """A checkpointed block whose parameters are used more than once."""

    wrap: Any
    table: nn.Module | None = None

    @nn.compact
    def __call__(self, x):
        return x + nn.tanh((self.table or nn.Dense(16))(x))


class Repeated(nn.Module):
    wrap: Any

    @nn.compact
    def __call__(self, x):
        block = self.wrap(Shared)(self.wrap, name="block")
        return block(block(block(x)))


class SetUp(nn.Module):
    wrap: Any

    def setup(self):
        self.block = self.wrap(Shared)(self.wrap)

    def __call__(self, x):
        return self.block(self.block(x))


class Tied(nn.Module):
    wrap: Any

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(16)
        first, second = (self.wrap(Shared)(self.wrap, dense, name=n) for n in "ab")
        return dense(second(first(x)))


@pytest.mark.parametrize("model", [Repeated, SetUp, Tied])
def test_parameters_may_be_shared(model):
    expected, got = (model(w).init(jax.random.key(0), X) for w in PLAIN_AND_OURS)
    jax.tree.map(np.testing.assert_array_equal, got, expected)

    def grad(wrap):
        return jax.grad(lambda v: jnp.sum(model(wrap).apply(v, X) ** 2))(expected)

    # Sums of float32 in another order, through three layers.
    for a, b in zip(*map(jax.tree.leaves, map(grad, PLAIN_AND_OURS)), strict=True):
        assert np.linalg.norm(a - b) < 2e-6 * np.linalg.norm(a)


def test_outside_of_jit_it_runs_op_by_op(compiled):
    """As Flax's do: each call has functions of its own, to compile them takes longer
    than to run them."""
    layer = clinen.checkpoint(nn.Dense, policy=jc.policies.int4())(8)
    variables = nn.Dense(8).init(jax.random.key(0), X)

    def call():
        layer.init(jax.random.key(0), X)
        jax.grad(lambda v: layer.apply(v, X).sum())(variables)
        return compiled()

    assert call() > 0  # its operations
    assert call() == 0


def test_parameters_are_named_as_under_remat():
    class Model(nn.Module):
        wrap: Any

        @nn.compact
        def __call__(self, x):
            return self.wrap(nn.Dense)(8)(x)

    expected = Model(nn.remat).init(jax.random.key(0), X)
    got = Model(clinen.checkpoint).init(jax.random.key(0), X)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
def test_checkpoint_leaves_state_as_the_module_does():
    """Batch statistics move once, dropout has one mask, gradients are near."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.gelu(nn.Dense(16)(x)))
            return nn.Dropout(0.5, deterministic=not train)(x)

    class Model(nn.Module):
        block: type

        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = self.block(name=f"block_{i}")(x, True)
            return x

    x = normal(0, 64, 16)
    small = clinen.checkpoint(Block, policy=jc.policies.int8(), static_argnums=2)
    rngs = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = Model(Block).init(rngs, x)
    assert jax.tree.structure(variables) == jax.tree.structure(
        Model(small).init(rngs, x)
    )

    def trained(block, x):
        def loss(params):
            out, state = Model(block).apply(
                {**variables, "params": params}, x, rngs=rngs, mutable=["batch_stats"]
            )
            return (out * jnp.cos(out)).sum(), (out, state)

        return jax.jit(jax.grad(loss, has_aux=True))(variables["params"])

    (_, aux), (_, small_aux) = trained(Block, x[:8]), trained(small, x[:8])
    jax.tree.map(np.testing.assert_array_equal, small_aux, aux)
    (exact, _), (got, _) = trained(Block, x), trained(small, x)  # enough to encode
    a, b = (
        jnp.concatenate([*map(jnp.ravel, jax.tree.leaves(g))]) for g in (got, exact)
    )
    # 8 bits of the stored tensors of two blocks: 0.6 % each.
    assert 0.001 < jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < 0.03


def test_static_arguments_by_name():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(4)(x) * (2.0 if train else 1.0)

    x = normal(0, 8, 16)
    small = clinen.checkpoint(Block, static_argnames="train")()
    variables = small.init(jax.random.key(1), x)
    for kwargs in {}, {"train": True}:
        got, exact = (b.apply(variables, x, **kwargs) for b in (small, Block()))
        np.testing.assert_array_equal(got, exact)


def test_checkpoint_names_the_module_and_its_arguments():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, hidden, mask):
            return jnp.tanh(nn.Dense(16)(hidden)) * mask

        def plain(self, hidden):
            return jnp.tanh(hidden)

    policy = jc.Policy({"nothing": jc.Save()})
    block = clinen.checkpoint(Block, policy=policy, methods=["__call__", "plain"])()
    variables = block.init(jax.random.key(0), X, X)

    def grad(*args, **kwargs):
        jax.grad(lambda x: block.apply(variables, x, *args, **kwargs).sum())(X)

    names = "dot_general.0, hidden, mask, tanh.0"
    with pytest.raises(
        ValueError, match=f"no tensor of 'Block'; the names are {names}"
    ):
        grad(mask=X)
    with pytest.raises(
        ValueError, match=r"no tensor of 'Block\.plain'; .* hidden, tan"
    ):
        grad(method="plain")
    with pytest.raises(TypeError, match="mask must be an array.* got 'all'"):
        grad("all")


def test_which_methods_are_checkpointed():
    for methods in ("__call__", ["nope"]):
        with pytest.raises(ValueError, match="methods must be names of methods of De"):
            clinen.checkpoint(nn.Dense, policy=jc.policies.int4(), methods=methods)


def test_modules_are_named_as_by_remat():
    """And those that have a name keep it, and their parameters."""

    class Net(nn.Module):
        layer: type
        name_of: str | None

        @nn.compact
        def __call__(self, x):
            return self.layer(16, name=self.name_of)(x)

    small = clinen.checkpoint(nn.Dense, policy=jc.policies.int4())

    def parameters(layer, name=None):
        return Net(layer, name).init(jax.random.key(0), X)["params"]

    assert parameters(small).keys() == parameters(nn.remat(nn.Dense)).keys()
    assert parameters(small).keys() == {"CheckpointDense_0"}
    named, plain = parameters(small, "up"), parameters(nn.Dense, "up")
    jax.tree.map(np.testing.assert_array_equal, named, plain)
