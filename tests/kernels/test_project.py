"""The kernel against the reference and against exact sums; compiled for a card."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from jaxcompact.kernels import choice
from jaxcompact.kernels.project import reference
from jaxcompact.kernels.project.api import project
from jaxcompact.kernels.quantize.reference import dequantize
from tests.cases import slow
from tests.kernels.machine_code import compiled, kernels_in, resources
from tests.kernels.test_activate import same

pytestmark = pytest.mark.usefixtures("optimized")

KERNEL, XLA = {"implementation": "mosaic_gpu"}, {"implementation": "xla"}
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)
# Fields, dtype, x's shape and the rank: whole blocks, tails of rows and of groups,
# several blocks of columns, one round.
CASES = {
    "4 bits": ({"bits": 4}, "bfloat16", (256, 128), 256),
    "8 bits, asymmetric, tails": (
        {"bits": 8, "symmetric": False},
        "bfloat16",
        (3, 24, 192),
        192,
    ),
    "2 bits, 8-bit scales, one round": (
        {"bits": 2, "scale_bits": 8},
        "float16",
        (136, 64),
        64,
    ),
    "8-bit scales, three groups": (
        {"bits": 4, "scale_bits": 8},
        "bfloat16",
        (136, 64),
        192,
    ),
    "groups of 128, two blocks": ({"bits": 4, "group": 128}, "float16", (8, 128), 384),
}
# On the oldest jax as well.
OFTEN = "4 bits", "2 bits, 8-bit scales, one round"
cases = pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else slow(name) for name in CASES],
)


def case(name: str):
    fields, dtype, shape, rank = CASES[name]
    return {"group": 64} | fields, jnp.dtype(dtype), shape, rank


def whole_numbers(shape, rank: int, dtype):
    """Whose sums are exact in any order, and in the dtype."""
    x = jax.random.randint(jax.random.key(0), shape, -3, 4).astype(dtype)
    return x, jax.random.rademacher(jax.random.key(1), (shape[-1], rank), dtype)


@cases
def test_bits_are_the_references_where_sums_are_exact(name):
    """Interpreted, with detection of races."""
    fields, dtype, shape, rank = case(name)
    x, p = whole_numbers(shape, rank, dtype)
    z = np.asarray(x, np.float64) @ np.asarray(p, np.float64)
    assert np.abs(z).max() <= 256  # which bfloat16 still has
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        found = project(x, p, **fields, **KERNEL)
    same(found, jax.jit(lambda *a: reference.project(*a, **fields))(x, p))


def test_what_is_decoded_is_the_product_to_half_a_step():
    """And to z's rounding, the decoded value's, and that of float32's sums."""
    fields, dtype, shape, rank = case("8 bits, asymmetric, tails")
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    p = jax.random.normal(jax.random.key(1), (shape[-1], rank), dtype)
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        codes, scales, lows = project(x, p, **fields, **KERNEL)
    z = np.asarray(x, np.float64) @ np.asarray(p, np.float64)
    decoding = {"bits": 8, "group": 64, "size": rank, "dtype": jnp.bfloat16}
    found = np.asarray(dequantize(codes, scales, lows, **decoding), np.float64)
    step = np.repeat(np.asarray(scales, np.float64), 64, axis=-1)
    sums = shape[-1] * 2.0**-24 * (np.abs(x) @ np.abs(p)).astype(np.float64)
    bound = step / 2 + 2.0**-8 * (np.abs(z) + np.abs(found)) + 2 * sums
    assert np.all(np.abs(found - z) <= bound)


@pytest.mark.slow
def test_vmap():
    """Of x, whose examples are rows; of P, where each has one of its own."""
    fields, dtype, shape, rank = case("8 bits, asymmetric, tails")
    x, p = whole_numbers(shape, rank, dtype)
    several = jnp.stack([p, -p])
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        rows = jax.vmap(lambda x: project(x, p, **fields, **KERNEL))(x)
        own = jax.vmap(lambda p: project(x, p, **fields, **KERNEL))(several)
    by_reference = jax.jit(lambda x, p: reference.project(x, p, **fields))
    same(rows, by_reference(x, p))
    same(own, jax.vmap(by_reference, (None, 0))(x, several))


