"""What is no argument is refused by every public function, early and by name."""

import math
import re
from collections.abc import Callable
from functools import partial
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcompact as jc
from jaxcompact import linen as clinen
from jaxcompact import nnx as cnnx
from jaxcompact.planner.effects import Effect

W, X, KEY = jnp.ones((4, 3)), jnp.ones((2, 4)), jax.random.key(0)
TREE, SPACE = {"kernel": W}, jc.Subspace({"kernel": jc.Projection(2)}, KEY)
INSIDE = jc.in_subspace(SPACE, optax.identity())
JUNK = st.one_of(
    st.sampled_from([None, True, False, [], {}, ["a"], int, object(), b"x", 1j, print]),
    st.sampled_from([np.zeros((2, 2, 2)), np.float32(0.5), np.int64(3), KEY, 10**30]),
    st.sampled_from([jnp.ones((3, 3), jnp.int32), jnp.ones((), bool), jnp.ones(5)]),
    st.sampled_from([jc.Quantized(4), jc.Policy(), jc.Save(), SPACE, jc.Projection(2)]),
    st.sampled_from(["h2o", "h200", "7GiB", "7 apples", "cpu:0", "keep", ""]),
    st.integers(-9, 9) | st.integers(-(2**70), 2**70) | st.floats(),
)

# --- rules: whether a value is right, or None if it is not to be tried ---


def never(value) -> bool:
    return False


def whole(least: float = -math.inf, most: float = math.inf) -> Callable:
    return lambda v: type(v) is int and least <= v <= most


def real(least: float, most: float, *kinds) -> Callable:
    kinds = kinds or (Real,)
    return lambda v: is_a(*kinds)(v) and not is_a(bool)(v) and least <= v <= most


def one_of(*values) -> Callable:
    return lambda v: any(type(v) is type(x) and v == x for x in values)


def is_a(*kinds) -> Callable:
    return lambda v: isinstance(v, kinds)


def of_dtype(*kinds) -> Callable:
    return lambda v: any(
        jnp.issubdtype(getattr(v, "dtype", object), kind) for kind in kinds
    )


def either(*rules: Callable) -> Callable:
    def rule(v):
        found = [rule(v) for rule in rules]
        return True if True in found else None if None in found else False

    return rule


def untried(rule: Callable) -> Callable:
    """What is right would be compiled, or called itself."""
    return lambda v: None if rule(v) else False


LEAST, MOST = 5e-324, 3.3e38
FUNCTION, SIZE, FLAG = untried(callable), whole(1), is_a(bool)
BITS, CODEC = one_of(1, 2, 3, 4, 8), is_a(jc.Codec)
ARRAY = untried(of_dtype(jnp.number))
RATE = either(real(-MOST, MOST), untried(callable), ARRAY)
BELOW_1 = either(real(0, 1 - 1e-9), ARRAY)
COUNT = either(whole(0, 2**31 - 1), is_a(np.int64))
FRACTION = either(SIZE, real(LEAST, 1.0, float))
POLICY, SUBSPACE = untried(lambda v: hasattr(v, "decide")), is_a(jc.Subspace)
EMPTY = one_of(None, [], {})
SEED = either(whole(), untried(lambda v: getattr(v, "shape", None) == ()))
DEVICE = untried(one_of(None, "h200"))
BUDGET = untried(either(SIZE, one_of(None, "7GiB")))
DTYPE = untried(either(EMPTY, one_of(["a"]), is_a(type), lambda v: hasattr(v, "dtype")))

# --- the functions ---


def product(v, n, m):
    return v * n * m


def chain(codecs):
    return jc.Chain(codecs)


def checkpoint(fun=product, **options):
    return jc.checkpoint(fun, **options)(X, 2, m=3)


def explain(fun=product, policy=None):
    return jc.explain(fun, X, 2, 3, policy=policy)


def gradient(params=TREE, step=0):
    loss = lambda tree, x: jc.linear(x, tree["kernel"]).sum()  # noqa: E731
    return jc.value_and_grad(loss, SPACE)(params, X, step=step)


