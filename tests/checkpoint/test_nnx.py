"""jaxcompact.nnx.checkpoint: a function of modules, whose state is as without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcompact as jc
from jaxcompact import nnx as cnnx
from tests.counted import Counted
from tests.draws import normal

X = normal(0, 32, 16)


@pytest.mark.slow
def test_checkpoint_leaves_state_as_the_module_does():
    """Batch statistics move once, random keys are counted once, gradients are near."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, scale, *, shift):
            return self.drop(self.norm(jax.nn.gelu(self.linear(x)))) * scale + shift

    x = normal(0, 64, 16)

    def call(m, x, scale, *, shift):
        return m(x, scale, shift=shift)

    def called(call):
        """The output and all state after two calls; the gradient after them."""
        model = Block(nnx.Rngs(0))
        for _ in range(2):
            out = nnx.jit(lambda m: call(m, x, 2.0, shift=1.0))(model)
        state = nnx.state(model, nnx.Not(nnx.Param))
        state = [
            jax.random.key_data(v)
            if jnp.issubdtype(v.dtype, jax.dtypes.prng_key)
            else v
            for v in jax.tree.leaves(state)
        ]
        grads = nnx.grad(lambda m: jnp.sin(call(m, x, 2.0, shift=1.0)).sum())(model)
        return [out, *state], jnp.concatenate([*map(jnp.ravel, jax.tree.leaves(grads))])

    small = cnnx.checkpoint(call, policy=jc.policies.int8(), static_argnums=2)
    (outs, exact), (small_outs, got) = called(call), called(small)
    for a, b in zip(small_outs, outs, strict=True):
        np.testing.assert_array_equal(a, b)
    # 8 bits of what is normalized: 0.6 %.
    error = jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact)
    assert 0.001 < error < 0.02


def test_outside_of_jit_it_runs_op_by_op(compiled):
    """As Flax's do: a module may wrap its layers each time that it is called."""
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    x = normal(0, 8, 16)

    def call():
        small = cnnx.checkpoint(lambda m, x: m(x), policy=jc.policies.int4())
        nnx.grad(lambda m: small(m, x).sum())(model)
        return compiled()

    assert call() > 0  # its operations
    assert call() == 0


def test_checkpoint_with_a_static_argument_before_the_module():
    model = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    block = cnnx.checkpoint(lambda scale, m, x: m(scale * x), static_argnums=0)
    block(2.0, model, X)
    np.testing.assert_allclose(model.mean[...], 0.02 * X.mean(0), rtol=1e-5, atol=1e-7)


def test_checkpoint_names_tensors_after_the_functions_arguments():
    def block(layer, hidden, mask, *, scales):
        return jnp.tanh(layer(hidden)) * mask * scales["first"]

    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    policy = jc.Policy({"hidden": jc.Save()}, default=jc.policies.int8())
    small = cnnx.checkpoint(block, policy=policy)
    said = jc.explain(small, layer, X, X, scales={"first": X})
    actions = {row.name: row.action for row in said.rows}
    assert actions == {
        "layer/bias": "keep",
        "layer/kernel": "keep",
        "hidden": "keep",
        "mask": "Quantized(bits=8)",
        "scales/first": "Quantized(bits=8)",
        "dot_general.0": "Quantized(bits=8, bound=4.0)",
        "tanh.0": "Recompute()",
    }


def test_checkpoint_with_a_static_argument_at_its_default_or_by_its_name():
    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def block(layer, x, train=True):
        return layer(x) if train else x

    small = cnnx.checkpoint(block, static_argnums=2)
    for args, named in (((), {}), ((False,), {}), ((), {"train": False})):
        out = small(layer, X, *args, **named)
        np.testing.assert_array_equal(out, block(layer, X, *args, **named))
    with pytest.raises(ValueError, match="below the number of arguments 3, got 3"):
        cnnx.checkpoint(block, static_argnums=3)(layer, X)


def test_static_arguments_that_are_equal_and_of_other_types():
    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    small = cnnx.checkpoint(
        lambda m, x, scale: m(x) * (10.0 if scale is True else float(scale)),
        static_argnums=2,
    )
    for scale, expected in ((1, 1.0), (True, 10.0), (1.0, 1.0)):
        np.testing.assert_array_equal(small(layer, X, scale), expected * layer(X))


def test_checkpoint_refuses_what_its_module_is_bound_to():
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    for bound in (drop, drop.__call__, nnx.Dropout):
        with pytest.raises(ValueError, match="takes the module.* got Dropout itself"):
            cnnx.checkpoint(bound)


def test_checkpoint_refuses_to_return_what_it_was_given():
    """It would be a copy: changes of one would not be seen in the other."""
    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    for returned in (lambda m: m, lambda m: [m.bias]):
        block = cnnx.checkpoint(lambda m, x, returned=returned: (m(x), returned(m)))
        with pytest.raises(ValueError, match=r"must return values.*nnx\.remat"):
            block(layer, X)
    out, bias = cnnx.checkpoint(lambda m, x: (m(x), m.bias[...]))(layer, X)
    np.testing.assert_array_equal(bias, layer.bias[...])


@pytest.mark.parametrize("method", ["count", "remember"])
def test_checkpoint_refuses_other_variables_and_attributes(method):
    block = cnnx.checkpoint(lambda m, x: getattr(m, method)(x))
    with pytest.raises(ValueError, match=r"not which variables and.*nnx\.remat"):
        block(Counted(), X)


def test_checkpoint_of_layers_in_a_scan():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Linear(16, 16, rngs=rngs)

    layers = make(nnx.Rngs(0))
    x = normal(0, 8, 16)

    def model(block):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return block(layer, x)

        return lambda layers: run(x, layers).sum()

    def block(layer, x):
        return jnp.tanh(layer(x))

    small = cnnx.checkpoint(block, policy=jc.policies.int8())
    exact, got = (nnx.grad(model(f))(layers)["kernel"][...] for f in (block, small))
    assert 0.0 < jnp.linalg.norm(got - exact) < 0.02 * jnp.linalg.norm(exact)
