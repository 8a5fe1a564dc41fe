"""Laws of layers, projections and optimizers in a subspace, for arguments drawn at
random.

Where data are small integers all sums are exact in every dtype, and equality is
equality.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxcompact as jc
from jaxcompact import linen as clinen
from jaxcompact import nnx as cnnx
from tests.contract.drawn import (
    BOOLS,
    FLOATS,
    KEY,
    KINDS,
    LEADING,
    WIDE_FLOATS,
    array,
    close,
    few,
    integers,
    matrix,
    same,
    tree_of,
)


@st.composite
def projections(draw, width: int, *kinds: str) -> jc.Projection:
    rank = draw(st.sampled_from([0.5, 0.1, 1.0]) | st.integers(1, width))
    sizes = width, jc.Projection(rank).rank_of(width)
    blocks = st.sampled_from([b for b in (3, 2, 1) if not any(s % b for s in sizes)])
    kind = draw(st.sampled_from(kinds or KINDS))
    return jc.Projection(rank, kind, blocks=draw(blocks))


@pytest.mark.parametrize("kind", KINDS)
@few(3)
@given(st.data(), LEADING, FLOATS, FLOATS, BOOLS, st.sampled_from([6, 12, 1]))
def test_a_linear_layer(kind, data, leading, dtype, x_dtype, biased, n):
    """y, dx and db are exact, dW is P^T (x^T dy), for any axes and dtypes."""
    m, step = data.draw(st.sampled_from([4, 1, 0])), data.draw(st.integers(0, 10**9))
    space = jc.Subspace({"kernel": data.draw(projections(n, kind))}, KEY, period=7)
    shapes = (*leading, n), (n, m), (m,), (*leading, m)
    x, w, b, dy = (integers(seed, *shape) for seed, shape in enumerate(shapes))
    tree = {"kernel": array(w, dtype), "x": array(x, x_dtype)}
    tree |= {"bias": array(b, dtype)} if biased else {}

    def layer(tree):
        return jc.linear(tree["x"], tree["kernel"], tree.get("bias"), dtype=dtype)

    def loss(tree):
        y = layer(tree)
        return jnp.sum((y * array(dy, dtype)).astype(jnp.float32)), y

    call = jax.jit(jc.value_and_grad(loss, space, has_aux=True))
    (_, y), grads = call(tree, step=step)
    assert y.dtype == dtype and grads["x"].dtype == x_dtype
    for got in (y, layer(tree)):
        same(np.asarray(got, float), x @ w + biased * b)
    same(np.asarray(grads["x"], float), dy @ w.T)
    tokens = math.prod(leading)
    x, dy = x.reshape(tokens, n), dy.reshape(tokens, m)
    if biased:
        same(np.asarray(grads["bias"], float), dy.sum(0))
    p = matrix(space, tree, "kernel", step)
    assert grads["kernel"].shape == (p.shape[1], m) and grads["kernel"].dtype == dtype
    # A rounding for each term of two sums, and one each of P, z and dW.
    sizes = abs(p).T @ (abs(x).T @ abs(dy))
    close(grads["kernel"], p.T @ (x.T @ dy), sizes, n + tokens + 3, dtype)


@pytest.mark.parametrize("kind", KINDS)
@few(3)
@given(st.data(), st.sampled_from([6, 12, 1]), FLOATS, LEADING)
def test_a_projection(kind, data, n, dtype, leading):
    """A function of the key, that project and lift multiply by, as its kind says."""
    projection = data.draw(projections(n, kind))
    key = jax.random.key(data.draw(st.integers(0, 99)))
    p, blocks = np.asarray(projection.matrix(key, n), np.float64), projection.blocks
    r = projection.rank_of(n)
    assert p.shape == (n, r) and 1 <= r <= n
    same(p, projection.matrix(key, n))
    columns = data.draw(st.sampled_from([2, 1, 0]))
    x, sketch = integers(0, *leading, n), integers(1, r, columns)
    z = projection.project(key, array(x, dtype))
    lifted = projection.lift(key, array(sketch, dtype), n)
    assert z.dtype == lifted.dtype == dtype and z.shape == (*leading, r)
    close(z, x @ p, abs(x) @ abs(p), n + 1, dtype)
    close(lifted, p @ sketch, abs(p) @ abs(sketch), r + 1, dtype)
    width, rank = n // blocks, r // blocks
    parts = p.reshape(blocks, width, blocks, rank)
    inside = np.stack([parts[i, :, i] for i in range(blocks)])
    assert np.count_nonzero(p) == np.count_nonzero(inside)
    sizes = abs(inside)
    if projection.kind == "rademacher":
        np.testing.assert_allclose(sizes, rank**-0.5, rtol=1e-6)
    elif projection.kind == "sparse":
        np.testing.assert_allclose(sizes[sizes > 0], (3 / rank) ** 0.5, rtol=1e-6)
    elif projection.kind == "countsketch":
        same(sizes.sum(2), np.ones((blocks, width)))
        assert np.ptp(sizes.sum(1)) <= 1 and set(np.unique(p)) <= {-1, 0, 1}
    elif projection.kind == "orthonormal":
        for part in inside:
            scale = width / rank
            np.testing.assert_allclose(
                part.T @ part, scale * np.eye(rank), atol=1e-6 * scale * width
            )


@few(200)
@given(st.integers(1, 10**6), st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_ranks_of_fractions(width, one, other):
    """Near the fraction, in units of 64 from there on, and never falling with it."""
    low, high = (jc.Projection(f).rank_of(width) for f in sorted((one, other)))
    assert 1 <= low <= high <= width
    want = max(one, other) * width
    assert high % 64 == 0 or high == width or want < 64
    assert abs(high - want) <= (32 if want >= 64 else max(0.5, 1 - want))


@few(20)
@given(
    st.floats(1.0, 3.0),
    st.lists(st.tuples(st.integers(0, 99), st.integers(-30, 55)), max_size=5),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.sampled_from([(), (1,), (2, 3), (0,)]),
)
def test_norms_never_grow_faster_than_gamma(gamma, drawn, dtype, shape):
    """Nor by a last spike whose square is beyond float32; what is slower stays."""
    tx, last = jc.limit_norm_growth(gamma), 0.0
    state = tx.init(jnp.zeros(shape, dtype))
    slack = 1 + 10 * float(jnp.finfo(dtype).eps)  # of 6 squares, a root and a product
    for seed, power in [*drawn, (0, 90)]:
        update = array(integers(seed, *shape) * 2.0**power, dtype)
        got, state = tx.update(update, state)
        norm, plain = (np.linalg.norm(np.asarray(u, float)) for u in (got, update))
        assert got.dtype == dtype
        assert not last or norm <= gamma * last * slack
        if not last or plain < gamma * last / slack:
            same(got, update)
        last = norm


STACKS = st.sampled_from([(2, 2), (), (1,)])
TREES = st.builds(
    tree_of, STACKS, st.sampled_from([6, 1]), st.sampled_from([3, 1]), WIDE_FLOATS
)


@pytest.mark.slow
@few(6)
@given(st.data(), TREES, st.integers(0, 10**6), st.integers(1, 500))
def test_value_and_grad(data, tree, step, period):
    """Sketches of each layer's gradient; value, other leaves and aux as of jax's."""
    *stack, n, m = tree["in"]["kernel"].shape
    projection = data.draw(projections(n))
    space = jc.Subspace({"in/.*": projection}, KEY, period)
    dtype, tokens = tree["bias"].dtype, 4
    x = array(integers(5, tokens, n), dtype)

    def loss(tree, x):
        product = jc.linear
        for _ in stack:
            product = jax.vmap(product, (None, 0))
        h = product(x, tree["in"]["kernel"]).sum(tuple(range(len(stack))))
        y = jc.linear(h, tree["out"]["kernel"]) * tree["bias"].sum()
        return jnp.sum(y.astype(jnp.float32)), {"h": h}

    want = jax.jit(jax.value_and_grad(loss, has_aux=True))(tree, x)
    call = jax.jit(jc.value_and_grad(loss, space, has_aux=True))
    got = call(tree, x, step=jnp.int32(step))
    full, sketch = want[1]["in"].pop("kernel"), got[1]["in"].pop("kernel")
    same(got, want)
    assert sketch.shape == (*stack, projection.rank_of(n), m) and sketch.dtype == dtype
    # |dy| of all tokens alike, and |x| of up to 2.
    dy = abs(integers(1, m, 2).sum(1) * integers(2, m).sum())
    sizes = 2 * tokens * np.broadcast_to(dy, (n, m))
    for layer in np.ndindex(*stack):
        p = matrix(space, tree, "in/kernel", step, layer or ...)
        exact = p.T @ np.asarray(full[layer], np.float64)
        close(sketch[layer], exact, abs(p).T @ sizes, n + tokens + 3, dtype)


def gradients(space: jc.Subspace, tree: dict) -> dict:
    slot = space.slots(tree)["in/kernel"]
    sketch = array(integers(9, *slot.sketch_shape), tree["bias"].dtype)
    return tree | {"in": {"kernel": sketch}}


INNERS = [optax.identity(), optax.scale_by_adam(), optax.trace(0.9)]


@pytest.mark.slow
@few(5)
@given(
    st.data(),
    TREES,
    st.sampled_from([*INNERS, optax.scale_by_lion()]),
    st.sampled_from(["keep", "reset", "transfer"]),
    st.integers(1, 3),
)
def test_in_subspace(data, tree, inner, moment, period):
    """State as of sketches; the inner transform for all else; any chain can count."""
    projection = data.draw(projections(tree["in"]["kernel"].shape[-2]))
    space = jc.Subspace({"in/.*": projection}, KEY, period)
    tree = tree | {"bias": tree["bias"].astype(jnp.bfloat16)}
    grads = gradients(space, tree)
    tx = jc.in_subspace(space, inner, moment=moment)
    for _ in range(data.draw(st.integers(0, 2))):
        tx = optax.chain(optax.identity(), tx)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
    with jax.numpy_dtype_promotion("standard"):
        state, alone, update = tx.init(tree), inner.init(wide), jax.jit(tx.update)
        kinds = sorted(str(jax.typeof(x)) for x in jax.tree.leaves(alone))
        held = [str(jax.typeof(x)) for x in jax.tree.leaves(state)]
        assert sorted([*kinds, "int32[]", "int32[]", "uint32[2]"]) == sorted(held)
        for step in range(4):
            assert int(jc.update_count(state)) == step
            updates, state = update(grads, state, tree)
            want, alone = jax.jit(inner.update)(wide, alone)
            for name in ("out", "bias"):
                own = jax.tree.map(lambda u, p: u.astype(p.dtype), want, wide | grads)
                same(updates[name], own[name])
            assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, tree)
    assert held == [str(jax.typeof(x)) for x in jax.tree.leaves(state)]


@few(6)
@given(
    WIDE_FLOATS.map(lambda dtype: tree_of((), 6, 3, dtype)),
    st.floats(0, 0.99),
    st.floats(0.5, 0.999),
    st.floats(1e-8, 1e-3),
    st.floats(0, 0.5),
)
def test_ready_made_optimizers(tree, b1, b2, eps, decay):
    """`scale_by_subspace_adam` is Adam inside; `subspace_adamw` optax's elsewhere."""
    space = jc.Subspace({"in/.*": jc.Projection(2)}, KEY)
    grads, rest = gradients(space, tree), {name: tree[name] for name in ("out", "bias")}
    with jax.numpy_dtype_promotion("standard"):
        inside = jc.in_subspace(space, optax.scale_by_adam(b1, b2, eps))
        adams = jc.scale_by_subspace_adam(space, b1, b2, eps), inside
        same(*(tx.update(grads, tx.init(tree), tree) for tx in adams))
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), rest)
        ours = jc.subspace_adamw(0.1, space, b1, b2, eps, decay)
        theirs = optax.adamw(0.1, b1, b2, eps, weight_decay=decay)
        got, _ = ours.update(grads, ours.init(tree), tree)
        want, _ = theirs.update(wide, theirs.init(wide), wide)
    # Ours rounds Adam's part, the decay and the update to the dtype: 3 of up to 2.
    for name in rest:
        ours, theirs = (jax.tree.leaves(t[name]) for t in (got, want))
        close(ours[0], np.asarray(theirs[0], float), 2.0, 3, tree["bias"].dtype)


