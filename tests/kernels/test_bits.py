"""Packing: where each code's bits lie, and that they come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.kernels.bits.reference import pack, unit, unpack
from tests.kernels.machine_code import compiled

pytestmark = pytest.mark.usefixtures("optimized")

BITS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_what_is_packed_comes_back_along_any_axis(bits, axis):
    shape = [2, 3, 5]
    shape[axis] = 48
    codes = np.random.default_rng(0).integers(0, 2**bits, shape).astype(np.uint8)
    packed = pack(jnp.asarray(codes), bits=bits, axis=axis)
    assert packed.dtype == jnp.uint8 and packed.shape[axis] == 48 * bits // 8
    np.testing.assert_array_equal(unpack(packed, bits=bits, axis=axis), codes)


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (1, [1, 0, 0, 0, 0, 0, 1, 1], [0b11000001]),
        (2, [1, 2, 3, 0], [0b00111001]),
        (4, [1, 2, 14, 15], [0xE1, 0xF2]),
        # 2 low bits of the codes 4 to 7 and 0 to 3 in two bytes, then their high bits.
        (3, [4, 5, 6, 7, 0, 1, 2, 3], [0b10001000, 0b11011101, 0b00001111]),
        (8, [7, 255], [7, 255]),
    ],
)
def test_first_codes_lie_in_the_low_bits(bits, codes, expected):
    packed = pack(jnp.asarray(codes, jnp.uint8), bits=bits)
    assert packed.tolist() == expected


@pytest.mark.parametrize(("bits", "codes"), [(1, 8), (2, 4), (3, 8), (4, 2), (8, 1)])
def test_unit_is_the_least_number_of_codes_in_whole_bytes(bits, codes):
    assert unit(bits) == codes


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_xla_packs_in_one_kernel(bits):
    """Each byte is read and written once: what a kernel of our own would do."""
    codes = jax.ShapeDtypeStruct((4096, 1024), jnp.uint8)
    packed = jax.ShapeDtypeStruct((4096, 128 * bits), jnp.uint8)
    for fun, x in ((pack, codes), (unpack, packed)):
        program = compiled(lambda x, f=fun: f(x, bits=bits), x).split("ENTRY")[1]
        assert program.count(" fusion(") == 1
        assert "kernel" not in program and "copy(" not in program
