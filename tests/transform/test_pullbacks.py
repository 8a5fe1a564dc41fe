"""One traced function, of which each use differentiates other inputs."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcompact as jc
from jaxcompact import linen as clinen
from jaxcompact import nnx as cnnx
from tests.cases import slow
from tests.checkpoint.functions import LOSSY, SAVE, ULPS, W, X, equal, mlp
from tests.errors import relative

V = jnp.cos(W)


def in_scan(f):
    def body(x, w):
        return f(w, x), None

    return lambda w, x: jax.lax.scan(body, x, w[None])[0]


def in_cond(f):
    def branch(w, x):
        return f(w, x)

    return lambda w, x: jax.lax.cond(x[0, 0] < 1e9, branch, branch, w, x)


def in_checkpoint(f):
    inner = jax.jit(f)
    return jax.jit(jc.checkpoint(lambda w, x: inner(w, x), policy=SAVE, params=0))


def of_examples(f):
    inner = jax.jit(f)
    return lambda w, x: jax.vmap(lambda x: inner(w, x[None])[0])(x)


HOLDERS = {
    "jit": jax.jit,
    "jax.checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": in_scan,
    "cond": in_cond,
    "jc.checkpoint": in_checkpoint,
    "vmap": of_examples,
}


def of_data(f):
    """Two layers, of which the first reads what is not differentiated."""
    return jax.grad(lambda w, v: jnp.square(f(v, f(w, X))).mean(), (0, 1))(W, V)


def of_a_frozen_layer(f):
    def loss(w):
        return jnp.square(f(w, f(V, jnp.sin(f(w, X))))).mean()

    return (jax.grad(loss)(W),)


def of_others_each(f):
    """As many inputs move in one use as in the other."""
    stop = jax.lax.stop_gradient
    return jax.grad(
        lambda w, x: (f(stop(w), x) ** 2 + f(w, stop(x)) ** 2).mean(), (0, 1)
    )(W, X)


def in_turn(f):
    grads = [jax.grad(lambda w, x: jnp.square(f(w, x)).mean(), i) for i in (0, 1)]
    return [grads[i](W, X) for i in (0, 1, 0, 1, 1, 0)]


@pytest.mark.parametrize("compiled", [True, slow(False)])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    "use",
    [of_data, slow(of_a_frozen_layer), of_others_each, slow(in_turn)],
    ids=lambda f: f.__name__,
)
def test_each_use_has_its_gradient(use, holder, compiled):
    """Of jax.custom_vjp's residuals the last use's structure would be all uses'."""
    run = jax.jit(use, static_argnums=0) if compiled else use
    exact = run(HOLDERS[holder](mlp))
    for policy, off in (SAVE, ULPS), (LOSSY, 0.05):
        small = HOLDERS[holder](jc.checkpoint(mlp, policy=policy, params=0))
        for got, expected in zip(run(small), exact, strict=True):
            assert relative(got, expected) < off


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_modules_that_are_jitted(flax):
    def loss(ws, block):
        return jnp.square(block(ws[1], block(ws[0], X))).mean()

    if flax == "nnx":
        layers = [nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in (0, 1)]
        ws = [nnx.state(layer) for layer in layers]
        graph = nnx.graphdef(layers[0])

        def block(wrap):
            run = nnx.jit(wrap(lambda layer, x: x + nnx.tanh(layer(x))))
            return lambda w, x: run(nnx.merge(graph, w), x)

        exact, small = block(lambda f: f), block(partial(cnnx.checkpoint, policy=SAVE))
    else:
        dense = nn.jit(nn.Dense)(32)
        ws = [dense.init(jax.random.key(i), X) for i in (0, 1)]
        exact = dense.apply
        small = nn.jit(clinen.checkpoint(nn.Dense, policy=SAVE))(32).apply
    got, expected = (jax.grad(loss)(ws, block) for block in (small, exact))
    assert relative(got, expected) < ULPS


def test_integers_and_what_does_not_move():
    def fun(w, x, n):
        scale = n.astype(jnp.float32)
        return x @ w[0] * scale, n + 1, x.argmax(-1), w[1].sum()

    def loss(w, x, n, fun):
        y, n, best, bias = fun(w, x, n)
        weights = (n + best[:, None]).astype(jnp.float32)
        return (y * weights).sum() + bias

    small = jax.jit(jc.checkpoint(fun, policy=SAVE, params=0))
    n = jnp.arange(8)[:, None]
    for moving in (0, 1, (0, 1)):
        got, expected = (
            jax.grad(partial(loss, fun=f), moving)(W, X, n) for f in (small, fun)
        )
        assert relative(got, expected) < ULPS
    value = small(W, X, n)
    equal(value, fun(W, X, n))
    np.testing.assert_array_equal(value[1], n + 1)


@pytest.mark.parametrize(
    "run", [lambda f: f, jax.jit, jax.vmap], ids=["", "jit", "vmap"]
)
def test_forward_mode_is_refused_by_name(run):
    small = jc.checkpoint(mlp, policy=SAVE, params=0)
    xs = X[None]
    with pytest.raises(TypeError, match=r"'mlp' can't .* forward mode \(jvp"):
        run(lambda x: jax.jvp(partial(small, W), (x,), (x,)))(xs)
    out, tangents = jax.linearize(partial(small, W), X)
    np.testing.assert_array_equal(out, small(W, X))
    with pytest.raises(TypeError, match="forward mode"):
        tangents(X)
    with pytest.raises(TypeError, match="forward mode"):
        jax.jvp(lambda x: jax.jvp(partial(small, W), (x,), (X,))[1], (X,), (X,))
