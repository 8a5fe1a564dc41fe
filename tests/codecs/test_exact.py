"""BitMask, Narrow and Offload give back what they got."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.codecs import BitMask, Chain, Hadamard, Narrow, Offload, Quantized
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optimized")


def round_trip(codec, x):
    encoded = codec.encode(x)
    decoded = codec.decode(encoded)
    assert decoded.shape == x.shape and decoded.dtype == x.dtype
    return encoded, decoded


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.uint8, jnp.int8, jnp.int32])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 511, 513])
def test_masks_of_any_length(n, dtype):
    """Also all ones and all zeros: GACT's kernel wrote beyond short ones."""
    random = np.random.default_rng(n).integers(0, 2, n)
    for values in (random, np.ones(n), np.zeros(n)):
        x = jnp.asarray(values, dtype)
        encoded, decoded = round_trip(BitMask(), x)
        assert encoded.data.dtype == jnp.uint8 and encoded.data.nbytes == -(-n // 8)
        np.testing.assert_array_equal(decoded, x)


@pytest.mark.parametrize("shape", [(), (3, 8), (3, 5), (2, 4, 6), (2, 3, 5, 7), (3, 0)])
def test_masks_of_any_shape_take_an_eighth(shape):
    x = jax.random.bernoulli(jax.random.key(0), 0.5, shape)
    encoded, decoded = round_trip(BitMask(), x)
    assert encoded.data.nbytes == -(-x.size // 8)
    np.testing.assert_array_equal(decoded, x)


def test_axes_before_whole_bytes_stay_apart():
    """One of them may be sharded."""
    assert BitMask().encode(jnp.ones((3, 5, 2, 4), bool)).data.shape == (3, 5, 1)


def test_integers_that_are_no_mask_become_one():
    assert round_trip(BitMask(), jnp.array([0, 2, -1]))[1].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("limit", "dtype", "stored"),
    [
        (1, jnp.int32, jnp.uint8),
        (256, jnp.int32, jnp.uint8),
        (257, jnp.int32, jnp.uint16),
        (2**16, jnp.uint32, jnp.uint16),
        (2**16 + 1, jnp.uint32, jnp.uint32),
        (2**32, jnp.uint32, jnp.uint32),
        (2**32, jnp.int8, jnp.uint8),  # never wider than the dtype
        (2**32, jnp.int16, jnp.uint16),
    ],
)
def test_narrowest_dtype_that_holds_the_range(limit, dtype, stored):
    top = min(limit - 1, int(jnp.iinfo(dtype).max))
    x = jnp.asarray([0, top // 2, top], dtype)
    encoded, decoded = round_trip(Narrow(limit), x)
    assert encoded.data.dtype == stored
    np.testing.assert_array_equal(decoded, x)


@pytest.mark.parametrize(("limit", "bits"), [(2, 1), (3, 2), (4, 2), (5, 4), (16, 4)])
@pytest.mark.parametrize("shape", [(), (7,), (3, 8), (2, 3, 5)])
def test_few_integers_share_bytes(limit, bits, shape):
    x = jax.random.randint(jax.random.key(0), shape, 0, limit)
    encoded, decoded = round_trip(Narrow(limit), x)
    assert encoded.data.nbytes == -(-x.size * bits // 8)
    np.testing.assert_array_equal(decoded, x)


def test_integers_outside_the_range_saturate():
    _, decoded = round_trip(Narrow(10), jnp.array([-5, 9, 10, 1000]))
    assert decoded.tolist() == [0, 9, 9, 9]


FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn]


@pytest.mark.parametrize(
    ("least", "limit", "bits"),
    [(-1, 1, 1), (-1, 2, 2), (-8, 8, 4), (-9, 8, 8), (200, 216, 4), (-128, 128, 8)]
    + [(-40000, 20000, 16), (-(2**24), 2**24, 32)],
)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint32, *FLOATS])
def test_from_the_least_on(least, limit, bits, dtype):
    """Of floats those that hold all whole numbers between."""
    codec, floating = Narrow(limit, least), jnp.issubdtype(dtype, jnp.floating)
    between = np.unique(np.linspace(least, limit - 1, 33).round().astype(np.int64))
    if floating:
        most = 2 ** (jnp.finfo(dtype).nmant + 1)
        assert codec.supports(dtype) == (max(-least, limit - 1) <= most)
        assert not Narrow(limit).supports(dtype)
    else:
        info = jnp.iinfo(dtype)
        between = between[(between >= info.min) & (between <= info.max)]
    if codec.supports(dtype) and between.size:
        x = jnp.asarray(between).astype(dtype)
        encoded, decoded = round_trip(codec, x)
        np.testing.assert_array_equal(decoded, x)
        if floating:
            assert encoded.data.nbytes == -(-x.size * bits // 8)


def test_doubles_hold_integers_that_int32_does_not():
    with jax.enable_x64(True):
        x = jnp.array([2.0**31, 2.0**32 - 1, 3.0])
        _, decoded = round_trip(Narrow(2**32, 0), x)
        np.testing.assert_array_equal(decoded, x)


def test_floats_outside_the_range_saturate_and_harm_no_others():
    x = jnp.array([-1e30, 1.0, jnp.inf, 2.0, jnp.nan, 1.0, -jnp.inf, 2.0])
    _, decoded = round_trip(Narrow(3, 1), x)
    assert decoded.tolist()[:4] == [1, 1, 2, 2]
    assert decoded.tolist()[5:] == [1, 1, 2] and decoded[4] in (1, 2)


@pytest.mark.parametrize(
    ("limit", "least", "message"),
    [
        (0, 0, "limit must be from 1 to 2^32, got 0"),
        (-8, -8, "limit must be from 1 to 2^32 above least=-8, got -8"),
        (8, -(2**31) - 1, "least must be from -2^31 to 2^32, got -2147483649"),
        (8, 0.5, "least must be from -2^31 to 2^32, got 0.5"),
        (8, False, "least must be from -2^31 to 2^32, got False"),
    ],
)
def test_bad_ranges(limit, least, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Narrow(limit, least)


@pytest.mark.parametrize("limit", [0, 2**32 + 1])
def test_bad_limits(limit):
    with pytest.raises(
        ValueError, match=f"limit must be from 1 to 2\\^32, got {limit}"
    ):
        Narrow(limit)


def test_offloaded_arrays_are_in_the_hosts_memory():
    x = jnp.arange(6.0)
    space = jax.make_jaxpr(Offload().encode)(x).out_avals[0].memory_space
    assert space == jax.memory.Space.Host
    back = jax.make_jaxpr(lambda x: Offload().decode(Offload().encode(x)))(x)
    assert back.out_avals[0].memory_space == jax.memory.Space.Device
    chain = Chain(Quantized(4), Offload())
    leaves = jax.make_jaxpr(chain.encode)(x).out_avals
    assert {leaf.memory_space for leaf in leaves} == {jax.memory.Space.Host}


def test_offloading_changes_no_gradient():
    """Row 16: the same losses and gradients, through a scan over layers."""

    def loss(w, codec):
        @jax.custom_vjp
        def layer(x, w):
            return jnp.tanh(x * w)

        def forward(x, w):
            return layer(x, w), (codec.encode(x) if codec else x, w)

        def backward(kept, dy):
            x, w = kept
            return jax.vjp(
                lambda x, w: jnp.tanh(x * w), codec.decode(x) if codec else x, w
            )[1](dy)

        layer.defvjp(forward, backward)
        return jax.lax.scan(lambda x, w: (layer(x, w), None), jnp.ones(5), w)[0].sum()

    w = normal(0, 4, 5)
    grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    jax.tree.map(np.testing.assert_array_equal, grad(w, None), grad(w, Offload()))


def test_chains_say_what_is_wrong():
    with pytest.raises(ValueError, match="must have Offload last"):
        Chain(Offload(), Quantized(4))
    with pytest.raises(ValueError, match="codecs must have Offload last"):
        Chain(Chain(Offload()), Quantized(4))
    with pytest.raises(ValueError, match="one or more codecs, got \\(\\)"):
        Chain()
    with pytest.raises(ValueError, match="one or more codecs"):
        Chain(Hadamard(), 4)


def test_a_chain_leaves_what_a_codec_does_not_support():
    chain = Chain(Quantized(4), Hadamard(4))
    x = normal(0, 8, 64)
    encoded = chain.encode(x)
    assert [leaf.dtype for leaf in encoded.leaves] == [jnp.uint8, jnp.bfloat16]
    assert chain.nbytes(x.shape) == 8 * (32 + 2)


def test_what_a_chain_leaves_is_not_moved():
    chain = Chain(Quantized(4), Chain(Quantized(8), Offload()))
    assert chain.nbytes((64, 64)) == 64 * 32  # codes, which no codec takes
    assert chain.host_nbytes((64, 64)) == 64 + 2  # scales in 8 bits, and their own


def test_chains_decode_in_reverse():
    x = normal(0, 8, 64)
    chain = Chain(Hadamard(64), Quantized(8))
    rotated = Hadamard(64).encode(x)
    by_hand = Hadamard(64).decode(Quantized(8).decode(Quantized(8).encode(rotated)))
    np.testing.assert_array_equal(chain.decode(chain.encode(x)), by_hand)
    nested = Chain(Chain(Hadamard(64), Quantized(8)), Offload())
    np.testing.assert_array_equal(nested.decode(nested.encode(x)), by_hand)
    assert nested.host_nbytes(x.shape) == chain.nbytes(x.shape)
    assert nested.nbytes(x.shape) == 0
