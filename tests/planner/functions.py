"""Small functions, and what of their tensors a plan has to choose."""

import jax
import jax.numpy as jnp

import jaxcompact as jc
from jaxcompact.checkpoint import TRACERS
from jaxcompact.memory import devices
from jaxcompact.planner.block import Noting
from jaxcompact.planner.problem import problem
from tests.planner.blocks import of

BASE, CARD = jc.policies.int4(), devices()["h200"]
N = 256


def mlp(w, x):
    a = jnp.sin(x @ w[0])
    b = jnp.cos(a @ w[1])
    return x + (a * b) @ w[2]


def deep(w, x):
    """A chain: to make the last product again, all before it are made again."""
    for w_nn in w:
        x = jnp.tanh(x @ w_nn)
    return x


def residual(w, x):
    """An operation with a backward pass of its own, that keeps two products."""

    @jax.custom_vjp
    def op(q, k, w):
        return (q @ w) * (k @ w)

    def forward(q, k, w):
        return op(q, k, w), (q @ w, jnp.tanh(k) @ w, w)

    def backward(kept, ct):
        a, b, w = kept
        return ct * b, ct * a, jnp.zeros_like(w)

    op.defvjp(forward, backward)
    return op(jnp.sin(x @ w[0]), x @ w[1], w[2])


def relu(w, x):
    """Its derivatives are kept as bits, whatever is chosen."""
    for w_nn in w[:2]:
        x = x + jax.nn.relu(x @ w_nn) @ w[2]
    return x


def convolved(w, x):
    """Convolutions have their operands in memory, which products need not."""
    for w_nn in w:
        kernel, x_1tn = w_nn[None], jnp.sin(x)[None]
        x = jax.lax.conv_general_dilated(
            x_1tn, kernel, (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")
        )[0]
    return x


def joined(w, x):
    """As a ResNet's blocks: each relu is of all products before it, if none is kept."""
    for w_nn in w[:2]:
        y = x @ w_nn
        x = jax.nn.relu(x + y * jnp.cos(y))
    return x @ w[2]


FUNCTIONS = {
    "mlp": mlp,
    "deep": deep,
    "residual": residual,
    "relu": relu,
    "convolved": convolved,
    "joined": joined,
}
ARGS = (of(3, N, N), of(4096, N))
CODECS = jc.Quantized(8), jc.Quantized(4)


def asked(fun, codecs=CODECS, args=ARGS, card=CARD):
    trace = TRACERS[jc.checkpoint(fun, policy=Noting(BASE, statistics=True), params=0)]
    traced, _ = trace(args, {})
    return problem(traced.plan((True, True)), BASE, codecs, card)
