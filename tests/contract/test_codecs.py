"""What every codec must satisfy: one list, each test over all of it.

Row numbers are those of the checks that GACT and its relatives should have had: bounds
(3), unbiasedness (4), bytes (5), exact cases (6), masks (7), ranges of 16 bit floats
(8), tails (9), shapes (10), bias and variance of a gradient (14), determinism (16),
reuse (21) and data that outgrow their range (22). Rows 1 and 2, the size of the error,
are with each codec's own tests, as is equality with an emulation in numpy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcompact.codecs
from jaxcompact.codecs import (
    Chain,
    Hadamard,
    Offload,
    Quantized,
)
from tests.contract.codec_cases import (
    CASES,
    FLOATS,
    Case,
    exact,
    norms,
    quantized_bound,
    rotated_bound,
)

pytestmark = pytest.mark.usefixtures("optimized")


SHAPE = (2, 3, 130)  # six rows: two groups of 64 and a tail of 2
SMALL = (5, 3)  # shorter than a group
SHAPES = [(), (0, 8), SMALL, (2, 2, 3, 2, 33)]


def over(cases):
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(c, id=repr(c.codec), marks=[pytest.mark.slow] * c.slow)
            for c in cases
        ],
    )


every = over(CASES)
floats = over([c for c in CASES if c.kind == "float"])
# Offload and Hadamard alone keep all values; the others have steps.
LOSSY = [
    c for c in CASES if c.kind == "float" and c.bound not in (exact, rotated_bound)
]


lossy = over(LOSSY)
STOCHASTIC = [c for c in CASES if getattr(c.codec, "stochastic", False)]
stochastic = over(STOCHASTIC)


def encoded_and_decoded(codec, x, seed=0):
    encoded = codec.encode(x, seed)
    return encoded, codec.decode(encoded)


round_trip = jax.jit(encoded_and_decoded, static_argnums=0)


# For sweeps, in which compiling is nearly all there is to do.
quick_round_trip = jax.jit(
    encoded_and_decoded,
    static_argnums=0,
    compiler_options={"xla_backend_optimization_level": 0},
)


def same(a, b) -> None:
    """Bit for bit, NaNs alike; in float32, which numpy compares."""
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.asarray(a.astype(jnp.float32) if a.dtype.kind == "V" else a),
            np.asarray(b.astype(jnp.float32) if b.dtype.kind == "V" else b),
        ),
        a,
        b,
    )


def check_bytes(case: Case, x: jax.Array) -> None:
    """Counted is what is stored, on the device or, whole, on the host."""
    stored = jax.tree.leaves(quick_round_trip(case.codec, x)[0])
    counted = case.codec.nbytes(x.shape, x.dtype)
    on_host = case.codec.host_nbytes(x.shape, x.dtype)
    assert counted + on_host == sum(leaf.nbytes for leaf in stored)
    assert counted == 0 if "Offload" in repr(case.codec) else on_host == 0


def check(case: Case, x: jax.Array) -> np.ndarray:
    """Shape, dtype and the bound of the error; returns the decoded values."""
    codec = case.codec
    _, decoded = quick_round_trip(codec, x)
    assert decoded.shape == x.shape and decoded.dtype == x.dtype
    exact_x = np.asarray(x, np.float64)
    found = np.asarray(decoded, np.float64)
    error, bound = abs(found - exact_x), case.bound(codec, exact_x)
    if case.kind == "float" and x.dtype != jnp.float32 and case.bound is not exact:
        # The cast of the result, and of the rotated blocks.
        info = jnp.finfo(x.dtype)
        length = norms(exact_x, 64) if "Hadamard" in repr(codec) else abs(found)
        bound = bound + 2 * float(info.eps) * length + float(info.smallest_subnormal)
    assert (error <= bound).all(), f"by {(error - bound).max()}"
    return found


@every
def test_bytes_are_those_counted_by_hand(case):
    dtype = case.dtypes[0]
    counted = case.codec.nbytes(SHAPE, dtype), case.codec.nbytes(SMALL, dtype)
    assert counted == case.nbytes
    assert all(isinstance(n, int) for n in counted)


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(case, shape):
    """Rows 3, 5, 9, 10: scalars, empty ones, tails, five axes."""
    axis = getattr(case.codec, "axis", -1)
    if len(shape) >= -axis:
        check(case, case.data(shape))
        check_bytes(case, case.data(shape))


@every
def test_any_dtype(case):
    for dtype in case.dtypes:
        check(case, case.data(SHAPE, dtype))
        check_bytes(case, case.data(SHAPE, dtype))


@every
def test_dtypes_of_64_bits(case):
    with jax.enable_x64(True):
        dtype = jnp.float64 if case.kind == "float" else jnp.int64
        x = case.data(SMALL, dtype)
        decoded = quick_round_trip(case.codec, x)[1]
        assert decoded.dtype == dtype
        check_bytes(case, x)
        error = abs(np.asarray(decoded - x, np.float64))
        # float64 is cast to float32, which Hadamard and the others compute in.
        bound = case.bound(case.codec, np.asarray(x, np.float64))
        assert (error <= bound + 2**-22 * abs(np.asarray(x, np.float64))).all()


@every
def test_float64_saturates(case):
    """It is no NaN beyond float32's range, where its arithmetic is."""
    with jax.enable_x64(True):
        x = jnp.array([[1e300, -3.0]] * 64, jnp.float64)
        if case.codec.supports(x.dtype):
            assert jnp.isfinite(case.codec.decode(case.codec.encode(x))).all()


