"""What kernels make at full size, against XLA's code of the same operation."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import jaxcompact as jc
from jaxcompact.kernels import choice
from jaxcompact.kernels.activate.api import activate
from jaxcompact.kernels.normalize.api import normalize

FULL = (
    ((128, 256, 1024), "bfloat16"),
    ((128, 256, 1024), "float32"),
    ((8, 1000, 2736), "bfloat16"),
    ((4, 24, 11008), "bfloat16"),
    ((7, 555, 5461), "float32"),
    ((7, 8, 5461), "bfloat16"),
    ((64, 784, 96), "bfloat16"),
)
# With SMALL=1, for the memory checker, which takes its time.
SMALL = ((2, 40, 320), "bfloat16"), ((3, 9, 136), "float32")


def relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def arrays():
    """At full size on a GPU, as the kernels need one; tests/kernels interprets them."""
    if jax.default_backend() != "gpu":
        print("not checked: the kernels need a GPU; tests/kernels interprets them")
        return []
    some = SMALL if os.environ.get("SMALL") else FULL
    return [jax.random.normal(jax.random.key(0), *one) for one in some]


def each(check, cases):
    """Of all cases; in threads, since the time is the compiler's."""

    def run(case):
        start, error = time.perf_counter(), None
        try:
            check(*case)
        except Exception as found:
            error = f"{type(found).__name__}: {str(found)[:300]}"
        shown = [f"{a.dtype}{a.shape}" if hasattr(a, "shape") else str(a) for a in case]
        took = f"{time.perf_counter() - start:.1f} s"
        print(f"{check.__name__} {' '.join(shown)}: {error or took}", flush=True)
        return error

    with ThreadPoolExecutor(8) as pool:
        failed = sum(error is not None for error in pool.map(run, cases))
    assert not failed, f"{failed} of {len(cases)} cases failed"


def same(found, expected):
    """Bit for bit, counted on the device."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        differ = int(differing(a, b))
        assert differ == 0, f"{differ} of {a.size} {a.dtype}s differ"


@jax.jit
def differing(a, b):
    kind = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    a, b = (jax.lax.bitcast_convert_type(x, kind) for x in (a, b))
    return jnp.sum(a != b)


def rows():
    yield from (jc.Quantized(bits) for bits in (2, 4, 8))
    yield from (jc.Quantized(4, stochastic=True), jc.Quantized(4, symmetric=False))
    yield from (jc.Quantized(4, 256, scale_bits=8), jc.Quantized(8, 32))
    yield from (jc.Quantized(4, bound=b) for b in (1.5, (-0.5, None)))


def channels():
    """As policies store q and k, and with all other numbers of bits."""
    yield jc.Quantized(8, symmetric=False, axis=-2)
    yield jc.Quantized(4, stochastic=True, axis=-2)
    yield jc.Quantized(3, 32, axis=-2)
    yield jc.Quantized(8, axis=-2, bound=1.5)
    yield jc.Quantized(2, 128, symmetric=False, stochastic=True, axis=-2)


def both_ways(fun, *args):
    """By the kernels, and by XLA."""
    for way in ("mosaic_gpu", "xla"):
        with choice.using(way):
            yield jax.jit(lambda *args: fun(*args))(*args)  # traced anew


def quantization_is_xlas(codec, x):
    encoded, expected = both_ways(codec.encode, x)
    same(encoded, expected)
    same(*both_ways(codec.decode, encoded))


def weight_gradient_is_xlas(codec, x):
    def product(encoded, dy):
        dy = dy.astype(encoded.dtype)
        return codec.weight_gradient(encoded, dy, preferred_element_type=jnp.float32)

    dy = x[..., :256].astype(jnp.bfloat16)
    found, expected = both_ways(product, codec.encode(x), dy)
    # A tensor core cuts off what is below float32's last bit, once for each 16 tokens.
    cut = x.size // x.shape[-1] / 16 * 2**-23
    assert relative(found, expected) < max(1e-5, cut)


def projection_is_xlas(codec, x, rank):
    """The same bits where sums are bfloat16 numbers: whole, and at most 256.

    XLA does not always round to bfloat16 what it encodes.
    """
    small, n = jnp.round(jnp.clip(x, -1, 1)).astype(jnp.bfloat16), x.shape[-1]
    p = jax.random.rademacher(jax.random.key(1), (n, rank), jnp.bfloat16)
    p = jnp.where(jnp.arange(n)[:, None] % -(-n // 256) == 0, p, 0)
    same(*both_ways(codec.project, small, p))


def group_of(x):
    """As codecs have it of these widths."""
    return 32 if x.shape[-1] < 128 else 64


def activation_is_xlas(x):
    """SwiGLU is within five roundings of the exact value, by either."""

    def swiglu(gate, up):
        return jax.nn.silu(gate) * up

    def run(gate, up):
        fields = {"bits": 4, "group": group_of(gate), "bounds": ((-1.5, 1.5), None)}
        return activate(swiglu, (gate, up), **fields)

    (y, encoded), (expected, codes) = both_ways(run, x, x[..., ::-1])
    same(encoded, codes)
    unit = {2: 2**-8, 4: 2**-24}[x.dtype.itemsize]
    # Also of exp itself in float32, by some units.
    close(y, expected, rtol=16 * unit)


def biased_activation_is_xlas(x):
    """The exact GELU: erfc and a product, of an argument that both round alike.

    In float32 erfc is within 16 + 2 t^2 units of itself, by either; t is 4 at most.
    """

    def gelu(x, bias):
        return jax.nn.gelu(x + bias.reshape(*[1] * (x.ndim - 1), -1), approximate=False)

    def run(x, bias):
        return activate(gelu, (x,), (bias,), bits=4, group=group_of(x))

    x = jnp.clip(x, -4, 4)
    (y, encoded), (expected, codes) = both_ways(run, x, x[0, 0])
    same(encoded, codes)
    unit = {2: 16 * 2**-8, 4: 2 * 64 * 2**-24}[x.dtype.itemsize]
    close(y, expected, rtol=unit, atol=1e-6)


def norm_is_xlas(x):
    """RMSNorm is within the bound of its sums, and two roundings, by either."""

    def norm(x, w):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6
        y = (wide * jax.lax.rsqrt(mean)).astype(x.dtype)
        return y * w.reshape(*[1] * (x.ndim - 1), -1), mean

    def run(x, w):
        return normalize(norm, x, [w], bits=4, group=group_of(x))

    (found, encoded), (expected, codes) = both_ways(run, x, x[0, 0])
    same(encoded, codes)
    unit = {2: 2**-8, 4: 2**-24}[x.dtype.itemsize]
    sums = (x.shape[-1] + 12) * 2**-24  # of kernels/functions/rows.py, twice
    for a, b, roundings in zip(found, expected, (4 * unit, 0), strict=True):
        close(a, b, rtol=sums + roundings)


def close(found, expected, rtol, atol=0.0):
    off, limit = exceeding(found, expected, rtol, atol)
    assert off <= limit, f"off by {off}, {limit} allowed"


@jax.jit
def exceeding(a, b, rtol, atol):
    """Where the most is off of what is allowed: by how much, and what is allowed."""
    a, b = (x.astype(jnp.float32).ravel() for x in (a, b))
    off, limit = jnp.abs(a - b), rtol * jnp.abs(b) + atol
    worst = jnp.argmax(off - limit)
    return off[worst], limit[worst]
