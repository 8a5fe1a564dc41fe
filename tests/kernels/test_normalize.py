"""The kernel against the reference and against exact sums; compiled for a card."""

import contextlib

import flax.linen as nn
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.kernels import choice
from jaxcompact.kernels.functions.rows import function_of
from jaxcompact.kernels.normalize import reference
from jaxcompact.kernels.normalize.api import in_one_pass, normalize
from jaxcompact.kernels.quantize.reference import quantize
from tests.cases import slow
from tests.kernels.machine_code import compiled, kernels_in, resources
from tests.kernels.test_activate import everything, same

pytestmark = pytest.mark.usefixtures("optimized")

KERNEL = {"implementation": "mosaic_gpu"}
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)
EPSILON = 1e-6


def along(w, x):
    return w.reshape(*[1] * (x.ndim - 1), -1)


def rms_norm(x, w):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), -1, keepdims=True) + EPSILON
    return (wide * jax.lax.rsqrt(mean)).astype(w.dtype) * along(w, x), mean


def layer_norm(x, w, b):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    variance = jnp.var(wide, -1, keepdims=True) + EPSILON
    z = (wide - mean) * jax.lax.rsqrt(variance)
    return z.astype(w.dtype) * along(w, x) + along(b, x), mean[..., 0], variance


def flax_norm(x, w, b):
    """Whose variance is that of sums of x and of its squares, made at once."""
    norm = nn.LayerNorm(EPSILON, dtype=x.dtype)
    with jax.numpy_dtype_promotion("standard"):
        return (norm.apply({"params": {"scale": w, "bias": b}}, x),)


def whole_sums(x, w, *_):
    """Exact for small whole numbers in any order: one sum of the other, y of both."""
    wide = x.astype(jnp.float32)
    total = jnp.sum(wide, -1, keepdims=True)
    off = wide - jnp.clip(total, -2, 2)
    squares = jnp.sum(jnp.square(off), -1)
    y = (off * along(w, x).astype(jnp.float32) + squares[..., None]).astype(w.dtype)
    return y, squares, total


# Functions, fields, dtypes of x and of parameters, shape and config: whole blocks,
# tails of rows and of groups, rows that are held, rows that are read there and back.
CASES = {
    "RMSNorm, a group in part": (
        rms_norm,
        {"bits": 4},
        ("bfloat16", "bfloat16"),
        (72, 376),
        {},
    ),
    "LayerNorm, there and back": (
        layer_norm,
        {"bits": 4, "symmetric": False},
        ("bfloat16", "bfloat16"),
        (2, 36, 440),
        {"columns": 64, "workers": 2},
    ),
    "flax's, 8-bit scales, one warpgroup": (
        flax_norm,
        {"bits": 8, "scale_bits": 8},
        ("float16", "float32"),
        (65, 200),
        {"columns": 128, "workers": 1},
    ),
    "RMSNorm, 8-bit scales, three groups of each warpgroup": (
        rms_norm,
        {"bits": 4, "scale_bits": 8},
        ("bfloat16", "bfloat16"),
        (8, 384),
        {"columns": 192, "workers": 2},
    ),
    "RMSNorm, float32, narrowed, groups of 128": (
        rms_norm,
        {"bits": 2, "group": 128},
        ("float32", "bfloat16"),
        (8, 384),
        {"columns": 128, "workers": 2},
    ),
    "LayerNorm, groups of 32, of Swin's width": (
        layer_norm,
        {"bits": 4, "group": 32},
        ("bfloat16", "bfloat16"),
        (72, 96),
        {},
    ),
    "RMSNorm, float32, groups of 32, there and back": (
        rms_norm,
        {"bits": 8, "group": 32, "symmetric": False},
        ("float32", "float32"),
        (65, 212),
        {"columns": 64, "workers": 1},
    ),
    "LayerNorm, widened, one short row": (
        layer_norm,
        {"bits": 4},
        ("float16", "float32"),
        (1, 72),
        {},
    ),
}
# On the oldest jax as well.
OFTEN = "RMSNorm, a group in part", "LayerNorm, there and back"
cases = pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else slow(name) for name in CASES],
)


def case(name: str):
    """f, the fields, x and parameters; groups of every size, of zeros, of one value."""
    f, fields, (dtype, of_parameters), shape, _ = CASES[name]
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], shape) + 0.5
    x *= jnp.exp(2 * jax.random.normal(keys[1], (*shape[:-1], 1)))
    if shape[-2] > 3:
        x = x.at[..., 1, :64].set(0.0).at[..., 2, :].set(-3.0)
    parameters = [
        jax.random.normal(key, shape[-1:]).astype(of_parameters)
        for key in keys[2 : 3 + (f is not rms_norm)]
    ]
    return f, {"group": 64} | fields, x.astype(dtype), parameters


