"""Kernels in programs that XLA splits over devices.

jax lowers no interpreted kernel as it splits a program: on CPUs the reference is in
their place, and has their bits (test_quantize). For cards they are compiled.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from jaxcompact.kernels import choice
from jaxcompact.kernels.activate.api import in_one_pass
from jaxcompact.kernels.quantize import api, mosaic_gpu, reference
from tests.draws import normal
from tests.kernels.machine_code import compiled, kernels_in
from tests.kernels.test_quantize import data, decoding, same

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
P = jax.P
# Of x, over a mesh of 2 by 2: shape, how it is split, a part as the kernel sees it.
SPLIT = {
    "batch and tokens": ((4, 6, 256), P("a", "b"), (6, 256)),
    "tokens over all": ((3, 8, 104), P(None, ("a", "b")), (6, 104)),
    "batch and width": ((2, 5, 256), P("b", None, "a"), (5, 128)),
    "width over all": ((15, 256), P(None, ("b", "a")), (15, 64)),
}
# Its groups lie on two devices, or the last one is in part.
GATHERED = {
    "half groups": ((2, 5, 192), P("a", None, "b"), (5, 192)),
    "groups for two of four": ((5, 128), P(None, ("a", "b")), (5, 128)),
    "a group in part": ((4, 3, 200), P("b", None, "a"), (6, 200)),
}
FIELDS = {
    "tokens over all": {"bits": 8, "symmetric": False},
    "width over all": {"bits": 2},
    "a group in part": {"scale_bits": 8},
}
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute")


@pytest.fixture
def parts(monkeypatch):
    """The reference in the kernels' place; the shapes that it was traced for last."""
    found = {}

    def quantize(x, seed, *, groups, **fields):
        assert seed is None
        found["quantize"] = x.shape
        return reference.quantize(x, **fields)

    def dequantize(*stored, groups, **fields):
        x = reference.dequantize(*stored, **fields)
        found["dequantize"] = x.shape
        return x

    monkeypatch.setattr(mosaic_gpu, "quantize", quantize)
    monkeypatch.setattr(mosaic_gpu, "dequantize", dequantize)
    return found


def on_mesh(x, spec, kind=AUTO):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    return jax.device_put(x, jax.NamedSharding(mesh, spec))


def through(x, way, fields):
    encoded = way.quantize(x, **fields)
    return encoded, way.dequantize(*encoded, **decoding(fields, x.dtype, x.shape))


def by_kernels(x, *, bits=4, **fields):
    with choice.using("mosaic_gpu"):
        return through(x, api, {"bits": bits, "group": 64} | fields)


def by_reference(x, *, bits=4, **fields):
    return through(x, reference, {"bits": bits, "group": 64} | fields)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", SPLIT | GATHERED)
def test_bits_are_those_of_one_device(name, kind, parts):
    """Under explicit sharding XLA's code gathers, not the kernel."""
    (shape, spec, part), fields = (SPLIT | GATHERED)[name], FIELDS.get(name, {})
    x = data(shape, jnp.bfloat16)
    found = jax.jit(lambda x: by_kernels(x, **fields))(on_mesh(x, spec, kind))
    same(found, jax.jit(lambda x: by_reference(x, **fields))(x))
    if name in SPLIT or kind is AUTO:
        assert parts == {"quantize": part, "dequantize": part}
    else:
        assert "quantize" not in parts
    if name in SPLIT:
        for leaf in jax.tree.leaves(found):
            kept = jax.NamedSharding(leaf.sharding.mesh, spec)
            assert leaf.sharding.is_equivalent_to(kept, leaf.ndim)


def test_what_is_decoded_comes_as_it_is_asked_for(parts):
    """Codes are moved, not x, which is larger."""
    x = data((4, 8, 128), jnp.float32)
    (*stored, _), expected = jax.jit(by_reference)(x)
    fields = decoding({"bits": 4, "group": 64}, x.dtype, x.shape)
    stored = [on_mesh(a, P()) for a in stored]
    kept = jax.NamedSharding(stored[0].sharding.mesh, P("a", "b"))

    @partial(jax.jit, out_shardings=kept)
    def decode(*stored):
        return api.dequantize(*stored, None, **fields, implementation="mosaic_gpu")

    same(decode(*stored), expected)
    assert parts["dequantize"] == (8, 128)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_outside_jit(kind, parts):
    x = data((4, 6, 104), jnp.bfloat16)
    same(by_kernels(on_mesh(x, P("a", "b"), kind)), jax.jit(by_reference)(x))
    assert parts == {"quantize": (6, 104), "dequantize": (6, 104)}


