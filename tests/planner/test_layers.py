"""How many layers of a block a step holds at once."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.planner.layers import layers_of

LAYERS = 6
X, WS = jnp.ones((8, 64)), jnp.ones((LAYERS, 2, 64, 64))


def block(w, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


def run(layer, ws, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]


def in_a_scan(layer):
    return jax.jit(jax.grad(lambda ws, x: run(layer, ws, x).sum())), (WS, X)


def by_hand(layer):
    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return x.sum()

    return jax.grad(loss), (list(WS), X)


def of_microbatches(layer):
    def step(ws, xs):
        def add(sum, x):
            return sum + jax.grad(lambda ws: run(layer, ws, x).sum())(ws), None

        return jax.lax.scan(add, jnp.zeros_like(ws), xs)[0]

    return step, (WS, jnp.stack([X] * 4))


def in_groups(layer):
    """Each of which is run again."""
    group = jax.checkpoint(lambda ws, x: run(layer, ws, x))
    step = jax.grad(lambda ws, x: run(group, ws, x).sum())
    return step, (WS.reshape(3, 2, *WS.shape[1:]), X)


def of_examples(layer):
    each = jax.vmap(lambda w, x: layer(w, x).sum(), (None, 0))
    return jax.grad(lambda w, x: each(w, x).sum()), (WS[0], jnp.stack([X] * 3))


def of_a_common_name(layer):
    @jax.jit
    def _forward(ws, x):
        return run(layer, ws, x).sum()

    return jax.grad(_forward), (WS, X)


def without_a_gradient(layer):
    return (lambda ws, x: run(layer, ws, x)), (WS, X)


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (in_a_scan, LAYERS),
        (by_hand, LAYERS),
        (of_microbatches, LAYERS),
        (in_groups, 2),
        (of_examples, 1),
        (of_a_common_name, LAYERS),
        (without_a_gradient, 0),
    ],
)
def test_layers_are_counted(make, layers):
    def make_step(policy):
        return make(jc.checkpoint(block, policy=policy, params=0))

    assert layers_of(make_step) == layers


def test_a_plan_says_where_another_number_was_given():
    def make_step(policy):
        return in_a_scan(jc.checkpoint(block, policy=policy, params=0))

    lines = []
    for layers in (None, LAYERS, 40):
        jc.plan_step(make_step, layers=layers, budget="1GiB", progress=lines.append)
    said = [line for line in lines if "times at once" in line]
    assert said == ["layers is 40, but the step runs the block 6 times at once"]
