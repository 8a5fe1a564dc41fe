"""What every codec does to values: exact cases, ranges, extremes, tails and chance.

Row numbers are those of the checks that GACT and its relatives should have had: bounds
(3), unbiasedness (4), exact cases (6), ranges of 16 bit floats (8), tails (9), bias and
variance of a gradient (14) and determinism (16). Rows 1 and 2, the size of the error,
are with each codec's own tests, as is equality with an emulation in numpy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcompact.codecs import Chain, Hadamard, Quantized
from tests.contract.codec_cases import (
    CASES,
    FLOATS,
    LOSSY,
    SHAPE,
    floats,
    lossy,
    over,
    quantized_bound,
)
from tests.contract.round_trips import check, round_trip
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optimized")

STOCHASTIC = [c for c in CASES if getattr(c.codec, "stochastic", False)]
stochastic = over(STOCHASTIC)
CHAINS = [c for c in CASES if isinstance(c.codec, Chain)]


@floats
@pytest.mark.parametrize("value", [0.0, -0.75, 448.0])
def test_a_constant(case, value):
    """Row 6. One number a group holds it: exact if asymmetric, or 2 to 4 bits."""
    x = jnp.full(SHAPE, value)
    decoded = check(case, x)
    nearest = case.codec in map(Quantized, (1, 2, 3, 4))
    asymmetric = isinstance(case.codec, Quantized) and not case.codec.symmetric
    if value == 0.0 or nearest or asymmetric:
        np.testing.assert_array_equal(decoded, value)


def test_one_bit_with_a_minimum_holds_two_values():
    """Row 6: one-hot rows."""
    x = jnp.eye(64)
    for stochastic_ in (False, True):
        codec = Quantized(1, symmetric=False, stochastic=stochastic_)
        np.testing.assert_array_equal(round_trip(codec, x)[1], x)


@lossy
@pytest.mark.parametrize("dtype", FLOATS)
def test_ranges_that_overflow_or_underflow_16_bits(case, dtype):
    """Row 8: no wrap, no infinite scale. GACT's fp16 wrapped below 4e-3."""
    base = case.data(SHAPE).astype(jnp.float32)
    base = base / jnp.max(jnp.abs(base))
    largest = min(case.largest, float(jnp.finfo(dtype).max))
    for size in (1e-2, 1e-4, 1e-7, largest):
        check(case, (base * size).astype(dtype))


@over([c for c in LOSSY if c.codec != Chain(Hadamard(32), Quantized(4))])
def test_extremes_saturate_and_keep_their_sign(case):
    """But where a rotation mixes signs."""
    top = jnp.finfo(jnp.float32).max
    x = jnp.where(case.data(SHAPE) > 0, top, -top)
    decoded = np.asarray(round_trip(case.codec, x)[1])
    assert np.isfinite(decoded).all()
    if case.codec == Quantized(1, symmetric=False):
        assert decoded.max() >= 0  # the range is twice the largest step
    elif None in (getattr(case.codec, "ends", None) or ()):
        assert (decoded[x > 0] > 0).all()  # others are within the bound, small beside
    else:
        np.testing.assert_array_equal(np.sign(decoded), np.sign(x))


@floats
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_is_seen_in_its_group_alone(case, bad):
    """The entry comes back as Inf or NaN; other rows are as they were. The array is
    long enough for XLA's maximum on a CPU to lose a NaN."""
    x = case.data((64, 256)).at[5, 70].set(bad)
    decoded = np.asarray(round_trip(case.codec, x)[1])
    low, high = getattr(case.codec, "ends", None) or (None, None)
    end = {-np.inf: low, np.inf: high}.get(float(bad))
    if end is not None:  # it saturates, to half a step
        largest = float(abs(x[5, 64:70]).max() + abs(x[5, 71:128]).max())
        half = 0.0 if None not in (low, high) else 16 * largest / 254
        assert decoded[5, 70] == pytest.approx(end * 19 / 3, rel=0.02, abs=half)
        assert np.isfinite(decoded).all()
        return
    assert not np.isfinite(decoded[5, 70])
    if getattr(case.codec, "axis", -1) == -2:
        others = np.delete(decoded, 70, axis=1)
    else:
        others = np.delete(decoded, 5, axis=0)
    assert np.isfinite(others).all()
    if hasattr(case.codec, "group_size"):
        assert np.isnan(decoded).sum() == case.codec.group_size


