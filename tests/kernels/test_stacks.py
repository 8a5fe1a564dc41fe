"""What kernels encode in a scan, they write where the scan stacks it."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.kernels import choice
from tests.cases import slow
from tests.kernels.machine_code import compiled, kernels_in

S = jax.ShapeDtypeStruct
LAYERS, TOKENS, WIDTH = 6, 4096, 512


def block(w, x):
    return x + jax.nn.gelu(jnp.sin(x @ w[0]) @ w[1]) @ w[2]


def gradient(policy, **options):
    wrapped = jc.checkpoint(block, policy=policy, params=0, **options)

    def loss(ws, x):
        x, _ = jax.lax.scan(lambda x, w: (wrapped(w, x), None), x, ws)
        return jnp.sum(x, dtype=jnp.float32)

    return jax.grad(loss)


def stacked_codes(text: str) -> list[bool]:
    """Of each stack that codes are put in, whether a kernel puts them there."""
    put = rf"= u8\[{LAYERS},\d+,\d+\]\S* dynamic-update-slice"
    bodies = (body for body in text.split("\n}\n") if re.search(put, body))
    return [kernels_in(body) == 1 for body in bodies]


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        slow(jc.Quantized(4), {}),
        (jc.Quantized(4), {"prevent_cse": False}),
        slow(jc.Quantized(8, symmetric=False), {"prevent_cse": False}),
        (jc.Quantized(8, symmetric=False, axis=-2), {"prevent_cse": False}),
    ],
    ids=["a barrier around it", "none", "three arrays", "channels"],
)
def test_codes_are_written_where_they_are_stacked(codec, options):
    args = (
        S((LAYERS, 3, WIDTH, WIDTH), jnp.bfloat16),
        S((TOKENS, WIDTH), jnp.bfloat16),
    )
    fun = gradient(jc.policies.uniform(codec), **options)  # XLA equalizes x
    with choice.using("mosaic_gpu"):
        assert stacked_codes(compiled(fun, *args)) == [True] * 3
