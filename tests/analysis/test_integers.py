"""Whole numbers of a known range: the range holds, and few bits hold them exactly."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcompact as jc
from jaxcompact.analysis.integers import find_integers
from jaxcompact.graph import graph_of

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (16, 64))
PARAMS = {
    "up": jax.random.normal(KEY, (64, 128)) / 8,
    "down": jax.random.normal(KEY, (128, 64)) / 11,
    "step": jnp.float32(0.3),
}
# As large as they come, and halves, which are rounded to even.
WILD = [0.0, 0.4, 0.5, 1.5, 2.5, 6.5, 7.5, 100.5, 1e3, 1e9, 1e30, np.inf]
WILD = np.array([sign * x for sign, x in product((-1, 1), WILD)], np.float32)


@jax.custom_vjp
def straight(x):
    """Rounds; the gradient goes straight through."""
    return jnp.round(x)


straight.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


@jax.custom_jvp
def rounded(x):
    return jnp.clip(lax.round(x), -3, 3)


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: jnp.clip(jnp.round(x), -8, 7), (-8, 7)),
        (lambda x: jnp.round(jnp.clip(x, -8, 7)), (-8, 7)),
        (lambda x: jnp.round(jnp.clip(x, -8.4, 7.4)), (-8, 7)),
        (lambda x: lax.round(jnp.clip(x, -0.5, 7.5)), (-1, 8)),  # away from zero
        (lambda x: jnp.floor(lax.clamp(-1.5, x, 1.5)), (-2, 2)),
        (lambda x: jnp.ceil(jnp.minimum(jnp.maximum(x, 0), 14.5)), (0, 15)),
        (lambda x: jnp.round(3 * jnp.tanh(x)), (-3, 3)),
        (lambda x: jnp.round(jax.nn.sigmoid(x) * 15) - 8, (-8, 7)),
        (lambda x: jnp.sign(x), (-1, 1)),
        (lambda x: jnp.abs(jnp.round(jnp.clip(x, -8, 7))), (0, 8)),
        (lambda x: jnp.round(jnp.abs(jnp.clip(x, 2, 7)) * -2), (-14, -4)),
        (lambda x: straight(jnp.clip(x, -128, 127)), (-128, 127)),
        (lambda x: jnp.clip(straight(x), -128, 127), (-128, 127)),
        (rounded, (-3, 3)),
        (lambda x: jax.nn.relu6(jnp.round(x)), (0, 6)),
        (lambda x: jnp.clip(x, 0, 5).astype(jnp.int32), (0, 5)),
        (lambda x: jnp.round(jnp.clip(x, 0, 5)).astype(jnp.bfloat16), (0, 5)),
        (lambda x: jnp.where(x > 0, jnp.round(jnp.clip(x, 0, 3)), -1), (-1, 3)),
        (lambda x: jnp.where(x > 0, 1.0, -1.0), (-1, 1)),
        (lambda x: 2 * (x > 0).astype(jnp.float32) - 1, (-1, 1)),
        (lambda x: jnp.argsort(x), (0, 23)),
        (lambda x: jnp.argmax(x.reshape(4, 6), 1), (0, 5)),
        (lambda x: jax.lax.top_k(x, 3)[1], (0, 23)),
        # Of no range, or not whole.
        (lambda x: jnp.round(x), None),
        (lambda x: jnp.round(jnp.log(jnp.clip(x, -1, 50))), None),
        (lambda x: jnp.clip(x, -8, 7), None),
        (lambda x: jnp.maximum(jnp.round(x), 0), None),
        (lambda x: jnp.clip(jnp.round(x), -8.5, 7), None),
        (lambda x: jnp.round(jnp.clip(x, -8, 7)) / 2, None),
        (lambda x: jnp.round(jnp.clip(x, 0, 499)).astype(jnp.bfloat16), None),
        (lambda x: (100 * jnp.clip(x, 0, 5)).astype(jnp.int8), None),
        (lambda x: jnp.arange(3)[jnp.argsort(x)], None),  # beyond, of what is filled in
    ],
)
def test_ranges(fun, expected):
    graph = graph_of(jax.make_jaxpr(fun)(WILD))
    (out,) = graph.outputs
    assert find_integers(graph).get(out) == expected
    if expected:
        made = np.asarray(fun(WILD), np.float32)
        assert expected[0] <= made.min() and made.max() <= expected[1]
        assert (made == np.round(made)).all()


def after(made, x):
    return x + lax.stop_gradient(made - x)


def eight_bits(x):
    """BitNet's activations (arXiv 2402.17764)."""
    scale = 127 / jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-5)
    return after(jnp.clip(jnp.round(x * scale), -128, 127) / scale, x)


