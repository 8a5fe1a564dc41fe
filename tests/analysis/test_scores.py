"""Which tensors attention makes its scores of, fused or not."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from tests.analysis.candidates import S, W, X, candidates


def attention(w, x):
    q, k, v = (y.reshape(2, 4, 2, 8) for y in jnp.split(x @ w["qkv"], 3, axis=-1))
    q, k, v = (checkpoint_name(y, name) for y, name in ((q, "q"), (k, "k"), (v, "v")))
    return jax.nn.dot_product_attention(q, k, v)


def test_the_operands_of_softmax_scores():
    w = {"qkv": S((16, 48), jnp.float32)}
    found = candidates(attention, w, S((2, 4, 16), jnp.float32))
    # [batch, tokens, heads, channels]: groups run along the tokens.
    scores = {n: t.scores for n, t in found.items() if t.scores is not None}
    assert (scores["q"], scores["k"]) == (1, 1)
    assert "v" not in scores
    terms = {n: t.terms for n, t in found.items() if t.terms is not None}
    assert sorted(terms.values()) == [4, 8]  # tokens; channels


def test_tokens_that_come_first():
    def fun(w, x):
        qkv = checkpoint_name((x @ w).reshape(4, 2, 3, 2, 8), "qkv")
        q, k, v = jnp.unstack(qkv.transpose(1, 3, 2, 0, 4), axis=2)
        return jax.nn.softmax(q @ k.mT) @ v

    found = candidates(fun, S((16, 48), jnp.float32), S((4, 2, 16), jnp.float32))
    assert found["qkv"].scores == 0


def test_logits_of_a_loss_are_no_scores():
    def fun(w, x):
        return jax.nn.log_softmax(x @ w)

    assert all(t.scores is None for t in candidates(fun, W, X).values())


@jax.custom_vjp
def fused(q, k, v):
    return fused_forward(q, k, v)[0]


def fused_forward(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    out = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse), v)
    return out, (q, k, v, out, lse)


fused.defvjp(fused_forward, lambda res, ct: res[:3])


def shared(op):
    """Of each device's heads, as a kernel is called on several devices."""
    place = jax.P(None, None, "tensor")
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("tensor",), kinds, devices=jax.devices()[:2])
    return jax.shard_map(op, mesh=mesh, in_specs=(place,) * 3, out_specs=place)


@pytest.mark.parametrize("wrap", [lambda op: op, shared], ids=["one", "shared"])
def test_fused_attention_is_told_from_one_that_makes_its_softmax_again(wrap):
    def fun(op):
        def call(w, x):
            q, k, v = (y.reshape(2, 4, 2, 8) for y in (x @ w, x @ w.T, x @ w @ w))
            return op(q, k, v)

        return call

    x = S((2, 4, 16), jnp.float32)
    found = candidates(fun(wrap(fused)), W, x)
    assert [t.fused for t in found.values()].count("result") == 1
    operands = [n for n, t in found.items() if t.fused == "operand"]
    assert operands == ["dot_general.0", "dot_general.1", "dot_general.3"]
    scores = [n for n, t in found.items() if t.scores is not None]
    assert scores == ["dot_general.0", "dot_general.1"]
    found = candidates(fun(wrap(jax.nn.dot_product_attention)), W, x)
    assert all(t.fused is None for t in found.values())
    scores = [n for n, t in found.items() if t.scores is not None]
    assert scores == ["dot_general.0", "dot_general.1"]


def test_fused_attention_may_say_what_vmap_makes_of_it():
    """As Tokamax's does."""

    @jax.custom_batching.custom_vmap
    def inner(q, k, v):
        return fused_forward(q, k, v)[0]

    @inner.def_vmap
    def _(size, batched, *args):
        return jax.vmap(fused)(*args), True

    @jax.custom_vjp
    def attention(q, k, v):
        return inner(q, k, v)

    attention.defvjp(lambda *args: (inner(*args), args), lambda args, ct: args)

    def fun(w, x):
        q, k, v = (y.reshape(2, 4, 2, 8) for y in (x @ w, x @ w.T, x @ w @ w))
        return attention(q, k, v)

    found = candidates(fun, W, S((2, 4, 16), jnp.float32))
    scores = [n for n, t in found.items() if t.scores is not None]
    assert scores == ["dot_general.0", "dot_general.1"]
    assert [t.fused for t in found.values()].count("operand") == 3


def test_a_temperature_is_no_operand_of_scores():
    """Of a scale of scores, a number, there are no tokens to take groups along."""

    def fun(w, x, scale):
        return jax.nn.softmax(((x @ w) * scale) @ (x @ w).T, axis=-1) @ x

    args = jnp.eye(16), jnp.linspace(-1.0, 1.0, 128).reshape(8, 16), jnp.float32(0.5)
    said = jc.explain(fun, *args, policy=jc.policies.int4(), params=0)
    (scale,) = (row for row in said.rows if row.name == "scale")
    assert "scores" not in scale.reason and scale.stored <= 4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_the_tokens_of_heads_that_are_normalized(first, bias):
    """A way through the norm says nothing of where they lie."""

    def normed(t):
        scale = jax.lax.rsqrt((t * t).mean(axis=-1, keepdims=True) + 1e-6)
        return scale * t if first else t * scale

    def fun(w, x):
        q, k = (jnp.einsum("blc,cnd->blnd", x, w[n]) for n in "qk")
        if bias:
            q, k = q + w["bias"], k + w["bias"]
        scores = jnp.einsum("bqnd,bknd->bnqk", normed(q), normed(k))
        return jnp.einsum("bnqk,bkc->bqnc", jax.nn.softmax(scores), x)

    w = {n: S((16, 4, 8), jnp.float32) for n in "qk"}
    w["bias"] = S((1, 1, 1, 8), jnp.float32)
    found = candidates(fun, w, S((2, 32, 16), jnp.float32))
    axes = [t.scores for t in found.values() if t.shape == (2, 32, 4, 8)]
    assert axes == [1, 1]


def test_where_tokens_are_few_groups_are_of_channels():
    """A scale and an offset for one entry are larger than it."""

    def fun(w, x, near):
        """Each pixel asks its neighbours."""
        q, k = x[:, :, None] @ w, near @ w
        return jax.nn.softmax(jnp.einsum("nrtd,nrsd->nrts", q, k))

    shapes = (64, 64), (8, 16, 64), (8, 16, 9, 64)
    args = (S(shape, jnp.float32) for shape in shapes)
    said = jc.explain(fun, *args, policy=jc.policies.int4(), params=0)
    q, k = (row for row in said.rows if row.reason == "operand of scores or phases")
    assert (q.shape, q.stored) == ((8, 16, 1, 64), 8 * 16 * (64 + 4))
    assert (k.shape, k.stored) == ((8, 16, 9, 64), 8 * 16 * 64 * (9 + 4))
