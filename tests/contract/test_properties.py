"""Laws of the public functions, for arguments drawn at random.

Codecs have theirs in `test_codecs` and `test_rounding`, `jc.checkpoint` in `checkpoint`
and `memory.largest_batch` in `test_search`; what is no argument is in `test_arguments`.
Where data are small integers all sums are exact in every dtype, and equality is
equality.
"""

import math
import sys
import tempfile
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxcompact as jc
from jaxcompact import linen as clinen
from jaxcompact import nnx as cnnx
from jaxcompact.compress import Compress
from jaxcompact.planner.effects import Effect
from tests.contract.drawn import (
    BOOLS,
    KEY,
    WIDE_FLOATS,
    array,
    few,
    integers,
    same,
    tree_of,
)


@few(12)
@given(st.integers(2, 4), st.data())
def test_static_arguments_of_flax_checkpoints(count, data):
    """Wherever they stand, from either end; beyond the ends they are refused."""
    place = data.draw(st.integers(1, count - 1))
    number = data.draw(st.sampled_from([place, place - count]))
    beyond = data.draw(st.sampled_from([count, -count - 1, 10**9]))
    args: list = [jnp.full(2, 3.0)] * (count - 1)
    args[place - 1] = "static"

    def double(module, *args):
        assert args[place - 1] == "static"
        return [2.0 * x for x in args if not isinstance(x, str)]

    class Module(nn.Module):
        __call__ = double

    for static in (number, beyond):
        block = cnnx.checkpoint(double, static_argnums=static)
        wrapped = clinen.checkpoint(Module, static_argnums=static)()
        for call in (block, lambda _, *args, w=wrapped: w.apply({}, *args)):
            if static == beyond:
                with pytest.raises(ValueError, match="static_argnums must be below"):
                    call(nnx.Dict(), *args)
            else:
                same(call(nnx.Dict(), *args), double(None, *args))


@few(2)
@given(st.integers(1, 3), st.integers(0, 3))
def test_results_stay_on_their_device(one, other):
    """And arrays of two devices are refused."""
    devices = jax.devices("cpu")
    tree = jax.device_put(tree_of((), 6, 3, jnp.float32), devices[one])
    x = jax.device_put(jnp.ones((2, 6)), devices[one])
    space = jc.Subspace({"in/.*": jc.Projection(2)}, KEY)
    call = jc.value_and_grad(
        lambda tree, x: jc.linear(x, tree["in"]["kernel"], tree["bias"]).sum(), space
    )
    tx = jc.in_subspace(space, optax.identity())
    value, grads = call(tree, x, step=0)
    state = jax.device_put(tx.init(tree), devices[one])
    updates, state = tx.update(grads, state, tree)
    encoded = jc.Quantized(4).encode(x)
    for leaf in jax.tree.leaves((value, grads["in"], updates, state, encoded)):
        assert leaf.devices() == {devices[one]}
    if one != other:
        with pytest.raises(ValueError, match="incompatible devices"):
            call(tree, jax.device_put(x, devices[other]), step=0)


CODECS = (
    st.builds(
        jc.Quantized,
        st.sampled_from([1, 2, 3, 4, 8]),
        st.sampled_from([8, 64]),
        BOOLS,
        BOOLS,
        st.integers(-3, -1),
    )
    | st.builds(jc.Quantized, scale_bits=st.just(8), bound=st.floats(1e-30, 1e30))
    | st.builds(jc.Quantized, bound=st.tuples(st.floats(-9, -1), st.none()))
    | st.builds(jc.OutlierQuantized, slots=st.floats(0.01, 1) | st.integers(1, 9))
    | st.builds(jc.Float8, st.integers(1, 200))
    | st.builds(jc.Hadamard, st.sampled_from([1, 2, 64]))
    | st.builds(jc.Narrow, st.integers(1, 2**31), st.none() | st.integers(-(2**31), 0))
    | st.just(jc.BitMask())
)


CODECS |= st.just(jc.Offload()) | st.builds(
    lambda inner, last: jc.Chain(*inner, last),
    st.lists(CODECS, max_size=2),
    CODECS | st.just(jc.Offload()),
)


ACTIONS = (
    CODECS
    | st.sampled_from([jc.Save(), jc.Recompute()])
    | st.builds(jc.Derivative, CODECS, st.none() | CODECS)
)


BYTES = st.integers(1 - 10**18, 10**18 - 1)  # a plan's numbers are below 1e18
REALS = BYTES | st.floats(-1e18, 1e18, exclude_min=True, exclude_max=True)
NUMBERS = st.tuples(BYTES, REALS, BYTES, REALS, BYTES, st.booleans())
RULES = st.dictionaries(st.text(), ACTIONS, max_size=4)


@few(60)
@given(st.text(), RULES, NUMBERS, ACTIONS)
def test_plans_survive_json_and_policies_are_as_they_are_printed(
    block, actions, numbers, default
):
    plan = jc.Plan(block, actions, "h200", *numbers)
    again = jc.Plan.from_json(plan.to_json())
    assert vars(again) == vars(plan) and hash(again) == hash(plan)
    stored = [n for n, action in actions.items() if action != jc.Recompute()]
    assert again.unused(set()) == sorted(stored)  # of another dtype it has others
    for policy in (jc.Policy(actions, default), jc.Policy({}, jc.policies.int3())):
        again = eval(repr(policy), vars(jc) | {"Compress": Compress})
        assert again == policy and hash(again) == hash(policy)


