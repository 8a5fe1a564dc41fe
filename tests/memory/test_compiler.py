"""What was compiled before, and what cannot be compiled or timed."""

import importlib.metadata
import json
import shutil

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.memory import cards, compiler
from tests.memory.steps import (
    ARGS,
    BF16,
    F32,
    S,
    double,
    sgd,
    sharded,
    train_step,
)


@pytest.mark.slow
def test_the_same_program_is_compiled_once(compiles, cache):
    first = jc.memory.peak(sgd, *(S((256, 256), F32),) * 2)
    assert jc.memory.peak(sgd, *(S((256, 256), F32),) * 2) == first
    assert len(compiles) == 1
    jc.memory.peak(sgd, *(S((256, 256), F32),) * 2, device="a100")
    jc.memory.peak(sgd, *(S((256, 256), F32),) * 2, donate=0)
    jc.memory.peak(sgd, *(S((512, 512), F32),) * 2)
    assert len(compiles) == 4
    assert len(list(cache.iterdir())) == 4


def test_a_line_further_down_is_the_same_program(compiles):
    source = "def f(x):\n    return x * 2.0"
    for text in (source, "\n\n" + source):
        space = {}
        exec(compile(text, "moved.py", "exec"), space)
        jc.memory.peak(space["f"], S((8,), F32))
    assert len(compiles) == 1


def test_a_spoiled_cache_is_no_answer(compiles, cache):
    first = jc.memory.peak(double, S((8,), F32))
    (file,) = cache.iterdir()
    file.write_text(file.read_text()[:50])
    assert jc.memory.peak(double, S((8,), F32)) == first
    assert len(compiles) == 2
    assert json.loads(file.read_text())["peak_bytes"] == first.peak_bytes


def test_no_place_for_a_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path / "file"))
    assert jc.memory.peak(double, S((8,), F32)).peak_bytes


def test_a_card_that_nobody_knows():
    with pytest.raises(ValueError, match="device must be one of .*h200.* got 'gtx'"):
        jc.memory.peak(double, S((8,), F32), device="gtx")


def test_the_card_that_is_here_is_the_default(monkeypatch, compiles):
    x = S((8, 8), F32)
    memory = jc.memory
    assert memory.here() == memory.peak(double, x).device == "h200"
    monkeypatch.setattr(cards, "present", memory.devices()["a100"].__eq__)
    assert memory.here() == memory.peak(double, x).device == "a100"
    found = memory.largest_batch(lambda n: (double, (S((n, 8), F32),)), budget="1KiB")
    assert found.peak.device == "a100"
    assert len({*compiles}) == 2


def test_a_card_that_the_compiler_does_not_take(compiles):
    """CUDA 13 has left out the V100: XLA, asked to compile for it, may crash."""
    if compiler.cuda() < 13:
        assert jc.memory.peak(double, S((8,), F32), device="v100").peak_bytes
    else:
        with pytest.raises(NotImplementedError, match="Tesla V100.*capability 7.0"):
            jc.memory.peak(double, S((8,), F32), device="v100")
        assert not compiles


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: jc.memory.peak(3, x), "step must be a function, got 3"),
        (lambda x: jc.memory.peak(jax.jit(double), x, donate=0), "donate must be said"),
        (lambda x: jc.memory.peak(double, x, devices=8), "mesh, 1, got 8"),
        (
            lambda x: jc.memory.peak(jnp.add, sharded(2), sharded(4)),
            "args must be sharded over one mesh",
        ),
        (
            lambda x: jc.memory.peak(double, sharded(12)),
            "must be a multiple of it, got 12",
        ),
    ],
)
def test_arguments_that_are_none(call, message):
    with pytest.raises(ValueError, match=message):
        call(S((8,), F32))


def test_a_step_that_does_not_compile(monkeypatch):
    def huge(x):  # a kernel's argument that no card has
        return jax.ffi.ffi_call("no_such_kernel", S((8,), F32))(x)

    with pytest.raises(
        ValueError, match="does not compile for a NVIDIA H200: .*kernel"
    ):
        jc.memory.peak(huge, S((8,), F32))


@pytest.mark.slow
def test_what_cannot_be_timed_is_not_tried(cache, monkeypatch, optax_promotion):
    """XLA's choices among ways to do a product are the same without a card."""
    found = jc.memory.peak(train_step, *ARGS)
    shutil.rmtree(cache)
    monkeypatch.setattr(compiler, "_OPTIONS", {})
    assert jc.memory.peak(train_step, *ARGS) == found


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, r"CUDA plugin is not installed: pip install .*\[memory\]"),
        (
            {"jax-cuda13-plugin": "0.1.2"},
            "jax-cuda13-plugin is 0.1.2, jaxlib is .*: pip install .*plugin==.*pjrt==",
        ),
    ],
)
def test_a_missing_or_foreign_plugin(monkeypatch, versions, message):
    version = importlib.metadata.version

    def installed(package):
        if package.startswith("jax-cuda"):
            if package not in versions:
                raise importlib.metadata.PackageNotFoundError(package)
            return versions[package]
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(ImportError, match=message):
        jc.memory.peak(double, S((8,), F32))


def test_missing_cudnn():
    """With the error that jax raises; it is jax's own where cuDNN is not installed."""

    def attention(q):
        if compiler._found("nvidia.cudnn"):
            raise RuntimeError("cuDNN not found.")
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    with pytest.raises(ImportError, match=r"cuDNN, which is not installed: pip"):
        jc.memory.peak(attention, S((2, 128, 4, 64), BF16))


def test_nothing_is_written_to_stderr(capfd):
    jc.memory.peak(sgd, *(S((384, 384), F32),) * 2, device="b200")
    assert capfd.readouterr().err == ""


def test_what_is_measured_needs_a_gpu():
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="cpu does not count its memory"):
            jc.memory.measure(double, S((8,), F32))


def test_what_is_measured_is_the_allocators_peak(monkeypatch):
    """On a card that has not been used yet, which says 0."""
    used = [0]

    class Card:
        platform = "gpu"

        def memory_stats(self):
            return {"peak_bytes_in_use": used[0]}

    def step(x):
        used[0] = 7  # as it is traced
        return x

    monkeypatch.setattr(jax, "local_devices", lambda: [Card()])
    assert jc.memory.measure(step, S((8,), F32)) == 7
