"""`jax.vmap` around a checkpoint of which some outputs are the same for all examples.

Their cotangents count once. Alone, a rule under `jax.vmap` would count them for each
example: `jax.custom_vjp`'s, and in a jitted function any other's.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcompact as jc
from jaxcompact import nnx as cnnx
from tests.cases import slow
from tests.checkpoint.functions import AGAIN, LOSSY, SAVE, ULPS
from tests.draws import normal
from tests.errors import relative
from tests.residuals import crossing

W, X, Y = (
    normal(i, *shape) / scale
    for i, (shape, scale) in enumerate([((64, 64), 8), ((8, 16, 64), 1), ((16, 64), 1)])
)


def penalized(w, x, y):
    """A layer, a penalty of its weights, and a loss that it has none of."""
    return jnp.tanh(x @ w), jnp.sum(w**2), jnp.float32(0), w


def two(w, x, y):
    """The second is of another activation."""
    return jnp.tanh(x @ w), jnp.sin(y @ w), jnp.sum(y**2)


def summed(w, x, y):
    """A loop carries the penalty beside the activation."""

    def step(carry, _):
        x, total = carry
        return (jnp.tanh(x @ w), total + jnp.sum(w**2)), None

    (x, total), _ = jax.lax.scan(step, (x, jnp.float32(0)), None, length=3)
    return x * y, total


def summed_branches(w, x, y):
    x, total = jax.lax.cond(
        jnp.sum(y) > 0, lambda x: (x @ w, jnp.sum(w)), lambda x: (x, w[0, 0]), x
    )
    return x, total


def gradients(fun, axes, args):
    def loss(*args):
        outs = jax.vmap(fun, axes)(*args)
        return sum(jnp.sum(out**2) for out in outs)

    return jax.grad(loss, argnums=(0, 1, 2))(*args)


@pytest.mark.parametrize(
    "policy", [slow(SAVE), AGAIN, LOSSY], ids=["save", "again", "8 bits"]
)
@pytest.mark.parametrize(
    ("params", "held"),
    [(0, jax.jit), slow(None, lambda f: f)],
    ids=["jit", "no params"],
)
@pytest.mark.parametrize("fun", [penalized, two, summed, summed_branches])
def test_what_examples_share_counts_once(fun, params, held, policy):
    axes, args = (None, 0, None), (W, X, Y)
    small = held(jc.checkpoint(fun, policy=policy, params=params))
    found, exact = (gradients(f, axes, args) for f in (small, fun))
    assert relative(found, exact) < (0.02 if policy is LOSSY else ULPS)


def heads(w, x):
    return jnp.tanh(
        jnp.einsum("thk,hko->to", x.reshape(-1, 4, 16), w.reshape(4, 16, 64))
    )


def convolved(w, x, numbers=("NWC", "WIO", "NWC"), strides=(1,), **options):
    kernel = w[:12].reshape(3, 16, 16)
    x = x.reshape(1, 64, 16) if numbers[0] == "NWC" else x.reshape(1, 16, 64)
    made = jax.lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=numbers, **options
    )
    return jnp.tanh(made[0])


def channels_first(w, x):
    return convolved(w, x, ("NCW", "WOI", "NCW"), strides=(2,), rhs_dilation=(2,))


# What weights' gradients of each example would be, of a convolution's eight groups too.
EACH = r"\[8,64,64\]|\[8,3,16,16\]|\[8,16,16,3\]|feature_group_count=8"
# What examples share, and whether all that is made of it is made by products.
SHARED = {
    "product": (lambda w, x: jnp.tanh(x @ w), True),
    "transposed": (lambda w, x: jnp.tanh(x @ w.T), True),
    "twice": (lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), True),
    "scaled": (lambda w, x: jnp.tanh(x @ (-2 * w)), True),
    "heads": (heads, True),
    "convolution": (convolved, True),
    "convolution, channels first": (channels_first, True),
    "vectors": (lambda w, x: jnp.tanh(x[0] @ w), True),
    "bias": (lambda w, x: jnp.tanh(x + w[:1]), False),
    "a number": (lambda w, x: jnp.tanh(x * w[0, 0]), False),
    "a loop": (
        lambda w, x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), x),
        False,
    ),
    "a penalty": (lambda w, x: jnp.tanh(x @ w) + jnp.sum(w**2), False),
}


OTHERS = ("transposed", "heads", "vectors", "a number", "convolution, channels first")


def squares(fun):
    return lambda w, x: jnp.sum(fun(w, x) ** 2)


@pytest.mark.parametrize("policy", [SAVE, slow(LOSSY)], ids=["save", "8 bits"])
@pytest.mark.parametrize(
    "name", [slow(name) if name in OTHERS else name for name in SHARED]
)
def test_gradients_of_what_examples_share_are_summed_by_products(name, policy):
    """None is made for each example, of products over their tokens: [8, 64, 64]."""
    fun, products = SHARED[name]
    small = jc.checkpoint(fun, policy=policy, params=0)
    gradient, exact = (
        jax.grad(squares(jax.vmap(f, (None, 0))), (0, 1)) for f in (small, fun)
    )
    limit = 0.02 if policy is LOSSY else ULPS
    assert relative(jax.jit(gradient)(W, X), jax.jit(exact)(W, X)) < limit
    text = str(jax.make_jaxpr(gradient)(W, X))
    assert not products or not re.search(EACH, text)
    twice = jax.vmap(jax.vmap(small, (None, 0)), (None, 0))
    gradient = jax.jit(jax.grad(squares(twice), (0, 1)))
    found, batches = gradient(W, X.reshape(2, 4, 16, 64)), exact(W, X)
    assert relative((found[0], found[1].reshape(X.shape)), batches) < limit


@pytest.mark.parametrize("name", ["product", slow("twice"), slow("heads"), "bias"])
def test_examples_that_devices_share(name):
    fun, products = SHARED[name]
    mesh = jax.make_mesh((4,), ("d",))
    small = jc.checkpoint(fun, policy=SAVE, params=0)

    def gradient(fun):
        return jax.grad(squares(jax.vmap(fun, (None, 0))), (0, 1))

    with jax.set_mesh(mesh):
        args = jax.device_put((W, X), (jax.P(), jax.P("d")))
        found, exact = (jax.jit(gradient(f))(*args) for f in (small, fun))
        assert not products or ",64,64]" not in str(
            jax.make_jaxpr(gradient(small))(*args)
        )
    assert relative(*map(jax.device_get, (found, exact))) < ULPS
    assert found[0].sharding == exact[0].sharding


@pytest.mark.parametrize("held", [jax.jit, lambda f: f], ids=["jit", ""])
@pytest.mark.parametrize("policy", [SAVE, LOSSY], ids=["save", "8 bits"])
def test_a_mean_over_examples(policy, held):
    """As of batch norm: of each example's gradient, and of the sum of all."""

    def centered(w, x):
        y = x @ w
        return jnp.tanh(y - jax.lax.pmean(y, "examples")) @ w

    def each(fun):
        slope = jax.grad(lambda x: jnp.sum(fun(W, x) ** 2))
        return jax.vmap(slope, axis_name="examples")(X)

    def summed(fun):
        many = jax.vmap(fun, (None, 0), axis_name="examples")
        return jax.grad(lambda *args: jnp.sum(many(*args) ** 2), (0, 1))(W, X)

    small = held(jc.checkpoint(centered, policy=policy, params=0))
    for use in each, summed:
        off = relative(use(small), use(centered))
        assert off < (0.02 if policy is LOSSY else ULPS)


