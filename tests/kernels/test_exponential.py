"""exp and the logistic function of all numbers that 16 bits have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.kernels.activate.api import activate
from jaxcompact.kernels.functions import exponential
from jaxcompact.kernels.functions.rows import function_of
from tests.kernels.machine_code import assembly

LEAST = np.log(2.0**-126)  # exp of less is no normal float32
KINDS = ["bfloat16", "float16"]


def all_finite(dtype, least=-jnp.inf):
    x = jnp.arange(2**16, dtype=jnp.uint16).view(dtype)
    wide = np.asarray(x, np.float32)
    return x[np.isfinite(wide) & (wide > least)]


def rounded(exact, dtype):
    with np.errstate(over="ignore"):
        return np.asarray(jnp.asarray(exact.astype(np.float32)).astype(dtype))


def neighbours(a, b):
    """Numbers of 16 bits between two of the same sign."""
    a, b = (np.asarray(x).view(np.uint16).astype(np.int32) for x in (a, b))
    return np.abs(a - b)


@pytest.mark.parametrize(
    ("dtype", "others"), [("bfloat16", [6.84375, 31.125]), ("float16", [-2.9667969])]
)
def test_exp_is_rounded_to_nearest_but_for_three_numbers(dtype, others):
    x = all_finite(dtype, LEAST)
    found = jax.jit(exponential.exp)(x)
    with np.errstate(over="ignore"):
        away = neighbours(found, rounded(np.exp(np.asarray(x, np.float64)), dtype))
    assert away.max() <= 1
    assert {*x[away > 0].tolist()} <= {*jnp.array(others, dtype).tolist()}


@pytest.mark.parametrize("dtype", KINDS)
def test_exp_is_within_its_bound_before_it_is_rounded(dtype):
    x = all_finite(dtype, LEAST)
    x = x[np.asarray(x, np.float32) < 88]
    wide = jax.jit(lambda x: exponential._exp(x, exponential._LOG2_E))(x)
    x = np.asarray(x, np.float64)
    error = np.abs(np.asarray(wide, np.float64) / np.exp(x) - 1)
    assert np.all(error <= 2.0**-22 + np.abs(x) * 2.0**-23)


@pytest.mark.parametrize("dtype", KINDS)
def test_the_logistic_functions_bits_are_xlas(dtype):
    """Where exp's are: of 6.84375 its other neighbour is taken."""
    x = all_finite(dtype)
    found = jax.jit(exponential.logistic)(x)
    away = neighbours(found, jax.jit(jax.nn.sigmoid)(x))
    assert away.max() <= 1
    assert {*x[away > 0].astype(np.float32).tolist()} <= {-6.84375, -31.125}


def test_quotients_by_a_logarithm_are_as_far_from_a_tie_as_is_said():
    """``1 / y`` of 8 bits lies ``2^-16`` of itself from where it rounds otherwise."""
    y = np.arange(129, 256)
    quotients = 2.0**15 / y  # between 128 and 256: halves are ties
    away = np.abs(quotients % 1 - 0.5) / quotients
    nearest = np.sort(away)
    assert np.log2(nearest[:3]) == pytest.approx([-16, -15, -14])
    # Of what is left, log2's error makes the most at y = 2^64.
    assert 64 * 2.0**-22 * np.log(2) < nearest[0]


@pytest.mark.parametrize(
    ("f", "dtype", "near"),
    [
        (jax.nn.silu, "bfloat16", True),
        (jax.nn.silu, "float16", True),
        (jnp.exp2, "bfloat16", True),
        (jax.nn.relu, "float32", True),
        (jax.nn.silu, "float32", False),
        (jax.nn.gelu, "bfloat16", False),
        (lambda x: jax.nn.gelu(x, approximate=False), "bfloat16", False),
        (lambda x: jnp.log(jnp.exp(x)), "bfloat16", False),
        (lambda x: jax.nn.silu(x.astype("float32")).astype(x.dtype), "bfloat16", False),
    ],
)
def test_what_may_be_approximated(f, dtype, near):
    """exp2, and what is made of it in 16 bits; not float32's exp, tanh, roots, logs."""
    x = jax.ShapeDtypeStruct((64, 128), dtype)
    assert function_of(f, [x]).may_approximate == near


def test_silu_takes_two_exp2_and_a_log2_an_entry():
    """Of bfloat16, compiled for Hopper: the card's own, without tests of ranges."""
    x = jax.ShapeDtypeStruct((4096, 1344), jnp.bfloat16)
    fields = {"bits": 4, "group": 64, "implementation": "mosaic_gpu"}
    [text] = assembly(lambda x: activate(jax.nn.silu, [x], **fields), x)
    exp2, log2 = (text.count(f"{f}.approx.ftz.f32") for f in ("ex2", "lg2"))
    assert log2 >= 32 and exp2 == 2 * log2
    assert text.count("rcp.") == log2 // 16  # of scales: a thread has 2 rows a group
