"""Masks and constants of the scores' size, in a loop over layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxcompact as jc
from jaxcompact import memory

LAYERS, B, HEADS, T, D = 3, 2, 4, 32, 64
CHOSEN = np.arange(D) % 3 > 0
KEPT = np.asarray(np.random.default_rng(0).random((T, T)) < 0.9)  # closed over


def block(params, x, mask, bias, key):
    heads = {n: (x @ params[n]).reshape(*x.shape[:-1], HEADS, -1) for n in "qkv"}
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads["q"], heads["k"]) / 4 + bias
    causal = jnp.tril(jnp.ones((T, T), bool)) & KEPT
    causal = jnp.broadcast_to(causal, scores.shape).reshape(-1, T, T)
    scores = jnp.where(causal.reshape(scores.shape), scores, -1e30)
    scores = jnp.where(mask, scores, -1e30)
    shown = jax.random.bernoulli(key, 0.9, scores.shape)
    weights = jnp.where(shown, jax.nn.softmax(scores), 0)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, heads["v"])
    return x + out.reshape(x.shape) @ params["o"] + params["b"]


def arguments(batch=B):
    rng = np.random.default_rng(1)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / D**0.5, jnp.float32)

    params = {n: normal(LAYERS, D, D) for n in "qkvo"} | {"b": normal(LAYERS, D)}
    mask = jnp.asarray(rng.random((batch, 1, 1, T)) < 0.9)
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return params, normal(1, HEADS, T, T), normal(batch, T, D), mask, keys


def gradient(wrapped):
    """Of the layers in a scan, by parameters, bias and x."""

    def loss(params, bias, x, mask, keys):
        def layer(x, own):
            params, key = own
            return wrapped(params, x, mask, bias, key), None

        x, _ = jax.lax.scan(layer, x, (params, keys))
        return jnp.sum(x * x)

    return jax.value_and_grad(loss, (0, 1, 2))


def scans(fun, *args):
    """Of the passes: what they read in each step, and what they make."""
    eqns = jax.make_jaxpr(fun)(*args).eqns
    return [
        ([v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])
        for eqn in eqns
        if eqn.primitive.name == "scan"
    ]


RECOMPUTE = jc.Policy({}, default=jc.Recompute())
POLICIES = {
    "recompute": RECOMPUTE,
    "int4": jc.policies.int4(),
    "GACT": jc.policies.uniform(jc.Quantized(4, 32, symmetric=False, stochastic=True)),
    "stochastic": jc.policies.uniform(jc.Quantized(8, 32, stochastic=True)),
    "outliers": jc.policies.uniform(jc.OutlierQuantized()),
    "float8": jc.policies.uniform(jc.Float8()),
    "hadamard": jc.policies.uniform(jc.Chain(jc.Hadamard(32), jc.Quantized(4, 32))),
}


def near(found, exact):
    """But for float32's roundings, in sums of a hundred terms in another order."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * jnp.abs(b).max())


def ahead(fun, *args):
    """Shapes of what is as large as x, and made before the forward pass' loop."""
    (given, _), *_ = scans(fun, *args)
    own = [x.shape for x in jax.tree.leaves(args)]
    return [x.shape for x in given if x.size >= B * T * D and x.shape not in own]


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_made_ahead_of_the_loop(name, any_rank):
    args = arguments()
    wrapped = jc.checkpoint(block, policy=POLICIES[name], params=(0, 3))
    assert ahead(gradient(wrapped), *args) == []
    alone = ahead(gradient(jax.checkpoint(block)), *args)
    assert set(alone) == {(B, HEADS, T, T)}  # masks and constants


def test_it_is_the_same_function(any_rank):
    args = arguments()
    loss, grads = jax.jit(gradient(jax.checkpoint(block)))(*args)
    found, same = jax.jit(gradient(jc.checkpoint(block, policy=RECOMPUTE)))(*args)
    assert loss == found
    near(same, grads)


