"""OutlierQuantized: which channels are kept apart, and what that is worth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.codecs import OutlierQuantized, Quantized
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optimized")


def tokens(shape=(4, 16, 256), outliers=(), size=100.0):
    x = normal(0, *shape)
    return x.at[..., list(outliers)].mul(size) if outliers else x


def kept_channels(codec, x) -> set[int]:
    encoded = codec.encode(x)
    unused = x.shape[-1]
    return {int(i) for i in encoded.index if i != unused}


@pytest.mark.slow
def test_outlier_channels_are_kept_in_sixteen_bits():
    x = tokens(outliers=(3, 77, 200))
    codec = OutlierQuantized(4, slots=5)
    encoded = codec.encode(x)
    decoded = np.asarray(codec.decode(encoded))
    assert kept_channels(codec, x) == {3, 77, 200}
    assert encoded.index.dtype == jnp.uint16 and encoded.index.shape == (5,)
    assert encoded.kept.dtype == jnp.bfloat16 and encoded.kept.shape == (4, 16, 5)
    for channel in (3, 77, 200):
        expected = np.asarray(x[..., channel].astype(jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(decoded[..., channel], expected)
    # All others are quantized as if the outliers were zeros.
    rest = x.at[..., jnp.array([3, 77, 200])].set(0)
    plain = np.asarray(Quantized(4).decode(Quantized(4).encode(rest)))
    others = np.setdiff1d(np.arange(256), [3, 77, 200])
    np.testing.assert_array_equal(decoded[..., others], plain[..., others])


def test_float16_keeps_its_digits():
    x = tokens(outliers=(3,), size=30.0).astype(jnp.float16)
    codec = OutlierQuantized(4, slots=1)
    encoded = codec.encode(x)
    assert encoded.kept.dtype == jnp.float16
    np.testing.assert_array_equal(codec.decode(encoded)[..., 3], x[..., 3])


def test_the_largest_win_when_there_are_more_than_slots():
    x = tokens(outliers=(10, 20, 30)).at[..., 20].mul(2)
    assert kept_channels(OutlierQuantized(4, slots=1), x) == {20}


def test_the_threshold_is_in_standard_deviations_over_channels():
    sizes = jnp.ones(100).at[7].set(2.0)  # z = 0.99 / sqrt(0.0099) = 9.95
    x = jnp.broadcast_to(sizes, (3, 100))
    assert kept_channels(OutlierQuantized(threshold=9.9), x) == {7}
    assert kept_channels(OutlierQuantized(threshold=10.0), x) == set()


@pytest.mark.parametrize(
    "x",
    [
        tokens(),
        jnp.ones((4, 256)),
        jnp.zeros((4, 256)),
        tokens(outliers=(3,)).at[0, 0, 9].set(jnp.nan),
        tokens(outliers=(3,)).at[0, 0, 9].set(jnp.inf),
        jnp.arange(64.0).at[5].set(1e6),
    ],
    ids=["normal", "constant", "zeros", "NaN", "Inf", "one axis"],
)
def test_without_outliers_it_is_quantized(x):
    codec = OutlierQuantized(4, threshold=6.0)
    np.testing.assert_array_equal(
        codec.decode(codec.encode(x)), Quantized(4).decode(Quantized(4).encode(x))
    )


def test_outliers_beyond_the_squares_range():
    x = tokens().at[..., 3].mul(1e30)
    codec = OutlierQuantized(4)
    assert kept_channels(codec, x) == {3}
    others = np.arange(256) != 3
    error = np.asarray(codec.decode(codec.encode(x)) - x)[..., others]
    assert np.abs(error).max() < 0.5


def test_the_separation_is_what_direct_int4_lacks():
    """1 % of the channels are 100 times larger: a group loses the rest to its step."""
    x = tokens(outliers=(3, 77, 200))
    others = np.setdiff1d(np.arange(256), [3, 77, 200])

    def error(codec):
        decoded = np.asarray(codec.decode(codec.encode(x)))
        difference = (decoded - np.asarray(x))[..., others]
        return np.linalg.norm(difference) / np.linalg.norm(np.asarray(x)[..., others])

    # 0.095 is the error of 4 bits on N(0, 1).
    assert error(OutlierQuantized(4)) < 0.11
    assert error(Quantized(4)) > 0.5


@pytest.mark.parametrize(
    ("slots", "channels", "count"),
    [
        (0.01, 256, 3),
        (0.01, 100, 1),
        (1.0, 7, 7),
        (3, 256, 3),
        (9, 7, 7),
        (1, 70000, 1),
    ],
)
def test_number_of_slots(slots, channels, count):
    encoded = jax.eval_shape(
        OutlierQuantized(slots=slots).encode,
        jax.ShapeDtypeStruct((2, channels), "float32"),
    )
    assert encoded.kept.shape == (2, count) and encoded.index.shape == (count,)
    assert encoded.index.dtype == (jnp.uint32 if channels > 65535 else jnp.uint16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": 0}, "slots must be a positive int, or a fraction .* got 0"),
        ({"slots": 1.5}, "slots must be .* got 1.5"),
        ({"slots": True}, "slots must be .* got True"),
        ({"threshold": 0.0}, "threshold must be positive, got 0.0"),
        ({"bits": 5}, "bits must be"),
        ({"group_size": 3}, "group_size must be"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        OutlierQuantized(**arguments)


def test_an_array_of_numpy():
    x = np.asarray(normal(0, 4, 64))
    codec = OutlierQuantized()
    same = jax.tree.map(jnp.array_equal, codec.encode(x), codec.encode(jnp.asarray(x)))
    assert jax.tree.all(same)


def test_one_slot_is_not_all_of_them():
    one, all_ = OutlierQuantized(slots=1), OutlierQuantized(slots=1.0)
    assert one != all_ and len({one, all_}) == 2
    assert one.nbytes((32, 64)) < all_.nbytes((32, 64))
