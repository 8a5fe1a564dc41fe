"""jaxcompact.nnx beside flax.nnx: the same model, its optimizer, its other state."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcompact as jc
from jaxcompact import nnx as cnnx
from tests.counted import Counted
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optax_promotion")


class Model(nnx.Module):
    """A compressed layer, batch statistics and dropout."""

    def __init__(self, rngs, layer=cnnx.Linear):
        self.first = layer(16, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = layer(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


def subspace(period=2) -> jc.Subspace:
    return jc.Subspace({"first/kernel": jc.Projection(4)}, jax.random.key(1), period)


def loss(model, x):
    return jnp.mean(model(x) ** 2)


X = normal(0, 32, 16)


def test_a_plain_checkpoint_fits():
    plain, ours = Model(nnx.Rngs(1), nnx.Linear), Model(nnx.Rngs(2))
    nnx.update(ours, nnx.state(plain))
    np.testing.assert_array_equal(ours(X), plain(X))


@pytest.mark.slow
def test_trains_with_nnx_optimizer_across_a_new_projection():
    """The same updates as on the bare parameter tree, and other state goes along."""
    space = subspace()
    tx = jc.subspace_adamw(1e-2, space)
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grad = cnnx.value_and_grad(loss, space)
        value, grads = grad(model, X, step=optimizer.step.get_value())
        optimizer.update(model, grads)
        return value

    twin = Model(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(twin, nnx.Param, ...)
    state = tx.init(nnx.to_pure_dict(params))
    params = nnx.to_pure_dict(params)

    def bare(params, rest):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return loss(model, X), nnx.state(model, nnx.Not(nnx.Param))

    before = model.norm.mean[...]
    for i in range(5):
        value = step(model, optimizer)
        (expected, rest), grads = jax.jit(jc.value_and_grad(bare, space, has_aux=True))(
            params, rest, step=i
        )
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert not np.array_equal(before, model.norm.mean[...])
    np.testing.assert_allclose(
        model.first.kernel[...], params["first"]["kernel"], rtol=1e-4, atol=1e-6
    )
    assert int(jc.update_count(state)) == 5


def test_has_aux():
    def with_aux(model, x):
        return loss(model, x), "aux"

    grad = cnnx.value_and_grad(with_aux, subspace(), has_aux=True)
    (value, aux), grads = grad(Model(nnx.Rngs(0)), X, step=0)
    assert aux == "aux" and value.shape == ()
    assert grads["first"]["kernel"].get_value().shape == (4, 8)


def test_state_among_the_arguments_moves_as_under_flax():
    """Dropout by `Rngs` that are an argument, and another module's statistics."""

    def loss(model, rngs, x, norm):
        hidden = model.dropout(norm(model.first(x)), rngs=rngs)
        return jnp.mean(model.second(hidden) ** 2)

    def losses(value_and_grad):
        model, rngs = Model(nnx.Rngs(0)), nnx.Rngs(1)
        norm = nnx.BatchNorm(8, rngs=rngs)
        step = nnx.jit(lambda m, r, n: value_and_grad(m, r, X, norm=n))
        found = [step(model, rngs, norm) for _ in range(3)]
        left = rngs.default.count[...], norm.mean[...]
        return [(v, g["second"]["kernel"][...]) for v, g in found], left

    with_sketches = cnnx.value_and_grad(loss, subspace())
    ours = losses(lambda *args, norm: with_sketches(*args, norm=norm, step=0))
    # One program sums up in another order than the other.
    chex.assert_trees_all_close(ours, losses(nnx.value_and_grad(loss)), rtol=1e-5)
    assert int(ours[1][0]) > 3


