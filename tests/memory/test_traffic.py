"""Bytes, products and times of compiled programs, counted by hand."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.kernels import choice
from jaxcompact.memory import devices
from jaxcompact.memory.traffic import Traffic, traffic
from tests.kernels.machine_code import compiled

H200 = devices()["h200"]
S = jax.ShapeDtypeStruct
X = S((256, 512), jnp.bfloat16)
SIZE = 256 * 512 * 2


def of(fun, *args):
    return traffic(compiled(fun, *args), H200)


def test_an_elementwise_operation_reads_and_writes():
    seconds = 3 * SIZE / H200.memory_bandwidth
    found = of(lambda x, y: jnp.sin(x) * y, X, X)
    assert found == {"elementwise": Traffic(3 * SIZE, 0, pytest.approx(seconds))}


def test_a_product_takes_what_takes_longer():
    n, m = 8192, 64
    x, w = S((n, n), jnp.bfloat16), S((m, n), jnp.bfloat16)
    narrow = of(lambda x, w: w @ x.T, x, w)["products"]
    assert narrow.flops == 2 * m * n * n
    assert narrow.nbytes >= 2 * (n * n + 2 * m * n)
    assert narrow.seconds == narrow.nbytes / H200.memory_bandwidth
    square = of(lambda x, y: x @ y, x, x)["products"]
    assert square.nbytes == 2 * 3 * n * n
    assert square.seconds == square.flops / H200.flops == 2 * n**3 / H200.flops


def test_a_loop_reads_slices_and_writes_in_place():
    """Of what is stacked: each round a layer's part, however large the whole."""

    def fun(ws, x):
        def layer(x, w):
            x = jnp.sin(x * w)
            return x, x

        return jax.lax.scan(layer, x, ws)

    found = of(fun, S((8, *X.shape), X.dtype), X)
    # A round reads w and the carry, writes the carry and its part of the stack.
    rounds = found["elementwise"].nbytes - found["elementwise"].nbytes % SIZE
    assert 8 * 4 * SIZE <= rounds <= 8 * 5 * SIZE + 4 * SIZE
    assert 0 <= found["zeros"].nbytes - 8 * SIZE < 64  # the stack, as scan begins it


def test_of_two_branches_the_longer_counts():
    def fun(flag, x):
        return jax.lax.cond(flag, lambda x: jnp.sin(x), lambda x: jnp.cumsum(x, 0), x)

    def longer(flag, x):
        return jax.lax.cond(flag, lambda x: jnp.cumsum(x, 0), lambda x: jnp.sin(x), x)

    flag = S((), bool)
    assert of(fun, flag, X) == of(longer, flag, X)
    assert of(fun, flag, X)["elementwise"].nbytes > 2 * SIZE


def test_what_is_encoded_after_a_product():
    """Twice read, and codes and scales written: 4.5 bytes an entry, and its scales'."""
    x, w = S((2**15, 512), jnp.bfloat16), S((512, 512), jnp.bfloat16)
    entries = 2**15 * 512

    def _encode(x):
        return jc.Quantized(4).encode(x)

    def fun(x, w):
        return jax.jit(_encode)(x @ w)

    with choice.using("xla"):
        found = of(fun, x, w)
    least = entries * (2 + 2 + 0.5)
    assert least < found["encoding"].nbytes < 1.15 * least
    with choice.using("mosaic_gpu"):
        found = of(fun, x, w)
    scales = entries // 64 * 2
    assert found["kernels"].nbytes == entries * 2.5 + scales
    assert "encoding" not in found


def test_what_a_kernel_puts_in_a_stack_is_written_once():
    x, ws = S((4096, 512), jnp.bfloat16), S((8, 512, 512), jnp.bfloat16)

    def fun(x, ws):
        return jax.lax.scan(lambda x, w: (x, jc.Quantized(4).encode(x @ w)), x, ws)

    with choice.using("mosaic_gpu"):
        found = of(fun, x, ws)
    scales, place = x.size // 64 * 2, 4
    assert found["kernels"].nbytes == 8 * (x.size * 2.5 + scales + place)


# As compiled with cuDNN, which not every machine of the tests has.
ATTENTION = """
ENTRY %main (q: bf16[2,1024,4,64]) -> bf16[2,4,1024,64] {
  %q = bf16[2,1024,4,64]{3,2,1,0} parameter(0)
  %s = f32[2,4,1024]{2,1,0} parameter(1)
  %f = (bf16[2,4,1024,64], f32[2,4,1024], u8[32]) custom-call(%q, %q, \
%q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type": "CAUSAL"}
  %b = (bf16[2,4,1024,64], u8[16]) custom-call(%q, %q, %q, %s, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"mask_type": "NONE"}
  ROOT %o = bf16[2,4,1024,64]{3,1,2,0} get-tuple-element(%b), index=0
}
"""


def test_attention_multiplies_half_a_square_if_causal():
    found = traffic(ATTENTION, H200)["attention"]
    product = 2 * 2 * 4 * 1024**2 * 64
    assert found.flops == 2 * product // 2 + 5 * product
    q, statistics = 2 * 1024 * 4 * 64 * 2, 2 * 4 * 1024 * 4
    assert found.nbytes == (4 * q + statistics) + (6 * q + statistics)


def test_what_lies_on_the_host_crosses_to_it_once():
    found = of(lambda x: jax.device_put(jnp.sin(x), jax.memory.Space.Host), X)["host"]
    assert found.nbytes == SIZE
    assert found.seconds == SIZE / H200.host_bandwidth

    def stacked(ws, x):
        def layer(x, w):
            x = jnp.sin(x * w)
            return x, jax.device_put(x, jax.memory.Space.Host)

        return jax.lax.scan(layer, x, ws)

    found = of(stacked, S((8, *X.shape), X.dtype), X)["host"]
    assert 0 <= found.nbytes - 8 * SIZE < 64  # and a few numbers: where in the stack


def test_a_loop_without_end_is_refused():
    text = compiled(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x), x), X)
    assert "known_trip_count" in text
    with pytest.raises(ValueError, match="how often a loop goes round is unknown"):
        traffic(text.replace("known_trip_count", "unknown"), H200)