@over([c for c in LOSSY if getattr(c.codec, "axis", -1) == -1 and c not in CHAINS])
def test_a_tail_is_no_worse_than_full_groups(case):
    """Row 9: 65 entries, 128 and 4 x 64 of the same; a padded zero would widen it.

    `test_any_shape` bounds chains' tails and those along other axes.
    """
    x = 100 + case.data((512, 80))
    _, decoded = round_trip(case.codec, x)
    error = np.asarray(decoded - x) ** 2
    # 512 x 16 entries of the tail; their mean error scatters by a few percent.
    assert error[:, 64:].mean() <= 1.15 * error[:, :64].mean()


@stochastic
def test_seeds_and_data_give_other_bytes(case):
    """Row 16, and what GACT's seeds lack."""
    x = case.data(SHAPE)
    codes = [np.asarray(round_trip(case.codec, x, s)[0].codes) for s in (0, 0, 1)]
    assert (codes[0] == codes[1]).all() and (codes[0] != codes[2]).any()
    assert (np.asarray(case.codec.encode(x, 2**32 + 1).codes) == codes[2]).all()


SEEDS = 2048


@stochastic
def test_stochastic_codecs_are_unbiased(case):
    """Row 4: the mean over K seeds is within 5 half steps / sqrt(K) of each entry, at
    least 5 standard deviations: one of the 560 is beyond in 1 of 3000 draws at most."""
    x = case.data((8, 70))
    decode = jax.jit(
        jax.vmap(lambda seed: case.codec.decode(case.codec.encode(x, seed)))
    )
    decoded = np.asarray(decode(jnp.arange(SEEDS, dtype=jnp.uint32)), np.float64)
    exact_x = np.asarray(x, np.float64)
    step = quantized_bound(case.codec, exact_x)
    assert (abs(decoded.mean(axis=0) - exact_x) <= 5 * step / 2 / SEEDS**0.5).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [-1, -2])
def test_gradients_of_linear_ops_are_unbiased_and_their_variance_falls(symmetric, axis):
    """Row 14. The squared bias of a mean over K seeds is variance / K where there is
    none; over 64 x 8 entries that ratio scatters by 6 %, and 1.3 is five times as much.
    The variance goes by the squared step, up to 30 % at few bits, where p (1 - p) is
    not yet its mean of 1/6."""
    x = normal(0, 64, 64)
    dy = normal(1, 64, 8)
    exact_gradient = np.asarray(x.T @ dy, np.float64)
    scaled = []
    for bits in (2, 3, 4, 8):
        codec = Quantized(bits, 64, symmetric, stochastic=True, axis=axis)

        def gradient(seed, codec=codec):
            return codec.decode(codec.encode(x, seed)).T @ dy

        draws = np.asarray(
            jax.jit(jax.vmap(gradient))(jnp.arange(SEEDS, dtype=jnp.uint32)), np.float64
        )
        variance = draws.var(axis=0).sum()
        bias = ((draws.mean(axis=0) - exact_gradient) ** 2).sum()
        assert bias <= 1.3 * variance / SEEDS
        steps = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
        scaled.append(variance * steps**2)
    np.testing.assert_allclose(scaled[1:], scaled[-1], rtol=0.1)
    np.testing.assert_allclose(scaled[0], scaled[-1], rtol=0.3)


VALUES = st.tuples(
    st.sampled_from(["normal", "heavy", "one-sided", "sparse", "offset"]),
    st.floats(-20, 20),
    st.integers(0, 2**31 - 1),
)


@pytest.mark.slow  # compiles for each example; the codecs are tested above
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from(LOSSY),
    st.sampled_from([(13,), (3, 65), (4, 1, 3, 33)]),
    st.sampled_from(FLOATS),
    VALUES,
)
def test_any_values(case, shape, dtype, values):
    kind, exponent, seed = values
    random = np.random.default_rng(seed)
    x = random.standard_t(2 if kind == "heavy" else 30, shape)
    if kind == "one-sided":
        x = abs(x)
    elif kind == "sparse":
        x *= random.uniform(size=shape) < 0.1
    elif kind == "offset":
        x += 10
    if len(shape) < -getattr(case.codec, "axis", -1):
        return
    most = min(case.largest, 6e4)
    check(case, jnp.asarray(np.clip(x * 2.0**exponent, -most, most), dtype))
