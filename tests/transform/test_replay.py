"""What crosses from forward to backward, and what the backward pass makes of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params

import jaxcompact as jc
from jaxcompact.checkpoint import TRACERS
from tests.draws import normal
from tests.flash import flash
from tests.residuals import (
    LAYERS,
    MLP,
    Q4,
    Q8,
    X,
    checkpointed,
    compress,
    crossing,
    layers,
    mlp,
    nbytes,
    references,
    slots,
    uniform,
    weighted,
)

softmax = jax.nn.dot_product_attention


def attention(op, w, x):
    q, k, v = jnp.split((x @ w["qkv"]).reshape(*x.shape[:2], 6, 32), 3, axis=2)
    return op(q, k, v).reshape(x.shape) @ w["o"]


ATTENTION = {"qkv": normal(4, 64, 192, scale=0.1), "o": normal(5, 64, 64, scale=0.2)}
TOKENS = normal(6, 2, 16, 64)
PROJECTIONS = [f"dot_general.0.{i}" for i in range(3)]  # q, k and v of one product


def count(kind, fun, *args):
    """Operations of a kind in a traced function, bodies of loops once."""

    def inside(jaxpr):
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        return sum(
            (eqn.primitive.name == kind)
            + sum(map(inside, jaxprs_in_params(eqn.params)))
            for eqn in jaxpr.eqns
        )

    return inside(jax.make_jaxpr(fun)(*args))


# --- what crosses ---


@pytest.mark.parametrize("codec", [Q4, Q8, jc.OutlierQuantized(4), jc.Float8()])
def test_codes_alone_cross_and_parameters_by_reference(codec):
    small = checkpointed(mlp, uniform(codec))
    held = crossing(small, MLP, X)
    assert all(jnp.issubdtype(aval.dtype, jnp.unsignedinteger) for aval in held)
    assert nbytes(held) == codec.nbytes(X.shape) + codec.nbytes((8, 128))
    assert references(small, MLP, X) == [(64, 128), (128, 64)]


def test_the_backward_function_holds_no_more_than_codes_and_parameters():
    """The same through `jax.vjp`'s pytree, which is what lives between the passes."""
    _, backward = jax.vjp(checkpointed(mlp, compress(Q4)), MLP, X)
    shapes = {(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(backward)}
    parameters = {("float32", w.shape) for w in MLP.values()}
    assert {s for s in shapes if not s[0].startswith("uint")} == parameters


def test_what_is_saved_and_what_is_made_again():
    saved = crossing(checkpointed(mlp, jc.Policy(default=jc.Save())), MLP, X)
    # x @ up, and tanh of gelu; x itself is an argument.
    assert nbytes(saved) == 2 * 8 * 128 * 4
    assert crossing(checkpointed(mlp, jc.Policy()), MLP, X) == []


def test_what_no_gradient_reads_is_not_stored():
    def summed(y):
        ones = jnp.ones((1, 1, 3))
        return jax.lax.conv_general_dilated(y[:, None], ones, (1,), "SAME")[:, 0]

    def fun(w, x):
        return summed(x @ w["up"] + summed(x) @ w["up"])

    names = slots(fun, jc.Policy(default=jc.Save()), MLP, X)
    # Sums are linear: only what multiplies the weights.
    assert set(names) == {"conv_general_dilated.0"}


def test_plain_attention_stores_its_input_and_the_projections():
    fun = partial(attention, softmax)
    # Both products over 32 and 16 terms are made again: scores, and the output.
    assert set(slots(fun, compress(Q4), ATTENTION, TOKENS)) == {"x", *PROJECTIONS}
    held = crossing(checkpointed(fun, uniform(Q4)), ATTENTION, TOKENS)
    assert nbytes(held) == Q4.nbytes(TOKENS.shape) + Q4.nbytes((2, 16, 192))


def test_fused_attention_adds_its_output_and_statistics_once():
    """Its q, k, v and output are no tensors of their own: the graph has them."""
    fun = partial(attention, flash)
    stored = slots(fun, compress(Q4), ATTENTION, TOKENS)
    assert set(stored) == {
        "x",
        *PROJECTIONS,
        "custom_vjp_call.0",
        "custom_vjp_call.0.residual4",
    }
    assert stored["custom_vjp_call.0.residual4"] == jc.Save()  # log-sum-exp
    assert nbytes(crossing(checkpointed(fun, uniform(Q4)), ATTENTION, TOKENS)) == (
        2 * Q4.nbytes(TOKENS.shape) + Q4.nbytes((2, 16, 192)) + 2 * 2 * 16 * 4
    )


def test_residuals_that_are_no_numbers_stay_exact():
    @jax.custom_vjp
    def op(x):
        return op_forward(x)[0]

    def op_forward(x):
        y = x @ x.T
        return y, (y > 0.0, jnp.argmax(y, -1), jnp.sort(y))

    def op_backward(residuals, ct):
        mask, best, ordered = residuals
        return ((jnp.where(mask, ct, ordered) @ X).at[best].mul(2.0),)

    op.defvjp(op_forward, op_backward)
    fun = lambda w, x: op(x * w)  # noqa: E731
    stored = slots(fun, uniform(Q8), jnp.float32(1.5), X)
    assert stored == {
        "x": Q8,
        "custom_vjp_call.0.residual0": jc.BitMask(),
        "custom_vjp_call.0.residual1": jc.Narrow(8),
        "custom_vjp_call.0.residual2": Q8,
    }


def sparse(w, x):
    """Two in a hundred are above zero, and small beside those below."""
    return jax.nn.relu(x @ w - 2.0) @ w.T


def test_of_what_relu_alone_reads_its_result_is_stored():
    """That is 1 % off; of 4 bits of its operand, whose size is -2, it were 6 %."""
    w, x = normal(1, 64, 256) / 8, normal(2, 128, 64)

    def gradient(fun):
        return jax.grad(lambda w: jnp.sum(jnp.sin(fun(w, x))))(w)

    small, exact = checkpointed(sparse, uniform(Q4)), gradient(sparse)
    off = jnp.linalg.norm(gradient(small) - exact) / jnp.linalg.norm(exact)
    assert off < 0.03
    rule = {"dot_general.0": Q8}  # is as many bits for what stands for it
    said = jc.explain(sparse, w, x, policy=jc.Policy(rule, default=Q4), params=0)
    stored = {row.name: row.action for row in said.rows if row.stored}
    assert stored["dot_general.0"] == "Quantized(bits=8)"
    assert stored["relu.0"] == "BitMask()"


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jnp.sin(y := x @ w) + jnp.square(jax.nn.relu(y)),
        lambda w, x: jnp.square(jax.nn.relu((x @ w) * jnp.cos(x @ w.T))),
    ],
)
def test_what_others_read_as_well_is_stored_itself(fun):
    said = jc.explain(fun, normal(1, 64, 64), X[:, :64], policy=uniform(Q4), params=0)
    stored = {row.name: row.action for row in said.rows if row.stored}
    assert stored["dot_general.0"] == "Quantized(bits=4)"
    assert stored["relu.0"] == "BitMask()"


