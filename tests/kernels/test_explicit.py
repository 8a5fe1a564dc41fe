"""Kernels under explicit sharding: of channels, of activations, of weights.

As in test_devices, whose are those of the last axis: on CPUs the reference is in the
kernels' place, for cards they are compiled.
"""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from jaxcompact.kernels import choice
from jaxcompact.kernels.activate import mosaic_gpu as activating
from jaxcompact.kernels.activate.api import activate, in_one_pass
from jaxcompact.kernels.functions.rows import evaluated
from jaxcompact.kernels.normalize import mosaic_gpu as normalizing
from jaxcompact.kernels.normalize.api import normalize
from jaxcompact.kernels.project import mosaic_gpu as projecting
from jaxcompact.kernels.project.api import project
from jaxcompact.kernels.quantize import channels, reference
from jaxcompact.kernels.quantize.api import dequantize, quantize
from jaxcompact.kernels.varying import varying_as
from jaxcompact.kernels.weight_gradient import mosaic_gpu as weighing
from jaxcompact.kernels.weight_gradient.api import weight_gradient
from tests.kernels.machine_code import compiled, kernels_in
from tests.kernels.test_devices import (
    COLLECTIVES,
    EXPLICIT,
    figures,
    kernels_on_cards,
    on_mesh,
)
from tests.kernels.test_normalize import whole_sums
from tests.kernels.test_project import whole_numbers
from tests.kernels.test_quantize import data, same

__all__ = ["figures"]  # the fixture
P = jax.P
KERNEL = {"implementation": "mosaic_gpu"}
MESH = {"with the mesh set": True, "without": False}


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def biased(gate, up, bias):
    return swiglu(gate + bias, up)


def pair(*shape):
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]


@pytest.fixture
def parts(monkeypatch):
    """References in the kernels' place; the shapes that they were traced for last."""
    found = {}

    def of_channels(x, seed, *, columns, **fields):
        assert seed is None
        found["quantize"] = x.shape
        return reference.quantize(x, axis=-2, **fields)

    def from_channels(*stored, columns, **fields):
        x = reference.dequantize(*stored, axis=-2, **fields)
        found["dequantize"] = x.shape
        return x

    def activated(f, xs, parameters, *, columns, bounds, **fields):
        found["activate"] = xs[0].shape, *(p.shape for p in parameters)
        along = varying_as(xs, parameters)
        known = dict(zip((*f.xs, *f.parameters), (*xs, *along), strict=True))
        y = evaluated(f.y, known, lambda a, *forms: jnp.broadcast_to(a, xs[0].shape))
        pairs = zip(xs, bounds, strict=True)
        return y, [reference.quantize(x, bound=b, **fields) for x, b in pairs]

    def weighed(codes, stored_t, dy, *, bits, size, columns, splits, steps):
        found["weigh"] = size, dy.shape
        how = {"bits": bits, "group": 64, "size": size, "dtype": dy.dtype}
        x = reference.dequantize(codes, stored_t.T, None, **how)
        return jnp.einsum("tn,tm->nm", x, dy, preferred_element_type=jnp.float32)[None]

    def projected(x, p, *, columns, steps, **fields):
        found["project"] = x.shape, p.shape
        return reference.quantize(x @ p, **fields)

    def normalized(f, x, parameters, *, columns, workers, **fields):
        found["normalize"] = x.shape, *(p.shape for p in parameters)
        y, *statistics = whole_sums(x, *parameters)
        of = reference.quantize(x, **fields)
        return [y, *(s.reshape(-1) for s in statistics)], of

    monkeypatch.setattr(normalizing, "normalize", normalized)
    monkeypatch.setattr(projecting, "project", projected)
    monkeypatch.setattr(channels, "quantize", of_channels)
    monkeypatch.setattr(channels, "dequantize", from_channels)
    monkeypatch.setattr(activating, "activate", activated)
    monkeypatch.setattr(weighing, "weight_gradient", weighed)
    return found


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (P("a", None, "b"), (2, 100, 32)),
        (P("a", "b"), (2, 50, 64)),
        (P(None, None, None, ("a", "b")), (4, 100, 16)),
    ],
    ids=str,
)
def test_channels(spec, part, parts):
    """Groups of 64 of 100 tokens: tokens that two devices share have XLA's code."""
    x = data((4, 100, 4, 16), jnp.bfloat16)
    how = {"bits": 4, "group": 64, "axis": -3}
    back = how | {"size": 100, "dtype": x.dtype}

    def through(x):
        stored = quantize(x, **how, **which)
        return stored, dequantize(*stored, **back, **which)

    which = {}
    expected = jax.jit(through)(x)
    which = {} if part[1] == 50 else KERNEL
    with choice.using("mosaic_gpu"):
        found = jax.jit(through)(on_mesh(x, spec, EXPLICIT))
    same(found, expected)
    assert parts == ({} if part[1] == 50 else {"quantize": part, "dequantize": part})


