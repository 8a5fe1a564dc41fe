"""Times on the card that is here: this machine's CPU stands for one."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from benchmarks import plans
from jaxcompact.graph import graph_of
from jaxcompact.memory import devices
from jaxcompact.memory.cards import present
from jaxcompact.planner import measured, roofline
from jaxcompact.planner.problem import problem_of

ABSENT = devices()["h200"]
HERE = replace(ABSENT, name=jax.devices()[0].device_kind)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    return tmp_path / "times"


def ops(fun, *shapes, dtype=jnp.float32):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return graph_of(jax.make_jaxpr(fun)(*args)).ops


def product(size):
    (op,) = ops(jnp.matmul, (size, size), (size, size))
    return op


def test_a_card_that_is_not_here_has_its_roofline(cache):
    op, codec = product(256), jc.Quantized(4)
    assert present(ABSENT) is None
    modelled = roofline.operation_seconds(op, ABSENT)
    assert measured.operation_seconds(op, ABSENT) == modelled
    args = codec, (256, 256), jnp.float32, ABSENT
    assert measured.codec_seconds(*args) == roofline.codec_seconds(*args)
    assert not cache.exists()


def test_products_take_their_time():
    """512 times the arithmetic; a busy machine may be some times as slow."""
    small, large = (measured.operation_seconds(product(n), HERE) for n in (128, 1024))
    assert 0 < 10 * small < large < 60


def test_elementwise_operations_take_none(cache):
    (op,) = ops(jnp.tanh, (256, 256))
    assert measured.operation_seconds(op, HERE) == 0
    assert not cache.exists()


def test_elementwise_operations_run_with_what_reads_them(monkeypatch):
    """From what is in memory on: not the first product, and a mask is as it is."""
    programs = []
    seconds = measured._seconds

    def noting(run, avals, device):
        programs.append(str(jax.make_jaxpr(run)(*map(jnp.zeros_like, avals))))
        return seconds(run, avals, device)

    def fun(w, x, keep):
        y = jnp.tanh(x @ w)
        return jnp.where(keep, 2 * y, 0.0).reshape(64, 8, 8) @ w[:8, :8]

    args = jnp.ones((64, 64)), jnp.ones((64, 64)), jnp.ones((64, 64), bool)
    graph = graph_of(jax.make_jaxpr(fun)(*args))
    makers = {v: op for op in graph.ops for v in op.outs}
    monkeypatch.setattr(measured, "_seconds", noting)
    found = [measured.operation_seconds(op, HERE, makers) for op in graph.ops]
    assert sum(map(bool, found)) == 2
    first, second = programs
    assert "tanh" not in first
    assert second.count("dot_general[") == 1
    assert all(name in second for name in ("tanh", "select_n", "reshape"))


def test_loops_run_whole():
    def loop(length):
        def fun(x, w):
            return jax.lax.scan(lambda x, _: (x @ w, None), x, length=length)[0]

        (op,) = ops(fun, (256, 256), (256, 256))
        return measured.operation_seconds(op, HERE)

    assert 0 < 5 * loop(2) < loop(100)


def test_constants_in_place_stay():
    (op,) = ops(lambda x: jax.lax.reduce(x, 0.0, jax.lax.add, (0,)), (64, 64))
    assert measured.operation_seconds(op, HERE) > 0


@pytest.mark.parametrize(
    "codec", [jc.Quantized(4), jc.Quantized(2, stochastic=True), jc.Float8()], ids=str
)
def test_codecs_are_timed_both_ways(codec, cache):
    assert measured.codec_seconds(codec, (256, 256), jnp.bfloat16, HERE) > 0
    assert len(list(cache.glob("*.json"))) == 2


def test_what_lies_on_the_host_has_its_roofline(cache):
    """A program by itself fetches nothing: what it decodes is on the device."""
    for codec in (jc.Offload(), jc.Chain(jc.Quantized(8), jc.Offload())):
        args = codec, (256, 256), jnp.float32, HERE
        assert measured.codec_seconds(*args) == roofline.codec_seconds(*args) > 0
    assert not cache.exists()


def test_what_was_timed_is_not_timed_again(cache, monkeypatch):
    found = measured.operation_seconds(product(128), HERE)
    monkeypatch.setattr(measured, "_timed", None)
    assert measured.operation_seconds(product(128), HERE) == found
    with pytest.raises(TypeError):
        measured.operation_seconds(product(64), HERE)


def test_a_spoiled_time_is_taken_again(cache):
    measured.operation_seconds(product(128), HERE)
    (file,) = cache.glob("*.json")
    file.write_text("0.0")
    assert measured.operation_seconds(product(128), HERE) == 0
    file.write_text("0.0x")
    assert measured.operation_seconds(product(128), HERE) > 0


def test_no_part_of_a_time_is_read_as_one(cache, monkeypatch):
    """Written elsewhere first, a file is whole or not there."""

    def full(path, text):
        path.write_bytes(text[:3].encode())
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    measured.operation_seconds(product(128), HERE)
    assert not list(cache.iterdir())


def test_without_memory_to_run_it_there_is_the_roofline(cache, monkeypatch):
    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(measured, "_timed", full)
    op = product(128)
    assert measured.operation_seconds(op, HERE) == roofline.operation_seconds(op, HERE)
    assert not cache.exists()


def test_what_reads_random_keys_has_its_roofline():
    def fun(key, x):
        return jax.lax.scan(
            lambda x, k: (x @ jax.random.normal(k, x.shape), None),
            x,
            jax.random.split(key),
        )[0]

    args = jax.eval_shape(lambda: jax.random.key(0)), jnp.ones((64, 64))
    graph = graph_of(jax.make_jaxpr(fun)(*args))
    (op,) = (op for op in graph.ops if op.kind == "scan")
    modelled = roofline.operation_seconds(op, HERE)
    assert 0 < modelled == measured.operation_seconds(op, HERE)


def make_step(policy):
    def block(w, x):
        return x + jnp.tanh(x @ w) @ w.T

    wrapped = jc.checkpoint(block, policy=policy, params=0)
    shapes = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 2
    return jax.grad(lambda w, x: wrapped(w, x).sum()), tuple(shapes)


def test_plans_are_made_of_measured_times(monkeypatch):
    """Seven seconds for all that takes time, twice seven for a codec both ways."""
    monkeypatch.setattr(measured, "_seconds", lambda *args: 7.0)

    asked = {}
    for card in (HERE, ABSENT):
        _, asked[card.name] = problem_of(make_step, card, 0.2, None, (jc.Quantized(4),))
    here, absent = asked[HERE.name], asked[ABSENT.name]
    assert {op.kind: seconds for op, seconds in here.runs.items()}["dot_general"] == 7
    assert set(here.runs.values()) == {0, 7}
    times = [
        option.seconds
        for item in here.items
        for option in item.options
        if isinstance(option.action, jc.Quantized)
    ]
    assert times and set(times) == {14}
    assert all(seconds < 1e-3 for seconds in absent.runs.values())


def test_modelled_beside_measured():
    rows = plans.actions(make_step, HERE)
    assert all(modelled > 0 and seconds > 0 for _, modelled, seconds in rows)
    names = [name.split()[0] for name, _, _ in rows]
    assert {"dot_general.0", "dot_general.1"} <= set(names)
    assert any("Quantized" in name for name, _, _ in rows)
    with pytest.raises(ValueError, match="H200"):
        plans.actions(make_step, ABSENT)
