"""Peaks of programs that are compiled for cards that are not here."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxcompact as jc
from jaxcompact.kernels import choice
from tests.cases import slow
from tests.draws import normal
from tests.memory.steps import ARGS, BF16, F32, S, double, train_step


@pytest.mark.parametrize("device", ["h100", "h200", "b200", "a100", "rtx4090", "l40s"])
def test_by_hand(device):
    """An input of 4 MiB and an output of 4 MiB; nothing else, and nothing shared."""
    found = jc.memory.peak(double, S((1024, 1024), F32), device=device)
    mib = 2**20
    assert found.peak_bytes == 8 * mib
    assert (found.argument_bytes, found.output_bytes) == (4 * mib, 4 * mib)
    assert (found.temporary_bytes, found.host_bytes) == (0, 0)
    assert {kind: n for kind, n in found.breakdown.items() if n} == {
        "inputs": 4 * mib,
        "outputs": 4 * mib,
    }
    assert [b.shape for b in found.buffers] == 2 * ["f32[1024,1024]"]


def test_a_donated_argument_is_overwritten():
    found = jc.memory.peak(double, S((1024, 1024), F32), donate=0)
    assert found.peak_bytes == 4 * 2**20 and found.output_bytes == 0
    jitted = jax.jit(double, donate_argnums=0)
    assert jc.memory.peak(jitted, S((1024, 1024), F32)) == found


def test_residuals_by_hand():
    """tanh of each of four layers waits for the backward pass."""

    def step(params, x):
        def loss(params):
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return y.sum()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    found = jc.memory.peak(step, 4 * [S((512, 512), F32)], S((8192, 512), F32))
    assert found.breakdown["residuals"] == 4 * 4 * 8192 * 512


def test_the_kinds_of_a_training_step(optax_promotion):
    found = jc.memory.peak(train_step, *ARGS, donate=(0, 1), device="a100")
    weights = 4 * (2 * 256 * 1024 + 256 * 8192)
    parts = found.breakdown
    assert parts["parameters"] == weights
    assert parts["optimizer state"] == 2 * weights + 4  # Adam's moments and count
    assert parts["inputs"] == 4 * 2048 * 256
    assert parts["logits"] >= 4 * 2048 * 8192
    assert parts["residuals"] >= 4 * 2048 * 1024
    assert sum(parts.values()) == found.peak_bytes
    assert all(b.nbytes >= 0 for b in found.buffers)
    text = str(found)
    assert "NVIDIA A100-SXM4-80GB" in text and "opt_state[0].mu['head']" in text


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(256, 1024, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(1024, 256, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.gelu(self.up(x))))


@pytest.mark.parametrize("jit", [slow(None), nnx.jit])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("make", [slow(lambda made: made()), nnx.eval_shape])
def test_a_step_that_changes_modules_in_place(jit, pair, make, optax_promotion):
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, grads)

    def of_pair(both, x):
        step(*both, x)

    def made():
        model = Net()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    (model, optimizer), x = make(made), S((4096, 256), F32)
    fun, donate = (of_pair, 0) if pair else (step, (0, 1))
    args = ((model, optimizer), x) if pair else (model, optimizer, x)
    if jit:
        found = jc.memory.peak(jit(fun, donate_argnums=donate), *args)
    else:
        found = jc.memory.peak(fun, *args, donate=donate)
    weights = 4 * (2 * 256 * 1024 + 256 + 1024)
    assert found.breakdown["parameters"] == weights
    # Adam's moments and count, and the optimizer's
    assert found.breakdown["optimizer state"] in (2 * weights + 4, 2 * weights + 8)
    assert found.breakdown["residuals"] >= 4 * 4096 * 1024
    assert sum(found.breakdown.values()) == found.peak_bytes


def test_static_arguments_and_numbers():
    def step(x, axis, scale, name):
        assert name == "sum"
        return scale * jnp.sum(x, axis)

    jitted = jax.jit(step, static_argnums=(1, 3))
    found = jc.memory.peak(jitted, S((512, 256), F32), 1, 2.0, "sum")
    assert found.argument_bytes == 4 * 512 * 256 + 4


@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit])
def test_a_module_that_is_read_alone(jit):
    """Nothing of it comes out."""
    found = jc.memory.peak(
        jit(lambda net, x: jnp.sum(net(x))), Net(), S((64, 256), F32)
    )
    assert found.output_bytes <= 4 + 4 + 16  # the sum, a count, pointers
    assert found.breakdown["parameters"] == 4 * (2 * 256 * 1024 + 256 + 1024)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.debug.print("{}", x[0, 0]),
        lambda x: jax.pure_callback(lambda x: x, S((512, 512), F32), x),
    ],
)
def test_a_step_that_calls_the_host_is_refused(call):
    def step(x):
        return 2 * x, call(x)

    with pytest.raises(NotImplementedError, match="call nothing on the host"):
        jc.memory.peak(step, S((512, 512), F32))


def test_gradients_of_layers_in_a_scan():
    def step(params, x):
        def loss(params):
            def layer(x, w):
                return jnp.tanh(x @ w), None

            return jax.lax.scan(layer, x, params)[0].sum()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    found = jc.memory.peak(step, S((6, 256, 256), F32), S((4096, 256), F32), donate=0)
    assert found.breakdown["gradients"] >= 4 * 6 * 256 * 256
    # x of every layer, or what tanh made of it, is stacked.
    assert found.breakdown["residuals"] >= 4 * 6 * 4096 * 256
    assert sum(found.breakdown.values()) == found.peak_bytes


@pytest.mark.slow
def test_what_is_encoded_is_smaller():
    def step(checkpoint):
        block = checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T)

        def run(w, x):
            def loss(w):
                return block(w, jnp.sin(block(w, x))).sum()

            return w - 0.1 * jax.grad(loss)(w)

        return run

    def peak(checkpoint):
        args = S((512, 2048), BF16), S((8192, 512), BF16)
        return jc.memory.peak(step(checkpoint), *args, donate=0)

    plain = peak(lambda f: f)
    small = partial(jc.checkpoint, policy=jc.policies.int4(), params=0)
    for way, most in (("xla", 0.5), ("mosaic_gpu", 0.7)):
        with choice.using(way):
            encoded = peak(small)
        # Here forward: XLA puts tanh in the place of what it is of, a kernel beside it.
        assert encoded.breakdown["residuals"] < most * plain.breakdown["residuals"]
        assert encoded.peak_bytes < plain.peak_bytes


def test_what_relu_is_of_is_not_held():
    """Beside its result, of which codes and bits are made."""
    shape, rows = (4, 512, 4096), 8192

    def block(w, x):
        return x + jax.nn.relu(x @ w["up"]) @ w["down"]

    def stack(w, x):
        layer = jc.checkpoint(block, policy=jc.policies.int4(), params=0)
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]

    w = {"up": S(shape, jnp.bfloat16), "down": S((4, 4096, 512), jnp.bfloat16)}
    found = jc.memory.peak(
        lambda w, x: jax.vjp(stack, w, x)[1], w, S((rows, 512), jnp.bfloat16)
    )
    numbers = (b for b in found.buffers if b.shape.startswith("bf16"))
    assert [b.nbytes for b in numbers].count(2 * rows * shape[2]) == 1


def test_offloaded_bytes_are_the_hosts():
    block = jc.checkpoint(
        lambda w, x: jnp.tanh(x @ w) @ w.T,
        policy=jc.policies.uniform(jc.Offload()),
        params=0,
    )

    def step(w, x):
        return jax.grad(lambda w: block(w, jnp.sin(block(w, x))).sum())(w)

    found = jc.memory.peak(step, S((512, 512), F32), S((8192, 512), F32))
    assert found.host_bytes >= 4 * 8192 * 512
    assert sum(found.breakdown.values()) == found.peak_bytes


def test_a_fusion_comes_from_where_its_parts_do():
    text = """