@cases
def test_compiled_for_hopper(name):
    """Three warpgroups have 168 registers a thread; z in 16 bits is nowhere."""
    fields, dtype, shape, _ = case(name)
    n = 1024 + shape[-1]
    x = jax.ShapeDtypeStruct((32768, n), dtype)
    p = jax.ShapeDtypeStruct((n, 256), dtype)

    def run(x, p):
        return project(x, p, **fields, **KERNEL)

    [(registers, spilled)] = resources(run, x, p)
    assert registers <= 168 and not spilled
    x = jax.ShapeDtypeStruct((40960, n), dtype)
    text = compiled(run, x, p)
    assert kernels_in(text) == 1 and "16[40960,256]" not in text
    by_xla = compiled(lambda x, p: project(x, p, **fields, **XLA), x, p)
    assert "16[40960,256]" in by_xla


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"seed": 0}, "noise is XLA's"),
        ({"bits": 3}, "bits must be 2, 4 or 8 in groups of 64, 128 or 256, got 3"),
        ({"group": 32}, "got 4 in 32"),
        ({"dtype": "float32"}, "dtypes must be one of 16 bits, got float32"),
        ({"shape": (8, 24)}, "of 8 rows and of 64 columns, P of 64, got 8, 24"),
        ({"shape": (3, 4, 32)}, "got 12, 32 and 64"),
        ({"rank": 96}, "P of 64, got 8, 64 and 96"),
        ({"shape": (0, 64)}, "got 0, 64"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take(change, rule):
    change = dict(change)
    shape, rank = change.pop("shape", (8, 64)), change.pop("rank", 64)
    x, p = whole_numbers(shape, rank, change.pop("dtype", "bfloat16"))
    with pytest.raises(NotImplementedError, match=rule):
        project(x, p, **{"bits": 4, "group": 64} | change, **KERNEL)


@pytest.mark.parametrize("kind", ["gaussian", "countsketch"])
def test_a_compressed_layer_takes_it(kind):
    """z of one product in 4 bits is never written; `countsketch` is no product.

    Whose z is encoded by a kernel of its own. The other kernel is the gradient's.
    """
    projection = jc.Projection(rank=64, kind=kind, codec=jc.Quantized(4))
    subspace = jc.Subspace({"kernel": projection}, jax.random.key(0))
    params = {"kernel": jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)}
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)

    def loss(params, x):
        y = jc.linear(x, params["kernel"]).astype(jnp.float32)
        return jnp.sum(jnp.square(y))

    def gradient(params, x):
        with choice.using("mosaic_gpu"):
            return jc.value_and_grad(loss, subspace)(params, x, step=0)[1]

    text = compiled(gradient, params, x)
    assert kernels_in(text) == 2
    assert ("bf16[512,64]" in text) == (kind == "countsketch")


def test_a_layer_gives_what_it_gives_without_the_kernel():
    """Interpreted."""
    codec = jc.Quantized(8, symmetric=False)  # decoded by XLA
    projection = jc.Projection(64, "rademacher", codec=codec)
    subspace = jc.Subspace({"kernel": projection}, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (72, 128), jnp.bfloat16)
    params = {"kernel": jnp.ones((128, 64), jnp.bfloat16)}

    def gradient(params, x, way):
        def loss(params, x):
            return jnp.sum(jc.linear(x, params["kernel"]).astype(jnp.float32))

        with choice.using(way):
            return jc.value_and_grad(loss, subspace)(params, x, step=0)[1]["kernel"]

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        found = jax.jit(gradient, static_argnums=2)(params, x, "mosaic_gpu")
    expected = jax.jit(gradient, static_argnums=2)(params, x, "xla")
    # Both are rounded to bfloat16's 2^-8. Where sums lie between two of its numbers a
    # code may differ: one term of 72 by a step of 1 / 255 of z's range.
    scale = np.abs(np.asarray(expected, np.float32)).max()
    found, expected = (np.asarray(a, np.float32) for a in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-6 * scale)
