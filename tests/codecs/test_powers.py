"""Channels far larger than all others: divided by powers of two, codes of the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.codecs import Quantized
from jaxcompact.codecs.powers import divided, multiplied, powers_of
from tests.contract.codec_cases import channel_powers
from tests.contract.round_trips import round_trip
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optimized")

PLAIN, EQUALIZED = Quantized(4), Quantized(4, equalized=True)
FAR = (
    jnp.zeros(128)
    .at[jnp.array([3, 40, 77, 101])]
    .set(jnp.array([60.0, -35.0, 20.0, 12.0]))[None, None]
)


def uniform(seed: int, *shape: int) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), shape)


def rms(x, axis=0):
    return np.sqrt((np.asarray(x, np.float64) ** 2).mean(axis))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_without_far_channels_codes_are_as_ever(dtype):
    """Of sizes e^N(0, 0.5), of one sign, a constant."""
    sizes = jnp.exp(0.5 * normal(1, 1, 128))
    for x in (normal(0, 96, 128) * sizes, uniform(2, 96, 128), jnp.ones((96, 128))):
        plain, codes = (
            round_trip(codec, x.astype(dtype))[0] for codec in (PLAIN, EQUALIZED)
        )
        np.testing.assert_array_equal(codes.powers, np.zeros(128))
        np.testing.assert_array_equal(codes.codes, plain.codes)
        np.testing.assert_array_equal(codes.scales, plain.scales)


@pytest.mark.parametrize(
    "far",
    [lambda x: x + FAR, lambda x: x * (1 + abs(FAR))],
    ids=["offsets", "sizes"],
)
def test_far_channels_hide_nothing_and_are_not_lost(far):
    """Others err as without them, within a half: a far one, divided, may yet be the
    largest of its group. Its own error is of an eighth of that, beside 0.35 of it."""
    x = normal(0, 3, 64, 128)
    y, others = far(x), np.flatnonzero(FAR[0, 0] == 0)
    encoded, decoded = round_trip(EQUALIZED, y)
    expected = channel_powers(np.asarray(y, np.float64), 2**1.5)
    np.testing.assert_array_equal(encoded.powers, expected)
    assert np.flatnonzero(expected).tolist() == [3, 40, 77, 101]
    off = rms(decoded - y, (0, 1))
    without = rms(round_trip(PLAIN, x)[1] - x)[..., others].mean()
    assert off[others].mean() < 1.5 * without
    assert (off / rms(y, (0, 1)))[expected > 0].max() < 0.12
    assert rms(round_trip(PLAIN, y)[1] - y, (0, 1))[others].mean() > 5 * without
    plain = round_trip(PLAIN, jnp.asarray(np.asarray(y) / np.exp2(expected), y.dtype))[
        0
    ]
    np.testing.assert_array_equal(encoded.codes, plain.codes)


def test_what_is_as_large_now_and_then_is_not_far():
    """A channel that is always 1 beside others that seldom are; and one row's."""
    seldom = jnp.where(uniform(0, 256, 128) < 0.01, 1.0, 0.0)
    x = seldom.at[:, 5].set(1.0).at[:, 20:120].set(0.0)
    np.testing.assert_allclose(round_trip(EQUALIZED, x)[1], x, atol=0.26)
    first = normal(0, 256, 128).at[0, 7].set(30.0)
    assert not powers_of(first).any()


def test_sizes_are_found_of_some_rows_at_equal_distances():
    x = normal(0, 8, 512, 128) + FAR
    some = np.asarray(x[::8, ::2], np.float64)
    assert some.shape == (1, 256, 128)
    np.testing.assert_array_equal(powers_of(x), channel_powers(some, 2**1.5))
    np.testing.assert_array_equal(powers_of(x), powers_of(x.at[1:].set(0.0)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_what_is_divided_comes_back(dtype):
    """Exactly, and what rounding has made larger than the dtype's largest is that."""
    x = (normal(0, 32, 64) + FAR[0, :, :64]).astype(dtype)
    powers = powers_of(x)
    assert powers.dtype == jnp.uint8 and powers.max() > 3
    found = multiplied(divided(x, powers), powers, dtype)
    np.testing.assert_array_equal(found, x)
    most = jnp.finfo(dtype).max
    wide = jnp.full((1, 64), most).astype(dtype)
    assert jnp.isfinite(multiplied(wide, powers, dtype)).all()


def test_what_is_not_finite_or_has_no_rows_is_not_divided():
    x = normal(0, 32, 64) + FAR[0, :, :64]
    for value in (jnp.nan, jnp.inf, 1e30):
        assert powers_of(x.at[2, 3].set(value))[3] == 0
    assert powers_of(x[0]) is powers_of(x[:0]) is None
    with jax.debug_nans(True):
        assert not powers_of(jnp.zeros((4, 64))).any()