@every
def test_other_dtypes_are_refused_by_name(case):
    for dtype in (jnp.float32, jnp.int32, jnp.bool_, jnp.complex64):
        x = jnp.zeros(8, dtype)
        if not case.codec.supports(dtype):
            with pytest.raises(ValueError, match=f"can't encode dtype {x.dtype.name}"):
                case.codec.encode(x)
    unlike = jnp.complex64 if case.kind == "float" else jnp.float32
    assert case.codec.supports(unlike) == isinstance(case.codec, Offload)


@pytest.mark.slow  # compiles each operation apart
@every
def test_compiled_or_not_it_is_the_same(case):
    """Rows 16: bytes and values, with the same seed; under vmap and scan as well."""
    x = case.data(SHAPE, seed=1)
    encoded, decoded = round_trip(case.codec, x, 5)
    plain = case.codec.encode(x, 5)
    same(jax.tree.leaves(plain), jax.tree.leaves(encoded))
    same(case.codec.decode(plain), decoded)


@every
def test_under_vmap_and_scan_it_is_the_same(case):
    x = case.data((2, *SHAPE), seed=2)
    decoded = jnp.stack([round_trip(case.codec, part)[1] for part in x])

    @jax.jit
    def layers(x):
        """Encoded by one scan, decoded by the next: what a stack of layers does."""
        _, encoded = jax.lax.scan(lambda _, a: (None, case.codec.encode(a)), None, x)
        _, scanned = jax.lax.scan(
            lambda _, e: (None, case.codec.decode(e)), None, encoded
        )
        return scanned, jax.vmap(case.codec.decode)(jax.vmap(case.codec.encode)(x))

    for result in layers(x):
        if "Hadamard" in repr(case.codec):  # sums in another order
            bound = 2 * case.bound(case.codec, np.asarray(x, np.float64))
            assert (abs(np.asarray(result - decoded)) <= bound).all()
        else:
            same(result, decoded)


@every
def test_codecs_are_values(case):
    again = eval(repr(case.codec), vars(jaxcompact.codecs))
    assert again == case.codec and hash(again) == hash(case.codec)
    assert [other.codec for other in CASES].count(case.codec) == 1
    with pytest.raises(AttributeError):
        case.codec.bits = 3


@every
def test_a_codec_remembers_nothing(case):
    """Rows 21, 22: two tensors, the second 100 times larger; the first decoded last."""
    small = case.data(SHAPE, seed=3)
    large = small * 100 if case.kind == "float" else small
    first, small_decoded = round_trip(case.codec, small)
    check(case, large)
    same(case.codec.decode(first), small_decoded)


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