def learned(x, step):
    """Learned step sizes, of 4 bits (arXiv 1902.08153)."""
    x = jnp.clip(x / step, -8, 7)
    return after(jnp.round(x), x) * step


def of_the_largest(x):
    scale = jnp.abs(x).max() / 127
    return jnp.clip(straight(x / scale), -128, 127) * scale


def finite_scalar(x):
    """Finite scalar quantization, of 5 levels (arXiv 2309.15505)."""
    x = 2 * jnp.tanh(x)
    return after(jnp.round(x), x) / 2


def ternary(x):
    return after(jnp.clip(jnp.round(x), -1, 1), x)


@pytest.mark.parametrize(
    ("quantize", "bits"),
    [
        (lambda x, _: eight_bits(x), 8),
        (learned, 4),
        (lambda x, _: of_the_largest(x), 8),
        (lambda x, _: finite_scalar(x), 4),
        (lambda x, _: ternary(x), 2),
    ],
    ids=["bitnet", "learned", "largest", "finite", "ternary"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quantized_activations_are_stored_in_their_bits(quantize, bits, dtype):
    """And the gradient of what they are multiplied by is that of exact training."""

    def block(params, x):
        x = jnp.tanh(x @ params["up"])
        return quantize(x, params["step"]) @ params["down"]

    params, x = jax.tree.map(lambda a: a.astype(dtype), (PARAMS, X))
    small = jc.checkpoint(block, policy=jc.policies.int4(), params=0)
    said = jc.explain(small, params, x)
    (row,) = (r for r in said.rows if r.kind == "op" and "Narrow" in r.action)
    assert row.stored == 16 * 128 * bits // 8

    def gradient(fun):
        return jax.grad(lambda p: (fun(p, x) * jnp.cos(x)).sum())(params)["down"]

    exact, found = (np.asarray(gradient(f), np.float32) for f in (block, small))
    # x + (y - x) of decoded x differs from y by x's last bits.
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert error < 4 * float(jnp.finfo(dtype).eps)


def test_where_a_sort_took_them_from_is_stored_in_few_bits():
    def block(w, x):
        y = x @ w
        order = jnp.argsort(y[:, 0])
        return jnp.take(jnp.sin(y), order, axis=0)

    w = PARAMS["up"]
    small = jc.checkpoint(block, policy=jc.policies.int4(), params=0)
    (row,) = (r for r in jc.explain(small, w, X).rows if r.name == "sort.0.1")
    assert row.action == "Narrow(limit=16)" and row.stored == 8
    gradient = jax.grad(lambda f, w: (f(w, X) * X[:, :1]).sum(), argnums=1)
    error = jnp.linalg.norm(gradient(small, w) - gradient(block, w))
    assert error < 0.1 * jnp.linalg.norm(gradient(block, w))


@pytest.mark.parametrize(
    "rounds",
    [
        lambda y: jnp.clip(jnp.round(8 * y), -8, 7).sum(0, keepdims=True),
        lambda y: jnp.clip(jnp.round(64 * y), -512, 511).astype(jnp.bfloat16),
        lambda y: jnp.round(jnp.clip(y, -1, 1) * 127).astype(jnp.float8_e4m3fn),
    ],
    ids=["sum", "bfloat16", "float8"],
)
@pytest.mark.parametrize("policy", [jc.policies.int8(), jc.policies.int4()])
def test_what_is_stored_in_their_place_has_a_range_of_its_own(rounds, policy):
    """And none, where a narrow float does not hold it."""

    def block(w, x):
        return rounds(x @ PARAMS["up"]).astype(x.dtype) @ w

    w = jax.random.normal(KEY, (128, 8))
    small = jc.checkpoint(block, policy=policy, params=0)
    found, exact = (
        jax.grad(lambda w, x, f=f: f(w, x).sum(), argnums=(0, 1))(w, X)[0]
        for f in (small, block)
    )
    assert jnp.abs(found - exact).max() <= 1e-6 * jnp.abs(exact).max()


def test_what_a_bound_is_read_beside_is_not_in_its_place():
    """The rounded numbers have no range of their own, and are read without bounds."""

    def block(w, x):
        y = jnp.round(4 * (x @ w))
        return jnp.clip(y, -2, 2) * jnp.sin(x @ w) + y * jnp.cos(x @ w)

    small = jc.checkpoint(block, policy=jc.policies.int4(), params=0)
    rows = {row.name: row for row in jc.explain(small, PARAMS["up"], X).rows}
    assert rows["round.0"].action == "Save()"
