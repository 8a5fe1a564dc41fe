"""Laws of the public functions, for arguments drawn at random.

Codecs have theirs in `test_codecs`, `jc.checkpoint` in `test_checkpoint` and
`memory.largest_batch` in `test_search`; what is no argument is in `test_arguments`.
Where data are small integers all sums are exact in every dtype, and equality is
equality.
"""

import math
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcompact as jc
from jaxcompact import linen as clinen
from jaxcompact import nnx as cnnx
from jaxcompact.planner.sensitivity import Effect
from jaxcompact.policy import Compress

KINDS = ("gaussian", "rademacher", "sparse", "countsketch", "orthonormal")
FLOATS = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
# What comes first is in the first example.
LEADING = st.sampled_from([(2, 1, 3), (), (1,), (0,), (3,)])
BOOLS = st.booleans()
KEY = jax.random.key(3)


def few(examples: int):
    return settings(derandomize=True, deadline=None, max_examples=examples)


def integers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, shape)


def array(x: np.ndarray, dtype) -> jax.Array:
    return jnp.asarray(x, jnp.float32).astype(dtype)


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(got, want, absolute, terms: int, dtype) -> None:
    """Sums of so many terms, each rounded: by the sum of their absolute values."""
    info = jnp.finfo(dtype)
    bound = terms * (float(info.eps) * absolute + float(info.tiny))
    assert (abs(np.asarray(got, np.float64) - want) <= bound).all()


def matrix(space: jc.Subspace, tree: Any, path: str, step: int = 0, layer=...):
    """P of a kernel, of one of its layers if it has several."""
    slot = space.slots(tree)[path]
    key = slot.keys(space.key, space.generation(step))[layer]
    return np.asarray(slot.projection.matrix(key, slot.width), np.float64)


@st.composite
def projections(draw, width: int, *kinds: str) -> jc.Projection:
    rank = draw(st.sampled_from([0.5, 0.1, 1.0]) | st.integers(1, width))
    sizes = width, jc.Projection(rank).rank_of(width)
    blocks = st.sampled_from([b for b in (3, 2, 1) if not any(s % b for s in sizes)])
    kind = draw(st.sampled_from(kinds or KINDS))
    return jc.Projection(rank, kind, blocks=draw(blocks))


# --- CompAct ---


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


def tree_of(stack: tuple[int, ...], n: int, m: int, dtype) -> dict:
    """A kernel for the subspace, one that is none of it, and a bias."""
    return {
        "in": {"kernel": array(integers(0, *stack, n, m), dtype)},
        "out": {"kernel": array(integers(1, m, 2), dtype)},
        "bias": array(integers(2, m), dtype),
    }


WIDE_FLOATS = st.sampled_from([jnp.float32, jnp.bfloat16])
STACKS = st.sampled_from([(2, 2), (), (1,)])
TREES = st.builds(
    tree_of, STACKS, st.sampled_from([6, 1]), st.sampled_from([3, 1]), WIDE_FLOATS
)


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


@few(12)
@given(st.integers(2, 4), st.data())
def test_static_arguments_of_flax_checkpoints(count, data):
    """Wherever they stand, from either end; beyond the ends they are refused."""
    place = data.draw(st.integers(1, count - 1))
    number = data.draw(st.sampled_from([place, place - count]))
    beyond = data.draw(st.sampled_from([count, -count - 1, 10**9]))
    args: list = [jnp.full(2, 3.0)] * (count - 1)
    args[place - 1] = "static"

    def double(module, *args):
        assert args[place - 1] == "static"
        return [2.0 * x for x in args if not isinstance(x, str)]

    class Module(nn.Module):
        __call__ = double

    for static in (number, beyond):
        block = cnnx.checkpoint(double, static_argnums=static)
        wrapped = clinen.checkpoint(Module, static_argnums=static)()
        for call in (block, lambda _, *args, w=wrapped: w.apply({}, *args)):
            if static == beyond:
                with pytest.raises(ValueError, match="static_argnums must be below"):
                    call(nnx.Dict(), *args)
            else:
                same(call(nnx.Dict(), *args), double(None, *args))