def plan_of(block):
    return jc.plan(block, W, X)


def peak(step=jnp.sin, **options):
    return jc.memory.peak(step, jax.ShapeDtypeStruct((8,), jnp.float32), **options)


update = partial(INSIDE.update, TREE, state=INSIDE.init(TREE), params=TREE)
plan = partial(jc.plan, lambda w, x: x + x @ w, jnp.eye(4), X)
plan_step = partial(jc.plan_step, make_step=product)
EFFECT = Effect((64,), jnp.float32, {jc.Quantized(4): 0.1, jc.Quantized(8): 0.01})
FOUND = jc.Sensitivity("block", jc.policies.int4(), {"x": EFFECT})
CALLS: list = []


def expect(fun: Callable, /, **rules: Callable) -> None:
    """The arguments of a function that has all others, and what is right for them."""
    name = getattr(fun, "func", fun).__name__
    CALLS.extend(
        pytest.param(fun, argument, rule, id=f"{name}-{argument}")
        for argument, rule in rules.items()
    )


expect(jc.Quantized, bits=BITS, symmetric=FLAG, stochastic=FLAG, axis=whole(most=-1))
expect(
    jc.Quantized, group_size=lambda v: SIZE(v) and not v % 2, scale_bits=one_of(8, 16)
)
expect(jc.Quantized, bound=either(one_of(None), real(1e-30, 1e30, int, float)))
expect(jc.OutlierQuantized, bits=BITS, slots=FRACTION, symmetric=FLAG)
expect(jc.OutlierQuantized, threshold=real(LEAST, math.inf, int, float))
expect(jc.Float8, group_size=SIZE)
expect(jc.Hadamard, block=lambda v: SIZE(v) and v.bit_count() == 1)
expect(jc.Narrow, limit=whole(1, 2**32))
expect(partial(jc.Narrow, 8), least=lambda v: v is None or whole(-(2**31), 7)(v))
expect(chain, codecs=CODEC)
expect(jc.Quantized().encode, x=of_dtype(jnp.floating))
expect(jc.BitMask().encode, x=of_dtype(jnp.integer, jnp.bool_))
expect(partial(jc.Quantized(stochastic=True).encode, jnp.ones(64)), seed=SEED)
expect(jc.Quantized().decode, encoded=never)
expect(jc.Float8().decode, encoded=never)
expect(jc.OutlierQuantized().decode, encoded=never)
expect(jc.BitMask().decode, encoded=never)
expect(jc.Chain(jc.Quantized(), jc.Offload()).decode, encoded=never)
expect(jc.Offload().encode, x=lambda v: hasattr(v, "dtype"))
expect(jc.policies.compress, codec=is_a(jc.Codec, jc.Save))
expect(jc.policies.uniform, codec=is_a(jc.Codec, jc.Save))
expect(partial(jc.Derivative, jc.BitMask()), value=is_a(jc.Save, jc.Codec, type(None)))
expect(jc.Derivative, codec=CODEC)
expect(jc.Policy, rules=one_of({}), default=is_a(jc.Codec, jc.Save, jc.Policy))
expect(checkpoint, fun=FUNCTION, policy=POLICY)
expect(checkpoint, params=either(EMPTY, one_of(0, 1, 2, -1, -2), is_a(type)))
expect(checkpoint, static_argnums=either(EMPTY, one_of(1, -1)))
expect(checkpoint, static_argnames=either(EMPTY, is_a(str), one_of(["a"])))
expect(explain, fun=never, policy=POLICY)
expect(jc.limit_norm_growth, gamma=real(1, math.inf))
linear = partial(jc.linear, x=X, kernel=W)
expect(linear, x=never, kernel=never, bias=one_of(None))
expect(linear, dtype=DTYPE, precision=one_of(None))
inside = partial(jc.in_subspace, subspace=SPACE, inner=optax.identity())
expect(inside, subspace=SUBSPACE, inner=never, moment=one_of("keep"))
expect(INSIDE.init, params=never)
expect(update, state=never, params=never)
expect(partial(INSIDE.update, state=INSIDE.init(TREE), params=TREE), updates=never)
adam = partial(jc.scale_by_subspace_adam, subspace=SPACE)
expect(adam, subspace=SUBSPACE, b1=BELOW_1, b2=BELOW_1)
expect(adam, eps=either(real(0, MOST), ARRAY))
adamw = partial(jc.subspace_adamw, learning_rate=0.1, subspace=SPACE)
expect(adamw, learning_rate=RATE, subspace=SUBSPACE, weight_decay=RATE)
expect(jc.update_count, opt_state=never)
projection = partial(jc.Projection, rank=2)
expect(projection, rank=FRACTION, kind=never, alpha=real(LEAST, MOST), blocks=SIZE)
expect(projection, codec=is_a(jc.Quantized, type(None)))
expect(jc.Projection(0.5).rank_of, width=either(SIZE, is_a(np.int64)))
subspace = partial(jc.Subspace, rules=SPACE.rules, key=KEY)
expect(subspace, rules=never, key=lambda v: v is KEY, period=whole(1, 2**31 - 1))
expect(SPACE.slots, params=never)
expect(gradient, params=never, step=COUNT)
for value_and_grad in (jc.value_and_grad, cnnx.value_and_grad):
    wrap = partial(value_and_grad, fun=product, subspace=SPACE)
    expect(wrap, fun=callable, subspace=SUBSPACE)
