"""Groups lie within what a norm sets to one scale: a channel, a head."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from jaxcompact.actions import written
from jaxcompact.planner.problem import problem_of
from tests.analysis.candidates import S, candidates
from tests.cases import slow
from tests.draws import normal
from tests.errors import relative

pytestmark = pytest.mark.usefixtures("standard_promotion")


def rms(h, axis):
    return h * jax.lax.rsqrt((h**2).mean(axis, keepdims=True) + 1e-6)


def centred(h, axis):
    mean = h.mean(axis, keepdims=True)
    return (h - mean) * jax.lax.rsqrt(h.var(axis, keepdims=True) + 1e-5)


def in_heads(h, axis=-1):
    return rms(h.reshape(*h.shape[:-1], 8, -1), axis).reshape(h.shape)


def half_in_heads(h):
    q, k = h[..., :64], h[..., 64:]
    turned = rms(k.reshape(*k.shape[:-1], 4, 16), -1).reshape(k.shape)
    return jnp.concatenate([turned, q], -1)


def of_groups(h):
    apart = h.reshape(*h.shape[:-1], 8, -1)
    return centred(apart, (1, 2, 4)).reshape(h.shape)


def turned(h):
    """Heads first, as attention has them."""
    apart = h.reshape(*h.shape[:-1], 8, -1).swapaxes(-2, -3)
    return rms(apart, -1).swapaxes(-2, -3).reshape(h.shape)


def channels_first(h):
    return jnp.moveaxis(centred(jnp.moveaxis(h, -1, 1), (0, 2, 3)), 1, -1)


def flax_norm(h, mask=None, **options):
    norm = nn.BatchNorm(**{"use_running_average": False} | options)
    ones, zeros = jnp.ones(h.shape[-1]), jnp.zeros(h.shape[-1])
    of = {"params": {"scale": ones, "bias": zeros}}
    of["batch_stats"] = {"mean": zeros, "var": ones}
    return norm.apply(of, h, mask=mask, mutable=["batch_stats"])[0]


MASK = np.arange(10) < np.arange(24).reshape(4, 6, 1) % 9 + 2  # of [4, 6, 10]


def masked(h):
    m = jnp.asarray(MASK[..., None], h.dtype)
    mean = (h * m).sum((0, 1, 2)) / m.sum()
    variance = ((h - mean) ** 2 * m).sum((0, 1, 2)) / m.sum()
    return (h - mean) * jax.lax.rsqrt(variance + 1e-5)


def masked_entries(h):
    """The mask is as large as what it is of."""
    m = jnp.repeat(~jnp.asarray(~MASK[..., None]), 128, -1)
    mean = jnp.where(m, h, 0).sum((0, 1, 2)) / MASK.sum()
    variance = jnp.where(m, (h - mean) ** 2, 0).sum((0, 1, 2)) / MASK.sum()
    return (h - mean) * jax.lax.rsqrt(variance + 1e-5)


def by_first_tokens(h):
    first = h[:, :, :5]
    off = h - first.mean((0, 1, 2))
    return off * jax.lax.rsqrt(first.var((0, 1, 2)) + 1e-5)


def batches_apart(h):
    return jnp.concatenate([centred(u, (0, 1, 2)) for u in jnp.split(h, 2)])


def in_halves(h):
    return jnp.concatenate([centred(u, (0, 1, 2)) for u in jnp.split(h, 2, -1)], -1)


def beside_another(h):
    return centred(jnp.concatenate([h, h[..., :64] ** 2], -1), (0, 1, 2))[..., :128]


def padded(h):
    around = jnp.pad(h, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return centred(around, (0, 1, 2))[:, 1:-1, 1:-1]


def repeated(h):
    return centred(jnp.repeat(h, 2, 1), (0, 1, 2))[:, ::2]


# What a norm is of, [4, 6, 10, 128]; and the entries that are to be in a group, or the
# axes over which channels are standardized.
CHANNELS = (0, 1, 2)
NORMS = {
    "layer norm": (lambda h: centred(h, -1), 128),
    "of the last axes": (lambda h: centred(h, (-2, -1)), 1280),
    "of all": (lambda h: centred(h, (0, 1, 2, 3)), None),
    "batch norm": (lambda h: centred(h, (0, 1, 2)), CHANNELS),
    "batch norm of flax": (flax_norm, CHANNELS),
    "batch norm, channels first": (channels_first, CHANNELS),
    "batch norm after a function": (
        lambda h: centred(jax.nn.silu(h), (0, 1, 2)),
        CHANNELS,
    ),
    "batch norm, averages": (partial(flax_norm, use_running_average=True), CHANNELS),
    "batch norm of tokens that count": (masked, None),
    "batch norm of entries that count": (masked_entries, None),
    "batch norm by the first tokens": (by_first_tokens, None),
    "batch norms of halves of a batch, apart": (batches_apart, None),
    "batch norm of averages, tokens": (
        lambda h: flax_norm(h.reshape(24, 10, 128), use_running_average=True),
        None,
    ),
    "batch norm of flax, a mask": (partial(flax_norm, mask=MASK[..., None]), None),
    "batch norm, exact variances, a mask": (
        partial(flax_norm, mask=MASK[..., None], use_fast_variance=False),
        None,
    ),
    "batch norm of halves": (in_halves, CHANNELS),
    "batch norm of what is put together": (beside_another, CHANNELS),
    "batch norm of what is padded": (padded, CHANNELS),
    "batch norm of what is repeated": (repeated, CHANNELS),
    "batch norm of halves of a batch": (
        lambda h: centred(h.reshape(2, 2, 6, 10, 128), (1, 2, 3)).reshape(h.shape),
        (1, 2),
    ),
    "batch norms of members": (jax.vmap(lambda h: centred(h, (0, 1))), (1, 2)),
    "instance norm": (lambda h: centred(h, (1, 2)), (1, 2)),
    "group norm": (of_groups, (1, 2)),
    "heads": (in_heads, 16),
    "heads, turned": (turned, 16),
    "the largest of a head": (
        lambda h: (
            (g := h.reshape(*h.shape[:-1], 4, 32)) / abs(g).max(-1, keepdims=True)
        ).reshape(h.shape),
        32,
    ),
    "over heads": (lambda h: in_heads(h, -2), None),
    "heads of a half": (half_in_heads, 16),
    "over examples": (lambda h: centred(h, 0), None),  # of which there are 4
    "none": (jnp.tanh, None),
}


@pytest.mark.parametrize("name", NORMS)
def test_what_shares_a_scale(name):
    norm, row = NORMS[name]

    def f(w, x):
        return norm(x @ w) @ w

    found = candidates(f, S((128, 128), jnp.float32), S((4, 6, 10, 128), jnp.float32))
    assert found["dot_general.0"].row == row


SIZES = {
    "batch norm": (NORMS["batch norm"][0], 1),
    "group norm": (of_groups, 1),
    "heads": (in_heads, 16),
}
PARAMS = {k: normal(i, 128, 128) / 11 for i, k in enumerate("ab")}
X, CT = normal(2, 4, 6, 10, 128), normal(4, 4, 6, 10, 128)


def block(norm):
    return lambda params, x: jax.nn.relu(norm(x @ params["a"])) @ params["b"]


def error(fun, policy, params=PARAMS, x=X):
    """Of the second product's gradient, relative."""

    def gradient(fun):
        return jax.jit(jax.grad(lambda p: jnp.sum(fun(p, x) * CT)))(params)["b"]

    exact = gradient(fun)
    small = gradient(jc.checkpoint(fun, policy=policy, params=0))
    return jnp.linalg.norm(small - exact) / jnp.linalg.norm(exact)


