"""What a plan has to choose: what is read, runs again, and may be encoded."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.memory import devices
from jaxcompact.planner.milp import solve
from jaxcompact.planner.problem import named, without_host
from tests.planner.functions import ARGS, BASE, FUNCTIONS, N, asked, mlp


@pytest.mark.parametrize("name", ["mlp", "deep", "relu"])
def test_what_runs_again_is_what_the_program_runs(name):
    """Products in the backward pass, under the plan, are those of the model."""
    fun, found = FUNCTIONS[name], asked(FUNCTIONS[name])
    whole = solve(found, smallest=True).nbytes, solve(found).nbytes
    for share in (0, 0.3, 0.6, 1):
        limit = whole[0] + share * (whole[1] - whole[0])
        solution = solve(found, nbytes=limit)
        actions = found.actions | named(found.items, solution.chosen)
        policy = jc.Policy(actions, default=BASE)
        wrapped = jc.checkpoint(fun, policy=policy, params=0)
        grad = jax.grad(lambda w, x, f=wrapped: f(w, x).sum().astype("float32"), (0, 1))
        products = str(jax.make_jaxpr(grad)(*ARGS)).count("dot_general[")
        again = solution.seconds - sum(o.seconds for o in solution.chosen if o)
        one = max(found.runs.values())  # all products here are equal
        exact = jax.grad(lambda w, x: fun(w, x).sum().astype("float32"), (0, 1))
        assert products - str(jax.make_jaxpr(exact)(*ARGS)).count("dot_general[") == (
            round(again / one)
        )


def test_complex_tensors_are_as_large_as_their_parts():
    args = tuple(jax.ShapeDtypeStruct(a.shape, jnp.complex64) for a in ARGS)

    def deep(w, x):
        for w_nn in w:
            x = jnp.sin(x @ w_nn)
        return x

    items = asked(deep, args=args).items
    x = args[1]
    assert len(items) == 4  # x, three products
    for item in items:
        sizes = {option.action: option.nbytes for option in item.options}
        assert sizes[jc.Save()] == 8 * x.size
        (codec,) = (c for c in sizes if isinstance(c, jc.Quantized) and c.bits == 4)
        assert sizes[codec] == codec.nbytes((2, *x.shape))


def test_what_the_backward_pass_reads():
    """By hand: w, x, both products within functions, what these make, and a * b."""
    found = asked(mlp)
    kinds = {value: op.name for value, op in found.makers.items()}
    named = {item.source: item.tensor.name for item in found.items}
    assert {kinds.get(v, named.get(v, "w")) for v in found.needed} == {
        *("w", "x", "dot_general.0", "sin.0", "dot_general.1", "cos.0", "mul.0")
    }


def normed(w, x):
    """A softmax and a norm: their sums are small beside what they are of."""
    y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    p = jax.nn.softmax(jnp.sin(y @ w[0]).astype(jnp.float32), axis=-1)
    return x + p.astype(x.dtype) @ w[1]


def reductions(policy):
    """In the whole gradient's program."""
    wrapped = jc.checkpoint(normed, policy=policy, params=0)
    grad = jax.grad(lambda w, x: wrapped(w, x).sum().astype("float32"), (0, 1))
    text = str(jax.make_jaxpr(grad)(*ARGS))
    return text.count("reduce_max[") + text.count("reduce_sum[")


@pytest.mark.slow
def test_sums_are_kept_where_they_are_exact():
    found = asked(normed)
    kept = solve(found, noise=0.0)
    assert kept.seconds == 0
    actions = found.actions | named(found.items, kept.chosen)
    statistics = {n: a for n, a in actions.items() if n.startswith("reduce_")}
    # The softmax's; the norm itself is kept, no sum that it is made of.
    assert [*statistics.values()] == [jc.Recompute(), jc.Save(), jc.Save()]
    plan = jc.Plan("normed", actions, "h200", 1, 0.0, 0, 0.0, 0)
    other = jc.Policy({n: a for n, a in actions.items() if n not in statistics})
    assert reductions(other) - reductions(plan) == 2
    keys = jax.random.split(jax.random.key(0), 2)
    w, x = jax.random.normal(keys[0], (3, 16, 16)), jax.random.normal(keys[1], (8, 16))
    grads = [
        jax.grad(lambda w, f=f: f(w, x).sum())(w)
        for f in (normed, jc.checkpoint(normed, policy=plan, params=0))
    ]
    assert jnp.allclose(*grads, rtol=1e-5, atol=1e-6)

    # With a rounded product or x the softmax is normalized anew; the norm never is.
    for name in ("dot_general.0", "x"):
        items = [
            dataclasses.replace(
                item,
                options=item.options[1:] if item.tensor.name == name else item.options,
                again=item.again and item.tensor.name != name,
            )
            for item in without_host(found).items
        ]
        solution = solve(dataclasses.replace(found, items=tuple(items)))
        chosen = named(items, solution.chosen)
        sums = [a for n, a in chosen.items() if n.startswith("reduce_")]
        assert isinstance(chosen[name], jc.Quantized)
        assert sums == [jc.Recompute()] * 3 and chosen["add.0"] == jc.Save()


def test_attention_keeps_its_bits():
    """q and k are offered no codec but the one that attention's gradients bear."""

    def attention(w, x):
        q, k, v = x @ w[0], x @ w[1], x @ w[2]
        return jax.nn.softmax(q @ k.T / 16) @ v

    found = asked(attention)
    codecs = {
        item.tensor.name: [
            o.action for o in item.options if isinstance(o.action, jc.Quantized)
        ]
        for item in found.items
    }
    for name in ("dot_general.0", "dot_general.1"):
        (codec,) = codecs[name]
        assert codec.bits == 8 and not codec.symmetric
    assert len(codecs["dot_general.2"]) == 2


def test_what_was_decided_is_not_decided_again():
    """Whole numbers and indices made of data are stored as without a plan."""

    def decided(w, x):
        y = x @ w[0]
        best = w[2][jnp.argmax(y, axis=-1)]
        return (y * jax.lax.stop_gradient(jnp.round(y))) @ w[1] + best

    found = asked(decided)
    assert {item.tensor.name for item in found.items} == {
        *("x", "dot_general.0", "dot_general.1")
    }
    assert found.actions["round.0"] == jc.Save()
    assert found.actions["argmax.0"] == jc.Narrow(N)


def test_nothing_is_moved_to_a_host_that_a_card_has_no_link_to():
    codecs = jc.Offload(), jc.Quantized(4)
    moved = {"tpu-v5e": {jc.Quantized}, "h200": {jc.Quantized, jc.Offload}}
    for card, expected in moved.items():
        items = asked(FUNCTIONS["deep"], codecs, card=devices()[card]).items
        offered = {type(o.action) for i in items for o in i.options}
        assert offered - {jc.Save} == expected
