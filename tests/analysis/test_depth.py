"""Functions of many layers, wrapped as a whole: none makes those before it again."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact import memory
from jaxcompact.kernels import choice
from tests.analysis.candidates import W, X, candidates
from tests.cases import slow


def normed(x):
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def before(p, x):
    x = x + jax.nn.gelu(normed(x) @ p["a"]) @ p["b"]
    return x + jax.nn.gelu(normed(x) @ p["c"]) @ p["d"]


def behind(p, x):
    x = normed(x + jax.nn.gelu(x @ p["a"]) @ p["b"])
    return normed(x + jax.nn.gelu(x @ p["c"]) @ p["d"])


def scaled(p, x):
    """What is added is read by the gradient of its scale as well."""
    x = x + p["s"][None] * (jax.nn.gelu(normed(x) @ p["a"]) @ p["b"])
    return x + p["s"][None] * (jax.nn.gelu(normed(x) @ p["c"]) @ p["d"])


def activated(p, x):
    """As a ResNet's block, with its convolutions' norms."""
    h = jax.nn.relu(normed(x @ p["a"]))
    h = jax.nn.relu(normed(h @ p["b"]))
    return jax.nn.relu(x + normed(h @ p["c"]))


def peak(block, layers, whole):
    """Of its gradient, in bytes, as compiled for an H200."""
    policy = jc.policies.int4()
    layer = block if whole else jc.checkpoint(block, policy=policy, params=0)

    def model(params, x):
        for p in params:
            x = layer(p, x)
        return x

    if whole:
        model = jc.checkpoint(model, policy=policy, params=0)
    shapes = dict.fromkeys("abcd", (256, 256)) | {"s": (256,)}
    of = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((8192, 256), jnp.bfloat16)

    def loss(params, x):
        return jnp.square(model(params, x).astype(jnp.float32)).sum()

    with choice.using("xla"):
        return memory.peak(jax.grad(loss), [of] * layers, x, device="h200").peak_bytes


@pytest.mark.parametrize("block", list(map(slow, (before, behind, scaled, activated))))
def test_a_whole_model_takes_what_its_layers_take(block):
    """Of ten layers; sums of up to four tensors are made again, but within what reads
    them. Of the sums of all layers before, the peak was 1.1 to 1.7 times as large."""
    assert peak(block, 10, whole=True) < 1.07 * peak(block, 10, whole=False)


def stream(w, x, count):
    for _ in range(count):
        x = x + w[0] * jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize(("count", "sums"), [(3, 0), (4, 1), (7, 1), (8, 2)])
def test_every_fourth_sum_is_stored(count, sums):
    """x and four products are five tensors of one size, and so are a sum and four."""
    with jax.numpy_rank_promotion("allow"):
        found = candidates(lambda w, x: jnp.sin(stream(w, x, count)), W, X)
    assert sum(name.startswith("add") for name in found) == sums


def test_of_what_is_only_added_up_the_last_sum_is_enough():
    def experts(w, x):
        shared = jax.nn.softmax(x @ w[:, :8])
        parts = [jnp.tanh(x @ (i * w)) for i in range(8)]
        return jnp.sin(sum(shared[:, i, None] * y for i, y in enumerate(parts)))

    found = candidates(experts, W, X)
    assert [name for name in found if name.startswith("add")] == ["add.7"]


def test_a_mean_of_many_is_no_sum_of_their_size():
    def fun(w, x):
        rows = [jnp.tanh(x @ (i * w)).mean(-1) for i in range(8)]
        return jnp.sin(sum(rows))

    assert not any(name.startswith("add") for name in candidates(fun, W, X))
