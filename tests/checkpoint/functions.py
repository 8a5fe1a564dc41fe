"""Functions of all kinds, and their gradients, exact and relative to others."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from tests.draws import normal

Q4, Q8 = jc.Quantized(4), jc.Quantized(8)
SAVE, AGAIN = jc.Policy(default=jc.Save()), jc.Policy()
LOSSY = jc.policies.uniform(Q8)
SLOW = pytest.mark.slow
# float32 products and sums in another order, relative to the gradient's norm.
ULPS = 3e-6


W, X = normal(0, 3, 32, 32, scale=0.2), normal(1, 8, 32)


def mlp(w, x):
    return x + jax.nn.gelu(x @ w[0]) @ w[1]


def attention(w, x):
    q, k, v = (jnp.reshape(x @ w[i], (2, 4, 2, 16)) for i in range(3))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(8, 32)


@jax.custom_vjp
def doubled(y):
    return 2.0 * y


doubled.defvjp(
    lambda y: (2.0 * y, (y, jnp.sort(y))), lambda kept, ct: (ct * kept[0] + kept[1],)
)


@jax.custom_jvp
def cubed(y):
    return y**3


@cubed.defjvp
def _(primals, tangents):
    return cubed(primals[0]), 4.0 * jnp.cos(primals[0]) * tangents[0]


def loop(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, w)


def branch(w, x):
    true, false = (lambda x, i=i: jnp.tanh(x @ w[i]) for i in (0, 1))
    return jax.lax.cond(x[0, 0] > 0, true, false, jnp.sin(x))


def several_branches(w, x):
    branches = [lambda x, i=i: x @ w[i] * x.mean() for i in range(3)]
    return jax.lax.switch((x[0, 0] > 0).astype(jnp.int32), branches, x)


def counted(w, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x @ w[i]), x)


def searched(w, x):
    """A while loop, of whose result the derivative is not asked."""
    size = jax.lax.while_loop(
        lambda s: s < jax.lax.stop_gradient(x).max(), lambda s: 2.0 * s, 1e-3
    )
    return (x @ w[0]) * jax.lax.stop_gradient(size)


def integers_too(w, x):
    y = x @ w[0]
    return {"y": jnp.tanh(y), "best": y.argmax(-1), "none": None, "mask": y > 0}


FUNCTIONS = {
    "mlp": mlp,
    "attention": attention,
    "custom_vjp": lambda w, x: doubled(x @ w[0]) @ w[1],
    "adapter": lambda w, x: jnp.sin(x @ w[0] - 2 * (x @ w[1][:, :4]) @ w[2][:4] / 3),
    "parts": lambda w, x: (
        jnp.sin((x @ w[0])[:, 4:8]),
        jnp.cos(jnp.fft.fft(x @ w[1]).real[:2]),
        jnp.tanh((x @ w[2]).reshape(2, 4, 32).sum(1)),
        jnp.exp(jnp.sort(x @ w[0])[:, -2:]),
    ),
    "custom_jvp": lambda w, x: cubed(x @ w[0]) @ w[1],
    "scan": loop,
    "state that begins as zeros": lambda w, x: jax.lax.scan(
        lambda s, x: (s := jnp.tanh(x + s @ w[0]), s), jnp.zeros(32), x
    ),
    "scan of scans": lambda w, x: jax.lax.scan(
        lambda x, w: (loop(w, x)[0], None), x, jnp.stack([w, w])
    )[0],
    "cond": branch,
    "switch": several_branches,
    "branch of a constant": lambda w, x: jax.lax.cond(
        x[0, 0] > 0, lambda: (0.0, x @ w[0]), lambda: (1.0, jnp.sin(x @ w[1]))
    ),
    "constants": lambda w, x: (
        x @ w[0],
        jnp.float32(2.0),
        jax.jit(lambda x: (x * 3.0, 4.0))(x),
    ),
    "fori_loop": counted,
    "while_loop": searched,
    "jit": lambda w, x: jax.jit(mlp)(w, jax.jit(mlp)(w, x)),
    "map": lambda w, x: jax.lax.map(lambda x: jnp.tanh(w[0] @ x), x),
    "vmap": lambda w, x: jax.vmap(lambda x: mlp(w, x[None]))(x),
    "jax.checkpoint": lambda w, x: jax.checkpoint(mlp)(w, jnp.sin(x)),
    "jc.checkpoint": lambda w, x: jc.checkpoint(mlp)(w, jnp.sin(x)),
    "outputs": integers_too,
    "input as output": lambda w, x: (x, x, w[0], x @ w[0]),
    "gather and scatter": lambda w, x: (w[0][jnp.arange(8) % 3]).at[1].add(x[0]) * x,
    "convolution": lambda w, x: jax.nn.silu(
        jax.lax.conv(x.reshape(2, 4, 4, 8), w[0].reshape(4, 4, 8, 8), (1, 1), "SAME")
    ),
    "cumulative": lambda w, x: jnp.cumsum(jnp.cumprod(x @ w[0], 0), 1),
    "expm": lambda w, x: jax.scipy.linalg.expm(0.1 * (x @ x.T)) @ x @ w[0],
    "linear algebra": lambda w, x: jnp.linalg.cholesky(x @ x.T + jnp.eye(8)) @ x,
    "factorizations": lambda w, x: (
        jnp.linalg.svd(x @ w[0], full_matrices=False)[1],
        jnp.linalg.eigh(x @ x.T)[0],
        jnp.linalg.qr((x @ w[0]).T)[0],
        jnp.linalg.solve(x @ x.T + jnp.eye(8), x @ w[1]),
        jnp.linalg.slogdet(w[2] + jnp.eye(32))[1] * x,
    ),
    "complex": lambda w, x: jnp.abs(jnp.fft.fft(x @ w[0]) + 1.0),
}
by_name = pytest.mark.parametrize("name", FUNCTIONS)


def weighted(fun):
    """A loss whose gradient with respect to the outputs is no function of them."""

    def loss(*args, **kwargs):
        leaves = jax.tree.leaves(fun(*args, **kwargs))
        floats = [y for y in leaves if jnp.issubdtype(y.dtype, jnp.floating)]
        places = [jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) for y in floats]
        parts = [(y * jnp.cos(i)).sum() for y, i in zip(floats, places, strict=True)]
        return sum(part.astype(jnp.float32) for part in parts)

    return loss


def gradients(fun, *args, argnums=(0, 1)):
    return jax.jit(jax.grad(weighted(fun), argnums=argnums))(*args)


@cache
def plain(name):
    """Gradients of a function itself."""
    return gradients(FUNCTIONS[name], W, X)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