@few(2)
@given(st.integers(1, 3), st.integers(0, 3))
def test_results_stay_on_their_device(one, other):
    """And arrays of two devices are refused."""
    devices = jax.devices("cpu")
    tree = jax.device_put(tree_of((), 6, 3, jnp.float32), devices[one])
    x = jax.device_put(jnp.ones((2, 6)), devices[one])
    space = jc.Subspace({"in/.*": jc.Projection(2)}, KEY)
    call = jc.value_and_grad(
        lambda tree, x: jc.linear(x, tree["in"]["kernel"], tree["bias"]).sum(), space
    )
    tx = jc.in_subspace(space, optax.identity())
    value, grads = call(tree, x, step=0)
    state = jax.device_put(tx.init(tree), devices[one])
    updates, state = tx.update(grads, state, tree)
    encoded = jc.Quantized(4).encode(x)
    for leaf in jax.tree.leaves((value, grads["in"], updates, state, encoded)):
        assert leaf.devices() == {devices[one]}
    if one != other:
        with pytest.raises(ValueError, match="incompatible devices"):
            call(tree, jax.device_put(x, devices[other]), step=0)


# --- policies, plans and reports ---

CODECS = (
    st.builds(
        jc.Quantized,
        st.sampled_from([1, 2, 3, 4, 8]),
        st.sampled_from([8, 64]),
        BOOLS,
        BOOLS,
        st.integers(-3, -1),
    )
    | st.builds(jc.Quantized, scale_bits=st.just(8))
    | st.builds(jc.OutlierQuantized, slots=st.floats(0.01, 1) | st.integers(1, 9))
    | st.builds(jc.Float8, st.integers(1, 200))
    | st.builds(jc.Hadamard, st.sampled_from([1, 2, 64]))
    | st.builds(jc.Narrow, st.integers(1, 2**32))
    | st.just(jc.BitMask())
)
CODECS |= st.just(jc.Offload()) | st.builds(
    lambda inner, last: jc.Chain(*inner, last),
    st.lists(CODECS, max_size=2),
    CODECS | st.just(jc.Offload()),
)
ACTIONS = (
    CODECS
    | st.sampled_from([jc.Save(), jc.Recompute()])
    | st.builds(jc.Derivative, CODECS, st.none() | CODECS)
)
BYTES = st.integers(1 - 10**18, 10**18 - 1)  # a plan's numbers are below 1e18
REALS = BYTES | st.floats(-1e18, 1e18, exclude_min=True, exclude_max=True)
NUMBERS = st.tuples(BYTES, REALS, BYTES, REALS, BYTES)
RULES = st.dictionaries(st.text(), ACTIONS, max_size=4)


@few(60)
@given(st.text(), RULES, NUMBERS, ACTIONS)
def test_plans_survive_json_and_policies_are_as_they_are_printed(
    block, actions, numbers, default
):
    plan = jc.Plan(block, actions, "h200", *numbers)
    again = jc.Plan.from_json(plan.to_json())
    assert vars(again) == vars(plan) and hash(again) == hash(plan)
    assert again.unused(set()) == sorted(actions)
    for policy in (jc.Policy(actions, default), jc.Policy({}, jc.policies.int3())):
        again = eval(repr(policy), vars(jc) | {"Compress": Compress})
        assert again == policy and hash(again) == hash(policy)


@few(5)
@given(
    st.sampled_from([2, 3, 66]),
    st.sampled_from([1, 8, 65]),
    st.sampled_from([jc.Quantized(4), jc.Quantized(8, 32), jc.Float8(8)]),
    WIDE_FLOATS,
)
def test_explained_bytes_are_those_that_are_held(tokens, width, codec, dtype):
    """And shapes alone say as much."""

    def block(w, x):
        return jnp.tanh(jnp.sin(x @ w) @ w)

    policy = Compress(codec)
    w, x = (array(integers(0, rows, width), dtype) for rows in (width, tokens))
    said = jc.explain(block, w, x, policy=policy, params=0)
    for row in said.rows:
        assert row.nbytes == math.prod(row.shape) * jnp.dtype(row.dtype).itemsize
        if row.action.startswith(("Quantized", "Float8")):
            action = eval(row.action, vars(jc))
            assert row.stored == action.nbytes(row.shape, row.dtype)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, x)]
    assert said == jc.explain(block, *shapes, policy=policy, params=0)
    _, backward = jax.vjp(jc.checkpoint(block, policy=policy, params=0), w, x)
    held = {id(a): a for a in jax.tree.leaves(backward) if a.shape != w.shape}
    assert said.stored == sum(a.nbytes for a in held.values())


