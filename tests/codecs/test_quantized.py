"""Quantized against an emulation in numpy: every code, scale and minimum."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from jaxcompact import memory
from jaxcompact.codecs import Float8, Quantized
from jaxcompact.kernels import choice
from tests.cases import slow
from tests.codecs.emulation import F32, QUARTERS, bits_of, emulated_group
from tests.contract.round_trips import round_trip
from tests.draws import normal
from tests.kernels.machine_code import compiled

pytestmark = pytest.mark.usefixtures("optimized")

OPTIONS = [
    pytest.param(
        Quantized(bits, 16, symmetric, stochastic, axis, scale_bits),
        marks=[pytest.mark.slow] * (bits in (2, 8)),
    )
    for bits, symmetric, stochastic, axis, scale_bits in itertools.product(
        [1, 2, 3, 4, 8], [True, False], [False, True], [-1, -2], [16, 8]
    )
    if symmetric or scale_bits == 16
]
OPTIONS += [
    Quantized(bits, 16, symmetric, stochastic, axis, bound=bound)
    for bits, symmetric, stochastic, axis, bound in [
        (4, True, False, -1, 0.75),
        (8, False, False, -1, 0.75),
        (3, True, True, -2, 0.75),
        (4, True, False, -1, (-0.75, None)),
        (4, False, False, -1, (None, 0.5)),
        (8, True, False, -2, (-0.25, 2.0)),
    ]
]


def ids(codec: Quantized) -> str:
    kind = "sym" if codec.symmetric else "asym"
    rounding = "stochastic" if codec.stochastic else "nearest"
    within = "" if codec.bound is None else f"-within {codec.bound}"
    name = f"{codec.bits}-{kind}-{rounding}-axis{codec.axis}-{codec.scale_bits}"
    return name + within


@pytest.mark.parametrize("codec", OPTIONS, ids=ids)
def test_equals_the_emulation(codec):
    """Rows of a group and of several with a tail; a zero and a constant group."""
    shape = (5, 37) if codec.axis == -1 else (37, 5)
    x = np.random.default_rng(0).standard_t(3, shape).astype(F32)
    rows = x if codec.axis == -1 else x.T
    rows[1, :16], rows[2, :16], rows[3] = 0, 0.7, np.abs(rows[3]) + 1
    rows[4] *= F32(1e-5)
    seed = -3
    encoded, decoded = round_trip(codec, jnp.asarray(x), seed)
    turn = np.asarray if codec.axis == -1 else np.transpose
    codes, scales = turn(np.asarray(encoded.codes)), turn(np.asarray(encoded.scales))
    decoded = turn(np.asarray(decoded))
    levels = codec.scale_bits if codec.symmetric else 32
    size = 16
    if codec.axis == -2 and 40 * codec.bits + 5 * levels < 48 * codec.bits + 3 * levels:
        size = 8  # five of those take less
    groups, width = -(-37 // size), size * codec.bits // 8
    assert codes.shape == (5, groups * width) and scales.shape == (5, groups)
    for row, group in itertools.product(range(5), range(groups)):
        part = slice(size * group, size * group + size)
        values = rows[row, part]
        real = len(values)
        fill = 0 if codec.symmetric else values[-1]
        values = np.concatenate([values, np.full(size - real, fill, F32)])
        places = np.arange(size) + size * group + 48 * row
        if codec.axis == -2:
            places = (np.arange(size) + size * group) * 5 + row
        code, scale, low, expected = emulated_group(
            codec, values, real, places.astype(np.uint32), seed
        )
        found = bits_of(codes[row, group * width : (group + 1) * width], codec.bits)
        np.testing.assert_array_equal(found, code)
        np.testing.assert_array_equal(decoded[row, part], expected[:real])
        stored = scales[row, group]
        if codec.scale_bits == 16:
            assert F32(stored) == scale
        else:
            assert stored % 128 == (
                0 if scale == 0 else list(QUARTERS).index(abs(scale)) + 1
            )
            assert (stored >= 128) == (scale < 0)
        if low is not None:
            assert F32(turn(np.asarray(encoded.lows))[row, group]) == low


def squared_error(codec: Quantized, x: jax.Array) -> float:
    x = np.asarray(x, np.float64)
    decoded = np.asarray(round_trip(codec, jnp.asarray(x, jnp.float32))[1], np.float64)
    return ((decoded - x) ** 2).sum() / (x**2).sum()


# 2^19 entries: the sampling error of these figures is below 0.5 % (1 % at 1 bit).
ENTRIES = (2048, 256)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_error_of_stochastic_rounding_of_uniform_values(bits):
    """step^2 / 6 over E[x^2] = 1/3; at 1 bit x (1 - x) over it, which is 0.5 less the
    range that groups of 256 lack: 0.490. Steps rounded up add up to 1.6 %."""
    x = jax.random.uniform(jax.random.key(0), ENTRIES)
    codec = Quantized(bits, 256, symmetric=False, stochastic=True)
    expected = 0.490 / (2**bits - 1) ** 2
    assert squared_error(codec, x) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("bits", "expected"), [(2, 0.597), (4, 0.0239), (8, 8.3e-5)])
def test_error_of_stochastic_rounding_of_normal_values(bits, expected):
    x = normal(0, *ENTRIES)
    codec = Quantized(bits, 256, symmetric=False, stochastic=True)
    assert squared_error(codec, x) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("bits", "expected"), [(2, 0.156), (3, 0.0367), (4, 0.0090), (8, 3.5e-5)]
)
def test_error_of_nearest_rounding_of_normal_values(bits, expected):
    """By the numpy prototype that chose between the grids, without rounded scales."""
    x = normal(0, *ENTRIES)
    assert squared_error(Quantized(bits), x) == pytest.approx(expected, rel=0.03)


def test_sign_and_mean_is_the_least_squares_bit():
    """E(|x| - E|x|)^2 = 1 - 2/pi for N(0, 1), less 1/64 of it from fitting the mean."""
    x = normal(0, *ENTRIES)
    expected = (1 - 2 / np.pi) * (1 - 1 / 64)
    assert squared_error(Quantized(1), x) == pytest.approx(expected, rel=0.02)


def test_channel_wise_groups_see_one_channel():
    """Channels of sizes from 2^-8 to 2^8: each as precise as the others."""
    scale = 2.0 ** jnp.arange(-8, 9, dtype=jnp.float32)
    x = normal(0, 256, 17) * scale[None]
    _, decoded = round_trip(Quantized(8, axis=-2), x)
    error = np.linalg.norm(decoded - x, axis=0) / np.linalg.norm(x, axis=0)
    # 8 bits of N(0, 1) err by 0.0059; four groups a channel scatter about it.
    assert error.max() < 0.008


def test_a_head_axis_between_tokens_and_channels():
    x = normal(0, 2, 40, 3, 8)
    encoded, decoded = round_trip(Quantized(4, 16, axis=-3), x)
    assert encoded.codes.shape == (2, 24, 3, 8) and encoded.scales.shape == (2, 3, 3, 8)
    _, turned = round_trip(Quantized(4, 16), jnp.moveaxis(x, 1, -1))
    np.testing.assert_array_equal(jnp.moveaxis(decoded, 1, -1), turned)


@pytest.mark.parametrize(
    ("tokens", "size", "group"),
    [
        (197, 64, 40),  # of ViT: five of 40 take less than four of 56
        (79, 64, 40),
        (96, 64, 48),
        (77, 64, 40),
        (128, 64, 64),
        (50, 16, 16),  # seven groups of eights take more
        (13, 12, 8),
        (9, 4, 4),
        (7, 64, 8),  # one group, in whole bytes
    ],
)
@pytest.mark.parametrize("symmetric", [slow(True), False])
def test_tokens_are_in_groups_that_are_alike(tokens, size, group, symmetric):
    """Group by group, each by itself; so is what is stored."""
    codec = Quantized(4, size, symmetric, axis=-2)
    x = normal(0, 3, tokens, 5)
    encoded, decoded = round_trip(codec, x)
    parts = [x[:, at : at + group] for at in range(0, tokens, group)]
    alone = [
        round_trip(dataclasses.replace(codec, group_size=group), part)[1]
        for part in parts
    ]
    np.testing.assert_array_equal(decoded, np.concatenate(alone, 1))
    assert encoded.codes.shape == (3, len(parts) * group // 2, 5)
    assert encoded.scales.shape == (3, len(parts), 5)


@pytest.mark.parametrize(
    ("width", "size", "group"),
    [
        (96, 64, 32),  # of Swin and ConvNeXt
        (97, 64, 64),  # four of 32 take more than two
        (80, 64, 32),
        (480, 64, 32),
        (544, 64, 64),  # as many bytes
        (320, 256, 128),
        (48, 32, 32),  # which kernels take, and no less
    ],
)
@pytest.mark.parametrize("symmetric", [True, slow(False)])
def test_rows_are_in_groups_that_take_the_least(width, size, group, symmetric):
    codec = Quantized(8 if width == 480 else 4, size, symmetric)
    x = normal(0, 3, width)
    whole = jnp.pad(
        x, ((0, 0), (0, -width % group)), mode="edge" if not symmetric else "constant"
    )
    alone = dataclasses.replace(codec, group_size=group)
    found, decoded = round_trip(codec, x)
    expected, of_whole = round_trip(alone, whole.reshape(-1, group))
    np.testing.assert_array_equal(decoded, of_whole.reshape(3, -1)[:, :width])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)


@pytest.mark.slow
def test_codes_are_decoded_in_as_little_memory():
    """Asymmetric or standardized: what convolutions read lies in memory in bfloat16; of
    two asymmetric ones, one in float32 too."""

    def block(w, x):
        for kernel in w:
            y = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ).astype(jnp.float32)
            mean, square = (a.mean((0, 1, 2), keepdims=True) for a in (y, y * y))
            y = (y - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)
            x = jax.nn.relu(x + y.astype(x.dtype))
        return x

    def nbytes(codec):
        wrapped = jc.checkpoint(block, policy=jc.policies.uniform(codec), params=0)
        step = jax.grad(lambda w, x: wrapped(w, x).astype(jnp.float32).sum(), (0, 1))
        kernels = jax.ShapeDtypeStruct((2, 3, 3, 64, 64), jnp.bfloat16)
        return memory.peak(step, kernels, x).peak_bytes

    x = jax.ShapeDtypeStruct((32, 56, 56, 64), jnp.bfloat16)
    least = nbytes(Quantized(4))
    assert nbytes(Quantized(4, symmetric=False)) < least + 4 * x.size
    assert nbytes(Quantized(4, standardized=True)) < least + 2**16  # its moments


READ_TWICE = [
    Quantized(4),
    Quantized(4, symmetric=False),
    Quantized(8, symmetric=False, axis=-2),
    Float8(),
]


@pytest.mark.parametrize("codec", READ_TWICE, ids=str)
def test_a_card_reads_twice_what_it_encodes(codec):
    """For the levels of groups, and for the codes; however many extremes there are."""

    def fun(a, b):
        x = a @ b
        with choice.using("xla"):  # a kernel reads it once
            return codec.encode(x), x

    a, b = ((4, 128, 64), jnp.bfloat16), ((64, 256), jnp.bfloat16)
    program = compiled(fun, jax.ShapeDtypeStruct(*a), jax.ShapeDtypeStruct(*b))
    entry = program[program.index("\nENTRY") :]
    [x] = re.findall(r"%(\S+) = bf16\[512,256\]\S* fusion\(", entry)
    assert len(re.findall(rf" fusion\([^)]*%{re.escape(x)}[,)]", entry)) == 2


@pytest.mark.parametrize(
    ("symmetric", "stochastic"),
    [slow(True, False), slow(False, False), slow(True, True), (False, True)],
)
@pytest.mark.parametrize("width", [96, 256])  # groups go on in the next row, or not
def test_a_card_writes_codes_alone(symmetric, stochastic, width):
    """Of x's size nothing but x itself, which is no wider than bfloat16."""

    def fun(a, b):
        return codec.encode(jnp.sin(a @ b))

    codec = Quantized(4, 256, symmetric=symmetric, stochastic=stochastic)
    shapes = (401408, width), (width, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    found = memory.peak(fun, *args).buffers
    made = [b for b in found if b.nbytes >= 401408 * width and b.kind != "inputs"]
    assert [b.shape for b in made] == [f"bf16[401408,{width}]"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 5}, "bits must be 1, 2, 3, 4 or 8, got 5"),
        ({"group_size": 7}, "group_size must be a positive multiple of 2 .* got 7"),
        ({"group_size": 0}, "group_size must be a positive multiple of 2 .* got 0"),
        ({"bits": 3, "group_size": 12}, "multiple of 8 for 3 bits, got 12"),
        ({"axis": 1}, "axis must be negative, got 1"),
        ({"standardized": 1}, "standardized must be True, False or a tuple .* got 1"),
        ({"standardized": ()}, r"standardized must be .* numbers from 0, got \(\)"),
        ({"standardized": (1, 1)}, r"standardized must be .* got \(1, 1\)"),
        ({"standardized": (-2,)}, r"standardized must be .* got \(-2,\)"),
        ({"bound": (1.0,)}, r"bound must be None, .* or two .* got \(1.0,\)"),
        ({"bound": (2.0, 1.0)}, r"the lesser first, or None .* got \(2.0, 1.0\)"),
        ({"bound": (0.0, 1.0)}, r"bound must be .* got \(0.0, 1.0\)"),
        ({"bound": (None, None)}, r"or None for one, got \(None, None\)"),
        ({"bound": (-math.nan, 1.0)}, r"bound must be .* got \(nan, 1.0\)"),
        (
            {"standardized": True, "bound": 1.0},
            "bound must be None if standardized is True, got 1.0",
        ),
        ({"scale_bits": 4}, "scale_bits must be 8 or 16, got 4"),
        ({"scale_bits": 8, "symmetric": False}, "scale_bits must be 16 if symmetric"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Quantized(**arguments)


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match=r"axis -2 needs .* got \(3,\)"):
        Quantized(axis=-2).encode(jnp.ones(3))


@pytest.mark.slow
def test_within_a_bound_products_are_of_what_is_decoded():
    """Kernels decode for them, or encode what they make, without one."""
    codec, key = Quantized(4, bound=1.0), jax.random.key(0)
    x, dy = 3 * jax.random.normal(key, (64, 128)), jax.random.normal(key, (64, 32))
    encoded = codec.encode(x)
    found = codec.weight_gradient(encoded, dy)
    exact = codec.decode(encoded).T @ dy
    np.testing.assert_allclose(found, exact, atol=1e-5 * abs(exact).max())
    p = jnp.eye(128)[:, :64]
    found, exact = (codec.decode(e) for e in (codec.project(x, p), codec.encode(x @ p)))
    np.testing.assert_array_equal(found, exact)
    assert jnp.abs(found).max() > 4 / 3