def test_within_a_shard_map_over_another_axis(parts):
    x = data((4, 64, 2, 16), jnp.bfloat16)
    how = {"bits": 4, "group": 64, "axis": -3}
    expected = jax.jit(lambda x: quantize(x, **how))(x)
    here = on_mesh(x, P("a", None, "b"), EXPLICIT)

    def of_half(x):
        assert jax.typeof(x).shape == (2, 64, 2, 16)
        return quantize(x, **how, **KERNEL)

    with jax.set_mesh(here.sharding.mesh):
        run = jax.shard_map(
            of_half, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
        )
        same(jax.jit(run)(here), expected)
    assert parts == {"quantize": (2, 64, 16)}


@pytest.mark.parametrize("set_mesh", MESH.values(), ids=MESH)
@pytest.mark.parametrize(
    ("spec", "part", "along"),
    [
        (P("a", "b"), (24, 256), P()),
        (P("b", None, "a"), (48, 128), P(None, None, "a")),
        (P("b", None, "a"), (48, 128), P()),
    ],
)
def test_activations(spec, part, along, set_mesh, parts):
    xs, (bias, _) = pair(4, 24, 256), pair(1, 1, 256)

    def run(*arrays, **which):
        *xs, bias = arrays
        return activate(biased, xs, [bias], bits=4, group=64, **which)

    expected = jax.jit(run)(*xs, bias)
    here = [on_mesh(x, spec, EXPLICIT) for x in xs] + [on_mesh(bias, along, EXPLICIT)]
    mesh = jax.set_mesh(here[0].sharding.mesh) if set_mesh else contextlib.nullcontext()
    with mesh:
        found = jax.jit(partial(run, **KERNEL))(*here)
    same(found, expected)
    assert parts == {"activate": (part, part[-1:])}


def test_activations_that_lie_otherwise_are_not_taken():
    x = jnp.ones((8, 256), jnp.bfloat16)
    xs = [on_mesh(x, spec, EXPLICIT) for spec in (P("a"), P("b"), P(None, "a"))]
    with choice.using("mosaic_gpu"):
        assert in_one_pass(swiglu, xs[:2], bits=4, group=64)  # brought together
        assert not in_one_pass(swiglu, xs[1:], bits=4, group=64)


@pytest.mark.parametrize("set_mesh", MESH.values(), ids=MESH)
@pytest.mark.parametrize(
    ("spec", "tokens"), [(P("a"), 48), (P("b", "a"), 24), (P(), 96)], ids=str
)
def test_projections(spec, tokens, set_mesh, parts):
    """Rows are shared in any way; P is everywhere, however it lay."""
    x, p = whole_numbers((4, 24, 128), 64, jnp.bfloat16)
    expected = jax.jit(lambda *a: project(*a, bits=4, group=64))(x, p)
    here = on_mesh(x, spec, EXPLICIT), on_mesh(p, P("b"), EXPLICIT)
    mesh = jax.set_mesh(here[0].sharding.mesh) if set_mesh else contextlib.nullcontext()
    with mesh:
        found = jax.jit(lambda *a: project(*a, bits=4, group=64, **KERNEL))(*here)
    same(found, expected)
    assert parts == {"project": ((tokens, 128), (128, 64))}


