"""The fastest solution within a limit, of all there are."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.planner import candidates
from jaxcompact.planner.alive import alive
from jaxcompact.planner.candidates import Candidates
from jaxcompact.planner.milp import frontier
from jaxcompact.planner.problem import CODECS, problem_of, without_host
from jaxcompact.planner.scan import scan_step
from tests.planner import functions

LAYERS, NOISE = 4, 0.04


@pytest.fixture(scope="module")
def asked():
    def block(w, x):
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x + (jnp.sin(y @ w[0]) * jnp.cos(y @ w[1])) @ w[2]

    shapes = (3, 512, 512), (8192, 512)
    args = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    make_step = scan_step(block, args, LAYERS, 0)
    return problem_of(make_step, jc.memory.devices()["h200"], 0.2, None, CODECS)[1]


@pytest.mark.parametrize("count", [4, 12])
def test_none_is_faster(asked, monkeypatch, count):
    """However few of them are looked at before a limit is known."""
    every = frontier(asked, NOISE, 500)
    assert len(every) > 10
    monkeypatch.setattr(candidates, "frontier", partial(frontier, count=count))
    some = Candidates(asked, LAYERS, NOISE)
    assert len(some.frontier) < len(every)
    sizes = sorted(map(some.nbytes, every))
    for limit in (*sizes, sizes[-1] * 2):
        best = min(s.seconds for s in every if some.nbytes(s) <= limit)
        found = some.fastest(limit)
        assert some.nbytes(found) <= limit
        # One that stores more, and has less in memory, may be faster than all of them.
        assert found.seconds <= best * (1 + 1e-6) + 1e-12
    assert some.fastest(0) is None


def test_the_smallest_are_without_the_host_and_with_it(asked):
    some = Candidates(asked, LAYERS, NOISE)
    alone, stored, *more, helped = some.smallest()
    for without in (alone, stored, *more):
        assert not any(option and option.away for option in without.chosen)
    assert some.nbytes(alone) <= some.nbytes(stored)
    assert stored.nbytes <= alone.nbytes
    sizes = list(map(some.nbytes, (alone, *more)))
    assert more and sizes == sorted(sizes)
    assert any(option and option.away for option in helped.chosen)
    assert some.nbytes(helped) <= min(map(some.nbytes, (alone, *some.known)))
    assert helped.seconds > alone.seconds


@pytest.mark.slow
def test_blocks_of_a_network_that_is_planned_whole():
    """Keeping each one's input is found, as `jax.checkpoint` around them would, or what
    is faster in the same memory. Inputs are relus of sums, which no product makes."""

    def network(w, x):
        for _ in range(8):
            y = jnp.sin(x @ w[0]) @ w[1]
            x = jax.nn.relu(x + y * jnp.cos(y))
        return x

    asked = without_host(functions.asked(network, codecs=()))
    ends = [i for i in asked.items if i.tensor.name.startswith("relu")]
    kept = {asked.items[0].source, *(item.source for item in ends)}
    chosen = tuple(i.options[0] if i.source in kept else None for i in asked.items)
    again = {op for op in asked.runs if op.kind == "dot_general"}
    limit = alive(asked, chosen, 1)
    found = Candidates(asked, 1, 0.0).fastest(limit)
    assert found.seconds < sum(asked.runs[op] for op in again)
    everything = tuple(item.options[0] for item in asked.items)
    assert limit < 0.6 * alive(asked, everything, 1)
