"""The search for the largest batch, on made-up steps and on a compiled one."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcompact as jc

search = sys.modules["jaxcompact.memory.search"]
SILENT = {"progress": lambda line: None}


def search_in(nbytes, budget, multiple=1):
    """With steps that take ``nbytes(batch)``: compiles, and the answer."""

    def peak(step, batch, device):
        return SimpleNamespace(peak_bytes=nbytes(batch))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "peak", peak)
        found = jc.memory.largest_batch(
            lambda batch: (print, (batch,)), budget=budget, multiple=multiple, **SILENT
        )
    return len(found.tried), found


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    start=st.integers(1, 10**10),
    slope=st.integers(10**4, 10**8),
    factor=st.floats(1.0, 1e4),
    multiple=st.sampled_from([1, 8, 64]),
    waves=st.integers(0, 30),
)
def test_within_one_percent_in_a_few_compiles(start, slope, factor, multiple, waves):
    """Straight lines, with steps of up to 30 % where a kernel is chosen otherwise."""

    def nbytes(batch):
        return start + slope * batch * (100 + waves * ((batch // 7) % 2)) // 100

    budget = int(nbytes(multiple) * factor)
    compiles, found = search_in(nbytes, budget, multiple)
    assert nbytes(found.batch) <= budget and found.batch % multiple == 0
    above = min(b for b, n in found.tried.items() if n > budget)
    assert above - found.batch <= max(multiple, 0.01 * found.batch)
    assert compiles <= (10 if waves == 0 else 20)


@pytest.mark.parametrize("budget", [100, 107, 108, 109, 1000, 12345])
def test_exact_while_small(budget):
    def nbytes(batch):
        return 100 + 8 * (batch - 1)

    _, found = search_in(nbytes, budget)
    largest = max(batch for batch in range(1, 2000) if nbytes(batch) <= budget)
    assert abs(found.batch - largest) <= 0.01 * largest


@pytest.mark.parametrize("slope", [1, 30, 60, 99])
def test_nothing_is_compiled_far_beyond_the_budget(slope):
    """There XLA takes minutes. On a straight line, by a batch or one in a hundred."""
    _, found = search_in(lambda batch: 100 + slope * (batch - 1), 200)
    assert max(found.tried.values()) <= 200 + max(slope, 0.01 * slope * found.batch)


def test_a_step_that_is_no_line():
    """Quadratic, as scores of attention in the sequence."""
    compiles, found = search_in(lambda batch: batch**2, 10**8)
    assert 9900 <= found.batch <= 10000 and compiles < 20


def test_a_compiled_step(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))

    def make_step(batch):
        x = jax.ShapeDtypeStruct((batch, 1024), jnp.float32)
        return jax.jit(lambda x: 2.0 * x), (x,)

    found = jc.memory.largest_batch(make_step, device="a100", budget="64 MiB")
    assert found.batch == 2**26 // (2 * 4096)
    assert found.peak.peak_bytes == found.budget == 2**26
    assert str(found) == "8192: 64.00 MiB of 64.00 MiB"
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "batch 1: 0.01 MiB, fits" and len(lines) == len(found.tried)
    whole = jc.memory.largest_batch(make_step, device="a100", multiple=512, **SILENT)
    assert whole.budget == jc.memory.devices()["a100"].memory
    assert whole.batch == whole.budget // 8192 // 512 * 512


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("80GB", 80 * 10**9),
        (" 1.5 GiB ", 3 * 2**29),
        ("2TiB", 2**41),
        ("7B", 7),
        ("3kB", None),
        ("3KB", 3000),
        ("1" + 400 * "0" + "B", 10**400),
    ],
)
def test_budgets(text, nbytes):
    if nbytes is None:
        with pytest.raises(ValueError, match="budget must be bytes"):
            search.parse_bytes(text)
    else:
        assert search.parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "16 gigs"}, "budget must be bytes, or a number and .*GiB.*16 gigs"),
        ({"budget": -5}, "budget must be bytes"),
        ({"budget": 0}, "budget must be bytes"),
        ({"budget": True}, "budget must be bytes"),
        ({"budget": "0GiB"}, "budget must be above 0"),
        ({"budget": 1.5}, "budget must be bytes"),
        ({"budget": 10}, "budget is 10 bytes, a batch of 1 takes"),
        ({"multiple": 0}, "multiple must be a positive int, got 0"),
        ({"multiple": True}, "multiple must be a positive int, got True"),
        ({"device": "gtx"}, "device must be one of"),
    ],
)
def test_what_is_none_is_refused(arguments, message):
    def make_step(batch):
        return (lambda x: x + x), (jax.ShapeDtypeStruct((batch, 64), jnp.float32),)

    with pytest.raises(ValueError, match=message):
        jc.memory.largest_batch(make_step, **arguments, **SILENT)


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (3, "int"),
        ((jnp.sin, 1, 2), "tuple"),
        ((3, ()), r"\(int, tuple\)"),
        ((jnp.sum, jnp.ones(3)), r"\(function, ArrayImpl\)"),
    ],
)
def test_what_is_no_step(made, got):
    rule = r"make_step must return \(step, args\), a function and a tuple, got "
    with pytest.raises(ValueError, match=f"^{rule}{got}$"):
        jc.memory.largest_batch(lambda batch: made, **SILENT)


def test_a_step_that_takes_no_memory():
    with pytest.raises(ValueError, match="a batch of .* fits: the peak does not grow"):
        search_in(lambda batch: 10, 100)


def test_a_budget_that_no_batch_takes():
    with pytest.raises(ValueError, match="a batch of .* a budget of .* is too large"):
        search_in(lambda batch: 10 + batch, 10**12)
