"""Two oracles for lossy policies: the backward pass by hand, and the exact one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from tests.draws import normal
from tests.errors import relative
from tests.flash import flash, flash_backward, flash_forward
from tests.residuals import (
    LAYERS,
    MLP,
    Q4,
    Q8,
    X,
    checkpointed,
    mlp,
    uniform,
)


def coded(codec, x):
    return codec.decode(codec.encode(x))


# Sums of up to 128 float32 products in another order: sqrt(128) * 2^-24 is 7e-7.
ULPS = 2e-6


def test_mlp():
    @jax.jit
    def by_hand(w, x, ct):
        h = coded(jc.Quantized(4, bound=(-2.6, None)), x @ w["up"])
        y, gelu = jax.vjp(jax.nn.gelu, h)
        (dh,) = gelu(ct @ w["down"].T)
        return {"up": coded(Q4, x).T @ dh, "down": y.T @ ct}, ct + dh @ w["up"].T

    ct = normal(9, 8, 64)
    got = jax.vjp(checkpointed(mlp, uniform(Q4)), MLP, X)[1](ct)
    assert relative(got, by_hand(MLP, X, ct)) < ULPS
    # Loose: 4 bits of N(0, 1) err by 0.095 of its norm; gelu' adds as much again.
    exact = jax.vjp(mlp, MLP, X)[1](ct)
    assert 0.02 < relative(got, exact) < 0.2


@pytest.mark.slow
def test_norm_and_gate():
    """A block of today's language models: what lies between the products is replayed.

    What is normalized is the decoded input, by the norm that was kept.
    """

    def square(x):
        return (x * x).mean(-1, keepdims=True) + 1e-5

    def norm(x):
        return x * jax.lax.rsqrt(square(x))

    def fun(w, x):
        y = norm(x)
        return x + (jax.nn.silu(y @ w[0]) * (y @ w[1])) @ w[2]

    @jax.jit
    def by_hand(w, x, ct):
        def again(y):
            error = jax.lax.stop_gradient(square(x) - square(y))
            return y * jax.lax.rsqrt(square(y) + error)

        y, backward = jax.vjp(again, coded(Q4, x))
        gate = coded(jc.Quantized(4, bound=(-4.7, None)), norm(x) @ w[0])
        up = coded(Q4, norm(x) @ w[1])
        z, gated = jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)
        dgate, dup = gated(ct @ w[2].T)
        (dx,) = backward(dgate @ w[0].T + dup @ w[1].T)
        return jnp.stack([y.T @ dgate, y.T @ dup, z.T @ ct]), ct + dx

    ct = normal(9, 8, 64)
    got = jax.vjp(checkpointed(fun, uniform(Q4)), LAYERS, X)[1](ct)
    assert relative(got, by_hand(LAYERS, X, ct)) < ULPS
    # Loose: three rounded factors of 0.095 each in the last product.
    assert 0.02 < relative(got, jax.vjp(fun, LAYERS, X)[1](ct)) < 0.3


def test_a_loop():
    def fun(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    @jax.jit
    def by_hand(w, x, ct):
        xs = [x]
        for i in range(3):
            xs.append(jnp.tanh(xs[-1] @ w[i]))
        moved = [None] * 3
        for i in reversed(range(3)):
            dh = ct * (1.0 - jnp.tanh(coded(bounded, xs[i] @ w[i])) ** 2)
            moved[i], ct = coded(Q4, xs[i]).T @ dh, dh @ w[i].T
        return jnp.stack(moved), ct

    bounded = jc.Quantized(4, bound=3.0)
    ct = normal(11, 8, 64)
    got = jax.vjp(checkpointed(fun, uniform(Q4)), LAYERS, X)[1](ct)
    assert relative(got, by_hand(LAYERS, X, ct)) < ULPS
    # Loose: as the MLP, through three layers.
    assert 0.02 < relative(got, jax.vjp(fun, LAYERS, X)[1](ct)) < 0.3


def test_a_derivative():
    def fun(w, x):
        return jnp.tanh(x @ w[0]) @ w[1]

    @jax.jit
    def by_hand(w, x, ct):
        y = jnp.tanh(x @ w[0])
        dh = (ct @ w[1].T) * coded(Q4, 1.0 - y**2)
        return coded(Q8, x).T @ dh, coded(Q8, y).T @ ct

    derivative = jc.Derivative(Q4, value=Q8)
    policy = jc.Policy({"tanh.0": derivative, "x": Q8}, default=jc.Recompute())
    ct = normal(12, 8, 64)
    got, _ = jax.vjp(checkpointed(fun, policy), LAYERS, X)[1](ct)
    assert relative((got[0], got[1]), by_hand(LAYERS, X, ct)) < ULPS
    assert not got[2].any()


# --- attention ---


softmax = jax.nn.dot_product_attention


@pytest.mark.slow
def test_the_fused_attention_used_here_is_right():
    q, k, v = normal(4, 3, 2, 16, 2, 32)
    got, want = (
        jax.vjp(f, q, k, v)[1](v) for f in (flash, partial(softmax, scale=1.0))
    )
    assert relative(got, want) < 10 * ULPS  # exp of scores of up to 20


@pytest.mark.parametrize("op", [softmax, flash])
def test_attention(op):
    """Softmax is made again of decoded q and k, but for what a fused one keeps."""

    def fun(w, x):
        qkv = jnp.split((x @ w["qkv"]).reshape(2, 16, 6, 32), 3, axis=2)
        return op(*qkv).reshape(x.shape) @ w["o"]

    @jax.jit
    def by_hand(w, x, ct):
        product = x @ w["qkv"]
        exact = jnp.split(product.reshape(2, 16, 6, 32), 3, axis=2)
        qkv = jnp.split(coded(Q8, product).reshape(2, 16, 6, 32), 3, axis=2)
        dy = (ct @ w["o"].T).reshape(2, 16, 2, 32)
        if op is flash:
            y, (*_, lse) = flash_forward(*exact)
            y = coded(Q8, y.reshape(x.shape)).reshape(y.shape)
            moved = flash_backward((*qkv, y, lse), dy)
        else:
            y, backward = jax.vjp(softmax, *qkv)
            moved = backward(dy)
        dp = jnp.concatenate(moved, axis=2).reshape(2, 16, 192)
        return {
            "qkv": jnp.einsum("btd,bte->de", coded(Q8, x), dp),
            "o": jnp.einsum("btd,bte->de", y.reshape(x.shape), ct),
        }, dp @ w["qkv"].T

    w = {"qkv": normal(4, 64, 192, scale=0.1), "o": normal(5, 64, 64, scale=0.1)}
    x, ct = normal(6, 2, 16, 64), normal(10, 2, 16, 64)
    got = jax.vjp(checkpointed(fun, uniform(Q8)), w, x)[1](ct)
    assert relative(got, by_hand(w, x, ct)) < 10 * ULPS  # exp of scores of up to 10
    # Loose: 8 bits err by 0.6 %, in scores that vary by a few.
    exact = jax.vjp(fun, w, x)[1](ct)
    assert 1e-3 < relative(got, exact) < 0.05


@pytest.mark.slow
def test_a_divisor_is_no_zero():
    """Sums from 1e-3 to 1: in groups of 64 with 4 bits most would become zero."""
    w, x = jnp.exp(jnp.linspace(-7.0, 0.0, 64)).reshape(1, 64), jnp.ones((1, 1))
    assert (coded(Q4, x @ w) == 0.0).any()

    def fun(w, x):
        return 1e-3 / (x @ w)

    for policy in (uniform(Q4), jc.policies.int4()):
        small = checkpointed(fun, policy)
        got, exact = (jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in (small, fun))
        assert relative(got, exact) < 0.01  # x comes back to half of bfloat16's 2^-8


@pytest.mark.parametrize("way", ["map", "scan", "checkpoint"])
def test_a_divisor_in_a_body_is_no_zero(way):
    """The entropy of mixtures, many of whose probabilities 8 bits make zero."""
    t, p = (jax.nn.softmax(4 * normal(20 + i, 32, 16)) for i in range(2))
    t = t[:16]

    def entropy(row):
        return -jnp.sum(row * jnp.log(row))

    def fun(t, p):
        mixed = p @ t
        if way == "scan":
            steps = jax.lax.scan(lambda c, row: (c + entropy(row), 0), 0.0, mixed)
            return steps[0]
        if way == "map":
            return jax.lax.map(entropy, mixed).sum()
        return jax.checkpoint(entropy)(mixed)

    assert (coded(Q8, p @ t) == 0.0).any()
    exact = jax.grad(fun)(t, p)
    for policy in (jc.policies.int8(), jc.policies.int4()):
        # p comes back to half a step of its codes.
        small = checkpointed(fun, policy)
        assert relative(jax.grad(small)(t, p), exact) < 0.1


@pytest.mark.slow
def test_a_loops_normalizer_is_no_zero():
    """The scaled forward algorithm of a hidden Markov model of 16 states."""
    params = {"emit": normal(23, 16, 16) / 2, "move": 3 * normal(24, 16, 16)}
    x = normal(25, 32, 16)

    def fun(params, x):
        moves = jax.nn.softmax(params["move"])

        def step(state, emitted):
            state = (state @ moves) * emitted
            return state / state.sum(), jnp.log(state.sum())

        emitted = jax.nn.softmax(x @ params["emit"])
        return -jax.lax.scan(step, jnp.ones(16) / 16, emitted)[1].sum()

    exact = jax.grad(fun)(params, x)
    for policy, most in ((jc.policies.int8(), 0.05), (jc.policies.int4(), 0.3)):
        found = jax.grad(checkpointed(fun, policy))(params, x)
        for name in params:
            assert relative(found[name], exact[name]) < most, (policy, name)


# --- layers, with the tolerances of GACT's and ActNN's own tests ---


@pytest.mark.slow
def test_batch_norm_in_four_bits():
    def norm(w, x):
        mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        return w[0] * (x - mean) * jax.lax.rsqrt(var + 1e-5) + w[1]

    w = jnp.stack([jnp.ones((1, 3, 1, 1)), jnp.zeros((1, 3, 1, 1))])
    x, ct = normal(13, 64, 3, 56, 56), normal(14, 64, 3, 56, 56)
    got, exact = (
        jax.vjp(f, w, x)[1](ct) for f in (checkpointed(norm, uniform(Q4)), norm)
    )
    np.testing.assert_allclose(got[1], exact[1], atol=1e-2, rtol=1e-2)
    np.testing.assert_allclose(got[0][1], exact[0][1], atol=1e-2, rtol=1e-2)
    assert (got[1] != exact[1]).any()


def test_layer_norm_in_eight_bits():
    def norm(w, x):
        x = x - x.mean(-1, keepdims=True)
        return w * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    x, ct = normal(15, 1, 10, 10), normal(16, 1, 10, 10)
    got, exact = (
        jax.vjp(f, jnp.ones((1, 1, 10)), x)[1](ct)
        for f in (checkpointed(norm, uniform(Q8)), norm)
    )
    for a, b in zip(got, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-1, rtol=1e-2)


@pytest.mark.slow
def test_a_layer_of_bert_in_eight_bits():
    def layer(w, x):
        q, k, v = (jnp.reshape(x @ w[n], (2, 512, 12, 64)) for n in "qkv")
        x = norm(x + softmax(q, k, v).reshape(x.shape) @ w["o"])
        return norm(x + jax.nn.gelu(x @ w["up"]) @ w["down"])

    def norm(x):
        return jax.nn.standardize(x, epsilon=1e-12)

    shapes = dict.fromkeys("qkvo", (768, 768)) | {
        "up": (768, 3072),
        "down": (3072, 768),
    }
    w = {
        n: normal(i, *shape, scale=0.02) for i, (n, shape) in enumerate(shapes.items())
    }
    x, ct = normal(17, 2, 512, 768), normal(18, 2, 512, 768)
    got, exact = (
        jax.jit(lambda w, x, f=f: jax.vjp(f, w, x)[1](ct))(w, x)
        for f in (checkpointed(layer, jc.policies.int8()), layer)
    )
    np.testing.assert_allclose(got[1], exact[1], atol=1e-1, rtol=1e-2)
    assert 0.0 < relative(got, exact) < 0.02


# --- noise ---


def test_same_data_same_bytes():
    small = checkpointed(mlp, uniform(jc.Quantized(4, stochastic=True)))
    first, again = (jax.tree.leaves(jax.vjp(small, MLP, X)[1]) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


def test_steps_and_layers_share_no_noise():
    """Averaged over 64 steps or layers, errors of unbiased rounding fade to an eighth.

    The data is the same but for its last bits. Noise that is shared does not fade.
    Of 512 independent entries the norm fluctuates by 3 %: 1/8 reaches 1/4 never.
    """
    codec = jc.Quantized(2, stochastic=True)
    small = checkpointed(lambda w, x: x @ w, uniform(codec))
    xs = X[None] * (1.0 + 1e-5 * jnp.arange(64.0).reshape(64, 1, 1))
    w, eye = LAYERS[0], jnp.eye(8, 64)

    def stored(x):
        """x as the weights' gradient x^T dy shows it."""
        return jax.vjp(small, w, x)[1](eye)[0][:, :8].T

    errors = jnp.stack([stored(x) for x in xs]) - xs
    one = float(jnp.linalg.norm(errors[0]))
    assert float(jnp.linalg.norm(errors.mean(0))) < one / 4

    def through_layers(w):
        return jax.lax.scan(lambda _, x: (None, small(w, x)), None, xs)[1]

    _, backward = jax.vjp(through_layers, w)
    mean = backward(jnp.broadcast_to(eye / 64.0, (64, 8, 64)))[0][:, :8].T
    assert float(jnp.linalg.norm(mean - xs.mean(0))) < one / 4


def test_two_places_share_no_noise():
    """The same values at two names: the codes differ."""

    def fun(w, x, y):
        return x @ w + y @ w

    small = checkpointed(fun, uniform(jc.Quantized(4, stochastic=True)))
    _, backward = jax.vjp(small, LAYERS[0], X, X)
    codes = [x for x in jax.tree.leaves(backward) if x.dtype == np.uint8]
    assert len(codes) == 2
    assert (codes[0] != codes[1]).any()