@lossy
def test_extremes_saturate_and_keep_their_sign(case):
    if case.codec == Chain(Hadamard(32), Quantized(4)):
        pytest.skip("the rotation mixes signs")
    top = jnp.finfo(jnp.float32).max
    x = jnp.where(case.data(SHAPE) > 0, top, -top)
    decoded = np.asarray(round_trip(case.codec, x)[1])
    assert np.isfinite(decoded).all()
    if case.codec == Quantized(1, symmetric=False):
        assert decoded.max() >= 0  # the range is twice the largest step
    else:
        np.testing.assert_array_equal(np.sign(decoded), np.sign(x))


@floats
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_is_seen_in_its_group_alone(case, bad):
    """The entry comes back as Inf or NaN; other rows are as they were. The array is
    long enough for XLA's maximum on a CPU to lose a NaN."""
    x = case.data((64, 256)).at[5, 70].set(bad)
    decoded = np.asarray(round_trip(case.codec, x)[1])
    assert not np.isfinite(decoded[5, 70])
    if getattr(case.codec, "axis", -1) == -2:
        others = np.delete(decoded, 70, axis=1)
    else:
        others = np.delete(decoded, 5, axis=0)
    assert np.isfinite(others).all()
    if hasattr(case.codec, "group_size"):
        assert np.isnan(decoded).sum() == case.codec.group_size


@lossy
def test_a_tail_is_no_worse_than_full_groups(case):
    """Row 9: 65 entries, 128 and 4 x 64 of the same; a padded zero would widen it."""
    if isinstance(case.codec, Chain) or getattr(case.codec, "axis", -1) != -1:
        pytest.skip("bounded by test_any_shape")
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


SEEDS = 1024


@stochastic
def test_stochastic_codecs_are_unbiased(case):
    """Row 4: the mean over K seeds is within 4 half steps / sqrt(K) of each entry, at
    least 4 standard deviations: 1 in 16000 for the worst entry."""
    x = case.data((8, 70))
    decode = jax.jit(
        jax.vmap(lambda seed: case.codec.decode(case.codec.encode(x, seed)))
    )
    decoded = np.asarray(decode(jnp.arange(SEEDS, dtype=jnp.uint32)), np.float64)
    exact_x = np.asarray(x, np.float64)
    step = quantized_bound(case.codec, exact_x)
    assert (abs(decoded.mean(axis=0) - exact_x) <= 4 * step / 2 / SEEDS**0.5).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [-1, -2])
def test_gradients_of_linear_ops_are_unbiased_and_their_variance_falls(symmetric, axis):
    """Row 14. The squared bias of a mean over K seeds is variance / K where there is
    none; over 64 x 8 entries that ratio scatters by 6 %, and 1.3 is five times as much.
    The variance goes by the squared step, up to 30 % at few bits, where p (1 - p) is
    not yet its mean of 1/6."""
    x = jax.random.normal(jax.random.key(0), (64, 64))
    dy = jax.random.normal(jax.random.key(1), (64, 8))
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


@pytest.mark.parametrize(("bits", "ratio"), [(2, 7.53), (4, 3.88), (8, 1.97)])
def test_bytes_of_groups_of_256(bits, ratio):
    """Row 5: 16 bits in, two 16 bit numbers a group."""
    shape = (64, 3, 224, 224)
    codec = Quantized(bits, 256, symmetric=False)
    stored = codec.nbytes((np.prod(shape).item() // 256, 256), jnp.bfloat16)
    assert 2 * np.prod(shape) / stored == pytest.approx(ratio, abs=0.005)


@every
def test_large_shapes_are_only_traced(case):
    """Row 10."""
    for shape in [(655350, 256), (655350, 512), (64, 3, 224, 224)]:
        nbytes = case.codec.nbytes(shape, case.dtypes[0])
        if nbytes:  # not on the host
            small = (2, *shape[1:])
            assert nbytes <= case.codec.nbytes(small, case.dtypes[0]) * shape[0]


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