%fused (p: f32[8]) -> f32[8] {
  %a = f32[8] add(%p, %p), metadata={op_name="jit(step)/jvp()/add"}
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %loop_fusion = f32[8] fusion(%x), kind=kLoop, calls=%fused, metadata={}
}
"""
    paths = sys.modules["jaxcompact.memory.buffers"]._paths(text)
    assert paths["loop_fusion"] == "jit(step)/jvp()/add"


@pytest.mark.parametrize("size", [8, 512])
def test_arrays_that_a_step_closes_over(size):
    """They lie on the card as they would if they were given."""
    x, frozen = S((64, size), F32), normal(0, size, size)
    given = jc.memory.peak(lambda x, frozen: jnp.sin(x @ frozen), x, frozen)
    found = jc.memory.peak(lambda x: jnp.sin(x @ frozen), x)
    inside = 4 * size**2 if size > 8 else 0  # as numbers in the code
    assert found.constant_bytes == found.breakdown["constants"] == inside
    assert found.peak_bytes == given.peak_bytes - (4 * size**2 - inside)
    assert found.peak_bytes == sum(found.breakdown.values())


def test_random_keys_are_arguments():
    keys = S((), jax.random.key(0).dtype)
    found = jc.memory.peak(lambda key: jax.random.normal(key, (1024,)), keys)
    assert found.output_bytes == 4096
