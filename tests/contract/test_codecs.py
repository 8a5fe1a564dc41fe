"""What every codec must satisfy: one list, each test over all of it.

Row numbers are those of the checks that GACT and its relatives should have had: bounds
(3), bytes (5), masks (7), tails (9), shapes (10), determinism (16), reuse (21) and data
that outgrow their range (22). What becomes of values is in `test_rounding`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact.codecs
from jaxcompact.codecs import Offload, Quantized
from tests.contract.codec_cases import CASES, SHAPE, SMALL, Case, every
from tests.contract.round_trips import check, quick_round_trip, round_trip

pytestmark = pytest.mark.usefixtures("optimized")

SHAPES = [(), (0, 8), SMALL, (2, 2, 3, 2, 33)]


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
            assert jnp.isfinite(quick_round_trip(case.codec, x)[1]).all()


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
        codec = repr(case.codec)
        if "Hadamard" in codec or "standardized=True" in codec:  # other orders of sums
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
