"""Standardized channels: a mean and a deviation of each, and codes of the rest."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.codecs import Quantized
from tests.contract.round_trips import round_trip
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optimized")


def test_standardized_channels_are_as_others():
    """Of any mean and size: an error of each, relative to its deviation, is that of
    N(0, 1), but for four groups' scatter, and the mean is none of it."""
    mean, size = 3 * normal(1, 1, 1, 128), jnp.exp(normal(2, 1, 1, 128))
    x = mean + size * normal(0, 4, 64, 128)
    encoded, decoded = round_trip(Quantized(4, standardized=True), x)
    error = np.sqrt(((decoded - x) ** 2).mean((0, 1))) / size[0, 0]
    assert 0.08 < error.min() and error.max() < 0.11  # 0.095: the square root of 0.009
    assert encoded.moments.shape == (2, 1, 1, 128)
    expected = np.stack([x.mean((0, 1)), np.std(x, (0, 1))])
    moments = encoded.moments.astype(jnp.float32)
    np.testing.assert_allclose(moments[:, 0, 0], expected, rtol=2**-8)
    standard = (x - moments[0]) / moments[1]
    found = round_trip(Quantized(4), standard)[0].codes
    np.testing.assert_array_equal(encoded.codes, found)


def test_standardized_over_some_axes_is_each_by_itself():
    x = normal(0, 3, 64, 128) * jnp.exp(2 * normal(1, 3, 1, 128))
    encoded, decoded = round_trip(Quantized(4, standardized=(1,)), x)
    assert encoded.moments.shape == (2, 3, 1, 128)
    for i in range(3):
        alone = round_trip(Quantized(4, standardized=True), x[i : i + 1])
        np.testing.assert_array_equal(encoded.codes[i], alone[0].codes[0])
        np.testing.assert_array_equal(decoded[i], alone[1][0])


def test_standardized_over_axes_that_are_not_there():
    with pytest.raises(ValueError, match=r"standardized \(2,\) needs .* got \(4, 64\)"):
        Quantized(4, standardized=(2,)).encode(jnp.ones((4, 64)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_standardized_channels_without_a_deviation(dtype):
    """Constant, zero, of one entry: what is left is the mean."""
    whole = jnp.array([[6e4, 0, -3, 1e-4]] * 5, dtype)
    codec = Quantized(4, standardized=True)
    for x in (whole, whole[:1], whole[0], whole[0, 0]):
        _, decoded = round_trip(codec, x)
        assert decoded.dtype == dtype and decoded.shape == x.shape
        np.testing.assert_allclose(decoded, x, rtol=2**-10)


def test_standardized_float16_saturates():
    x = jnp.where(normal(0, 64, 64) > 0, 65504, -65504).astype(jnp.float16)
    decoded = round_trip(Quantized(4, 2, stochastic=True, standardized=True), x)[1]
    assert jnp.isfinite(decoded).all() and (jnp.sign(decoded) == jnp.sign(x)).all()
