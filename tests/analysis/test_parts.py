"""Tensors of which a part is read are stored in part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from tests.analysis.candidates import W, X, candidates
from tests.draws import normal


@jax.custom_vjp
def summed(x):
    return x @ jnp.tri(x.shape[1]).T


summed.defvjp(lambda x: (summed(x), x), lambda x, ct: (ct * x,))


@pytest.mark.parametrize(
    ("fun", "name", "shape"),
    [
        (lambda w, x: (x @ w)[:, 4:8], "dot_general.0", (8, 4)),
        (lambda w, x: (x @ w).reshape(2, 4, 16).sum(1) / 4, "dot_general.0", (2, 16)),
        (lambda w, x: -(x @ w).T[::2].reshape(4, 16).sum(0), "dot_general.0", (16,)),
        (lambda w, x: jnp.sort(x @ w, stable=False)[:, -2:], "sort.0", (8, 2)),
        (lambda w, x: jnp.fft.fft(x @ w).real[:2], "fft.0", (2, 16)),
        (lambda w, x: checkpoint_name((x @ w)[0], "cls"), "cls", (1, 16)),
        (lambda w, x: (x @ w + x @ w.T)[0], "add.0", (1, 16)),
        (
            lambda w, x: jax.lax.scan(lambda x, _: (x @ w, x @ w), x, length=3)[1][-1],
            "scan.0.1",
            (1, 8, 16),
        ),
        # All of it is read, or its numbers are.
        (lambda w, x: (y := x @ w)[:2] @ y.T, "dot_general.0", (8, 16)),
        (lambda w, x: (x @ w).max(1), "dot_general.0", (8, 16)),
        (lambda w, x: x[jnp.arange(8), (x @ w).argmax(1).sum()], "argmax.0", (8,)),
        (lambda w, x: x[(x @ w)[:, 0].astype(jnp.int8)], "dot_general.0", (8, 1)),
        (lambda w, x: summed(x @ w)[0], "custom_vjp_call.0", (8, 16)),
        (lambda w, x: jnp.exp(x @ w).sum(1), "dot_general.0", (8, 16)),
    ],
)
def test_what_is_read_in_part_is_stored_in_part(fun, name, shape):
    found = candidates(lambda w, x: jnp.sin(fun(w, x)), W, X)
    assert found[name].shape == shape


def test_attention_in_float32_that_is_read_as_bfloat16():
    """What a `jax.custom_vjp` returns and what it keeps go together."""

    @jax.custom_vjp
    def product(x):
        return x @ x.T

    product.defvjp(lambda x: (x @ x.T, 2 * x), lambda twice, ct: (ct @ twice,))

    def fun(w, x):
        y = product((x @ w).astype(jnp.float32)).astype(jnp.bfloat16)
        return jnp.sin(y) @ x

    w, x = (jnp.ones(a.shape, jnp.bfloat16) for a in (W, X))
    small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    grads = [jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in (small, fun)]
    assert jnp.allclose(*grads, rtol=0.1)


def cut(x):
    return x[:, :4], x[:, 4:8], x[:, 8:]


def split(x):
    return jnp.split(x, [4, 8], axis=1)


def folded(x):
    parts = x.reshape(8, 4, 4)
    return (a.reshape(8, -1) for a in (parts[:, 0], parts[:, 1], parts[:, 2:]))


def most(x):
    return x[:, :6], x[:, 6:12], x[:, 12:]


def unstacked(x):
    return jnp.unstack(x.reshape(8, 4, 4).swapaxes(0, 1))


def attention(w, x, parts):
    """What is multiplied by the attention's probabilities is what is left."""
    q, k, *v = parts(x @ w)
    return jnp.sin(jax.nn.softmax(q @ k.T) @ jnp.sin(jnp.concatenate(v, axis=1)))


@pytest.mark.parametrize(
    ("parts", "at"),
    [
        (cut, (4, 8)),
        (split, (4, 8)),
        (folded, (4, 8)),
        (most, (6, 12)),
        (unstacked, (4, 8, 12)),
    ],
)
def test_what_exponentials_read_a_part_of_is_stored_in_parts(parts, at):
    """Each as if it had been made by itself, in as many bytes."""
    w, x = (normal(i, n, 16) for i, n in ((0, 16), (1, 8)))

    def together(w, x):
        return attention(w, x, parts)

    def alone(w, x):
        return attention(w, x, lambda _: [x @ part for part in cuts(w)])

    def cuts(w):
        return jnp.split(w, at, axis=1)

    found = candidates(together, W, X)
    sizes = [found[f"dot_general.0.{i}"].size for i in range(len(at) + 1)]
    assert sizes == [a.size for a in cuts(x)] and "dot_general.0" not in found
    for policy in (jc.policies.int8(), jc.policies.int4()):
        small, other = (
            jc.checkpoint(f, policy=policy, params=0) for f in (together, alone)
        )
        grads = [jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in (small, other)]
        # They differ by float32's sums alone.
        np.testing.assert_allclose(*grads, rtol=1e-5, atol=1e-5)
        assert stored_in(together, policy) == stored_in(alone, policy)


