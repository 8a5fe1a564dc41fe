"""Steps to which rules give slopes: spikes, levels. The slope is stored."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.planner.problem import problem_of
from tests.analysis.rule_cases import MANY, PARAMS, ROWS, X, keeping, layer_of, tangents
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("any_rank")


def fast(v, k=25.0):
    return 1.0 / (1.0 + k * jnp.abs(v)) ** 2


def fires(v):
    return (v > 0.0).astype(v.dtype)


def surrogate(backward, forward=None):
    fun = jax.custom_vjp(forward or fires)
    fun.defvjp(lambda *args: (fun(*args), args), backward)
    return fun


@jax.custom_gradient
def by_closure(v):
    return jnp.heaviside(v, 0.0), lambda g: g * fast(v)


above = surrogate(  # of a threshold that is learned
    lambda kept, g: ((slope := g * fast(kept[0] - kept[1])), -slope.sum(0)),
    lambda v, at: (v > at).astype(v.dtype),
)
SPIKES = {
    "fast sigmoid": surrogate(lambda v, g: (g * fast(*v),)),
    "divided": surrogate(lambda v, g: (-g / -((1.0 + 25.0 * jnp.abs(*v)) ** 2),)),
    "its derivative is kept": keeping(
        lambda v: (fires(v), fast(v)), lambda slope, g: (g * slope,)
    ),
    "by tangents": tangents(fires, lambda v, t: t * fast(v)),
    "in a window": surrogate(
        lambda v, g: (jnp.where(jnp.abs(*v) < 0.5, g * jnp.exp(-8.0 * v[0] ** 2), 0.0),)
    ),
    "by closure": by_closure,
    "of examples": jax.vmap(by_closure),
}


def leaks(spike):
    def fun(p, x):
        def step(v, x):
            v = 0.9 * v + x @ p["up"]
            s = spike(v - 1.0)
            return v - s, s

        x = jnp.linspace(1.0, 1.5, 8)[:, None, None] * x
        return jax.lax.scan(step, jnp.zeros((ROWS, MANY)), x)[1].mean(0) @ p["down"]

    return fun


def fused_cell(p, x):
    """One rule for the spike and the membrane, which is reset by it."""

    def cell(v, i):
        v = 0.9 * v + i
        s = fires(v - 1.0)
        return v - s, s

    def backward(kept, cts):
        g = cts[0] + (cts[1] - cts[0]) * fast(0.9 * kept[0] + kept[1] - 1.0)
        return 0.9 * g, g

    run = jax.custom_vjp(cell)
    run.defvjp(lambda *args: (cell(*args), args), backward)
    x = jnp.linspace(1.0, 1.5, 8)[:, None, None] * x
    step = lambda v, x: run(v, x @ p["up"])  # noqa: E731
    return jax.lax.scan(step, jnp.zeros((ROWS, MANY)), x)[1].mean(0) @ p["down"]


def levels(v):
    return jnp.clip(jnp.round(4.0 * v), -8.0, 7.0) / 4.0


STEPS = {name: layer_of(spike) for name, spike in SPIKES.items()} | {
    "a threshold that is learned": lambda p, x: above(x @ p["up"], p["at"]) @ p["down"],
    "in a loop": leaks(SPIKES["fast sigmoid"]),
    "beside what it resets": fused_cell,
    "levels": layer_of(
        surrogate(lambda v, g: (g * (1 + jnp.cos(25.0 * v[0])),), levels)
    ),
    "any number of levels": layer_of(
        surrogate(
            lambda v, g: (g * jnp.cos(12.0 * v[0]),), lambda v: jnp.floor(2.0 * v) / 2.0
        )
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_slopes_of_steps_are_near(name):
    """Two tensors of 4 bits, 0.1 each: made again of what was rounded they are 1 to 3
    off, by most where they are most."""

    def gradient(fun):
        return jax.jit(jax.grad(lambda p: jnp.sum(weights * fun(p, X))))(PARAMS)

    fun, weights = STEPS[name], normal(3, *X.shape)
    found = gradient(jc.checkpoint(fun, policy=jc.policies.int4(), params=0))
    for name, exact in gradient(fun).items():
        off = jnp.linalg.norm(found[name] - exact)
        assert off <= 0.25 * jnp.linalg.norm(exact), name


def test_a_plan_makes_no_slope_again_of_what_is_rounded():
    fun, card = layer_of(SPIKES["fast sigmoid"]), jc.memory.devices()["h200"]

    def make_gradient(policy):
        wrapped = jc.checkpoint(fun, policy=policy, params=0)
        return jax.grad(lambda p, x: jnp.mean(wrapped(p, x) ** 2)), (PARAMS, X)

    codecs = [jc.Quantized(4)]
    _, asked = problem_of(make_gradient, card, 2.0, None, codecs)
    (slope,) = (
        i for i in asked.items if i.tensor.name == "custom_vjp_call.0.residual0"
    )
    assert slope.source in asked.own


def test_a_slope_is_stored_in_the_place_of_what_it_is_of():
    said = jc.explain(
        STEPS["fast sigmoid"], PARAMS, X, policy=jc.policies.int4(), params=0
    )
    stored = {row.name: row.action for row in said.rows if row.stored}
    assert stored == {
        "x": "Quantized(bits=4)",
        "custom_vjp_call.0": "Narrow(limit=2, least=0)",
        "custom_vjp_call.0.residual0": "Quantized(bits=4)",
    }
