"""The kernel against the reference: the same bits. Compiled for a card: no spills."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jaxcompact.kernels import choice
from jaxcompact.kernels.activate import reference
from jaxcompact.kernels.activate.api import activate, in_one_pass
from jaxcompact.kernels.functions import error_function
from jaxcompact.kernels.functions.operations import TAKEN
from tests.cases import slow
from tests.draws import normal
from tests.kernels.machine_code import resources

pytestmark = pytest.mark.usefixtures("optimized")

KERNEL = {"implementation": "mosaic_gpu"}
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def narrowed(gate, up):
    return swiglu(gate, up).astype(jnp.bfloat16)


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def biased(x, bias):
    return jax.nn.gelu(x + bias.reshape(*[1] * (x.ndim - 1), -1))


def biased_swiglu(gate, up, bias, scale):
    return jax.nn.silu(gate + bias.reshape(1, -1)) * up * scale


def gated(gate, up):
    return jax.nn.sigmoid(gate) * up


def clipped(x):
    return jnp.where(x > 0, jnp.minimum(x, 2), -0.5)


# Functions, fields, dtype and shape: whole blocks, tails of rows and of groups, a last
# group in part, less than a group.
CASES = {
    "SwiGLU, a group in part": (swiglu, {"bits": 4}, "bfloat16", (72, 312)),
    "SwiGLU, float32, narrowed": (
        narrowed,
        {"bits": 8, "symmetric": False},
        "float32",
        (65, 200),
    ),
    "GELU, asymmetric, a group in part": (
        jax.nn.gelu,
        {"bits": 4, "symmetric": False},
        "bfloat16",
        (2, 36, 184),
    ),
    "silu, 8-bit scales": (
        jax.nn.silu,
        {"bits": 8, "scale_bits": 8},
        "float16",
        (72, 320),
    ),
    "relu, groups of 128": (
        jax.nn.relu,
        {"bits": 2, "group": 128},
        "float32",
        (8, 384),
    ),
    "GELU of a biased x, a group in part": (
        biased,
        {"bits": 4, "symmetric": False},
        "bfloat16",
        (2, 36, 184),
    ),
    "SwiGLU of two parameters": (
        biased_swiglu,
        {"bits": 4},
        "bfloat16",
        (65, 328),
    ),
    "GELU, groups of 32": (
        jax.nn.gelu,
        {"bits": 4, "group": 32},
        "bfloat16",
        (72, 96),
    ),
    "SwiGLU, groups of 32, one in part": (
        swiglu,
        {"bits": 8, "group": 32, "symmetric": False},
        "float16",
        (65, 208),
    ),
    "clipped, one short row": (clipped, {"bits": 4}, "float16", (1, 72)),
    "a sigmoid's gate within a bound": (
        gated,
        {"bits": 4, "bounds": ((-1.5, 1.5), (-0.5, None))},
        "bfloat16",
        (72, 312),
    ),
}
# Its exp is the other neighbour of XLA's in bfloat16: test_exponential.py.
OTHER = 6.84375
# On the oldest jax as well.
OFTEN = "SwiGLU, a group in part", "GELU of a biased x, a group in part"
cases = pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else slow(name) for name in CASES],
)


def case(name: str):
    """f, the fields, parameters, and xs with groups of all sizes, of zeros, of one."""
    f, fields, dtype, shape = CASES[name]
    xs, along = [], {biased: 1, biased_swiglu: 2}.get(f, 0)
    keys = jax.random.split(jax.random.key(2), 2)[:along]
    parameters = [jax.random.normal(k, shape[-1:]).astype(dtype) for k in keys]
    parameters[1:] = [p.reshape(1, -1) for p in parameters[1:]]
    for n in range(2 if f in (swiglu, narrowed, biased_swiglu, gated) else 1):
        keys = jax.random.split(jax.random.key(n))
        x = jax.random.normal(keys[0], shape)
        x *= jnp.exp(2 * jax.random.normal(keys[1], (*shape[:-1], 1)))
        if shape[-2] > 3:
            x = x.at[..., 1, :64].set(0.0).at[..., 2, :64].set(-3.0)
        xs.append(x.astype(dtype))
    bias = jnp.broadcast_to(parameters[0], shape) if along else jnp.zeros_like(xs[0])
    read = xs[0] + bias
    xs[0] = jnp.where(jnp.abs(read) == OTHER, jnp.zeros((), dtype), xs[0])
    return f, {"group": 64} | fields, xs, parameters


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = (np.asarray(v, np.float32) for v in (x, y))
        np.testing.assert_array_equal(x, y)


@cases
def test_bits_are_the_references(name):
    """Interpreted, with detection of races: exp and tanh are then XLA's as well."""
    f, fields, *arrays = case(name)
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        found = activate(f, *arrays, **fields, **KERNEL)
    same(found, jax.jit(lambda *a: reference.activate(f, *a, **fields))(*arrays))