@few(4)
@given(st.sampled_from([5, 1]), st.sampled_from([4, 1]), BOOLS, FLOATS, LEADING)
def test_flax_layers(n, m, biased, dtype, leading):
    """Flax's outputs, exactly; sketches P^T G, and Flax's gradients of the rest."""
    x = array(integers(0, *leading, n), dtype)
    space = jc.Subspace({".*kernel": jc.Projection(0.5)}, KEY)
    like = {"use_bias": biased, "dtype": dtype, "param_dtype": dtype}

    def loss(apply):
        return lambda tree: jnp.sum(apply(tree, x).astype(jnp.float32))

    layers = nnx.Linear, cnnx.Linear
    plain, ours = (layer(n, m, **like, rngs=nnx.Rngs(0)) for layer in layers)
    same(ours(x), plain(x))
    call = loss(lambda model, x: model(x))
    grads = nnx.to_pure_dict(cnnx.value_and_grad(call, space)(ours, step=0)[1])
    p = matrix(space, nnx.state(ours), "kernel")
    found = [(grads, nnx.to_pure_dict(nnx.grad(call)(plain)), p)]
    plain, ours = (layer(m, **like) for layer in (nn.Dense, clinen.Dense))
    tree = ours.init(KEY, x)
    same(ours.apply(tree, x), plain.apply(tree, x))
    grads = jc.value_and_grad(loss(ours.apply), space)(tree, step=0)[1]["params"]
    exact = jax.grad(loss(plain.apply))(tree)["params"]
    found.append((grads, exact, matrix(space, tree, "params/kernel")))
    tokens = math.prod(leading)
    for got, exact, p in found:
        kernel = np.asarray(exact.pop("kernel"), np.float64)
        sketch = got.pop("kernel")
        same(got, exact)
        sizes = abs(p).T @ np.full((n, m), 2.0 * tokens)  # |x| of up to 2, dy of 1
        close(sketch, p.T @ kernel, sizes, n + tokens + 3, dtype)