def in_a_scan(fun, policy, **options):
    """Of ``fun(w, x, key)`` of each layer, with one key."""
    wrapped = jc.checkpoint(fun, policy=policy, params=0, **options)

    def loss(w, x, key):
        x, _ = jax.lax.scan(lambda x, w: (wrapped(w, x, key), None), x, w)
        return jnp.sum(x * x)

    shape = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
    w = jax.ShapeDtypeStruct((LAYERS, D), jnp.float32)
    return scans(jax.grad(loss), w, shape, jax.random.key(0))


def test_a_mask_that_is_stored_is_stored_once(any_rank):
    """That of all layers is known before the loop; in its steps it would be theirs."""
    rates = np.linspace(0.5, 0.9, T, dtype=np.float32)[:, None]

    def fun(w, x, key):
        shown = jax.random.uniform(key, x.shape) < jnp.broadcast_to(rates, x.shape)
        return jnp.where(shown, w * x, 0)

    policy = jc.Policy({"lt.*": jc.BitMask()}, default=jc.Recompute())
    for once in (False, True):  # what is tied to the outputs is theirs
        (_, made), (read, _) = in_a_scan(fun, policy, prevent_cse=not once)
        assert (jnp.uint8 in [x.dtype for x in made]) != once
        sizes = [x.size for x in read if x.dtype == jnp.uint8]
        assert sizes == [B * T * D // 8 * (1 if once else LAYERS)]


def test_what_costs_is_made_once(any_rank):
    """A table, and what is no elementwise function of what is broadcast."""
    rates = np.linspace(1, 2, D, dtype=np.float32)

    def fun(w, x, key):
        table = jnp.sin(jnp.arange(T, dtype=jnp.float32)[:, None] * rates)
        ranks = jnp.cumsum(jnp.broadcast_to(rates, x.shape), -1)
        return w * x * -jnp.broadcast_to(table, x.shape) + jnp.reshape(ranks, x.shape)

    (given, _), _ = in_a_scan(fun, RECOMPUTE)
    shapes = [x.shape for x in given if x.size >= T * D]
    assert sorted(shapes) == [(B, T, D), (B, T, D), (T, D)]  # x itself, ranks, table


def test_what_layers_share(any_rank):
    """A bias of theirs is broadcast in each; a product of one input is made once."""

    def fun(shared, context, w, x):
        mean = jnp.mean(context, -1, keepdims=True)
        other = (context - jnp.broadcast_to(mean, x.shape)) @ shared["w"]
        bias = jnp.broadcast_to(shared["b"].reshape(1, 1, D), x.shape)
        return w * x + jnp.tanh(other) + bias

    def loss(shared, context, w, x):
        wrapped = jc.checkpoint(fun, policy=RECOMPUTE, params=(0, 2))
        layer = lambda x, w: (wrapped(shared, context, w, x), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    shared = {"w": jnp.ones((D, D)), "b": jnp.ones(D)}
    context = x = jnp.ones((B, T, D))
    args = shared, context, jnp.ones((LAYERS, D)), x
    eqns = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*args).eqns
    forward = next(eqn for eqn in eqns if eqn.primitive.name == "scan")
    assert "dot_general" not in str(forward.params["jaxpr"])
    assert "select_n" in str(forward.params["jaxpr"])


@pytest.mark.slow
def test_examples_of_a_vmap(any_rank):
    """Of the mask or of x: what is broadcast is one's, or all's."""
    params, bias, x, mask, keys = arguments(batch=4)
    wrapped = jc.checkpoint(block, policy=RECOMPUTE, params=0)

    def one(fun, x, mask):
        return gradient(fun)(params, bias, x[None], mask, keys)

    for axes in ((0, None), (0, 0), (None, 0)):
        masks = mask[:, None] if axes[1] == 0 else mask[:1]
        of = x if axes[0] == 0 else x[0]
        found, exact = (
            jax.jit(jax.vmap(lambda x, m, fun=fun: one(fun, x, m), axes))(of, masks)
            for fun in (wrapped, jax.checkpoint(block))
        )
        near(found, exact)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto, "shard_map"])