@pytest.mark.parametrize("params", [0, None])
def test_what_models_share_counts_once(params):
    """As adapters of one model: the second output has the weights of none."""

    def fun(w, x, y):
        return jnp.tanh(x @ w), jnp.sin(x)

    axes, args = (0, None, None), (jnp.stack([W, 2 * W]), X[0], Y)
    small = jc.checkpoint(fun, policy=SAVE, params=params)
    found, exact = (gradients(f, axes, args) for f in (small, fun))
    assert relative(found, exact) < ULPS


def test_nothing_is_read_for_it():
    """To be seen to read what others do costs a compiled program nothing."""

    def fun(w, x, y):
        return jnp.tanh(x @ w), jnp.sin(y)

    small = jc.checkpoint(fun, policy=SAVE, params=0)

    def gradient(*args):
        outs, backward = jax.vjp(small, *args)
        return outs, backward(outs)

    for program in (small, gradient):
        assert " reduce(" not in jax.jit(program).lower(W, X[0], Y).compile().as_text()


def test_what_a_closure_reads_is_known():
    def gradient(checkpoint):
        def loss(w, x):
            def one(x):
                return checkpoint(lambda w: (jnp.tanh(x @ w), jnp.sum(w**2)))(w)

            y, total = jax.vmap(one)(x)
            return jnp.sum(y**2) + jnp.sum(total)

        return jax.grad(loss, argnums=(0, 1))(W, X)

    found = gradient(lambda fun: jc.checkpoint(fun, policy=SAVE))
    assert relative(found, gradient(lambda fun: fun)) < ULPS


def test_what_is_made_of_parameters_alone_is_the_same_for_all():
    small = jc.checkpoint(penalized, policy=LOSSY, params=0)
    outs = jax.vmap(small, (None, 0, None), out_axes=(0, None, None, None))(W, X, Y)
    expected = penalized(W, X[0], Y)
    assert outs[3] is W
    for got, want in zip(outs[1:], expected[1:], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_is_made_of_parameters_alone_stores_nothing():
    """What a closure holds is none of the activations."""
    x = X[0]

    def fun(w):
        for _ in range(4):
            w = jnp.tanh(w @ w)
        return x @ w

    held = crossing(jc.checkpoint(fun, policy=LOSSY, params=0), W)
    assert all(aval.shape in (W.shape, x.shape) for aval in held) and len(held) <= 2


def test_state_of_modules_is_the_same_for_all():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 64, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.linear(x)), jnp.sum(self.linear.kernel[...] ** 2)

    def gradient(fun):
        def loss(model):
            y, total = nnx.vmap(fun, in_axes=(None, 0))(model, X)
            return jnp.sum(y**2) + jnp.sum(total)

        return nnx.grad(loss)(Block(nnx.Rngs(0)))

    small = cnnx.checkpoint(lambda model, x: model(x), policy=LOSSY)
    found, exact = map(gradient, (small, lambda model, x: model(x)))
    assert relative(found, exact) < 0.02