def test_rows_of_which_devices_have_parts_are_xlas_to_project():
    x, p = whole_numbers((4, 24, 128), 64, jnp.bfloat16)
    expected = jax.jit(lambda *a: project(*a, bits=4, group=64))(x, p)
    here = on_mesh(x, P(None, None, "a"), EXPLICIT), on_mesh(p, P("a"), EXPLICIT)
    same(jax.jit(lambda *a: project(*a, bits=4, group=64))(*here), expected)
    with pytest.raises(NotImplementedError, match="got 64 of 128 entries"):
        project(*here, bits=4, group=64, **KERNEL)


@pytest.mark.parametrize("set_mesh", MESH.values(), ids=MESH)
@pytest.mark.parametrize(
    ("spec", "tokens"), [(P("a"), 48), (P("b", "a"), 24), (P(), 96)], ids=str
)
def test_norms(spec, tokens, set_mesh, parts):
    """Rows are shared in any way."""
    x, w = whole_numbers((4, 24, 128), 1, jnp.bfloat16)
    w = w[:, 0]

    def run(x, w, **which):
        return jax.jit(
            lambda *a: normalize(whole_sums, a[0], a[1:], bits=4, group=64, **which)
        )(x, w)

    expected = run(x, w)
    here = on_mesh(x, spec, EXPLICIT), on_mesh(w, P(), EXPLICIT)
    mesh = jax.set_mesh(here[0].sharding.mesh) if set_mesh else contextlib.nullcontext()
    with mesh:
        found = run(*here, **KERNEL)
    same(found, expected)
    assert parts == {"normalize": ((tokens, 128), (128,))}


def test_norms_of_parts_of_rows_are_xlas():
    x = on_mesh(jnp.ones((4, 24, 128), jnp.bfloat16), P(None, None, "a"), EXPLICIT)
    w = on_mesh(jnp.ones(128, jnp.bfloat16), P("a"), EXPLICIT)
    with pytest.raises(NotImplementedError, match="devices must have whole rows"):
        normalize(whole_sums, x, [w], bits=4, group=64, **KERNEL)


@pytest.mark.parametrize(
    ("of_x", "of_dy", "part"),
    [
        (P("a"), P("a", None, "b"), (128, (128, 64))),
        (P("a", None, "b"), P("a"), (64, (128, 128))),
        (P(("a", "b")), P(("a", "b")), (128, (64, 128))),
        (P(), P(), (128, (256, 128))),
    ],
    ids=str,
)
@pytest.mark.parametrize("out", [None, P("b"), P()], ids=str)
def test_gradients_of_weights(of_x, of_dy, part, out, parts):
    x, dy = pair(4, 64, 128)
    how = {"bits": 4, "group": 64, "size": 128, "dtype": x.dtype}
    how["preferred_element_type"] = jnp.float32
    codes, stored, _ = jax.jit(lambda x: reference.quantize(x, bits=4, group=64))(x)
    expected = weight_gradient(codes, stored, None, dy, **how)
    codes, stored = (on_mesh(a, of_x, EXPLICIT) for a in (codes, stored))
    dy = on_mesh(dy, of_dy, EXPLICIT)
    if out is not None:
        how["out_sharding"] = jax.NamedSharding(jax.typeof(dy).sharding.mesh, out)
    run = jax.jit(lambda *a: weight_gradient(*a[:2], None, a[2], **how, **KERNEL))
    found = run(codes, stored, dy)
    # 256 products of size 1 are summed in another order, over devices at last.
    np.testing.assert_allclose(found, expected, rtol=0, atol=256 * 2.0**-24 * 5 * 16)
    assert parts == {"weigh": part}
    if out is not None:
        assert found.sharding.is_equivalent_to(
            jax.NamedSharding(found.sharding.mesh, out), 2
        )