# --- what is run again ---


@pytest.mark.parametrize(
    ("fun", "w", "x"),
    [
        (mlp, MLP, X),
        (layers, LAYERS, X),
        (lambda w, x: jnp.sort(x @ w["up"], stable=False) @ w["down"], MLP, X),
    ],
)
def test_no_product_is_run_again_unless_the_policy_says_so(fun, w, x):
    def products(f):
        return count("dot_general", jax.grad(weighted(f), argnums=(0, 1)), w, x)

    plain = products(fun)
    assert products(checkpointed(fun, uniform(Q4))) == plain
    assert products(checkpointed(fun, jc.Policy(default=jc.Save()))) == plain
    assert products(checkpointed(fun, jc.Policy())) > plain


def test_attentions_forward_runs_once():
    fun = partial(attention, flash)

    def runs(policy):
        grad = jax.grad(weighted(checkpointed(fun, policy)), argnums=(0, 1))
        # Only its forward takes the logarithm.
        return count("log", grad, ATTENTION, TOKENS)

    assert runs(compress(Q4)) == runs(uniform(Q8)) == 1
    assert runs(jc.Policy(default=jc.Save())) == 1
    assert runs(jc.Policy()) == runs(jc.policies.int3()) == 2


@pytest.mark.parametrize("kind", ["sort", "top_k", "conv_general_dilated"])
def test_other_expensive_operations_are_not_run_again(kind):
    op = {
        "sort": lambda y: y[0, jnp.argsort(y[1])],
        "top_k": lambda y: jax.lax.top_k(y, 4)[0],
        "conv_general_dilated": lambda y: jnp.sin(jnp.convolve(y[0], y[1])),
    }[kind]

    def fun(w, x):
        return op(x @ w)

    def runs(f):
        return count(kind, jax.grad(weighted(f)), LAYERS[0], X)

    assert runs(checkpointed(fun, uniform(Q8))) == runs(fun)


# --- the same tensor is stored once ---


@pytest.mark.parametrize(
    "readers",
    [
        lambda w, x: jnp.tanh(x @ w[0]) * jnp.sin(x @ w[1]) + x @ w[2],
        lambda w, x: (lambda y: jnp.tanh(y) + jnp.sin(y) + y @ w[0])(x @ w[1]),
        lambda w, x: (lambda y: jnp.tanh(checkpoint_name(y, "y")) * y)(x @ w[1]),
        lambda w, x: (lambda y: jnp.tanh(y.reshape(64, 8)).T @ y.T)(x @ w[1]),
        lambda w, x: (lambda y: jnp.tanh(y.T).T * y)(jax.jit(jnp.matmul)(x, w[1])),
        lambda w, x: (lambda y: flash(0.01 * y, y, y)[0, 0])(
            (x @ w[0]).reshape(1, 4, 2, 64)
        ),
        lambda w, x: (lambda y: flash(0.01 * y, y, y))(x.reshape(1, 4, 2, 64)) @ w[0],
    ],
)
def test_however_often_it_is_read(readers):
    """Every stored array is another tensor, by its decoded values."""
    small = checkpointed(readers, uniform(Q8))
    _, backward = jax.vjp(small, LAYERS, X)
    codes = [
        leaf.tobytes()
        for leaf in map(np.asarray, jax.tree.leaves(backward))
        if leaf.dtype == np.uint8 and leaf.size >= X.size
    ]
    assert codes
    assert len(set(codes)) == len(codes)


def test_a_codec_without_noise_has_one_seed():
    """So that tensors of one kind share what is traced, with constants or without."""
    for codec, shared in (
        (jc.Chain(jc.Hadamard(16), Q4), True),
        (Q4, True),
        (jc.Quantized(4, stochastic=True), False),
    ):
        traced, inputs = TRACERS[checkpointed(mlp, uniform(codec))]((MLP, X), {})
        plan = traced.plan((True,) * len(inputs))
        seeds = {s.seed for s in plan.stores.each if s.codec == codec}
        assert (seeds == {0}) == shared and seeds
