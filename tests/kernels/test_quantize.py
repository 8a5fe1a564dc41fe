"""The kernels against the reference: the same bits. Compiled for a card: no spills."""

import math
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from jaxcompact.kernels import choice
from jaxcompact.kernels.quantize import api, mosaic_gpu, reference
from jaxcompact.memory.cards import find_device
from jaxcompact.memory.traffic import traffic
from tests.cases import slow
from tests.draws import normal
from tests.kernels.machine_code import compiled, kernels_in, resources

pytestmark = pytest.mark.usefixtures("optimized")

KERNEL = {"implementation": "mosaic_gpu"}
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)
# Fields, dtype and shape: whole blocks, tails of rows and of groups, several blocks; a
# last group in part. Channel by channel in one block or several, whose copies are
# contiguous or not.
CASES = {
    "4 bits": ({"bits": 4}, "bfloat16", (64, 256)),
    "8 bits, 8-bit scales, tails": (
        {"bits": 8, "scale_bits": 8},
        "bfloat16",
        (72, 320),
    ),
    "2 bits, float32": ({"bits": 2}, "float32", (65, 196)),
    "stochastic, tails": ({"bits": 4, "seed": 5}, "bfloat16", (136, 320)),
    "asymmetric, float16, a group in part": (
        {"bits": 4, "symmetric": False},
        "float16",
        (72, 312),
    ),
    "asymmetric, stochastic": (
        {"bits": 8, "symmetric": False, "seed": 3},
        "float32",
        (64, 128),
    ),
    "2 bits, asymmetric": ({"bits": 2, "symmetric": False}, "bfloat16", (8, 128)),
    "groups of 128": ({"bits": 4, "group": 128}, "bfloat16", (64, 640)),
    "groups of 32": ({"bits": 4, "group": 32}, "bfloat16", (72, 208)),
    "groups of 32, asymmetric, stochastic": (
        {"bits": 8, "group": 32, "symmetric": False, "seed": 3},
        "float32",
        (65, 100),
    ),
    "leading axes": ({"bits": 4}, "bfloat16", (2, 4, 8, 128)),
    "leading axes, tails": ({"bits": 4}, "bfloat16", (3, 5, 104)),
    "stochastic, 8-bit scales": (
        {"bits": 8, "scale_bits": 8, "seed": 7},
        "float16",
        (136, 72),
    ),
    "asymmetric, stochastic, a group in part": (
        {"bits": 4, "symmetric": False, "seed": 3},
        "bfloat16",
        (16, 216),
    ),
    "one row of less than a group": ({"bits": 4}, "bfloat16", (1, 40)),
    "within a bound, tails": ({"bits": 4, "bound": (-0.8, 0.8)}, "bfloat16", (72, 320)),
    "channels, within a bound, tails": (
        {"bits": 8, "symmetric": False, "axis": -2, "bound": (-2.2, None)},
        "bfloat16",
        (2, 100, 272),
    ),
    "channels, as q and k": (
        {"bits": 8, "symmetric": False, "axis": -3},
        "bfloat16",
        (2, 64, 4, 64),
    ),
    "channels, stochastic, tails": (
        {"bits": 4, "axis": -2, "seed": 5},
        "bfloat16",
        (2, 100, 272),
    ),
    "channels, as q and k of 77 tokens": (
        {"bits": 8, "symmetric": False, "axis": -3, "group": 40},
        "bfloat16",
        (2, 77, 2, 64),
    ),
    "channels, asymmetric, stochastic, tails": (
        {"bits": 3, "symmetric": False, "axis": -2, "seed": 3, "group": 32},
        "float32",
        (3, 50, 128),
    ),
    "channels, 8-bit scales, tails": (
        {"bits": 2, "scale_bits": 8, "axis": -2, "group": 128},
        "float16",
        (130, 400),
    ),
}


# On the oldest jax as well; what the others have is in one or other of these.
OFTEN = "stochastic, 8-bit scales", "asymmetric, float16, a group in part"
OFTEN += "channels, asymmetric, stochastic, tails", "within a bound, tails"
assert {*OFTEN} <= {*CASES}
cases = pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else slow(name) for name in CASES],
)


