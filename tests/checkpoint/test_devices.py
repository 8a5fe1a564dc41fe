"""`jc.checkpoint` of arrays that several devices share, as types or XLA have it."""

from contextlib import nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcompact as jc
from tests.cases import slow
from tests.checkpoint.functions import (
    AGAIN,
    FUNCTIONS,
    LOSSY,
    SAVE,
    ULPS,
    W,
    X,
    gradients,
    mlp,
    weighted,
)
from tests.draws import normal
from tests.errors import relative


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("policy", [SAVE, AGAIN, LOSSY, jc.policies.int4()])
def test_sharded_over_four_devices(axis_type, policy):
    small = jc.checkpoint(mlp, policy=policy, params=0)
    expected = gradients(small, W, X)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        got = gradients(small, w, x)
    assert got[1].sharding.spec[0] == "data"
    assert relative(jax.device_get(got), expected) < 1e-3  # as a batch's members


@pytest.mark.parametrize("policy", [SAVE, AGAIN, LOSSY])
@pytest.mark.parametrize(
    "choose",
    [
        lambda y: jnp.sort(y, axis=1),
        lambda y: jnp.clip(y, -0.5, 0.5),
        lambda y: jnp.abs(y).max(axis=1),
        lambda y: jax.lax.top_k(y, 4)[0],
    ],
)
def test_choices_of_explicitly_sharded_arrays(choose, policy):
    """Two rows of 16 columns on each: a group of 64 lies on two devices."""

    def fun(w, x):
        return choose(x @ w[0, :, :16]) ** 2

    small = jc.checkpoint(fun, policy=policy, params=0)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        got = jax.device_get(gradients(small, w, x))
    limit = 0.1 if policy == LOSSY else ULPS  # the square is read decoded
    assert relative(got, gradients(fun, W, X)) < limit


def of_a_part(name):
    def fun(w, x, positive):
        if name == "cond":  # a branch that differs by device hangs in plain JAX
            cases = (lambda: jnp.tanh(x @ w[0]), lambda: jnp.sin(x) @ w[1])
            return jax.lax.cond(positive, *cases)
        return jax.tree.leaves(FUNCTIONS[name](w, x))[0]

    return fun


def over_devices(fun):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    specs = PartitionSpec(), spec, PartitionSpec()
    return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=spec)


def both_gradients(fun):
    grad = jax.jit(jax.grad(weighted(fun), argnums=(0, 1)))
    return [grad(W, X, jnp.array(positive)) for positive in (True, False)]


@cache
def plain_over_devices(name):
    return both_gradients(over_devices(of_a_part(name)))


@pytest.mark.parametrize("policy", [slow(SAVE), slow(AGAIN), LOSSY])
@pytest.mark.parametrize("name", ["mlp", "scan", "cond", "constants", "custom_vjp"])
@pytest.mark.parametrize("inside", [True, False])
def test_with_shard_map(inside, name, policy):
    """The devices' parts of a batch, checkpointed one by one and all at once."""
    small, fun = partial(jc.checkpoint, policy=policy, params=0), of_a_part(name)
    mapped = over_devices(small(fun)) if inside else small(over_devices(fun))
    found = both_gradients(mapped)
    for got, exact in zip(found, plain_over_devices(name), strict=True):
        assert relative(got, exact) < (0.04 if policy == LOSSY else ULPS)


def attention(w, x):
    q, k, v = (x @ w[i] for i in range(3))
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 4) @ v


def gated(w, x):
    return x + jax.lax.cond(
        w.sum() < 1e9, lambda: jax.nn.relu(x @ w[1]), lambda: jnp.sin(x @ w[0])
    )


def rounds(w, x):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0]


BOTH, ONE = {"data", "tensor"}, {"data"}


@pytest.mark.parametrize(
    ("fun", "axis_type", "axes", "check"),
    [
        (attention, AxisType.Auto, BOTH, True),
        slow(attention, AxisType.Explicit, ONE, False),
        (gated, AxisType.Auto, ONE, True),
        (rounds, AxisType.Explicit, BOTH, True),
        slow(rounds, AxisType.Auto, ONE, False),
    ],
)
def test_what_devices_run_by_themselves_is_stored_as_elsewhere(
    fun, axis_type, axes, check
):
    """Whether they do inside what is checkpointed, or it is inside of that; over all
    axes or some. Groups are of a row, or of a device's tokens."""
    w, x = normal(1, 4, 64, 64, scale=0.125), normal(2, 8, 16, 64)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    policy, data = jc.policies.int4(), PartitionSpec("data")

    def mapped(fun):
        specs = {"in_specs": (PartitionSpec(), data), "out_specs": data}
        return jax.shard_map(fun, axis_names=axes, check_vma=check, **specs)

    def small(fun):
        return jc.checkpoint(fun, policy=policy, params=0)

    def gradient(fun):
        return jax.jit(jax.grad(weighted(fun), argnums=(0, 1)))(w, x)

    one, exact = gradient(small(fun)), gradient(fun)
    assert relative(one, exact) < 0.2
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
        x = jax.device_put(x, NamedSharding(mesh, data))
        for got in map(gradient, (small(mapped(fun)), mapped(small(fun)))):
            assert relative(jax.device_get(got), one) < ULPS
        said = jc.explain(mapped(fun), w, x, policy=policy, params=0)
    of_one = jc.explain(fun, w, x, policy=policy, params=0)
    # A device has its own powers of channels.
    assert said.stored <= 1.01 * of_one.stored