@pytest.mark.parametrize(
    "argument", ["dot_general", "preferred_element_type", "promote_dtype"]
)
def test_what_the_sketch_does_not_know_is_refused(argument):
    def product(*args, **kwargs):
        return jax.lax.dot_general(*args, **kwargs)

    def promote(arrays, **_):
        return arrays

    values = {"dot_general": product, "promote_dtype": promote}
    given = {argument: values.get(argument, jnp.float32)}
    model = nnx.Dict(first=cnnx.Linear(16, 8, rngs=nnx.Rngs(0), **given))
    assert model.first(X).shape == (32, 8)
    with pytest.raises(
        ValueError, match="dot_general.*'first/kernel', which is in the"
    ):
        cnnx.value_and_grad(lambda m, x: m.first(x).sum(), subspace())(model, X, step=0)


def test_a_model_without_parameters_is_told_so():
    subspace = jc.Subspace({"kernel": jc.Projection(4)}, jax.random.key(0))
    grad = cnnx.value_and_grad(lambda model, x: x.sum(), subspace)
    with pytest.raises(ValueError, match="'kernel' matches no parameter"):
        grad(nnx.Dropout(0.5), X, step=0)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("count", "not attributes that are no variables"),
        ("overwrite", "written one of these, or added or removed an nnx.Param"),
        ("add", "written one of these, or added or removed an nnx.Param"),
        ("remember", None),
        ("write", None),
    ],
)
def test_what_a_gradient_would_lose_is_refused(method, message):
    model = Counted(cnnx.Linear)
    sketched = jc.Subspace({"linear/kernel": jc.Projection(4)}, jax.random.key(0))
    grad = cnnx.value_and_grad(lambda m, x: getattr(m, method)(x).sum(), sketched)
    if message:
        with pytest.raises(ValueError, match=message):
            grad(model, X, step=0)
    else:
        grad(model, X, step=0)
        plain = Counted(cnnx.Linear)
        nnx.grad(lambda m, x: getattr(m, method)(x).sum())(plain, X)
        state = nnx.state(model), nnx.state(plain)
        jax.tree.map(np.testing.assert_array_equal, *state)


def through_remat(model, x):
    return nnx.remat(lambda m, x: m(x))(model, x)


def through_jit(model, x):
    return nnx.jit(lambda m, x: m(x))(model, x)


def through_cond(model, x):
    return nnx.cond(x[0, 0] < 9, lambda m, x: m(x), lambda m, x: -m(x), model, x)


def through_switch(model, x):
    return nnx.switch(0, [lambda m, x: m(x), lambda m, x: -m(x)], model, x)


@pytest.mark.parametrize(
    "call", [through_remat, through_jit, through_cond, through_switch]
)
def test_flax_transforms_work_inside(call):
    """Graph mode's write each variable back, which is no change of it."""

    def loss(model, x):
        return jnp.square(call(model, x)).sum()

    sketched = jc.Subspace({"kernel": jc.Projection(4)}, jax.random.key(0))
    model = cnnx.Linear(16, 16, rngs=nnx.Rngs(0))
    inside, plain = (
        cnnx.value_and_grad(f, sketched)(model, X, step=0)[1]
        for f in (loss, lambda model, x: jnp.square(model(x)).sum())
    )
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(inside[name][...], plain[name][...], rtol=1e-6)


def test_a_scan_over_layers_works_inside():
    """Flax's default form, which gives each layer and takes it back."""

    @nnx.vmap
    def make(rngs):
        return cnnx.Linear(16, 16, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return jnp.tanh(layer(x))

    def by_hand(model, x):
        graphdef, state = nnx.split(model)
        return jax.lax.scan(
            lambda x, s: (jnp.tanh(nnx.merge(graphdef, s)(x)), None), x, state
        )[0].sum()

    sketched = jc.Subspace({"kernel": jc.Projection(4)}, jax.random.key(0))
    layers = make(nnx.Rngs(0).split(3))
    inside, plain = (
        cnnx.value_and_grad(f, sketched)(layers, X, step=0)[1]
        for f in (lambda m, x: run(x, m).sum(), by_hand)
    )
    assert inside["kernel"].get_value().shape == (3, 4, 16)
    for name in ("kernel", "bias"):
        got, expected = inside[name].get_value(), plain[name].get_value()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