def case(name: str):
    fields, dtype, shape = CASES[name]
    return {"group": 64, "axis": -1} | fields, jnp.dtype(dtype), shape


def decoding(fields: dict, dtype, shape) -> dict:
    kept = {k: v for k, v in fields.items() if k in ("bits", "group", "axis")}
    return kept | {"size": shape[fields.get("axis", -1)], "dtype": dtype}


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        x, y = (np.asarray(v, np.float32) for v in (x, y))
        np.testing.assert_array_equal(x, y)


def data(shape, dtype, axis=-1) -> jax.Array:
    """Groups of every size, of zeros, of one value, and with a value of 3e38."""
    if axis != -1:
        shape = *shape[:axis], *shape[axis:][1:], shape[axis]
        return jnp.moveaxis(data(shape, dtype), -1, axis)
    x = normal(0, *shape)
    x *= jnp.exp(4 * normal(1, *shape[:-1], 1))
    if shape[-2] > 3:
        x = x.at[..., 1, :64].set(0.0).at[..., 2, :64].set(-3.0)
        x = x if dtype == jnp.float16 else x.at[..., 3, 5].set(3e38)
    return x.astype(dtype)


@cases
def test_bits_are_the_references(name):
    """Interpreted, with detection of races."""
    fields, dtype, shape = case(name)
    x = data(shape, dtype, fields["axis"])
    expected = jax.jit(lambda x: reference.quantize(x, **fields))(x)
    decoded = decoding(fields, dtype, shape)
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        found = api.quantize(x, **fields, **KERNEL)
        same(found, expected)
        x = api.dequantize(*found, **decoded, **KERNEL)
    same(x, jax.jit(lambda *e: reference.dequantize(*e, **decoded))(*expected))


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 213), ("float32", 33)])
def test_rows_of_no_multiple_of_16_bytes_are_decoded(dtype, size):
    """What the kernel writes behind a row is cut."""
    x = data((72, size), jnp.dtype(dtype))
    fields = {"bits": 4, "group": 64}
    encoded = reference.quantize(x, **fields)
    decoded = decoding(fields, x.dtype, x.shape)
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        found = api.dequantize(*encoded, **decoded, **KERNEL)
    same(found, reference.dequantize(*encoded, **decoded))


@pytest.mark.parametrize("axis", [-1, -2])
def test_wide_dtypes_change_no_bit(axis):
    """Noise too is made of integers of 32 bits."""
    x = data((64, 128), jnp.bfloat16, axis)
    fields = {"bits": 4, "group": 64, "axis": axis, "seed": 5}
    expected = jax.jit(lambda x: reference.quantize(x, **fields))(x)
    with jax.enable_x64(True), plgpu.force_gpu_interpret_mode(INTERPRETED):
        same(api.quantize(x, **fields, **KERNEL), expected)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
@pytest.mark.parametrize("groups", range(1, 9))
def test_the_copy_engine_takes_each_warpgroups_levels(groups, dtype):
    """From a multiple of 128 bytes on."""
    found = mosaic_gpu.shared_levels(2, groups, jnp.dtype(dtype))
    assert found.shape[1] >= groups
    assert math.prod(found.shape[1:]) * found.dtype.itemsize % 128 == 0


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_group_that_is_not_finite_decodes_to_nan(value, symmetric, axis):
    x = jnp.ones((16, 128), jnp.bfloat16).at[3, 70].set(value).swapaxes(-1, axis)
    fields = {"bits": 4, "group": 64, "symmetric": symmetric, "axis": axis}
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        found = api.quantize(x, **fields, **KERNEL)
        x = api.dequantize(*found, **decoding(fields, x.dtype, x.shape), **KERNEL)
    bad = np.zeros((16, 128), bool)
    bad[3, 64:] = True
    found = np.isnan(np.asarray(x, np.float32)).swapaxes(-1, axis)
    np.testing.assert_array_equal(found, bad)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("bound", [(-3.0, 3.0), (None, 3.0)])