def run(name: str, f, x, parameters, how=INTERPRETED):
    _, fields, _, _ = case(name)
    with configured(name), plgpu.force_gpu_interpret_mode(how):
        return normalize(f, x, parameters, **fields, **KERNEL)


def configured(name: str):
    config = CASES[name][-1]
    return choice.using(None, config) if config else contextlib.nullcontext()


@cases
def test_bits_are_the_references_where_sums_are_exact(name):
    """Interpreted, with detection of races."""
    _, fields, x, parameters = case(name)
    x, *parameters = (jnp.round(jnp.clip(a, -3, 3)) for a in (x, *parameters))
    found = run(name, whole_sums, x, parameters)
    expected = jax.jit(lambda *a: reference.normalize(whole_sums, *a, **fields))
    same(found, expected(x, parameters))


@cases
def test_y_is_within_the_bound_of_its_sums(name):
    """That of `rows`, of the exact value; codes are the reference's."""
    f, fields, x, parameters = case(name)
    (y, *statistics), of = run(name, f, x, parameters, plgpu.InterpretGPUParams())
    same(of, jax.jit(lambda x: quantize(x, **fields))(x))
    n, u = x.shape[-1], 2.0**-24
    unit = {2: 2.0**-8, 4: u}[y.dtype.itemsize]  # float16's is less
    a, (w, *b) = jax.tree.map(lambda v: np.asarray(v, np.float64), (x, parameters))
    b = b[0] if b else 0.0
    m, off = np.zeros((*x.shape[:-1], 1)), 0.0
    if f is not rms_norm:
        m = a.mean(-1, keepdims=True)
        off = (n + 1) * u * np.abs(a).mean(-1, keepdims=True)
    square = ((a - m) ** 2).mean(-1, keepdims=True) + EPSILON
    r = 1 / np.sqrt(square)
    bound = (n / 2 + 6) * u
    if f is flax_norm:  # a difference: mean(x^2) - m^2
        squares = (a**2).mean(-1, keepdims=True) + m**2
        bound = bound + (n + 4) * u * squares * r**2 / 2
    z = (a - m) * r
    bound = (bound * np.abs(z) + off * r) * np.abs(w)
    bound += unit * (2 * np.abs(z * w) + np.abs(z * w + b))
    bound += float(jnp.finfo(y.dtype).tiny)
    for got in (y, jax.jit(f)(x, *parameters)[0]):
        error = np.abs(np.asarray(got, np.float64) - (z * w + b))
        assert np.all(error <= bound), (error / bound).max()
        assert error.max() > 0
    for s, exact in zip(statistics[::-1], (square, m[..., 0]), strict=False):
        assert s.shape == exact.shape
        some = (n + 4) * u * exact if exact is square else off[..., 0]
        assert np.all(np.abs(np.asarray(s, np.float64) - exact) <= some)


def test_passes_over_x():
    """A variance waits for its mean; flax's does not."""
    x, w = jnp.ones((8, 128)), jnp.ones(128)

    def sums(f, *parameters):
        found = function_of(f, [x], parameters)
        return [len(of_pass) for of_pass in found.sums]

    assert sums(rms_norm, w) == [1]
    assert sums(layer_norm, w, w) == [1, 1]
    assert sums(flax_norm, w, w) == [2]


def test_infinities_stay_in_their_row_and_group():
    x = jnp.ones((8, 128), jnp.bfloat16).at[3, 70].set(jnp.inf)
    w = jnp.ones(128, jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        (y, mean), (_, scales, _) = normalize(
            rms_norm, x, [w], bits=4, group=64, **KERNEL
        )
    bad = np.zeros((8, 2), bool)
    bad[3, 1] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(scales, np.float32)), bad)
    np.testing.assert_array_equal(np.isinf(mean), bad.any(1, keepdims=True))
    same(y, rms_norm(x, w)[0])


@pytest.mark.slow
def test_vmap():
    """Of x, whose examples are rows; of parameters, where each has its own."""
    f, fields, x, [w, b] = case("LayerNorm, there and back")
    several = jnp.stack([w, -w])

    def of(x, w, normalize=normalize, **which):
        return normalize(f, x, [w, b], **fields, **which)

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        every = of(x, w, **KERNEL)
        nested = x.reshape(2, 3, 12, -1)
        rows = jax.vmap(jax.vmap(lambda x: of(x, w, **KERNEL)))(nested)
        own = jax.jit(jax.vmap(lambda w: of(x, w, **KERNEL)))(several)
    same(jax.tree.map(lambda a: a.reshape(2, 36, *a.shape[3:]), rows), every)
    by_xla = jax.vmap(lambda w: of(x, w, reference.normalize))
    same(own, jax.jit(by_xla)(several))