expect(cnnx.checkpoint, fun=callable)
wrap = partial(cnnx.checkpoint, fun=product)
expect(wrap, policy=POLICY, static_argnums=either(EMPTY, whole()))
expect(clinen.checkpoint, target=FUNCTION)
wrap = partial(clinen.checkpoint, target=nn.Dense)
expect(wrap, static_argnums=either(EMPTY, whole()))
expect(peak, step=FUNCTION, device=DEVICE, devices=untried(one_of(1, None)))
expect(peak, donate=untried(either(EMPTY, whole())))
search = partial(jc.memory.largest_batch, make_step=product, budget=1)
expect(search, make_step=FUNCTION, device=DEVICE, budget=BUDGET, multiple=untried(SIZE))
expect(search, progress=untried(either(one_of(None), callable)))
expect(jc.memory.measure, step=FUNCTION)
expect(plan_of, block=FUNCTION)
expect(plan, params=untried(either(EMPTY, one_of(0, 1, -1, -2), is_a(type))))
for search in (plan, plan_step):
    expect(search, device=DEVICE, budget=BUDGET)
    expect(search, max_error=untried(real(0, math.inf)), codecs=untried(one_of([])))
    expect(search, sensitivity=untried(one_of(None)))
    expect(search, progress=untried(either(one_of(None), callable)))
expect(plan, layers=untried(SIZE))
expect(plan_step, make_step=FUNCTION, layers=untried(either(SIZE, one_of(None))))
sensitivity = partial(jc.sensitivity, make_gradient=product)
expect(sensitivity, make_gradient=FUNCTION, policy=POLICY, probes=untried(SIZE))
expect(sensitivity, codecs=untried(one_of([])))
expect(FOUND.policy, bits=real(4.25, math.inf))
expect(FOUND.bits, actions=never)
expect(FOUND.error, actions=one_of({}))
expect(jc.Plan.from_json, text=never)

# Where it is not the argument's own name: whose word it is then.
WORDS = {
    "params": "rules",  # of the subspace, which match nothing in them
    "text": "plan",
    "x": "dtype",
    "dtype": "data type",  # numpy's
    "precision": "Precision",  # jax's
    "static_argnums": "static arguments",
}


@pytest.mark.parametrize(("fun", "name", "rule"), CALLS)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(value=JUNK)
def test_a_wrong_argument_is_refused_by_name(fun, name, rule, value):
    """And a right one is not refused."""
    right = rule(value)
    if right:
        fun(**{name: value})
    elif right is not None:
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
            fun(**{name: value})
        said, words = str(error.value), f"{name}|{WORDS.get(name, name)}"
        assert re.search(rf"\b({words})\b", said) or repr(value) in said, said
