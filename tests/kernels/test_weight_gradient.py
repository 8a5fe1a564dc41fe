"""The kernel against the reference; compiled for a card."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.kernels.quantize.reference import dequantize, quantize
from jaxcompact.kernels.weight_gradient.api import weight_gradient
from tests.cases import slow
from tests.kernels.machine_code import compiled, kernels_in, resources

pytestmark = pytest.mark.usefixtures("optimized")

KERNEL = {"implementation": "mosaic_gpu"}
# Bits, tokens (as axes), columns of x and of dy: whole blocks, tails, splits of tokens.
CASES = {
    "4 bits": (4, (256,), 128, 128),
    "8 bits, tails": (8, (2, 72), 192, 192),
    "2 bits, split in two": (2, (2048,), 64, 64),
}


def encoded(bits: int, tokens, n: int, m: int, dtype=jnp.bfloat16, scale_bits=16):
    x = jax.random.normal(jax.random.key(0), (*tokens, n), dtype)
    dy = jax.random.normal(jax.random.key(1), (*tokens, m), dtype)
    how = {"bits": bits, "group": 64, "scale_bits": scale_bits}
    codes, stored, _ = jax.jit(lambda x: quantize(x, **how))(x)
    return codes, stored, dy


def fields(bits: int, n: int, dtype=jnp.bfloat16) -> dict:
    return {
        "bits": bits,
        "group": 64,
        "size": n,
        "dtype": dtype,
        "preferred_element_type": jnp.float32,
    }


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_reference(name):
    """Up to float32's rounding: sqrt(tokens) additions of terms of size 1 at random.

    Interpreted, with detection of races.
    """
    bits, tokens, n, m = CASES[name]
    codes, stored, dy = encoded(bits, tokens, n, m)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        found = weight_gradient(codes, stored, None, dy, **fields(bits, n), **KERNEL)
    decoding = {"bits": bits, "group": 64, "size": n, "dtype": jnp.bfloat16}
    x = np.asarray(dequantize(codes, stored, None, **decoding), np.float64)
    expected = x.reshape(-1, n).T @ np.asarray(dy, np.float64).reshape(-1, m)
    assert found.shape == (n, m) and found.dtype == jnp.float32
    # A sum of T terms: at most T additions, each off by 2^-24 of sums below 5 sqrt(T).
    count = np.prod(tokens)
    bound = count * 2.0**-24 * 5 * np.sqrt(count)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=bound)


def test_each_example_of_a_vmap_has_a_gradient():
    codes, stored, dy = encoded(4, (2, 64), 64, 64)

    def gradient(codes, stored, dy, **which):
        return weight_gradient(codes, stored, None, dy, **fields(4, 64), **which)

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        found = jax.vmap(lambda *a: gradient(*a, **KERNEL))(codes, stored, dy)
    expected = jax.vmap(gradient)(codes, stored, dy)
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * 2.0**-24 * 40)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [slow(2), 4, slow(8)])
def test_compiled_for_hopper(bits):
    """Three warpgroups have 168 registers a thread; x in 16 bits is nowhere."""
    tokens, n, m = 32768, 1024, 1024
    args = (
        jax.ShapeDtypeStruct((tokens, n * bits // 8), jnp.uint8),
        jax.ShapeDtypeStruct((tokens, n // 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, m), jnp.bfloat16),
    )

    def gradient(codes, stored, dy):
        return weight_gradient(codes, stored, None, dy, **fields(bits, n), **KERNEL)

    [(registers, spilled)] = resources(gradient, *args)
    assert registers <= 168 and not spilled
    args = (*args[:2], jax.ShapeDtypeStruct((tokens, 2 * m), jnp.bfloat16))
    text = compiled(gradient, *args)
    assert kernels_in(text) == 1
    assert f"bf16[{tokens},{n}]" not in text


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"lows": 0}, "the codes must be symmetric"),
        ({"bits": 3}, "bits must be 2, 4 or 8 in groups of 64, got 3 in 64"),
        ({"group": 128}, "got 4 in 128"),
        ({"dtype": jnp.float32}, "dtypes must be one of 16 bits, got float32"),
        ({"tokens": (60,)}, "tokens must be a multiple of 8, columns of 64, got 60"),
        ({"tokens": (72,), "scale_bits": 8}, "must be a multiple of 16, .* got 72"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take(change, rule):
    change = dict(change)
    how = {"scale_bits": change.pop("scale_bits", 16)}
    codes, stored, dy = encoded(4, change.pop("tokens", (64,)), 64, 64, **how)
    lows = stored if "lows" in change else None
    change = fields(4, 64) | {k: v for k, v in change.items() if k != "lows"}
    with pytest.raises(NotImplementedError, match=rule):
        weight_gradient(codes, stored, lows, dy, **change, **KERNEL)


def test_of_nothing_there_is_nothing():
    codes, stored = jnp.zeros((64, 0), jnp.uint8), jnp.zeros((64, 0), jnp.bfloat16)
    dy = jnp.ones((64, 128), jnp.bfloat16)
    assert weight_gradient(codes, stored, None, dy, **fields(4, 0)).shape == (0, 128)
