"""Modelled times, by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import jaxcompact as jc
from jaxcompact.graph import graph_of
from jaxcompact.memory import devices
from jaxcompact.planner.roofline import REACHED, codec_seconds, operation_seconds

CARD = devices()["a100"]
RATE, BYTES = CARD.flops * REACHED, CARD.memory_bandwidth


def seconds(fun, *shapes, dtype=jnp.bfloat16):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    graph = graph_of(jax.make_jaxpr(fun)(*args))
    return sum(operation_seconds(op, CARD) for op in graph.ops)


def test_products():
    large = 2 * 4096 * 2048 * 1024
    assert seconds(jnp.matmul, (4096, 2048), (2048, 1024)) == large / RATE
    full = seconds(jnp.matmul, (4096, 2048), (2048, 1024), dtype=jnp.float32)
    assert full == 2 * large / RATE
    batched = seconds(lambda a, b: a @ b, (8, 512, 256), (8, 256, 1024))
    assert batched == max(
        2 * 8 * 512 * 256 * 1024 / RATE,
        2 * 8 * (512 * 256 + 256 * 1024 + 512 * 1024) / BYTES,
    )
    # A vector's product is as fast as the matrix is read.
    vector = seconds(jnp.matmul, (2048,), (2048, 1024))
    assert vector == 2 * (2048 + 2048 * 1024 + 1024) / BYTES


def test_convolutions():
    found = seconds(
        lambda x, w: jax.lax.conv(x, w, (2, 2), "SAME"),
        (64, 256, 32, 32),
        (512, 256, 3, 3),
    )
    assert found == pytest.approx(2 * 64 * 512 * 16 * 16 * 256 * 9 / RATE)


def test_elementwise_operations_are_fused_and_reductions_are_read():
    assert seconds(lambda x: jnp.tanh(x) * 2 + x, (1024, 1024)) == 0
    total = seconds(lambda x: jax.lax.reduce_max(x, (1,)), (1024, 1024))
    assert total == 2 * (1024 * 1024 + 1024) / BYTES


def test_loops_and_branches():
    one = seconds(jnp.matmul, (1024, 1024), (1024, 1024))

    def loop(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=7)[0]

    def branch(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)

    assert seconds(loop, (1024, 1024), (1024, 1024)) == pytest.approx(7 * one)
    assert seconds(branch, (1024, 1024), (1024, 1024)) == pytest.approx(2 * one)


def test_codecs():
    shape, dtype = (1024, 1024), jnp.bfloat16
    stored = jc.Quantized(4).nbytes(shape, dtype)
    found = codec_seconds(jc.Quantized(4), shape, dtype, CARD)
    assert found == (3 * 2 * 1024**2 + 2 * stored) / BYTES
    away = codec_seconds(jc.Offload(), shape, dtype, CARD)
    assert away == 2 * 2 * 1024**2 / CARD.host_bandwidth


def fused(name, outputs):
    """An operation of cuDNN's name and operands, which needs no cuDNN to be traced."""
    op = Primitive(name)
    op.multiple_results = True
    op.def_abstract_eval(lambda q, *_: [q] * outputs)
    return op


def test_fused_attention():
    """Two products of all pairs of tokens in one pass, five in the other."""
    forward = fused("dot_product_attention_fwd_wrapper", 1)
    backward = fused("dot_product_attention_bwd_wrapper", 3)

    def of(op, *more):
        return lambda q, k, v: op.bind(q, k, v, *(make(q) for make in more))

    def statistic(q):  # in float32, as cuDNN's is
        return jnp.zeros((16, 8, 1024), jnp.float32)

    shape = (16, 1024, 8, 64)
    product = 2 * 16 * 8 * 1024 * 1024 * 64 / RATE
    assert seconds(of(forward), *[shape] * 3) == pytest.approx(2 * product)
    both = seconds(of(backward, statistic), *[shape] * 3)
    assert both == pytest.approx(5 * product)


def test_copies_to_the_host():
    def there_and_back(x):
        there = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
        return jax.device_put(there, jax.memory.Space.Device)

    found = seconds(there_and_back, (1024, 1024))
    assert found == 2 * 2 * 1024**2 / CARD.host_bandwidth
