"""A norm is not made again of what is rounded, which may decode to zero."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.planner.milp import solve
from jaxcompact.planner.problem import named, problem_of
from tests.analysis.attention_cases import W, X
from tests.analysis.steep_cases import errors
from tests.cases import slow

pytestmark = pytest.mark.usefixtures("standard_promotion")

SIZES = jnp.where(jnp.arange(32) % 2, 1.0, 0.03)
NORMS = {
    "rms of rows": (
        lambda p, x: (
            (h := x @ p["w"]) * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        ),
        W,
        X * jnp.tile(SIZES, 2)[:, None],
    ),
    "length of rows": (
        lambda p, x: (h := x @ p["w"]) / jnp.linalg.norm(h, axis=-1, keepdims=True),
        W,
        X * jnp.tile(SIZES, 2)[:, None],
    ),
    "largest of rows": (
        lambda p, x: (h := x @ p["w"]) / jnp.abs(h).max(-1, keepdims=True),
        W,
        X * jnp.tile(SIZES, 2)[:, None],
    ),
    "variance of channels": (
        lambda p, x: ((h := x @ p["w"]) - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5),
        W * SIZES[None],
        X,
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("bits", [slow(8), 4, 3])
def test_a_norm_of_what_is_rounded_away_stays(name, bits):
    """What is small beside its group decodes to zero: wrong by itself, by no more."""
    fun, w, x = NORMS[name]
    policy = jc.policies.uniform(jc.Quantized(bits))  # the others have groups of one
    [error] = errors(fun, {"w": w}, x, policy)
    assert error < 1


def test_a_plan_makes_no_norm_again_of_what_is_rounded():
    fun, w, x = NORMS["variance of channels"]

    def make_gradient(policy):
        wrapped = jc.checkpoint(fun, policy=policy, params=0)
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(wrapped({"w": w}, x)))), (w, x)

    found = jc.sensitivity(make_gradient, codecs=[jc.Quantized(2, 32)])
    card, codecs = jc.memory.devices()["h200"], [jc.Quantized(2, 32)]
    traces, asked = problem_of(make_gradient, card, 2.0, found, codecs)
    items = []
    for item in asked.items:  # the product is rounded
        if item.tensor.name == "dot_general.0":
            options = tuple(o for o in item.options if o.lossy)
            item = replace(item, options=options, again=False)
        items.append(item)
    asked = replace(asked, items=tuple(items))
    chosen = named(asked.items, solve(asked, smallest=True).chosen)
    assert isinstance(chosen["dot_general.0"], jc.Quantized)
    label, actions = traces.traced.label, asked.actions | chosen
    plan = jc.Plan(label, actions, "h200", 1, 0.0, 0, 0.0, 0)
    gradient = make_gradient(plan)[0](w, x)
    exact = jax.grad(lambda w: jnp.sum(jnp.sin(fun({"w": w}, x))))(w)
    assert jnp.linalg.norm(gradient - exact) < jnp.linalg.norm(exact)
