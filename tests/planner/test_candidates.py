"""The fastest solution within a limit, of all there are."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.planner import candidates
from jaxcompact.planner.candidates import Candidates
from jaxcompact.planner.milp import frontier
from jaxcompact.planner.problem import CODECS, problem_of
from jaxcompact.planner.scan import scan_step

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
        assert found.seconds == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert some.fastest(0) is None


def test_the_smallest_are_without_the_host_and_with_it(asked):
    some = Candidates(asked, LAYERS, NOISE)
    alone, stored, helped = some.smallest()
    for without in (alone, stored):
        assert not any(option and option.away for option in without.chosen)
    assert some.nbytes(alone) <= some.nbytes(stored)
    assert stored.nbytes <= alone.nbytes
    assert any(option and option.away for option in helped.chosen)
    assert some.nbytes(helped) <= min(map(some.nbytes, (alone, *some.known)))
    assert helped.seconds > alone.seconds