def test_gradients_of_each_example_of_a_shared_batch(parts):
    x, dy = pair(4, 64, 128)
    how = {"bits": 4, "group": 64, "size": 128, "dtype": x.dtype}
    how["preferred_element_type"] = jnp.float32

    def gradients(codes, stored, dy, **which):
        def gradient(codes, stored, dy):
            return weight_gradient(codes, stored, None, dy, **how, **which)

        return jax.jit(jax.vmap(gradient))(codes, stored, dy)

    codes, stored, _ = jax.jit(lambda x: reference.quantize(x, bits=4, group=64))(x)
    expected = gradients(codes, stored, dy)
    here = [on_mesh(a, P("a", "b"), EXPLICIT) for a in (codes, stored, dy)]
    found = gradients(*here, **KERNEL)
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * 2.0**-24 * 5 * 8)
    assert parts == {"weigh": (128, (32, 128))}


def test_gradients_of_one_width_shared_over_one_axis_are_xlas(parts):
    x = jnp.ones((4, 64, 128), jnp.bfloat16)
    how = {"bits": 4, "group": 64, "size": 128, "dtype": x.dtype}
    how |= {"preferred_element_type": jnp.float32, "out_sharding": None}
    stored = jax.jit(lambda x: reference.quantize(x, bits=4, group=64))(x)[:2]
    stored = [on_mesh(a, P(None, None, "a"), EXPLICIT) for a in stored]
    dy = on_mesh(x, P("b", None, "a"), EXPLICIT)
    with pytest.raises(NotImplementedError, match="shared over other axes"):
        weight_gradient(*stored, None, dy, **how, **KERNEL)


def test_gradients_of_parts_of_groups_are_xlas(parts):
    x = jnp.ones((4, 64, 128), jnp.bfloat16)
    how = {"bits": 4, "group": 64, "size": 128, "dtype": x.dtype}
    how |= {"preferred_element_type": jnp.float32, "out_sharding": None}
    codes, stored, _ = jax.jit(lambda x: reference.quantize(x, bits=4, group=64))(x)
    codes = on_mesh(codes, P(None, None, ("a", "b")), EXPLICIT)
    rest = [on_mesh(a, P(), EXPLICIT) for a in (stored, x)]
    with pytest.raises(NotImplementedError, match="whole groups, got 32 columns"):
        weight_gradient(codes, rest[0], None, rest[1], **how, **KERNEL)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (P("a", None, "b"), "bf16[2,1024,256]"),
        (P(None, ("a", "b")), "bf16[4,256,512]"),
    ],
    ids=str,
)
def test_each_card_takes_its_channels(spec, part, figures, monkeypatch):
    cards = dict.fromkeys(("default", "NVIDIA H200"), {"columns": 128})
    found = {"quantize_channels": cards, "dequantize_channels": cards}
    monkeypatch.setattr(choice, "_configs", lambda folder: found)
    kernels, text = kernels_on_cards(jc.Quantized(4, axis=-2), spec, EXPLICIT)
    assert kernels == 2
    assert part in text
    assert not [name for name in COLLECTIVES if f"{name}(" in text]


def test_a_layer_on_four_cards():
    """Data and tensor parallel: gate, up and SwiGLU in one kernel, x in another."""
    kinds = (EXPLICIT,) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"), axis_types=kinds)

    def array(*shape, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def mlp(weights, x):
        gate, up, down = weights
        h = swiglu(x @ gate, x @ up)
        return jnp.einsum("btf,fd->btd", h, down, out_sharding=x.aval.sharding)

    block = jc.checkpoint(mlp, policy=jc.policies.int4(), params=0)

    def loss(weights, x):
        with choice.using("mosaic_gpu"):
            return jnp.sum(jnp.sin(block(weights, x * 2).astype(jnp.float32)))

    wide = [array(1024, 8192, spec=P(None, "tensor")) for _ in range(2)]
    down = array(8192, 1024, spec=P("tensor"))
    x = array(8, 2048, 1024, spec=P("data"))
    text = compiled(jax.grad(loss, (0, 1)), (*wide, down), x)
    assert kernels_in(text) == 2
    assert "bf16[8192,4096]" in text  # of a card: half of the tokens, of the width
