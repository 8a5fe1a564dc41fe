"""Stored scales: rounded away from zero, in 16 and in 8 bits."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxcompact.kernels.quantize import scales
from jaxcompact.kernels.quantize.api import dequantize, quantize

pytestmark = pytest.mark.usefixtures("optimized")

# Every exponent of float32's normal numbers, 64 mantissas each, both signs.
GRID = np.ldexp(
    (1 + np.arange(64, dtype=np.float32) / 64)[:, None], np.arange(-126, 127)[None]
).astype(np.float32)
GRID = np.concatenate([GRID.ravel(), np.nextafter(GRID.ravel(), np.float32(np.inf))])
GRID = np.concatenate([GRID, -GRID])


def test_away_and_down_are_the_nearest_bfloat16_on_their_side():
    nearest = GRID.astype(ml_dtypes.bfloat16)
    up = np.nextafter(nearest, ml_dtypes.bfloat16(np.inf)).astype(np.float32)
    below = np.nextafter(nearest, ml_dtypes.bfloat16(-np.inf)).astype(np.float32)
    nearest = nearest.astype(np.float32)
    down = np.where(nearest <= GRID, nearest, below)
    up = np.where(nearest >= GRID, nearest, up)
    away = np.where(GRID > 0, up, down)
    np.testing.assert_array_equal(scales.away(jnp.asarray(GRID)), away)
    finite = np.maximum(down, float(jnp.finfo(jnp.bfloat16).min))
    np.testing.assert_array_equal(scales.down(jnp.asarray(GRID)), finite)


def test_eight_bits_are_the_next_quarter_octave():
    """By search among all of them; the library compares bits."""
    steps = np.float32(2.0 ** (np.arange(-96, 30) / 4))
    used, stored = scales.store(jnp.asarray(GRID), bits=8, largest=np.inf)
    at = np.minimum(np.searchsorted(steps, np.abs(GRID)), len(steps) - 1)
    np.testing.assert_array_equal(used, np.sign(GRID) * steps[at])
    np.testing.assert_array_equal(stored & 127, at + 1)
    assert stored.dtype == jnp.uint8


def test_every_code_of_eight_bits_is_stored_as_itself():
    codes = jnp.arange(256, dtype=jnp.uint8)
    values = scales.load(codes)
    again = np.asarray(scales.store(values, bits=8, largest=np.inf)[1])
    expected = np.arange(256)
    expected[128] = 0  # there is one zero
    expected[255] = 127  # and one NaN
    np.testing.assert_array_equal(again, expected)
    assert np.isnan(values[127]) and values[0] == 0


@pytest.mark.parametrize(("bits", "largest"), [(8, 2**7.25), (16, 4.0)])
def test_zero_nan_and_infinity(bits, largest):
    special = jnp.array([0.0, jnp.nan, jnp.inf, -jnp.inf])
    used, stored = scales.store(special, bits=bits, largest=4.0)
    assert used[0] == 0
    loaded = np.asarray(scales.load(stored))
    expected = np.float32([0, np.nan, largest, -largest])
    np.testing.assert_array_equal(loaded, expected)


@pytest.mark.parametrize("exponent", [-120, -1, 0, 60, 126, 127])
def test_ratios_of_the_whole_range(exponent):
    """Within the rounding of a reciprocal and a product, 1.5 ulp of 2^-23."""
    scale = np.float32(1.7 * 2.0**exponent)
    x = np.linspace(-1, 1, 9, dtype=np.float32) * scale
    found = scales.ratio(jnp.asarray(x), jnp.full((1,), scale))
    np.testing.assert_allclose(found, x / scale, rtol=1.5 * 2**-23)
    assert scales.ratio(jnp.asarray(x), jnp.zeros(1)).tolist() == [0] * 9


def test_sixteen_bits_stay_within_their_limits():
    used, stored = scales.store(jnp.asarray(GRID), bits=16, largest=2.0)
    size = np.abs(np.asarray(used))
    assert size.min() == 2.0**-125 and size.max() == 2.0
    np.testing.assert_array_equal(np.sign(used), np.sign(GRID))
    np.testing.assert_array_equal(scales.load(stored), used)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("fields", "seed"),
    [
        ({"bits": 2}, None),
        ({"bits": 3}, None),
        ({"bits": 4}, None),
        ({"bits": 8}, None),
        ({"bits": 2}, 3),
        ({"bits": 4}, 3),
        ({"bits": 8}, 3),
        ({"bits": 4, "scale_bits": 8}, None),
        ({"bits": 8, "scale_bits": 8}, None),
        ({"bits": 4, "symmetric": False}, None),
        ({"bits": 8, "symmetric": False}, None),
    ],
)
def test_entries_at_the_ends_of_float32_keep_their_sign(fields, seed, sign):
    """There scales are at their largest, and entries lie beyond the last codes."""
    most = float(np.finfo(np.float32).max)
    ends = sign * most * np.float32([[1], [1 - 2**-20], [0.999], [0.998], [0.97]])
    x = np.full((5, 64), 1e30, np.float32)
    x[:, :2] = np.concatenate([ends, -0.9999 * ends], 1)
    kind = {"bits": fields["bits"], "group": 64}
    stored = quantize(jnp.asarray(x), **{"group": 64, "seed": seed} | fields)
    found = np.asarray(dequantize(*stored, size=64, dtype=jnp.float32, **kind))
    assert np.isfinite(found).all()
    if fields.get("scale_bits") != 8:
        assert np.all(found[:, 0] * sign > most / 2.1)  # 1 of -2 to 1
    assert np.all(found[:, 0] * sign > 0) and np.all(found[:, 1] * sign <= 0)
