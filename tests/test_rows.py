"""Groups lie within what a norm sets to one scale: a channel, a head."""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.planner.problem import problem_of
from jaxcompact.policy import written
from tests.candidates import S, candidates
from tests.cases import slow
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("standard_promotion")


def rms(h, axis):
    return h * jax.lax.rsqrt((h**2).mean(axis, keepdims=True) + 1e-6)


def centred(h, axis):
    mean = h.mean(axis, keepdims=True)
    return (h - mean) * jax.lax.rsqrt(h.var(axis, keepdims=True) + 1e-5)


def in_heads(h, axis=-1):
    return rms(h.reshape(*h.shape[:-1], 8, -1), axis).reshape(h.shape)


def of_groups(h):
    apart = h.reshape(*h.shape[:-1], 8, -1)
    return centred(apart, (1, 2, 4)).reshape(h.shape)


def turned(h):
    """Heads first, as attention has them."""
    apart = h.reshape(*h.shape[:-1], 8, -1).swapaxes(-2, -3)
    return rms(apart, -1).swapaxes(-2, -3).reshape(h.shape)


def channels_first(h):
    return jnp.moveaxis(centred(jnp.moveaxis(h, -1, 1), (0, 2, 3)), 1, -1)


def flax_norm(h):
    norm = nn.BatchNorm(use_running_average=False)
    params = norm.init(jax.random.key(0), jnp.zeros((1, *h.shape[1:])))
    return norm.apply(params, h, mutable=["batch_stats"])[0]


# What a norm is of, [4, 6, 10, 128]; and the entries that are to be in a group.
NORMS = {
    "layer norm": (lambda h: centred(h, -1), 128),
    "of the last axes": (lambda h: centred(h, (-2, -1)), 1280),
    "of all": (lambda h: centred(h, (0, 1, 2, 3)), None),
    "batch norm": (lambda h: centred(h, (0, 1, 2)), 1),
    "batch norm of flax": (flax_norm, 1),
    "batch norm, channels first": (channels_first, 1),
    "batch norm after a function": (lambda h: centred(jax.nn.silu(h), (0, 1, 2)), 1),
    "instance norm": (lambda h: centred(h, (1, 2)), 1),
    "group norm": (of_groups, 1),
    "heads": (in_heads, 16),
    "heads, turned": (turned, 16),
    "the largest of a head": (
        lambda h: (
            (g := h.reshape(*h.shape[:-1], 4, 32)) / abs(g).max(-1, keepdims=True)
        ).reshape(h.shape),
        32,
    ),
    "over heads": (lambda h: in_heads(h, -2), None),
    "over examples": (lambda h: centred(h, 0), None),
    "none": (jnp.tanh, None),
}


@pytest.mark.parametrize("name", NORMS)
def test_what_shares_a_scale(name):
    norm, row = NORMS[name]

    def f(w, x):
        return norm(x @ w) @ w

    found = candidates(f, S((128, 128), jnp.float32), S((4, 6, 10, 128), jnp.float32))
    assert found["dot_general.0"].row == row


SIZES = {
    "batch norm": (NORMS["batch norm"][0], 1),
    "group norm": (of_groups, 1),
    "heads": (in_heads, 16),
}
PARAMS = {k: normal(i, 128, 128) / 11 for i, k in enumerate("ab")}
X, CT = normal(2, 4, 6, 10, 128), normal(4, 4, 6, 10, 128)


def block(norm):
    return lambda params, x: jax.nn.relu(norm(x @ params["a"])) @ params["b"]


def error(fun, policy, params=PARAMS, x=X):
    """Of the second product's gradient, relative."""

    def gradient(fun):
        return jax.jit(jax.grad(lambda p: jnp.sum(fun(p, x) * CT)))(params)["b"]

    exact = gradient(fun)
    small = gradient(jc.checkpoint(fun, policy=policy, params=0))
    return jnp.linalg.norm(small - exact) / jnp.linalg.norm(exact)


@pytest.mark.parametrize(("bits", "most"), [(4, 0.11), slow(8, 0.007)])
@pytest.mark.parametrize("name", ["batch norm", "heads", slow("group norm")])
def test_sizes_that_a_norm_takes_away_change_nothing(name, bits, most):
    """e^N(0, 1), of each channel or head; beside larger ones a small one is lost.

    64 entries of N(0, 1) err by 0.095 in 4 bits and 0.0059 in 8, 16 by less.
    """
    norm, size = SIZES[name]
    sizes = jnp.exp(jnp.repeat(normal(3, 128 // size), size))
    params = PARAMS | {"a": PARAMS["a"] * sizes}
    policy = {4: jc.policies.int4, 8: jc.policies.int8}[bits]()
    assert 0 < error(block(norm), policy, params) < most
    shared = jc.policies.uniform(policy.codec)
    assert error(block(norm), shared, params) > 2 * most


def test_channels_may_lie_far_from_zero():
    """Ten times their size."""
    x = X + 10 * normal(3, 128)
    policy = jc.Policy({"x": jc.Save()}, jc.policies.int4())
    assert 0 < error(block(NORMS["batch norm"][0]), policy, x=x) < 0.11


def test_a_plan_has_such_groups_in_all_its_bits():
    fun = block(NORMS["batch norm"][0])

    def make_gradient(policy):
        wrapped = jc.checkpoint(fun, policy=policy, params=0)
        return jax.grad(lambda p, x: jnp.sum(wrapped(p, x) * CT)), (PARAMS, X)

    codecs = [jc.Quantized(8), jc.Quantized(2, 32)]
    channels = [replace(c, standardized=True) for c in codecs]
    own = jc.Quantized(4, standardized=True)
    for found in (jc.sensitivity(make_gradient, codecs=codecs), None):
        if found:
            assert list(found.effects["dot_general.0"].errors) == [own, *channels]
        _, asked = problem_of(
            make_gradient, jc.memory.devices()["h200"], 2.0, found, codecs
        )
        [item] = [i for i in asked.items if i.tensor.name == "dot_general.0"]
        offered = {o.action for o in item.options if o.lossy}
        assert offered == {*channels, *([own] if found else [])}


def test_a_codecs_own_axis_and_uniform_stay():
    fun, own = block(NORMS["batch norm"][0]), jc.Quantized(8, axis=-3)
    policies = jc.policies.compress(own), jc.policies.uniform(jc.Quantized(8))
    for policy in policies:
        said = jc.explain(fun, PARAMS, X, policy=policy, params=0)
        [row] = [row for row in said.rows if row.name == "dot_general.0"]
        assert row.action == written(policy.codec)