def test_where_nothing_was_put_on_the_mesh_all_is_gathered(parts):
    """jax tells a kernel its mesh by an argument that lies on it alone."""
    x = data((4, 6, 104), jnp.bfloat16)
    with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=(AUTO,) * 2)):
        split = partial(jax.lax.with_sharding_constraint, shardings=P("a", "b"))
        found = jax.jit(lambda x: by_kernels(split(x)))(x)
    same(found, jax.jit(by_reference)(x))
    assert parts == {"quantize": (24, 104), "dequantize": (24, 104)}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_vmap_and_scan(kind, parts):
    x = data((4, 6, 104), jnp.bfloat16)
    expected = jax.jit(jax.vmap(by_reference))(x)
    same(jax.jit(jax.vmap(by_kernels))(on_mesh(x, P("a", "b"), kind)), expected)
    assert parts == {"quantize": (6, 104), "dequantize": (6, 104)}

    @jax.jit
    def scanned(x):
        return jax.lax.scan(lambda _, x: (None, by_kernels(x)), None, x)[1]

    same(scanned(on_mesh(x, P(None, "b"), kind)), expected)
    assert parts == {"quantize": (3, 104), "dequantize": (3, 104)}


def test_gradients_of_a_checkpointed_scan(parts):
    """Data-parallel: sums over devices are in another order. XLA decodes what is
    stored beside each of its readers; a kernel would write it for them.
    """
    policy = jc.policies.uniform(jc.Quantized(4, 32))  # XLA could not split activate
    block = jc.checkpoint(lambda x, w: jnp.tanh(x @ w[0]) @ w[1], policy=policy)

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (x + block(x, w), None), x, weights)
        return jnp.sum(jnp.sin(x))

    def gradients(way, weights, x):
        with choice.using(way):
            return jax.jit(jax.grad(loss))(weights, x)

    weights = normal(0, 2, 2, 104, 104) / 10
    x = normal(1, 8, 104)
    expected = gradients("xla", weights, x)
    found = gradients("mosaic_gpu", on_mesh(weights, P()), on_mesh(x, P("a")))
    assert parts == {"quantize": (4, 104)}
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jax.lax.erf(x @ w) @ w,
        lambda w, x: jnp.tanh(x @ w) @ w,
        lambda w, x: jax.nn.softmax((x @ w) @ (x @ w).T) @ x,
    ],
    ids=["rows", "activated", "channels"],
)
def test_what_varies_over_a_shard_map_is_known(fun):
    """Else jax refuses the gradient's products."""
    wrapped = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    grad = jax.grad(lambda w, x: wrapped(w, x).astype(jnp.float32).sum(), (0, 1))
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AUTO,) * 2)
    specs = P(), P("a")
    run = jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=specs)
    w, x = (jnp.ones((n, 128), jnp.bfloat16) for n in (128, 256))
    with choice.using("mosaic_gpu"):
        text = str(jax.make_jaxpr(run)(w, x))
    assert "custom_vmap_call" in text


def test_activations_are_not_split():
    """jax would gather x for a kernel that says nothing of it."""
    x = jnp.ones((256, 128), jnp.bfloat16)
    with choice.using("mosaic_gpu"):
        assert in_one_pass(jnp.tanh, [x], bits=4, group=64)
        assert not in_one_pass(jnp.tanh, [on_mesh(x, P("a"))], bits=4, group=64)


@pytest.fixture
def figures(monkeypatch):
    """Kernels of an H200, and what its programs are compiled with is here."""
    cards = {"default": {"groups": 4}, "NVIDIA H200": {"groups": 2}}
    found = {"quantize": cards, "quantize_stochastic": cards, "dequantize": cards}
    monkeypatch.setattr(choice, "_configs", lambda folder: found)


def kernels_on_cards(codec, spec, kind, sizes=(2, 2)):
    """That encode and decode a tensor over absent cards, and the program."""
    mesh = jax.sharding.AbstractMesh(sizes, ("a", "b"), axis_types=(kind,) * 2)
    sharding = jax.NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((4, 1024, 512), jnp.bfloat16, sharding=sharding)

    def through(x):
        return codec.decode(jax.lax.optimization_barrier(codec.encode(x)))

    text = compiled(through, x)
    return kernels_in(text), text


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (P("a", "b"), "bf16[1024,512]"),
        (P("b", None, "a"), "bf16[2048,256]"),
        (P(None, None, ("a", "b")), "bf16[4096,128]"),
    ],
    ids=str,
)
def test_each_card_takes_its_own_part(spec, part, kind, figures):
    kernels, text = kernels_on_cards(jc.Quantized(4), spec, kind)
    assert kernels == 2
    assert part in text
    assert not [name for name in COLLECTIVES if f"{name}(" in text]


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_xla_encodes_with_noise(kind, figures):
    """It is of entries' places in the whole tensor."""
    codec = jc.Quantized(4, stochastic=True)
    kernels, text = kernels_on_cards(codec, P("a", "b"), kind)
    assert kernels == 1  # what decodes it
    assert "u8[2,512,256]" in text


@pytest.mark.parametrize("stochastic", [True, False])
def test_the_kernel_of_a_card_that_has_all(stochastic, figures):
    """Alone on an explicit mesh, or with copies: it knows all places."""
    codec = jc.Quantized(4, stochastic=stochastic)
    for sizes, spec in (((1, 1), P("a", "b")), ((2, 2), P())):
        assert kernels_on_cards(codec, spec, EXPLICIT, sizes)[0] == 2