@few(5)
@given(
    st.sampled_from([2, 3, 66]),
    st.sampled_from([1, 8, 65]),
    st.sampled_from([jc.Quantized(4), jc.Quantized(8, 32), jc.Float8(8)]),
    WIDE_FLOATS,
)
def test_explained_bytes_are_those_that_are_held(tokens, width, codec, dtype):
    """And shapes alone say as much."""

    def block(w, x):
        return jnp.tanh(jnp.sin(x @ w) @ w)

    policy = Compress(codec)
    w, x = (array(integers(0, rows, width), dtype) for rows in (width, tokens))
    said = jc.explain(block, w, x, policy=policy, params=0)
    for row in said.rows:
        assert row.nbytes == math.prod(row.shape) * jnp.dtype(row.dtype).itemsize
        if row.action.startswith(("Quantized", "Float8")):
            action = eval(row.action, vars(jc))
            assert row.stored == action.nbytes(row.shape, row.dtype)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, x)]
    assert said == jc.explain(block, *shapes, policy=policy, params=0)
    _, backward = jax.vjp(jc.checkpoint(block, policy=policy, params=0), w, x)
    held = {id(a): a for a in jax.tree.leaves(backward) if a.shape != w.shape}
    assert said.stored == sum(a.nbytes for a in held.values())


def effects_of(drawn) -> jc.Sensitivity:
    codecs = [jc.Quantized(b) for b in (8, 4, 2)]
    effects = {
        f"t{i}": Effect((size,), jnp.float32, dict(zip(codecs, e, strict=True)), count)
        for i, (size, count, e) in enumerate(drawn)
    }
    return jc.Sensitivity("block", jc.policies.int4(), effects)


ERRORS = st.tuples(*[st.integers(0, 1000)] * 3)
EFFECTS = st.tuples(st.integers(1, 5000), st.integers(1, 3), ERRORS)


@few(20)
@given(st.lists(EFFECTS, min_size=1, max_size=5).map(effects_of), st.floats(1.0, 20.0))
def test_automatic_precision_keeps_to_its_bits(found, bits):
    """And is no worse than any one codec that does."""
    alike = [dict.fromkeys(found.effects, jc.Quantized(b)) for b in (8, 4, 2)]
    if bits < found.bits(alike[-1]):
        with pytest.raises(ValueError, match="bits must be .* or more"):
            found.policy(bits)
        return
    policy = found.policy(bits)
    rules = dict(policy.rules)
    assert rules.keys() == found.effects.keys() and policy.default == found.base
    assert found.bits(rules) <= bits * (1 + 1e-9)
    for others in alike:  # the solver stops within 1e-4 of the best
        if found.bits(others) <= bits:
            assert found.error(rules) ** 2 <= found.error(others) ** 2 * 1.001


@few(4)
@given(st.integers(0, 10**9), st.integers(1, 48), st.floats(1.0, 3.0), st.floats(0, 1))
def test_plans_keep_their_budget_and_their_error(beside, layers, factor, max_error):
    """Of a step that takes what the plan stores, and something beside it."""
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 64), (512, 64))]
    made: list = []

    def make_step(policy):
        made.append(policy)
        wrapped = jc.checkpoint(
            lambda w, x: x + jnp.tanh(jnp.sin(x @ w) @ w), policy=policy, params=0
        )
        return jax.grad(lambda w, x: wrapped(w, x).sum().astype(jnp.float32)), args

    def peak(step, *args, device):
        return SimpleNamespace(peak_bytes=beside + layers * made[-1].nbytes)

    def planned(budget):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["jaxcompact.planner.trials"], "peak", peak)
            options = {"max_error": max_error, "progress": lambda line: None}
            return jc.plan_step(make_step, layers=layers, budget=budget, **options)

    if beside:
        with pytest.raises(ValueError, match=r"budget must be [\d.]+ .iB or more"):
            planned(1)
    small = planned(2**30 + 2**20)
    large = planned(2**30 + int(2**20 * factor))
    for plan, room in ((small, 1), (large, factor)):
        budget = 2**30 + int(2**20 * room)
        assert plan.peak_bytes == beside + layers * plan.nbytes <= budget == plan.budget
        assert plan.error <= max_error * (1 + 1e-6)
    assert large.seconds <= small.seconds


@few(3)
@given(st.sampled_from(["a100", "h200", "rtx4090"]), st.sampled_from([300, 40]), BOOLS)
def test_a_peak_is_the_sum_of_its_parts(device, rows, donated):
    """By kind, and by arguments, outputs and temporaries; a donated one counts once."""
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
    step = jax.jit(lambda x: x * x.sum(), donate_argnums=0 if donated else ())
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXCOMPACT_CACHE", cache)
        found = jc.memory.peak(step, x, device=device)
    parts = found.argument_bytes, found.output_bytes, found.temporary_bytes
    assert found.peak_bytes == sum(parts) == sum(found.breakdown.values())
    assert parts[:2] == (4096 * rows, 0 if donated else 4096 * rows)
    assert 4 <= parts[2] < 2**20  # the sum, and what its parts are added up in
    assert found.peak_bytes < jc.memory.devices()[device].memory