@pytest.mark.parametrize(("bits", "most"), [(4, 0.11), slow(8, 0.007)])
@pytest.mark.parametrize("name", ["batch norm", "heads", slow("group norm")])
def test_sizes_that_a_norm_takes_away_change_nothing(name, bits, most):
    """e^N(0, 1), of each channel or head; beside larger ones a small one is lost.

    64 entries of N(0, 1) err by 0.095 in 4 bits and 0.0059 in 8, 16 by less.
    """
    norm, size = SIZES[name]
    sizes = jnp.exp(jnp.repeat(normal(3, 128 // size), size))
    params = PARAMS | {"a": PARAMS["a"] * sizes}
    policy = {4: jc.policies.int4, 8: jc.policies.int8}[bits]()
    assert 0 < error(block(norm), policy, params) < most
    shared = jc.policies.uniform(policy.codec)
    assert error(block(norm), shared, params) > 2 * most


def test_channels_may_lie_far_from_zero():
    """Ten times their size."""
    x = X + 10 * normal(3, 128)
    policy = jc.Policy({"x": jc.Save()}, jc.policies.int4())
    assert 0 < error(block(NORMS["batch norm"][0]), policy, x=x) < 0.11


@pytest.mark.parametrize("name", ["instance norm", slow("group norm")])
def test_samples_may_differ_in_size(name):
    """Those of one sign above all: the mean of the bright is far from the dim."""
    dim = jnp.where(jnp.arange(4) % 2, 0.01, 1.0)[:, None, None, None]
    off = error(block(NORMS[name][0]), jc.policies.int4(), x=abs(X) * dim)
    assert 0 < off < 0.11


@pytest.mark.parametrize(
    "name", ["batch norm of tokens that count", slow("batch norm of flax, a mask")]
)
def test_what_a_mask_leaves_out_may_be_of_any_size(name):
    norm, m = NORMS[name][0], MASK[..., None]
    x = jnp.where(m, X, 100.0)
    fun = block(norm)
    assert 0 < error(lambda p, x: fun(p, x) * m, jc.policies.int4(), x=x) < 0.11


def test_sums_over_devices_are_a_norms():
    """As a batch norm's that devices share; each has moments of its own."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P("d")}
    fun = block(partial(flax_norm, axis_name="d"))
    policy, actions = jc.policies.int4(), []

    def wrapped(params, x):
        said = jc.explain(fun, params, x, policy=policy, params=0)
        actions.extend(r.action for r in said.rows if r.name == "dot_general.0")
        return jc.checkpoint(fun, policy=policy, params=0)(params, x)

    jax.eval_shape(jax.shard_map(wrapped, mesh=mesh, **specs), PARAMS, X)
    assert actions == ["Quantized(bits=4, standardized=True)"]


# A residual stream's: three channels are far larger than all others.
FAR = jnp.where(jnp.arange(128) % 50 == 3, 60.0, 0.0)[None, None]
STREAM, STREAM_CT = normal(5, 4, 64, 128) + FAR, normal(6, 4, 64, 128)
GAIN = jnp.where(FAR == 0, jnp.std(FAR), 0.1)


def of_tokens(params, x):
    gain = GAIN.reshape(*[1] * (x.ndim - 1), -1)
    x = x + jax.nn.gelu(centred(x, -1) * gain @ params["a"]) @ params["b"]
    return x + jnp.tanh(centred(x, -1) * gain @ params["b"]) @ params["a"]


def of_inputs(params, x):
    """As a norm before them leaves them; little is made of the large ones."""
    read = x * jnp.where(FAR == 0, 1.0, 0.01).reshape(*[1] * (x.ndim - 1), -1)
    return x + jnp.tanh(read @ params["a"]) @ params["b"]


def of_images(params, x):
    """A convolution of each channel by itself reads them, then a norm, as ConvNeXt."""
    images = x.reshape(-1, 8, 8, 128)
    around = 1 / 9 + params["b"][:9].reshape(3, 3, 1, 128) / 9
    numbers = ("NHWC", "HWIO", "NHWC")
    made = jax.lax.conv_general_dilated(
        images, around, (1, 1), "SAME", None, None, numbers, 128
    )
    made = centred(made, -1) * GAIN[None]
    return x + (jax.nn.gelu(made @ params["a"]) @ params["b"]).reshape(x.shape)


def of_products(params, x):
    """A norm after them, whose scale makes channels alike."""
    sizes = 1 + FAR[0]
    made = jax.nn.gelu(x @ params["a"]) @ (params["b"] * sizes)
    return x + jnp.tanh(centred(made, -1) * 9 / sizes[None]) @ params["b"]


def of_sums(params, x):
    """A product reads them as they are; nothing makes tokens alike."""
    return (x @ params["a"] + jnp.tanh(x) @ params["b"]) @ params["b"]


def convolved_sums(params, x):
    read, numbers = x @ params["a"] + jnp.tanh(x) @ params["b"], ("NWC", "WIO", "NWC")
    kernel = params["b"][None]
    return jax.lax.conv_general_dilated(read, kernel, (1,), "SAME", None, None, numbers)


def one_by_one(fun, policy):
    return jax.vmap(jc.checkpoint(fun, policy=policy, params=0), (None, 0))


def together(fun, policy):
    return jc.checkpoint(fun, policy=policy, params=0)


def whole_images(fun, policy):
    small = together(fun, policy)
    return lambda p, x: small(p, x.reshape(4, 8, 8, 128)).reshape(x.shape)


@pytest.mark.parametrize(("policy", "most"), [("int4", 0.15), slow("int8", 0.01)])
@pytest.mark.parametrize(
    ("fun", "wrapped", "x"),
    [
        (of_tokens, together, STREAM),
        (of_tokens, one_by_one, STREAM),
        (of_tokens, whole_images, STREAM),
        (of_inputs, together, STREAM),
        slow(of_inputs, one_by_one, STREAM),
        (of_images, whole_images, STREAM),
        (of_products, together, STREAM - FAR),
    ],
)
def test_channels_may_be_far_larger_than_all_others(fun, wrapped, x, policy, most):
    """Of what is rounded and what is made of it 4 bits err by 0.1 each. Of products the
    far ones count as well, whose codes are of a third of the largest."""
    most *= 1.5 if fun is of_products else 1
    policy = getattr(jc.policies, policy)()

    def gradient(fun):
        grads = jax.grad(lambda p, x: jnp.sum(fun(p, x) * STREAM_CT), (0, 1))
        return jax.jit(grads)(PARAMS, x)[0]["a"]

    def off(policy):
        return relative(gradient(wrapped(fun, policy)), exact)

    exact = gradient(fun)
    found = off(policy)
    assert 0 < found < most
    assert off(jc.policies.uniform(policy.codec)) > 3 * found


@pytest.mark.parametrize(
    ("fun", "names"), [(of_tokens, {"x", "add.3"}), (of_inputs, {"x"})]
)
def test_what_is_a_stream(fun, names):
    said = jc.explain(fun, PARAMS, STREAM, policy=jc.policies.int4(), params=0)
    apart = {r.name for r in said.rows if r.action == "Quantized(bits=4, axis=-2)"}
    assert apart == names


@pytest.mark.parametrize(
    ("fun", "x", "names"),
    [
        (of_tokens, STREAM[:, :24], ("x", "add.3")),  # scales would take a 16th more
        (of_tokens, STREAM.reshape(256, 128), ("x", "add.3")),  # may be a graph's nodes
        (of_images, STREAM.reshape(4, 8, 8, 128), ("x",)),
        (of_sums, STREAM, ("add.0",)),
        (convolved_sums, STREAM, ("add.0",)),
        (block(NORMS["layer norm"][0]), STREAM, ("dot_general.0",)),
    ],
    ids=["few tokens", "rows", "images", "sums", "convolutions", "products"],
)
def test_what_is_no_stream_is_equalized(fun, x, names):
    rows = jc.explain(fun, PARAMS, x, policy=jc.policies.int4(), params=0).rows
    actions = {r.action for r in rows if r.name in names}
    assert actions == {"Quantized(bits=4, equalized=True)"}


@pytest.mark.parametrize(
    ("fun", "x", "names"),
    [
        (of_tokens, STREAM[0, :24], ("x", "add.3")),  # powers would take a 16th more
        (block(jnp.tanh), STREAM, ("dot_general.0",)),
    ],
    ids=["few rows", "a function reads it"],
)
def test_what_is_even(fun, x, names):
    rows = jc.explain(fun, PARAMS, x, policy=jc.policies.int4(), params=0).rows
    assert not [r for r in rows if r.name in names and "equalized" in r.action]


@pytest.mark.parametrize(
    ("fun", "x", "name", "fields"),
    [
        (block(NORMS["batch norm"][0]), X, "dot_general.0", {"standardized": True}),
        (of_tokens, STREAM, "add.3", {"axis": -2}),
        (of_tokens, STREAM.reshape(256, 128), "add.3", {"equalized": True}),
        (of_inputs, STREAM.reshape(256, 128), "x", {"equalized": True}),
    ],
    ids=["standardized", "channels", "equalized", "inputs"],
)
def test_a_plan_has_such_groups_in_all_its_bits(fun, x, name, fields):

    def make_gradient(policy):
        wrapped = jc.checkpoint(fun, policy=policy, params=0)
        grads = jax.grad(lambda p, x: jnp.sum(wrapped(p, x) ** 2), (0, 1))
        return grads, (PARAMS, x)

    codecs = [jc.Quantized(8), jc.Quantized(2, 32)]
    channels = [replace(c, **fields) for c in codecs]
    own = jc.Quantized(4, **fields)
    for found in (jc.sensitivity(make_gradient, codecs=codecs), None):
        if found:
            assert list(found.effects[name].errors) == [own, *channels]
        _, asked = problem_of(
            make_gradient, jc.memory.devices()["h200"], 2.0, found, codecs
        )
        [item] = [i for i in asked.items if i.tensor.name == name]
        offered = {o.action for o in item.options if o.lossy}
        assert offered == {*channels, *([own] if found else [])}


def test_a_codecs_own_axis_and_uniform_stay():
    fun, own = block(NORMS["batch norm"][0]), jc.Quantized(8, axis=-3)
    policies = jc.policies.compress(own), jc.policies.uniform(jc.Quantized(8))
    for policy in policies:
        said = jc.explain(fun, PARAMS, X, policy=policy, params=0)
        [row] = [row for row in said.rows if row.name == "dot_general.0"]
        assert row.action == written(policy.codec)
