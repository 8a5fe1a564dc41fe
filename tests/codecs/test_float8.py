"""Float8 and Hadamard against numpy, and what each is for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxcompact.codecs import Chain, Float8, Hadamard, Quantized
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optimized")


def round_trip(codec, x):
    return np.asarray(jax.jit(lambda x: codec.decode(codec.encode(x)))(x))


def test_float8_equals_the_emulation():
    x = np.random.default_rng(0).standard_t(2, (4, 50)).astype(np.float32)
    x[1, :16] = 0
    encoded = Float8(16).encode(jnp.asarray(x))
    decoded = np.asarray(Float8(16).decode(encoded))
    for row in range(4):
        for group in range(4):
            part = slice(16 * group, min(50, 16 * group + 16))
            values = x[row, part]
            exact = np.abs(values).max() * np.float32(1 / 448)
            scale = ml_dtypes.bfloat16(exact)
            if np.float32(scale) < exact:
                scale = np.nextafter(scale, ml_dtypes.bfloat16(np.inf))
            scale = np.float32(scale)
            inverse = np.float32(1) / scale if scale else np.float32(0)
            codes = (values * inverse).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(
                decoded[row, part], codes.astype(np.float32) * scale
            )
            assert np.float32(encoded.scales[row, group]) == scale


def test_float8_keeps_the_digits_of_small_entries():
    """Three mantissa bits down to 2^-14 of a group's largest; 8 bit integers have none
    left at 2^-8 of it."""
    x = 2.0 ** -jnp.arange(0.0, 13.0)[None]
    relative = np.abs(round_trip(Float8(64), x) / np.asarray(x) - 1)
    assert relative.max() <= 2**-4
    assert (round_trip(Quantized(8), x)[0, 10:] == 0).all()


def test_bad_arguments():
    with pytest.raises(ValueError, match="group_size must be positive, got 0"):
        Float8(0)
    with pytest.raises(ValueError, match="block must be a power of two, got 48"):
        Hadamard(48)
    with pytest.raises(ValueError, match="block must be a power of two, got 0"):
        Hadamard(0)


@pytest.mark.parametrize("size", [1, 7, 64, 100, 192])
def test_the_rotation_is_orthonormal_and_its_own_inverse(size):
    matrix = np.asarray(Hadamard(64).encode(jnp.eye(size)))
    # Entries are exact to float32's 2^-24; a product has 64 of them of size 1/8.
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)
    blocks = np.abs(matrix) > 0
    # Each entry is spread over its block: 64, and what is left in powers of two.
    spread = [64] * (size // 64 * 64)
    for block in (32, 16, 8, 4, 2, 1):
        spread += [block] * (size % 64 & block)
    assert blocks.sum(axis=0).tolist() == spread


def test_sylvesters_matrix():
    expected = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    np.testing.assert_allclose(Hadamard(4).encode(jnp.eye(4)), expected / 2, atol=1e-7)


def test_an_outlier_costs_the_quantizer_less_when_rotated():
    """One of 64 entries is 30 times the others: its step swallows them. Rotated, the
    step is 1/8 of it, and so is the error, spread over all."""
    x = normal(0, 64, 64).at[:, 5].mul(30)
    rest = np.arange(64) != 5

    def error(codec):
        return np.linalg.norm((round_trip(codec, x) - x)[:, rest])

    assert error(Chain(Hadamard(64), Quantized(4))) < 0.5 * error(Quantized(4))


def test_rotated_float16_saturates_and_float32_stays_finite():
    x = jnp.full((1, 64), 60000.0, jnp.float16)
    assert np.asarray(Hadamard(64).encode(x))[0, 0] == 65504
    x = jnp.full((1, 64), 3e38)
    assert np.isfinite(round_trip(Hadamard(64), x)).all()