def test_on_several_devices(kind, any_rank):
    manual = kind == "shard_map"
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(AxisType.Auto if manual else kind,)
    )
    params, bias, x, mask, _ = arguments()

    def fun(params, x, mask, bias, key):
        weights = jnp.where(CHOSEN, params["q"], 0)  # which vary over no device
        return jnp.where(mask[:, 0, 0, :, None], x @ weights + params["b"], 0)

    def of(fun):
        def grads(params, bias, x, mask):
            keys = jax.random.split(jax.random.key(0), LAYERS)
            loss, grads = gradient(fun)(params, bias, x, mask, keys)
            return (loss[None], grads[2]) if manual else (loss, grads[2])

        if not manual:
            return grads
        data = jax.P("data")
        specs = jax.P(), jax.P(), data, data
        return jax.shard_map(grads, mesh=mesh, in_specs=specs, out_specs=data)

    wrapped = jc.checkpoint(fun, policy=RECOMPUTE, params=0)
    with jax.set_mesh(mesh):
        x, mask = jax.device_put((x, mask), jax.NamedSharding(mesh, jax.P("data")))
        if kind is AxisType.Explicit:
            assert ahead(of(wrapped), params, bias, x, mask) == []
        programs = [
            jax.jit(of(f)).lower(params, bias, x, mask).compile()
            for f in (wrapped, jax.checkpoint(fun))
        ]
        found, exact = (program(params, bias, x, mask) for program in programs)
    near(found, exact)
    collectives = [program.as_text().count("all-") for program in programs]
    assert collectives[0] == collectives[1]


def test_inputs_of_all_kinds(any_rank):
    """Scalars, keys that are used once, what lies in the host's memory."""

    @jax.custom_vjp
    def scaled(x, keys):  # which has x and keys that are broadcast beside it
        return x * jax.vmap(jax.random.normal)(keys)[:, None]

    scaled.defvjp(lambda x, keys: (scaled(x, keys), None), lambda _, ct: (2 * ct, None))

    def fun(x, scale, key, count, far):
        spread = jnp.broadcast_to(scale, x.shape)
        chosen = jnp.broadcast_to(count, x.shape) > 2
        one, other = key
        noise = scaled(jnp.sin(x), jnp.broadcast_to(one, 4)) + jax.random.normal(other)
        here = jax.device_put(far, jax.memory.Space.Device)
        return jnp.where(chosen, x * spread, 1.0) + noise * here

    def loss(fun, x, scale, count, far):
        return fun(x, scale, jax.random.split(jax.random.key(0)), count, far).sum()

    x, count = jnp.arange(8.0).reshape(4, 2), jnp.array(3)
    far = jax.device_put(x, jax.memory.Space.Host)
    args = x, jnp.float32(3), count, far
    with jax.debug_key_reuse(True):
        found, exact = (
            jax.jit(jax.grad(partial(loss, f), (0, 1)))(*args)
            for f in (jc.checkpoint(fun, policy=RECOMPUTE), fun)
        )
    jax.tree.map(np.testing.assert_allclose, found, exact)


@pytest.mark.slow
def test_a_card_has_less_in_memory(any_rank):
    """XLA moves nothing ahead either."""

    def attention(w, x):
        q, k, v = ((x @ w[n]).reshape(2, 1024, 8, 64) for n in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        scores = jnp.where(jnp.tril(jnp.ones((1024, 1024), bool)), scores, -1e30)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
        return x + out.reshape(x.shape)

    def broadcasts(wrapped):
        def loss(w, x):
            x, _ = jax.lax.scan(lambda x, w: (wrapped(w, x), None), x, w)
            return jnp.sum(x, dtype=jnp.float32)

        w = jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16)
        x = jax.ShapeDtypeStruct((2, 1024, 512), jnp.bfloat16)
        there = memory.peak(jax.grad(loss), dict.fromkeys("qkv", w), x).buffers
        large = (b for b in there if b.shape.endswith("1024,1024]"))
        return [b.shape for b in large if "broadcast" in b.source]

    assert broadcasts(jc.checkpoint(attention, policy=RECOMPUTE, params=0)) == []
    assert broadcasts(jax.checkpoint(attention)) != []
