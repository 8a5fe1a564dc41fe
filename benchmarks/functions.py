"""Peaks of what is no transformer trained whole: adapters, recurrences, Fourier layers.

    pip install ".[train,memory]"
    python benchmarks/functions.py all
    python benchmarks/functions.py table

Gradients of plain JAX and Linen functions, compiled for an H200, with nothing done to
them but ``jc.checkpoint`` or `jax.checkpoint` around the whole, for LoRA around each
layer. Rows of results/functions.jsonl that are there are not made again.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks/results/functions.jsonl"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import linen as nn  # noqa: E402
from provenance import append, provenance, rows_of  # noqa: E402
from recurrent_tasks import delta_rule  # noqa: E402

import jaxcompact as jc  # noqa: E402
from jaxcompact import memory  # noqa: E402

S, BF16 = jax.ShapeDtypeStruct, jnp.bfloat16
# The function that wraps, the parameters (differentiated), and the other arguments.
Built = tuple[Callable[[Callable], Callable], Any, tuple]
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
WRAPS = {
    "exact": lambda fun: fun,
    "dots": lambda fun: jax.checkpoint(fun, policy=DOTS),
    "recomputed": jax.checkpoint,
    "int8": lambda fun: jc.checkpoint(fun, policy=jc.policies.int8(), params=(0, 1)),
    "int4": lambda fun: jc.checkpoint(fun, policy=jc.policies.int4(), params=(0, 1)),
}


def lora() -> Built:
    """24 layers as LLaMA-350M's, frozen, with adapters of rank 16; 16 x 1024 tokens."""
    layers, width, ff, heads, rank = 24, 1024, 2816, 16, 16
    sizes = dict.fromkeys("qkvo", (width, width))
    sizes |= {"gate": (width, ff), "up": (width, ff), "down": (ff, width)}
    frozen = {name: S((layers, *size), BF16) for name, size in sizes.items()}
    adapters = {
        name: (S((layers, n, rank), BF16), S((layers, rank, m), BF16))
        for name, (n, m) in sizes.items()
    }

    def block(adapters, frozen, x_btd):
        def linear(name, x):
            a, b = adapters[name]
            return x @ frozen[name] + 2 * ((x @ a) @ b)

        h_btd = _normalized(x_btd)
        split = (*x_btd.shape[:2], heads, -1)
        q, k, v = (linear(name, h_btd).reshape(split) for name in "qkv")
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )
        x_btd += linear("o", mixed.reshape(x_btd.shape))
        h_btd = _normalized(x_btd)
        gated = jax.nn.silu(linear("gate", h_btd)) * linear("up", h_btd)
        return x_btd + linear("down", gated)

    def wrapped(wrap):
        layer = wrap(block)

        def model(adapters, frozen, x_btd):
            def body(x_btd, weights):
                return layer(*weights, x_btd), None

            return jax.lax.scan(body, x_btd, (adapters, frozen))[0]

        return model

    return wrapped, adapters, (frozen, S((16, 1024, width), BF16))


