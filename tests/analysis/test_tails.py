"""Functions that are flat on one side: what they are of is stored within a bound.

Of a group of normal numbers around a mean below zero the least sets the step, of which
GELU leaves nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from tests.analysis.test_bounded import errors, of, stored, wide
from tests.cases import slow

pytestmark = pytest.mark.usefixtures("standard_promotion")


def exact_gelu(h):
    return jax.nn.gelu(h, approximate=False)


FLAT = {
    "gelu": (jax.nn.gelu, "(-2.6, None)"),
    "exact gelu": (exact_gelu, "(-2.5, None)"),
    "by a sigmoid": (lambda h: h * jax.nn.sigmoid(1.702 * h), "(-2.8, None)"),
    "silu": (jax.nn.silu, "(-4.7, None)"),
    "elu": (jax.nn.elu, "(-3.5, None)"),
    "a selu": (jax.nn.selu, "(-3.5, None)"),
    "of the negative": (lambda h: jax.nn.gelu(-h), "(None, 2.6)"),
    "more than a number": (lambda h: jax.nn.gelu(h + 1), "(-3.5, None)"),
    "in float32": (lambda h: jax.nn.gelu(h.astype(jnp.float32)), "(-2.6, None)"),
    "two of one": (lambda h: jax.nn.gelu(h) + jnp.maximum(h, -4), "(-4.0, None)"),
    "clipped on one side": (lambda h: jnp.minimum(h, 1), "(None, 1.0)"),
    "a bump": (lambda h: h / (1 + jnp.square(jnp.square(h))), "(-3.1, 3.1)"),
}


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("dtype", [slow(jnp.bfloat16), jnp.float32])
def test_where_it_is_flat(name, dtype):
    """Where its slope is three hundredths of the largest; with a bias the same."""
    function, bound = FLAT[name]
    if name == "exact gelu" and dtype == jnp.bfloat16:
        bound = "(-2.6, None)"  # its root of a half is rounded
    found = stored(of(function), *wide(1, dtype), jc.policies.int4())["dot_general.0"]
    assert found == f"Quantized(bits=4, bound={bound})"


def read_twice(w, x):
    h = x @ w["up"]
    return jax.nn.gelu(h) @ w["down"] + h[:, :64]


def of_a_learned_size(w, x):
    return jax.nn.gelu((x @ w["up"]) * w["b"]) @ w["down"]


@jax.custom_jvp
def stepped(h):
    return jnp.maximum(jnp.sign(h), 0)


@stepped.defjvp
def _(primals, tangents):
    (h,), (d,) = primals, tangents
    return stepped(h), d / (1 + jnp.abs(h))


SLOPED = {
    "read twice": read_twice,
    "of a learned size": of_a_learned_size,
    "a leak": of(jax.nn.leaky_relu),
    "a small leak": of(lambda h: jnp.where(h > 0, h, 1e-3 * h)),
    "ever steeper": of(lambda h: jnp.square(jnp.maximum(h, 0))),
    "near zero": of(lambda h: jax.nn.gelu(h - 2)),
    "of masks": of(lambda h: h * ((h > 1) * 1.0 - (h < -1) * 1.0)),
    "on both sides": of(lambda h: h * jnp.tanh(h)),
    "a slope of its own": of(stepped),
    "straight through": of(lambda h: h + jax.lax.stop_gradient(jax.nn.gelu(h) - h)),
    "rounded": of(lambda h: jax.nn.gelu(h).astype(jnp.int32).astype(jnp.float32) + h),
}


@pytest.mark.parametrize("name", SLOPED)
def test_what_is_not_flat_has_no_bound(name):
    found = stored(SLOPED[name], *wide(1), jc.policies.int4())
    assert not any("bound" in action for action in found.values()), found


def trained(size):
    """Weights of which most products are below zero, as those of trained networks."""
    w, x = wide(size)
    return {**w, "up": w["up"].at[0].set(-size / 8)}, x.at[:, 0].set(8)


@pytest.mark.parametrize("name", ["elu", *map(slow, sorted(FLAT.keys() - {"elu"}))])
@pytest.mark.parametrize("size", [slow(1), 2, slow(8)])
@pytest.mark.parametrize("policy", ["int4", slow("int8")])
def test_gradients_are_no_further_off_for_a_bound(name, size, policy):
    """Than within one that nothing is beyond; what is clipped by half a step, 0.5 %."""
    fun, policy = of(FLAT[name][0]), getattr(jc.policies, policy)()
    whole = jc.Quantized(policy.codec.bits, bound=1e30)
    without = jc.Policy({"dot_general.0": whole}, default=policy)
    found, before = (errors(fun, *trained(size), p) for p in (policy, without))
    assert np.linalg.norm(found) < 1.1 * np.linalg.norm(before) + 0.005


@pytest.mark.parametrize("name", ["gelu", slow("exact gelu"), slow("by a sigmoid")])
@pytest.mark.parametrize("policy", ["int4", slow("int8")])
def test_gelu_is_nearer_by_a_third_or_more(name, policy):
    fun, policy = of(FLAT[name][0]), getattr(jc.policies, policy)()
    whole = jc.Quantized(policy.codec.bits, bound=1e30)
    without = jc.Policy({"dot_general.0": whole}, default=policy)
    found, before = (errors(fun, *trained(2), p) for p in (policy, without))
    assert np.linalg.norm(found) < 2 / 3 * np.linalg.norm(before)


def test_what_is_given_is_read_too():
    """What a block gives, and no product reads."""

    def fun(w, x):
        h = x @ w["up"]
        return jax.nn.gelu(h) @ w["down"], jnp.square(h)

    found = stored(fun, *wide(1), jc.policies.int4())
    assert found["dot_general.0"] == "Quantized(bits=4)"


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_is_one_on_the_open_side_alone(sign):
    """What overflows in float16, and is nothing to an ELU."""
    w, x = jax.tree.map(lambda a: a.astype(jnp.float16), trained(1))
    w = {**w, "up": w["up"].at[0, 3].set(sign * 6e4)}
    assert jnp.isinf(x @ w["up"]).any()
    block = jc.checkpoint(of(jax.nn.elu), policy=jc.policies.int4(), params=0)
    found = jax.grad(lambda w: block(w, x).astype(jnp.float32).sum())(w)
    assert jnp.isfinite(found["up"]).all() == (sign < 0)
