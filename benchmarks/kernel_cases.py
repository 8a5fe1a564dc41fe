"""What `kernels.py` times: ops at the shapes of LLaMAs, and what stands beside each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.kernels.activate.api import activate
from jaxcompact.kernels.normalize.api import normalize
from jaxcompact.kernels.project.api import project
from jaxcompact.kernels.quantize.api import dequantize, quantize
from jaxcompact.kernels.weight_gradient.api import weight_gradient

# Tokens, width of x, width of dy: residual streams and MLPs of LLaMAs.
SHAPES = {
    "350m": (32768, 1024, 1024),
    "350m_mlp": (32768, 2736, 1024),
    "1b": (32768, 2048, 2048),
    "7b": (32768, 4096, 4096),
    "7b_mlp": (32768, 11008, 4096),
}
TOY = {"toy": (64, 128, 64)}


@dataclass(frozen=True)
class Case:
    """One op at one shape, and the plain op that it stands beside.

    ``bytes`` are those that it must read and write, ``flops`` those of its product; a
    case without a plain op stands beside a copy.
    """

    op: str
    name: str
    fun: Callable
    args: tuple
    bytes: int
    flops: int = 0
    plain: tuple[Callable, tuple] | None = None
    apart: Callable | None = None  # of kernels for parts of it

    def beside(self) -> tuple[Callable, tuple]:
        if self.plain:
            return self.plain
        return jnp.copy, (jax.ShapeDtypeStruct((self.bytes // 2,), jnp.uint8),)


def cases(name: str, tokens: int, n: int, m: int) -> Iterator[Case]:
    """Ops on ``x``, ``[tokens, n]``, and ``dy``, ``[tokens, m]``, in bfloat16."""
    x = jax.ShapeDtypeStruct((tokens, n), jnp.bfloat16)
    dy = jax.ShapeDtypeStruct((tokens, m), jnp.bfloat16)
    for bits, seed in ((8, None), (4, None), (2, None), (4, 0)):
        fields = {"bits": bits, "group": 64}

        def encode(x, fields=fields, seed=seed):
            return quantize(x, seed=seed, **fields)

        encoded = jax.eval_shape(encode, x)
        kind = f"{name}_int{bits}"
        op = "quantize" if seed is None else "quantize_stochastic"
        yield Case(op, kind, encode, (x,), size(x, encoded))
        if seed is not None:
            continue
        fields = fields | {"size": n, "dtype": jnp.bfloat16}

        def decode(codes, stored, fields=fields):
            return dequantize(codes, stored, None, **fields)

        yield Case("dequantize", kind, decode, encoded[:2], size(x, encoded))
        product = fields | {"preferred_element_type": jnp.float32}

        def gradient(codes, stored, dy, fields=product):
            return weight_gradient(codes, stored, None, dy, **fields)

        moved, flops = size(encoded, dy) + 4 * n * m, 2 * tokens * n * m
        args = (*encoded[:2], dy)
        plain = (lambda x, dy: x.T @ dy), (x, dy)
        if n % 64 == 0:  # else it is dequantize and XLA's product
            yield Case("weight_gradient", kind, gradient, args, moved, flops, plain)
        fields = {"bits": bits, "group": 64}

        def swiglu(gate, up, fields=fields):
            return activate(lambda g, u: jax.nn.silu(g) * u, (gate, up), **fields)

        def apart(gate, up, fields=fields):
            return jax.nn.silu(gate) * up, [quantize(a, **fields) for a in (gate, up)]

        moved = size(x, x, jax.eval_shape(swiglu, x, x))
        args, kind = (x, x), f"{kind}_swiglu"
        plain = (lambda gate, up: jax.nn.silu(gate) * up), args
        yield Case("activate", kind, swiglu, args, moved, 0, plain, apart)

        def gelu(x, bias):
            return jax.nn.gelu(x + bias.reshape(1, -1), approximate=False)

        def biased(x, bias, fields=fields):
            return activate(gelu, (x,), (bias,), **fields)

        def after(x, bias, fields=fields):
            return gelu(x, bias), [quantize(x, **fields)]

        args = x, jax.ShapeDtypeStruct((n,), x.dtype)
        moved = size(*args, jax.eval_shape(biased, *args))
        kind = kind.replace("swiglu", "gelu")
        yield Case("activate", kind, biased, args, moved, 0, (gelu, args), after)
    yield of_norms(name, x)
    yield from of_channels(name, x)
    if n % 64:
        return
    # As a compressed layer stores z, in 4 bits at n/2.
    p = jax.ShapeDtypeStruct((n, 64 * max(1, n // 128)), jnp.bfloat16)

    def sketch(x, p):
        return project(x, p, bits=4, group=64)

    moved, flops = size(x, p, jax.eval_shape(sketch, x, p)), 2 * tokens * p.size
    plain = jnp.matmul, (x, p)
    yield Case("project", f"{name}_int4", sketch, (x, p), moved, flops, plain)


def of_norms(name: str, x: jax.ShapeDtypeStruct) -> Case:
    """RMSNorm, as LLaMAs have it, and x in 4 bits."""

    def norm(x, w):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6
        y = wide * jax.lax.rsqrt(mean) * w[None]
        return y.astype(x.dtype), mean

    def together(x, w):
        return normalize(norm, x, [w], bits=4, group=64)

    def apart(x, w):
        return norm(x, w), quantize(x, bits=4, group=64)

    args = x, jax.ShapeDtypeStruct(x.shape[1:], jnp.float32)
    moved = size(args, jax.eval_shape(together, *args))
    return Case(
        "normalize", f"{name}_int4", together, args, moved, 0, (norm, args), apart
    )


def of_channels(name: str, x: jax.ShapeDtypeStruct) -> Iterator[Case]:
    """As policies store q and k."""
    fields: dict = {"bits": 8, "group": 64, "axis": -2}

    def encode(x):
        return quantize(x, symmetric=False, **fields)

    def decode(*encoded):
        return dequantize(*encoded, size=x.shape[0], dtype=x.dtype, **fields)

    def round_up(x):
        return quantize(x, bits=4, group=64, axis=-2, seed=0)

    encoded, noisy = jax.eval_shape(encode, x), jax.eval_shape(round_up, x)
    moved = size(x, encoded)
    yield Case("quantize_channels", f"{name}_int8", encode, (x,), moved)
    yield Case("dequantize_channels", f"{name}_int8", decode, encoded, moved)
    moved, op = size(x, noisy), "quantize_stochastic_channels"
    yield Case(op, f"{name}_int4", round_up, (x,), moved)


def size(*trees: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(trees))