@cases
def test_compiled_for_hopper(name):
    """Rows of 1024 and more; of 4 warpgroups a thread has 128 registers."""
    f, fields, x, parameters = case(name)
    # A kernel that this process has compiled before would not be compiled again.
    rows, n = 4096 * (1 + list(CASES).index(name)), 1024 + x.shape[-1]
    shapes = (
        jax.ShapeDtypeStruct((rows, n), x.dtype),
        [jax.ShapeDtypeStruct((n,), p.dtype) for p in parameters],
    )

    def run(x, parameters):
        return normalize(f, x, parameters, **fields, **KERNEL)

    with configured(name):
        found = resources(run, *shapes)
        [(registers, spilled)] = found
        assert registers <= 128 and not spilled, found
        assert kernels_in(compiled(run, *shapes)) == 1


@pytest.mark.slow
def test_each_operation_compiles():
    """On sums and on parameters, where elementwise functions are of entries."""

    def f(x, w):
        mean = jnp.mean(x, -1).astype(x.dtype)
        y = x * everything(mean).reshape(-1, 1) + everything(w.reshape(1, -1))
        return y, mean

    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
    found = resources(
        lambda x, w: normalize(f, x, [w], bits=4, group=64, **KERNEL), x, w
    )
    assert len(found) == 1


X = jnp.ones((8, 128), jnp.bfloat16)
W = jnp.ones(128, jnp.bfloat16)


def first_of(f):
    return lambda x, w: (f(x, w), jnp.sum(x, -1))


@pytest.mark.parametrize(
    ("f", "change", "rule"),
    [
        (
            first_of(lambda x, w: jax.lax.erf_inv(x)),
            {},
            "f must be made of abs.*, got erf_inv",
        ),
        (first_of(lambda x, w: jax.nn.softmax(x)), {}, "got reduce_max"),
        (first_of(lambda x, w: x * X), {}, "f must close over no arrays"),
        (first_of(lambda x, w: x**5), {}, "integer_pow must be of 2 or 3, got 5"),
        (first_of(lambda x, w: x > 0), {}, "f must make floats of .* first, got bool"),
        (lambda x, w: (x * w[None],), {}, "f must sum over the last axis"),
        (lambda x, w: (x, x), {}, "statistics of rows after y, got bfloat16"),
        (lambda x, w: (x, w), {}, "statistics of rows after y, got bfloat16"),
        (lambda x, w: (x - x.sum(0),), {}, "must sum over the last axis of"),
        (
            lambda x, w: (x - jax.lax.reduce_sum(x, (1,))[:, None],),
            {},
            "sums must be of float32, got bfloat16",
        ),
        (
            lambda x, w: (x * jnp.mean(x, -1)[None],),
            {"shape": (128, 128)},
            "must lie along .* got broadcast_in_dim to ",
        ),
        (first_of(jnp.multiply), {"w": X}, r"must be \(128,\), got \(8, 128\)"),
        (rms_norm, {"w": W.astype(int)}, "floats of 16 or 32 bits, got int32"),
        (rms_norm, {"bits": 3}, "bits must be 2, 4 or 8, got 3"),
        (rms_norm, {"group": 48}, "group must be 32, 64, 128 or 256, got 48"),
        (rms_norm, {"shape": (8, 132)}, r"multiples of 16 bytes, got bfloat16\[132\]"),
        (rms_norm, {"shape": (0, 128)}, r"must have entries, got \(0, 128\)"),
    ],
)
def test_what_the_kernel_does_not_take(f, change, rule):
    change = dict(change)
    x = jnp.ones(change.pop("shape", X.shape), X.dtype)
    w = change.pop("w", W if x.shape[-1] == 128 else jnp.ones(x.shape[1:], x.dtype))
    fields = {"bits": 4, "group": 64} | change
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        with pytest.raises(NotImplementedError, match=rule):
            normalize(f, x, [w], **fields, **KERNEL)
        with choice.using("mosaic_gpu"):
            assert not in_one_pass(f, x, [w], **fields)


def test_nothing_of_an_array_without_rows():
    x = X[:0]
    with choice.using("mosaic_gpu"):
        found = normalize(rms_norm, x, [W], bits=4, group=64)
    same(found, reference.normalize(rms_norm, x, [W], bits=4, group=64))


def test_where_no_card_was_measured_xla_is_taken():
    assert not in_one_pass(rms_norm, X, [W], bits=4, group=64)
    with choice.using("mosaic_gpu"):
        assert in_one_pass(rms_norm, X, [W], bits=4, group=64)


def test_values_that_are_read_twice_are_found_once():
    """Else each of these would take twice the time of the one before."""

    def f(x):
        for _ in range(40):
            x = x * (1 - x)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    assert len(function_of(f, [x], []).sums) == 1