# --- explicit sharding ---


def test_a_gradient_that_waits_for_another_and_is_shared():
    """What passes a barrier of two comes after both, next to its product or not."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def fun(params, x):
        w = jax.sharding.reshard(params["w"], PartitionSpec())
        w, b = jax.lax.optimization_barrier((w, params["b"]))
        return jnp.tanh((x + b[None]) @ w)

    params = {"w": normal(1, 64, 64, scale=0.125), "b": normal(2, 64)}
    x = normal(3, 16, 64)
    with jax.set_mesh(mesh):
        places = {"w": PartitionSpec("data"), "b": PartitionSpec()}
        params = {n: jax.device_put(params[n], places[n]) for n in params}
        x = jax.device_put(x, PartitionSpec("data"))
        small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
        got, exact = (
            jax.jit(jax.grad(lambda p, f=f: jnp.square(f(p, x)).sum()))(params)
            for f in (small, fun)
        )
        assert relative(jax.device_get(got), jax.device_get(exact)) < 0.2


GACT = jc.policies.uniform(jc.Quantized(8, 256, symmetric=False, stochastic=True))
OUTLIERS = jc.policies.uniform(jc.codecs.OutlierQuantized(8))


def block(weights, x):
    """Attention of four heads and SwiGLU of 96 columns, half of them on a device."""
    heads, o, gate, up, down = weights
    of_batch = jax.typeof(x).sharding
    q, k, v = jnp.einsum("btd,ndhk->nbthk", x, heads)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x += jnp.einsum("bthk,hkd->btd", mixed, o, out_sharding=of_batch)
    wide = jax.nn.silu(x @ gate) * (x @ up)
    return x + jnp.einsum("btf,fd->btd", wide, down, out_sharding=of_batch)


SHAPES = (3, 32, 4, 16), (4, 16, 32), (32, 96), (32, 96), (96, 32)
SHARED = (None, None, "tensor"), ("tensor",), (None, "tensor"), (None, "tensor")
SHARED = *SHARED, ("tensor",)


@pytest.mark.parametrize(
    "set_mesh", [True, slow(False)], ids=["mesh set", "mesh of arrays"]
)
@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        (SAVE, ULPS),
        (LOSSY, 0.03),
        slow(GACT, 0.06),
        slow(OUTLIERS, 0.03),
        (jc.policies.int4(), 0.3),
    ],
)
def test_tensor_parallelism_by_types(policy, limit, set_mesh):
    """Groups of 64 of 48 columns, and of 256 of heads of 16."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    weights = tuple(
        put(normal(i, *shape, scale=0.2), *spec)
        for i, (shape, spec) in enumerate(zip(SHAPES, SHARED, strict=True))
    )
    x = put(normal(9, 4, 8, 32), "data")
    with jax.set_mesh(mesh) if set_mesh else nullcontext():
        exact = gradients(block, weights, x)
        got = gradients(jc.checkpoint(block, policy=policy, params=0), weights, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert relative(*jax.device_get((got, exact))) < limit


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize(("policy", "limit"), [(SAVE, ULPS), (LOSSY, 0.03)])
def test_where_types_say_nothing_for_a_while(policy, limit, scanned):
    """A tensor of `jax.sharding.auto_axes` lies on another mesh than what reads it."""

    def fun(w, x):
        inner = lambda w, x: jnp.tanh(x @ w[0]) * jax.nn.softmax(x @ w[1])  # noqa: E731
        x = jax.sharding.auto_axes(inner, out_sharding=PartitionSpec("data"))(w, x)
        return x + jnp.sin(x @ w[2])

    small = jc.checkpoint(fun, policy=policy, params=0)

    def layers(fun):
        if not scanned:
            return fun
        return lambda w, x: jax.lax.scan(lambda x, _: (fun(w, x), None), x, None, 2)[0]

    mesh = jax.make_mesh((4,), ("data",))
    with jax.set_mesh(mesh):
        w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        exact, got = gradients(layers(fun), w, x), gradients(layers(small), w, x)
    assert relative(*jax.device_get((got, exact))) < limit