def corners(w, x):
    """Of a spectrum, as a Fourier neural operator's: low frequencies of both signs."""
    modes = jnp.fft.fft(x @ w, axis=1)
    w = w.astype(modes.dtype)
    return modes[:, :4] * w[:8, :4] + modes[:, -4:] * w[:8, 4:8]


def columns(w, x):
    y = x @ w
    return jnp.sin(y[:, :4]) + jnp.cos(y[:, -4:])


@pytest.mark.parametrize(
    ("fun", "name"), [(corners, "fft.0"), (columns, "dot_general.0")]
)
def test_slices_of_no_more_than_half_are_stored_alone(fun, name):
    found = candidates(lambda w, x: jnp.abs(fun(w, x)), W, X)
    assert [found[f"{name}.{i}"].shape[-2:] for i in (0, 1)] == [(8, 4)] * 2
    assert name not in found
    small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    w, x = (normal(i, n, 16) for i, n in ((0, 16), (1, 8)))
    w /= 4
    exact, grad = (
        jax.grad(lambda w, f=f: jnp.sum(jnp.abs(f(w, x)) ** 2))(w) for f in (fun, small)
    )
    assert 0.01 < jnp.linalg.norm(grad - exact) / jnp.linalg.norm(exact) < 0.2


def gates(w, x):
    """As an LSTM's: sums of two products and a bias, in one."""
    i, f, g, o = jnp.split(x @ w + x @ w.T + w[0][None], 4, axis=1)
    c = jax.nn.sigmoid(f) * x[:, :4] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.sin(c)


def test_gates_that_are_made_together_have_bounds_as_if_they_were_not():
    found = candidates(gates, W, X)
    bounds = [found[f"add.0.{i}"].bound for i in range(4)]
    assert bounds == [6, 6, 3, 6] and "add.0" not in found

    def one_is_squared(w, x):
        a, b = jnp.split(x @ w, 2, axis=1)
        return jax.nn.sigmoid(a) * b**2

    assert "dot_general.0" in candidates(one_is_squared, W, X)


def reset(w, x):
    """As a GRU's: of two products some parts are read as sums, one is not."""
    of_x, of_h = (jnp.split(y, [4, 8], axis=1) for y in (x @ w, x @ w.T))
    r, z = (jax.nn.sigmoid(a + b) for a, b in zip(of_x[:2], of_h[:2], strict=True))
    z = jnp.concatenate([z, z], axis=1)
    return z * jnp.tanh(of_x[2] + jnp.concatenate([r, r], axis=1) * of_h[2])


def test_parts_that_are_read_as_sums_are_stored_as_these():
    """Two of six of a GRU's, a fourth of the bytes."""
    found = candidates(reset, W, X)
    names = [n for n, t in found.items() if t.kind == "op" and not t.cheap]
    assert sorted(names) == ["add.0", "add.1", "add.2", "dot_general.1.2"]
    assert [found[f"add.{i}"].bound for i in range(3)] == [6, 6, 3]
    w, x = (normal(i, n, 16) for i, n in ((0, 16), (1, 8)))
    small = jc.checkpoint(reset, policy=jc.policies.int8(), params=0)
    exact, grad = (jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in (reset, small))
    assert jnp.linalg.norm(grad - exact) < 0.02 * jnp.linalg.norm(exact)


def test_parts_are_read_as_sums_however_they_are_cut():
    def fun(w, x):
        pairs = zip(unstacked(x @ w), unstacked(x @ w.T), strict=True)
        i, f, g, o = (a + b for a, b in pairs)
        return jax.nn.sigmoid(i) * jnp.sin(f) + jax.nn.sigmoid(o) * jnp.cos(g)

    found = candidates(fun, W, X)
    names = [n for n, t in found.items() if t.kind == "op" and not t.cheap]
    assert sorted(names) == [f"add.{i}" for i in range(4)]


def stored_in(fun, policy):
    return jc.explain(fun, W, X, policy=policy, params=0).stored


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: attention(w, x, lambda y: (y[:, :8], y[:, 8:], x)),
        lambda w, x: attention(w, x, lambda y: (y[:, :4], y[:, 4:8], y)),
        lambda w, x: attention(
            w, x, lambda y: (y[:, :4], y[:, 4:8], y.max(1)[:, None])
        ),
        lambda w, x: attention(w, x, lambda y: (y[:, :4], y[:, :4], y[:, :12])),
        lambda w, x: jnp.sin(jnp.sin((y := x @ w)[:, :4]) @ jnp.sin(y[:, 4:]).T[:4]),
        lambda w, x: jnp.sin((y := x @ w)[:, :5]) + jnp.cos(y[:, -5:]),
        lambda w, x: attention(w, x, lambda y: cut(checkpoint_name(y, "qkv"))),
        lambda w, x: attention(w, x, lambda y: cut(summed(y))),
    ],
    ids=[
        "q and k alone",
        "whole",
        "a maximum",
        "twice",
        "no exponential",
        "more than half",
        "by name",
        "of a block",
    ],
)
def test_what_is_stored_whole(fun):
    found = candidates(fun, W, X)
    assert not any(name.count(".") == 2 for name in found), list(found)