def effects_of(drawn) -> jc.Sensitivity:
    codecs = [jc.Quantized(b) for b in (8, 4, 2)]
    effects = {
        f"t{i}": Effect((size,), jnp.float32, dict(zip(codecs, e, strict=True)), count)
        for i, (size, count, e) in enumerate(drawn)
    }
    return jc.Sensitivity("block", jc.policies.int4(), effects)


ERRORS = st.tuples(*[st.integers(0, 1000)] * 3)
EFFECTS = st.tuples(st.integers(1, 5000), st.integers(1, 3), ERRORS)


@few(20)
@given(st.lists(EFFECTS, min_size=1, max_size=5).map(effects_of), st.floats(1.0, 20.0))
def test_automatic_precision_keeps_to_its_bits(found, bits):
    """And is no worse than any one codec that does."""
    alike = [dict.fromkeys(found.effects, jc.Quantized(b)) for b in (8, 4, 2)]
    if bits < found.bits(alike[-1]):
        with pytest.raises(ValueError, match="bits must be .* or more"):
            found.policy(bits)
        return
    policy = found.policy(bits)
    rules = dict(policy.rules)
    assert rules.keys() == found.effects.keys() and policy.default == found.base
    assert found.bits(rules) <= bits * (1 + 1e-9)
    for others in alike:  # the solver stops within 1e-4 of the best
        if found.bits(others) <= bits:
            assert found.error(rules) ** 2 <= found.error(others) ** 2 * 1.001


@few(4)
@given(st.integers(0, 10**9), st.integers(1, 48), st.floats(1.0, 3.0), st.floats(0, 1))
def test_plans_keep_their_budget_and_their_error(beside, layers, factor, max_error):
    """Of a step that takes what the plan stores, and something beside it."""
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 64), (512, 64))]
    made: list = []

    def make_step(policy):
        made.append(policy)
        wrapped = jc.checkpoint(
            lambda w, x: x + jnp.tanh(jnp.sin(x @ w) @ w), policy=policy, params=0
        )
        return jax.grad(lambda w, x: wrapped(w, x).sum().astype(jnp.float32)), args

    def peak(step, *args, device):
        return SimpleNamespace(peak_bytes=beside + layers * made[-1].nbytes)

    def planned(budget):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["jaxcompact.planner.search"], "peak", peak)
            options = {"max_error": max_error, "progress": lambda line: None}
            return jc.plan_step(make_step, layers=layers, budget=budget, **options)

    if beside:
        with pytest.raises(ValueError, match=r"budget must be [\d.]+ .iB or more"):
            planned(1)
    small = planned(2**30 + 2**20)
    large = planned(2**30 + int(2**20 * factor))
    for plan, room in ((small, 1), (large, factor)):
        budget = 2**30 + int(2**20 * room)
        assert plan.peak_bytes == beside + layers * plan.nbytes <= budget == plan.budget
        assert plan.error <= max_error * (1 + 1e-6)
    assert large.seconds <= small.seconds


@few(3)
@given(st.sampled_from(["a100", "h200", "rtx4090"]), st.sampled_from([300, 40]), BOOLS)
def test_a_peak_is_the_sum_of_its_parts(device, rows, donated):
    """By kind, and by arguments, outputs and temporaries; a donated one counts once."""
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
    step = jax.jit(lambda x: x * x.sum(), donate_argnums=0 if donated else ())
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXCOMPACT_CACHE", cache)
        found = jc.memory.peak(step, x, device=device)
    parts = found.argument_bytes, found.output_bytes, found.temporary_bytes
    assert found.peak_bytes == sum(parts) == sum(found.breakdown.values())
    assert parts[:2] == (4096 * rows, 0 if donated else 4096 * rows)
    assert 4 <= parts[2] < 2**20  # the sum, and what its parts are added up in
    assert found.peak_bytes < jc.memory.devices()[device].memory
