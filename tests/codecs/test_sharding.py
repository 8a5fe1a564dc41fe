"""Sharded tensors are encoded where they lie, under explicit sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.codecs import (
    BitMask,
    Chain,
    Float8,
    Hadamard,
    Narrow,
    OutlierQuantized,
    Quantized,
)
from jaxcompact.codecs.codec import merged
from jaxcompact.kernels.bits.reference import unit
from jaxcompact.kernels.quantize import reference
from tests.cases import slow
from tests.contract.codec_cases import quantized_groups
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optimized")

CODECS = [
    Quantized(4),
    Quantized(4, symmetric=False),
    Quantized(3, stochastic=True),
    Quantized(8, 16, axis=-2),
    Float8(),
    Chain(Hadamard(64), Quantized(4)),
    BitMask(),
    Narrow(2),
    Narrow(256),
    Narrow(8, -8),
]
# By moments, and sizes of channels, of all devices.
OF_ALL = Quantized(4, standardized=True), Quantized(4, equalized=True)
# Shapes and layouts of which a codec can't keep every one: heads shorter than a group,
# parts of groups, of bytes, of the channels among which outliers are found.
LAYOUTS = [
    ((4, 6, 4, 16), jax.P("a", None, "b")),
    ((4, 6, 4, 16), jax.P("a", None, None, "b")),
    ((4, 6, 4, 16), jax.P(None, "a", "b")),
    ((4, 6, 192), jax.P("a", None, "b")),
    ((4, 6, 100), jax.P("a", None, "b")),
    ((8, 10), jax.P("a", "b")),
    ((128,), jax.P(("a", "b"))),
]
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute")


def compiled(codec, x):
    def round_trip(x):
        encoded = codec.encode(x)
        return encoded, codec.decode(encoded)

    program = jax.jit(round_trip).lower(x).compile()
    return program(x), program.as_text()


@pytest.mark.parametrize(
    ("axis", "codec"),
    [(0, codec) for codec in CODECS]
    + [
        slow(2, codec)
        for codec in CODECS
        # Lanes are slices of the whole width.
        if codec not in (BitMask(), Narrow(2), Narrow(8, -8))
    ],
    ids=repr,
)
def test_nothing_is_moved(codec, axis):
    """Axis 0 is the batch of data parallelism, axis 2 the width of a tensor parallel
    layer, in whole groups of 64."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = normal(0, 4, 16, 256)
    if not codec.supports(x.dtype):
        x = (x > 0).astype(jnp.int32)
    (_, expected), _ = compiled(codec, x)
    spec = [None, None, None]
    spec[axis] = "d"
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
        (encoded, decoded), text = compiled(codec, sharded)
    for leaf in jax.tree.leaves(encoded):
        assert leaf.sharding.spec[axis] == "d"
    assert decoded.sharding.spec[axis] == "d"
    assert not [name for name in COLLECTIVES if f"{name}(" in text]
    # A rotated block may be summed in another order, which may turn a code: a step of
    # about 0.4 in one rotated entry, an eighth of it in each of 64.
    atol = 0.2 if isinstance(codec, Chain) else 0
    np.testing.assert_allclose(decoded, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("codec", [Quantized(4), Quantized(3), Float8()], ids=repr)
def test_nothing_is_moved_for_groups_that_do_not_come_out_even(codec):
    """A device's 684 of 2736 columns, LLaMA-350M's, are 10.7 groups."""
    x = normal(0, 8, 2736)
    with jax.set_mesh(jax.make_mesh((4,), ("d",))):
        sharded = jax.device_put(x, jax.P(None, "d"))
        (encoded, decoded), text = compiled(codec, sharded)
    assert not [name for name in COLLECTIVES if f"{name}(" in text]
    assert decoded.sharding.is_equivalent_to(sharded.sharding, 2)
    first = codec.encode(x[:, :684])
    for all_of, of_first in zip(*map(jax.tree.leaves, (encoded, first)), strict=True):
        assert all_of.shape[:2] == (8, 4)
        np.testing.assert_array_equal(jax.device_get(all_of)[:, 0], of_first)


def in_layouts(codec):
    """One of groups in all of them, of others one, of some none."""
    for i, layout in enumerate(LAYOUTS):
        fast = codec == CODECS[0] or (i == 4 and codec not in CODECS[1:6])
        marks = () if fast else pytest.mark.slow
        yield pytest.param(codec, *layout, marks=marks, id=f"{codec!r}-{layout}")


@pytest.mark.parametrize(
    ("codec", "shape", "spec"),
    [
        case
        for codec in (*CODECS, OutlierQuantized(4), *OF_ALL)
        for case in in_layouts(codec)
    ],
)
def test_any_layout_is_taken(codec, shape, spec):
    """As on one device; but what devices have of a row, if that is of no whole groups.

    Also of arrays that lie on a mesh which is not set: they alone know it.
    """
    x = normal(0, *shape)
    if not codec.supports(x.dtype):
        x = (x > 0).astype(jnp.int32)
    if isinstance(codec, Quantized) and len(shape) < -codec.axis:
        codec = Quantized(codec.bits, codec.group_size)  # it has no such axis
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, spec))

    through = jax.jit(lambda x: codec.decode(codec.encode(x)))
    expected, found = through(x), through(sharded)
    rows, parts = in_parts(codec, x, spec)
    # As in `test_nothing_is_moved`.
    atol = 0.2 if isinstance(codec, Chain) else 0
    apart = parts > 1 and isinstance(codec, Chain | OutlierQuantized)
    if apart or codec in OF_ALL:  # whose sums have other orders as well
        # A part has groups of its own, whose errors are about as large.
        assert jnp.linalg.norm(found - x) < 1.2 * jnp.linalg.norm(expected - x)
        return
    if parts > 1 and isinstance(codec, Quantized | Float8):
        expected = of_parts(codec, rows).reshape(shape)
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


def in_parts(codec, x, spec):
    """Rows of which devices have no whole groups in their parts, and in how many."""
    group, axis = getattr(codec, "group_size", 64), getattr(codec, "axis", -1)
    rows = x.reshape(merged(x.shape, group) if axis == -1 else x.shape)
    at = rows.ndim + axis
    names = spec[at] if at < len(spec) else None
    parts = 2 ** (0 if names is None else len(names))  # each has one letter
    size = rows.shape[at]
    if size % (parts * min(group, size)) == 0:
        return rows, 1
    split = *rows.shape[:at], parts, size // parts, *rows.shape[at + 1 :]
    return rows.reshape(split), parts


def of_parts(codec, rows):
    """What is decoded of rows none of which is merged with another, on one device."""
    if isinstance(codec, Float8):
        size = rows.shape[-1]
        codec = Float8(min(codec.group_size, size))
        return codec.decode(codec.encode(rows.reshape(-1, size)))
    size, whole = rows.shape[codec.axis], unit(codec.bits)
    group = min(codec.group_size, -(-size // whole) * whole)
    if codec.axis == -1 and size > group:
        group = len(quantized_groups(codec, np.zeros(size))[0])
    fields = {"bits": codec.bits, "group": group, "axis": codec.axis}
    seed = 0 if codec.stochastic else None
    stored = reference.quantize(rows, **fields, symmetric=codec.symmetric, seed=seed)
    return reference.dequantize(*stored, **fields, size=size, dtype=rows.dtype)