def test_within_a_bound_an_infinity_is_a_number_and_nan_is_none(axis, bound):
    x = jnp.ones((16, 128), jnp.bfloat16).at[3, 70].set(jnp.inf).at[5, 2].set(jnp.nan)
    x, fields = x.swapaxes(-1, axis), {"bits": 8, "group": 64, "axis": axis}
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        found = api.quantize(x, bound=bound, **fields, **KERNEL)
    same(found, reference.quantize(x, bound=bound, **fields))
    x = jc.Quantized(8, axis=axis, bound=bound)
    x = x.decode(x.encode(jnp.full((16, 128), jnp.inf).at[5, 2].set(jnp.nan)))
    bad = np.zeros((16, 128), bool)
    bad[(5, slice(64)) if axis == -1 else (slice(16), 2)] = True
    np.testing.assert_array_equal(np.isnan(x), bad)
    np.testing.assert_allclose(x[~bad], 19.0, rtol=0.06)


@pytest.mark.parametrize("fields", [{}, {"seed": 3}], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("axis", [-1, slow(-2)])
def test_vmap_and_scan(fields, axis):
    x = data((3, 5, 104) if axis == -1 else (3, 100, 16), jnp.bfloat16, axis)
    fields = {"bits": 4, "group": 64, "axis": axis} | fields
    expected = jax.jit(jax.vmap(lambda x: reference.quantize(x, **fields)))(x)
    decoded = decoding(fields, x.dtype, x.shape)

    def through(x):
        encoded = api.quantize(x, **fields, **KERNEL)
        return encoded, api.dequantize(*encoded, **decoded, **KERNEL)

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        batched = jax.vmap(through)(x)
        scanned = jax.lax.scan(lambda _, x: (None, through(x)), None, x)[1]
    same(batched[0], expected)
    same(scanned, batched)


def test_gradients_through_a_checkpointed_scan(monkeypatch):
    """The kernels' codes are XLA's; the rest rounds alike to a few ulps of float32."""
    from jaxcompact.kernels.quantize import mosaic_gpu

    codec = jc.Quantized(4, 32, stochastic=True)  # activate rounds to nearest alone
    policy = jc.policies.uniform(codec)
    block = jc.checkpoint(lambda x, w: jnp.tanh(x @ w[0]) @ w[1], policy=policy)

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (x + block(x, w), None), x, weights)
        return jnp.sum(jnp.sin(x))

    def gradients(way):
        params = plgpu.InterpretGPUParams()
        with choice.using(way), plgpu.force_gpu_interpret_mode(params):
            return jax.jit(jax.grad(loss))(weights, x)

    weights = normal(0, 2, 2, 104, 104) / 10
    x = normal(1, 3, 104)
    expected, calls = gradients("xla"), []
    for op in ("quantize", "dequantize"):
        kernel = getattr(mosaic_gpu, op)
        monkeypatch.setattr(
            mosaic_gpu,
            op,
            lambda *a, op=op, kernel=kernel, **k: calls.append(op) or kernel(*a, **k),
        )
    found = gradients("mosaic_gpu")
    assert {*calls} == {"quantize"}  # what is stored XLA decodes
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


# A multiprocessor has 65536: 8 blocks of 128 threads with 64, 5 with 96, 4 with 128.
MOST_REGISTERS = {"asymmetric, stochastic, a group in part": 128}
MOST_REGISTERS |= {name: 64 for name in CASES if name.startswith("channels")}


@cases
def test_compiled_for_hopper(name):
    fields, dtype, shape = case(name)
    # A kernel that this process has compiled before would not be compiled again.
    number = 1 + list(CASES).index(name)
    axis = fields["axis"]
    shape = (
        math.prod(shape[:axis]) + 4096 * number,
        1024 + shape[axis],
        *shape[axis:][1:],
    )
    x = jax.ShapeDtypeStruct(shape, dtype)

    def through(x):
        encoded = jax.lax.optimization_barrier(api.quantize(x, **fields, **KERNEL))
        return api.dequantize(*encoded, **decoding(fields, dtype, x.shape), **KERNEL)

    found = resources(through, x)
    assert len(found) == 2
    most = MOST_REGISTERS.get(name, 96)
    assert all(registers <= most and not spilled for registers, spilled in found), found


