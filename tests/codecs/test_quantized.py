"""Quantized: against a numpy emulation (tight) and against the input (by its bound)."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcompact as jc

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]


def emulated(x: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Row by row, group by group, in plain Python: what decode(encode(x)) must be."""
    qmax = 2 ** (bits - 1) - 1
    rows = x.astype(np.float32).reshape(-1, x.shape[-1])
    out = np.empty_like(rows)
    for row, target in zip(rows, out, strict=True):
        for start in range(0, len(row), group):
            values = row[start : start + group]
            scale = np.float32(
                ml_dtypes.bfloat16(np.abs(values).max() / np.float32(qmax))
            )
            codes = np.rint(values / scale) if scale > 0 else np.zeros_like(values)
            target[start : start + group] = np.clip(codes, -qmax, qmax) * scale
    return out.reshape(x.shape)


def round_trip(codec: jc.Quantized, x: jax.Array) -> np.ndarray:
    encoded = codec.encode(x)
    decoded = codec.decode(encoded)
    assert decoded.shape == x.shape and decoded.dtype == x.dtype
    assert encoded.codes.nbytes + encoded.scales.nbytes == codec.nbytes(x.shape)
    assert (encoded.codes.dtype, encoded.scales.dtype) == (jnp.uint8, jnp.bfloat16)
    return np.asarray(decoded)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7,), (3, 64), (2, 3, 65), (1, 2, 3, 4, 50), (5, 1)])
def test_equals_the_emulation(shape, dtype, bits):
    x = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    codec = jc.Quantized(bits=bits, group_size=16)
    group = min(16, shape[-1] + shape[-1] % 2)
    expected = emulated(np.asarray(x, np.float32), bits, group).astype(dtype)
    np.testing.assert_array_equal(round_trip(codec, x), expected)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 70),
    st.sampled_from([4, 8]),
    st.sampled_from([2, 32, 64]),
    st.floats(1e-20, 1e20),
    st.integers(0, 2**31 - 1),
)
def test_error_is_bounded_by_the_step(size, bits, group, magnitude, seed):
    x = np.random.default_rng(seed).standard_t(2, (3, size)).astype(np.float32)
    x *= np.float32(magnitude)
    codec = jc.Quantized(bits=bits, group_size=group)
    decoded = round_trip(codec, jnp.asarray(x))
    width = min(group, size + size % 2)
    for start in range(0, size, width):
        part = slice(start, start + width)
        largest = np.abs(x[:, part]).max(axis=1, keepdims=True)
        step = largest / (2 ** (bits - 1) - 1)
        # Half a step of rounding, stretched by the scale's 2^-8; a scale that was
        # rounded down clips the largest entries by up to 2^-8 of themselves.
        bound = np.maximum(step / 2 * (1 + 2**-8), largest * 2**-8) * (1 + 1e-6)
        assert (np.abs(decoded - x)[:, part] <= bound).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_saturates_and_keeps_signs_and_zeros(bits):
    x = jnp.array([[-3.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    decoded = round_trip(jc.Quantized(bits=bits, group_size=4), x)
    np.testing.assert_array_equal(np.sign(decoded), np.sign(x))
    huge = jnp.full((1, 4), jnp.finfo(jnp.float32).max)
    decoded = round_trip(jc.Quantized(bits=bits, group_size=4), huge)
    assert (decoded > 0).all(), "the largest value must not wrap to a negative one"


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_with_a_non_finite_entry_decodes_to_nan_alone(bad, bits):
    x = jnp.ones((1, 8)).at[0, 1].set(bad)
    decoded = round_trip(jc.Quantized(bits=bits, group_size=4), x)
    assert np.isnan(decoded[0, :4]).all()
    assert np.isfinite(decoded[0, 4:]).all()


def test_empty_and_all_zero():
    codec = jc.Quantized(bits=4)
    assert round_trip(codec, jnp.zeros((0, 8))).shape == (0, 8)
    np.testing.assert_array_equal(round_trip(codec, jnp.zeros((2, 8))), 0)


def test_four_bits_take_an_eighth_of_float32_plus_the_scales():
    assert jc.Quantized(bits=4, group_size=64).nbytes((32, 128)) == 32 * (64 + 2 * 2)
    assert jc.Quantized(bits=8, group_size=64).nbytes((32, 128)) == 32 * (128 + 2 * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, r"bits must be 4 or 8, got 3"),
        ({"group_size": 7}, r"group_size must be even and at least 2, got 7"),
        ({"group_size": 0}, r"group_size must be even and at least 2, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        jc.Quantized(**arguments)