def lstm() -> Built:
    """Two layers of Linen, 1024 wide, with what they read added; 32 x 512 tokens."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x_btd):
            for _ in range(2):
                x_btd += nn.RNN(nn.OptimizedLSTMCell(1024, dtype=BF16))(x_btd)
            return x_btd

    model, x = Model(), S((32, 512, 1024), BF16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return (
        lambda wrap: wrap(lambda params, _, x: model.apply(params, x)),
        params,
        ({}, x),
    )


def linear_attention() -> Built:
    """One layer by the delta rule, 8 heads of 64; 8 x 1024 tokens."""
    heads, size = 8, 64
    width = heads * size
    params = {name: S((width, width), BF16) for name in "qkvo"}
    params["beta"] = S((width, heads), BF16)

    def layer(params, _, x_btd):
        split = (*x_btd.shape[:2], heads, size)
        q, k, v = ((x_btd @ params[name]).reshape(split) for name in "qkv")
        k = _normalized(k) / size**0.5
        beta = jax.nn.sigmoid(x_btd @ params["beta"])[..., None]

        mixed_bthv = delta_rule(q, k, v, beta)
        return x_btd + mixed_bthv.reshape(x_btd.shape) @ params["o"]

    return lambda wrap: wrap(layer), params, ({}, S((8, 1024, width), BF16))


def state_space() -> Built:
    """S4D: 512 channels of 16 complex modes that a scan carries, 8 x 1,024 tokens."""
    width, modes = 512, 16
    params = {name: S((width, modes), jnp.float32) for name in ("size", "angle")}
    params |= {"out": S((width, modes), jnp.complex64)}
    params |= {"w": S((width, width), jnp.float32)}

    def layer(params, _, x_btd):
        decay_dn = jnp.exp(jax.lax.complex(-jnp.exp(params["size"]), params["angle"]))

        def step(state_bdn, x_bd):
            state_bdn = decay_dn * state_bdn + x_bd[..., None]
            return state_bdn, jnp.sum(params["out"] * state_bdn, axis=-1).real

        start_bdn = jnp.zeros((*x_btd.shape[::2], modes), jnp.complex64)
        _, y_tbd = jax.lax.scan(step, start_bdn, x_btd.swapaxes(0, 1))
        return jax.nn.gelu(y_tbd) @ params["w"]

    return lambda wrap: wrap(layer), params, ({}, S((8, 1024, width), jnp.float32))


def fourier() -> Built:
    """A Fourier neural operator: 4 layers, 64 channels, 12 x 12 modes, 32 x 128^2."""
    width, modes = 64, 12
    mixing, weight = (
        S((width, width, modes, modes), jnp.float32),
        S((width, width), jnp.float32),
    )
    params = [{"re": mixing, "im": mixing, "w": weight} for _ in range(4)]

    def model(params, _, x_bhwc):
        for p in params:
            modes_bhwc = jnp.fft.rfft2(x_bhwc, axes=(1, 2))
            kept = modes_bhwc[:, :modes, :modes]
            mixed = jnp.einsum(
                "bhwc,cdhw->bhwd", kept, jax.lax.complex(p["re"], p["im"])
            )
            all_bhwc = jnp.zeros_like(modes_bhwc).at[:, :modes, :modes].set(mixed)
            back = jnp.fft.irfft2(all_bhwc, s=x_bhwc.shape[1:3], axes=(1, 2))
            x_bhwc = jax.nn.gelu(back + x_bhwc @ p["w"])
        return x_bhwc

    return lambda wrap: wrap(model), params, ({}, S((32, 128, 128, width), jnp.float32))


FUNCTIONS = {
    "LoRA, LLaMA-350M's layers": lora,
    "LSTM": lstm,
    "linear attention": linear_attention,
    "S4D": state_space,
    "Fourier neural operator": fourier,
}


def _normalized(x):
    squares = jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squares + 1e-6).astype(x.dtype)


def peak(build: Callable[[], Built], wrap: Callable) -> int:
    wrapped, params, rest = build()
    function = wrapped(wrap)

    def loss(params, *rest):
        return jnp.mean(function(params, *rest).astype(jnp.float32) ** 2)

    return memory.peak(jax.grad(loss), params, *rest, device="h200").peak_bytes


def everything() -> None:
    done = {(row["function"], row["method"]) for row in rows_of(RESULTS)}
    for name, build in FUNCTIONS.items():
        for method, wrap in WRAPS.items():
            if (name, method) in done:
                continue
            row = {"function": name, "method": method, "peak_bytes": peak(build, wrap)}
            row |= provenance() | {"device": "h200"}
            append(RESULTS, row)
            print(row, flush=True)


def table() -> str:
    rows = rows_of(RESULTS)
    found = {(row["function"], row["method"]): row["peak_bytes"] for row in rows}
    lines = [f"| GiB | {' | '.join(WRAPS)} |", "|---" * (len(WRAPS) + 1) + "|"]
    for name in FUNCTIONS:
        cells = [f"{found[name, method] / 2**30:.2f}" for method in WRAPS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("all", "table"))
    if parser.parse_args().command == "all":
        everything()
    print(table())


if __name__ == "__main__":
    main()