@pytest.mark.slow
@pytest.mark.parametrize("groups", [8, 4])
def test_as_many_groups_as_shared_memory_holds(groups):
    """Of 256 float32: three."""
    fields = {"bits": 4, "group": 256, "symmetric": False}
    x = jax.ShapeDtypeStruct((4096 + groups, 2100), jnp.float32)

    def through(x):
        with choice.using("mosaic_gpu", {"groups": groups}):
            encoded = jax.lax.optimization_barrier(api.quantize(x, **fields))
            return api.dequantize(*encoded, **decoding(fields, x.dtype, x.shape))

    found = resources(through, x)
    assert len(found) == 2 and not any(spilled for _, spilled in found), found


def programs(codec, x) -> tuple[str, str]:
    """What encodes an array and what decodes it, where there are kernels."""

    def forced(fun):
        def with_kernels(arg):
            with choice.using("mosaic_gpu"):
                return fun(arg)

        return with_kernels

    encoded = jax.eval_shape(codec.encode, x)
    return compiled(forced(codec.encode), x), compiled(forced(codec.decode), encoded)


@pytest.mark.parametrize(
    ("codec", "shape", "flat"),
    [
        (jc.Quantized(4), (8, 512, 1024), "[4096,1024]"),
        (
            jc.Quantized(8, symmetric=False, axis=-3),
            (8, 512, 16, 64),
            "[8,512,1024]",
        ),
    ],
    ids=["rows", "channels"],
)
def test_codecs_take_the_kernel(codec, shape, flat):
    """Once to encode, once to decode; else nothing of the tensor's size is written."""
    encode, decode = programs(codec, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert kernels_in(encode) == 1
    assert "bf16" + flat not in encode.split("ENTRY")[0]  # no fusion works on it
    assert kernels_in(decode) == 1


def test_what_is_equalized_is_xlas():
    """x is read twice, and some rows of it before; no copy is made for a kernel."""
    codec = jc.Quantized(4, equalized=True)
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    size, codes = 2 * x.size, codec.nbytes(x.shape, x.dtype)
    for text, most in zip(programs(codec, x), (2 * size, size), strict=True):
        assert kernels_in(text) == 0
        moved = traffic(text, find_device("h200")).values()
        assert sum(each.nbytes for each in moved) < 1.1 * (most + codes)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"bits": 3}, "bits must be 2, 4 or 8, got 3"),
        ({"group": 16}, "group must be 32, 64, 128 or 256, got 16"),
        ({"group": 32, "bits": 2}, "bits must be 4 or 8 in groups of 32, got 2"),
        ({"axis": -2, "bits": 1}, "bits must be 2, 3, 4 or 8, got 1"),
        ({"axis": -2, "group": 256}, "group must be a multiple of 8, at most 128"),
        ({"axis": -2, "group": 4}, "group must be a multiple of 8, at most 128, got 4"),
        (
            {"axis": -2, "shape": (64, 24)},
            "there must be a multiple of 16 channels, got 24",
        ),
        ({"shape": (64, 33)}, "rows must be multiples of 16 bytes, got 66"),
        ({"shape": (0, 64)}, r"x must have entries, got \(0, 64\)"),
        ({"shape": ()}, r"x must have axis -1, got shape \(\)"),
        ({"dtype": "float64"}, "dtype must have 16 or 32 bits, got float64"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take(change, rule):
    shape = change.pop("shape", (64, 128))
    with jax.enable_x64("float64" in change.values()):
        x = jnp.zeros(shape, change.pop("dtype", "bfloat16"))
    fields = {"bits": 4, "group": 64} | change
    with pytest.raises(NotImplementedError, match=rule):
        api.quantize(x, **fields, **KERNEL)
    if shape:
        with choice.using("mosaic_gpu"):  # where it can: here XLA's
            found, expected = (
                jax.jit(partial(each.quantize, **fields))(x)
                for each in (api, reference)
            )
        same(found, expected)