@pytest.mark.parametrize(
    ("dtype", "unit"), [("bfloat16", 2**-8), ("float16", 2**-11), ("float32", 2**-24)]
)
def test_swiglu_is_within_its_five_roundings(dtype, unit):
    """Of the exact value: 1 + exp, the quotient, two products, and exp itself.

    float32's exp is a few units off; 2^-14 of a unit squared is of second order.
    """
    f, fields, xs, _ = case("SwiGLU, a group in part")
    xs = [jnp.clip(x, -8, 8).astype(dtype) for x in xs]
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        y, _ = activate(f, xs, **fields, **KERNEL)
    gate, up = (np.asarray(x, np.float64) for x in xs)
    exact = gate / (1 + np.exp(-gate)) * up
    error = np.abs(np.asarray(y, np.float64) - exact)
    tiny = float(jnp.finfo(dtype).tiny)  # below it, numbers are further apart
    assert np.all(error <= (5 + 2) * unit * np.abs(exact) + tiny)
    assert error.max() > 0


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_exact_gelu_is_within_its_four_roundings(dtype, unit):
    """Of erfc, of the product, and of two before erfc, by which it changes more."""
    x = (3 * normal(0, 72, 312)).astype(dtype)
    fields = {"bits": 4, "group": 64}
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        y, codes = activate(exact_gelu, [x], **fields, **KERNEL)
    same(
        codes,
        jax.jit(lambda x: reference.activate(exact_gelu, [x], [], **fields))(x)[1],
    )
    x = np.asarray(x, np.float64)
    of = -x / np.sqrt(2)
    exact = x / 2 * scipy.special.erfc(of)
    slope = 2 / np.sqrt(np.pi) * np.exp(-np.square(of)) / scipy.special.erfc(of)
    error = np.abs(np.asarray(y, np.float64) - exact)
    # Of second order: erfc's slope changes by as much as 1 + 2 (2 of^2 u) from x on.
    allowed = (2 + 2 * np.abs(of) * slope * (1 + 4 * of**2 * unit)) * unit
    tiny = float(jnp.finfo(dtype).tiny)  # below it, numbers are further apart
    assert np.all(error <= allowed * np.abs(exact) + tiny)
    assert error.max() > 0


@pytest.mark.parametrize("name", ["erf", "erfc"])
def test_error_functions(name):
    """Of float32, against float64: erfc to a few units and the rounding of x^2."""
    f = jax.jit(getattr(error_function, name))
    x = jnp.concatenate([jnp.linspace(-5, 9, 4001), jnp.array([1e-20, 0, 30, -30])])
    found = np.asarray(f(x), np.float64)
    exact = getattr(scipy.special, name)(np.asarray(x, np.float64))
    allowed = (
        16 + 2 * np.square(np.asarray(x, np.float64)) * (name == "erfc")
    ) * 2**-24
    assert np.all(np.abs(found - exact) <= allowed * np.abs(exact) + 2**-126)
    special = f(jnp.array([jnp.inf, -jnp.inf, jnp.nan]))
    np.testing.assert_array_equal(
        special, [1, -1, np.nan] if name == "erf" else [0, 2, np.nan]
    )


def test_infinities_stay_in_their_group():
    x = jnp.ones((8, 128), jnp.bfloat16).at[3, 70].set(jnp.inf)
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        y, [(_, scales, _)] = activate(jnp.tanh, [x], bits=4, group=64, **KERNEL)
    same(y, jnp.tanh(x))
    bad = np.zeros((8, 2), bool)
    bad[3, 1] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(scales, np.float32)), bad)


@pytest.mark.parametrize("mapped", ["gate", "gate and bias"])
def test_vmap(mapped):
    """Also where one of the arrays is the same for all examples."""
    f, fields, [gate, up], [bias, scale] = case("SwiGLU of two parameters")
    gate, up = gate[:63].reshape(3, 21, -1), up[:21]
    biases = jnp.stack([bias, -bias, 2 * bias]) if "bias" in mapped else bias
    axes = (0, 0 if "bias" in mapped else None)

    def run(activate, **which):
        def one(gate, bias):
            return activate(f, [gate, up], [bias, scale], **fields, **which)

        return jax.jit(jax.vmap(one, axes))(gate, biases)

    expected = run(reference.activate)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        same(run(activate, **KERNEL), expected)


# Of 65536: 5 blocks of 128 threads with 96.
MOST_REGISTERS = {"relu, groups of 128": 128}


@cases
def test_compiled_for_hopper(name):
    f, fields, *arrays = case(name)
    # A kernel that this process has compiled before would not be compiled again.
    rows = 4096 * (1 + list(CASES).index(name))

    def longer(a):
        leading = [1 if size == 1 else rows for size in a.shape[-2:-1]]
        return jax.ShapeDtypeStruct((*leading, 1024 + a.shape[-1]), a.dtype)

    args = jax.tree.map(longer, arrays)
    found = resources(lambda *a: activate(f, *a, **fields, **KERNEL), *args)
    [(registers, spilled)] = found
    assert registers <= MOST_REGISTERS.get(name, 96) and not spilled, found


def everything(x):
    """Each operation that a kernel takes."""
    y = jax.lax.integer_pow(jnp.exp2(x), 3) - jax.lax.square(jnp.log(jnp.abs(x)))
    y = jax.lax.rsqrt(jnp.sqrt(y) + 1) / jax.lax.clamp(jnp.bfloat16(-1), y, -x)
    y = jnp.where((y < x) == (y >= -x), jnp.tanh(y), jax.nn.sigmoid(y))
    y = jnp.where((y <= 1) != (y > x), jnp.maximum(y, x), jnp.minimum(x, 0.5) * y)
    y = jax.lax.erf(y) + jax.lax.erfc(jnp.array(x))  # which copies it
    y = jnp.where(x == y, jnp.exp(y).astype(jnp.float32), 2.0)
    return y.astype(jnp.bfloat16)


def test_each_operation_compiles():
    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    text = str(jax.make_jaxpr(everything)(x))
    assert {kind for kind in TAKEN if f"= {kind}" in text} == TAKEN
    found = resources(
        lambda x: activate(everything, [x], bits=4, group=64, **KERNEL), x
    )
    assert len(found) == 1


X = jnp.ones((8, 128), jnp.bfloat16)


@pytest.mark.parametrize(
    ("f", "change", "rule"),
    [
        (jax.lax.erf_inv, {}, "f must be made of abs, .*, tanh, got erf_inv"),
        (lambda x: jax.nn.softmax(x), {}, "got reduce_max"),
        (lambda x: x * X, {}, "f must close over no arrays"),
        (lambda x: jax.jit(lambda y: y * X)(x), {}, "f must close over no arrays"),
        (lambda x: x[:4], {}, "got slice"),
        (lambda x: x**5, {}, "integer_pow must be of 2 or 3, got 5"),
        (lambda x: jax.lax.broadcasted_iota(x.dtype, x.shape, 1), {}, "got iota"),
        (lambda x: x > 0, {}, r"f must make floats of \(8, 128\) first, got bool"),
        (lambda x: x - x.sum(-1, keepdims=True), {}, "got reduce_sum|elementwise"),
        (jnp.tanh, {"bits": 3}, "bits must be 2, 4 or 8, got 3"),
        (jnp.tanh, {"group": 48}, "group must be 32, 64, 128 or 256, got 48"),
        (
            jnp.tanh,
            {"shape": (8, 133)},
            r"multiples of 16 bytes, got bfloat16\[133\]",
        ),
        (
            jnp.add,
            {"xs": [X.astype(jnp.float32)] * 2, "group": 256},
            "groups of 256 take 8 bytes of xs and y, got 12",
        ),
        (jnp.add, {"xs": (X, X[:4])}, "xs must have one shape and dtype"),
        (lambda x, y, z: x + y + z, {"xs": (X, X, X)}, "one or two arrays, got 3"),
    ],
)
def test_what_the_kernel_does_not_take(f, change, rule):
    change = dict(change)
    xs = change.pop("xs", [jnp.ones(change.pop("shape", X.shape), X.dtype)])
    fields = {"bits": 4, "group": 64} | change
    with pytest.raises(NotImplementedError, match=rule):
        activate(f, xs, **fields, **KERNEL)
    with choice.using("mosaic_gpu"):
        assert not in_one_pass(f, xs, **fields)


def test_where_no_card_was_measured_xla_is_taken():
    assert not in_one_pass(jnp.tanh, [X], bits=4, group=64)
    with choice.using("mosaic_gpu"):
        assert in_one_pass(jnp.tanh, [X], bits=4, group=64)
