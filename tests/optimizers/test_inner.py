"""Transforms inside in_subspace that are more than moments."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

import jaxcompact as jc
from tests.draws import normal
from tests.optimizers.sketched import M, N, R, gradients, matrix, params, subspace

pytestmark = pytest.mark.usefixtures("optax_promotion")
X = normal(9, 8, N)


def test_apply_if_finite_inside_skips_a_step():
    tx = jc.in_subspace(subspace(), optax.apply_if_finite(optax.scale_by_adam(), 3))
    plain = jc.in_subspace(subspace(), optax.scale_by_adam())
    tree, first, second = params(), gradients(0), gradients(1)
    _, state = tx.update(first, tx.init(tree), tree)
    _, plain_state = plain.update(first, plain.init(tree), tree)
    skipped, after = tx.update(jax.tree.map(lambda g: g * jnp.nan, first), state, tree)
    assert not any(update.any() for update in jax.tree.leaves(skipped))
    updates, _ = tx.update(second, after, tree)
    expected, _ = plain.update(second, plain_state, tree)
    for got, wanted in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        # Compiled in one and not in the other; what P lifts are entries of about 1.
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_multisteps_inside_keeps_p_and_the_moments_for_an_accumulation():
    """k mini-steps inside equal one step on their mean, also across a new P."""
    space, k = subspace(period=2), 3
    whole = jc.in_subspace(space, optax.scale_by_adam(), moment="transfer")
    split = jc.in_subspace(
        space, optax.MultiSteps(optax.scale_by_adam(), k), moment="transfer"
    )
    tree = params()
    state, split_state = whole.init(tree), split.init(tree)
    accumulator = split_state.inner.acc_grads["a"]["kernel"]
    assert accumulator.shape == (R, M) and accumulator.dtype == jnp.float32
    for step in range(5):
        micro = [gradients(10 * step + i) for i in range(k)]
        mean = jax.tree.map(lambda *g: sum(g) / k, *micro)
        expected, state = whole.update(mean, state, tree)
        for i, g in enumerate(micro):
            assert int(jc.update_count(split_state)) == step
            updates, split_state = split.update(g, split_state, tree)
            if i < k - 1:
                assert all(not u.any() for u in jax.tree.leaves(updates))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5),
            updates,
            expected,
        )


def test_what_is_accumulated_is_not_lifted_by_another_p():
    """As where a run goes on with another period: half of an accumulation is lost."""

    def make(period):
        inner = optax.MultiSteps(optax.sgd(1.0), 2)
        return jc.in_subspace(subspace(period=period), inner)

    tree, gradient = params(), gradients(0)
    zeros = jax.tree.map(jnp.zeros_like, gradient)
    before, after = make(5), make(3)
    state = before.init(tree)
    for g in [gradient, zeros] * 3 + [gradient]:  # three updates and a half
        _, state = before.update(g, state, tree)
    updates, _ = after.update(zeros, state, tree)
    assert not updates["a"]["kernel"].any()
    updates, _ = before.update(zeros, state, tree)
    assert updates["a"]["kernel"].any()


def frozen_init(tree):
    return FrozenDict(momentum=optax.trace(0.9).init(tree))


def frozen_update(updates, state, _):
    updates, momentum = optax.trace(0.9).update(updates, state["momentum"])
    return updates, FrozenDict(momentum=momentum)


@pytest.mark.parametrize(
    "inner",
    [
        optax.partition(
            {"all": optax.trace(0.9)}, lambda t: jax.tree.map(lambda _: "all", t)
        ),
        optax.named_chain(("clip", optax.clip(1.0)), ("trace", optax.trace(0.9))),
        optax.GradientTransformation(frozen_init, frozen_update),
    ],
    ids=["dict", "ordered", "frozen"],
)
def test_moments_are_reset_whatever_holds_them(inner):
    tx, tree = jc.in_subspace(subspace(period=1), inner), params()
    state, ones = tx.init(tree), jax.tree.map(jnp.ones_like, gradients(0))
    for _ in range(3):
        _, state = tx.update(ones, state, tree)
    traces = [x for x in jax.tree.leaves(state.inner) if x.shape == (R, M)]
    np.testing.assert_array_equal(traces[0], 1.0)


def test_the_gradient_before_is_transferred():
    """Less itself a steady gradient is zero, in whatever coordinates it was."""
    all_of_it = jc.Projection(1.0, kind="orthonormal")
    space = jc.Subspace({"a/kernel": all_of_it}, jax.random.key(0), period=1)
    inner = optax.scale_by_optimistic_gradient(alpha=0.0, beta=1.0)
    tx, tree = jc.in_subspace(space, inner, moment="transfer"), params()
    grad = jc.value_and_grad(lambda t: jnp.sum(jc.linear(X, t["a"]["kernel"])), space)
    state = tx.init(tree)
    for step in range(3):
        _, sketch = grad(tree, step=step)
        updates, state = tx.update(sketch, state, tree)
        left, whole = (jnp.linalg.norm(t["a"]["kernel"]) for t in (updates, sketch))
        assert left < 1e-5 * whole


@pytest.mark.parametrize(
    "inner",
    [optax.rprop(0.1), optax.contrib.momo(0.1), optax.contrib.momo_adam(0.1)],
    ids=["prev_updates", "exp_avg", "exp_avg of Adam"],
)
def test_first_moments_of_any_name_are_transferred(inner):
    """A P that moves entries and changes signs alone is to them as if there were none.

    Sums are taken in another order: from one step to the next by an error of float32.
    """
    whole = jc.Projection(1.0, kind="countsketch")
    space = jc.Subspace({"a/kernel": whole}, jax.random.key(0), period=2)
    tx, tree = jc.in_subspace(space, inner, moment="transfer"), params()
    state, plain_state = tx.init(tree), inner.init(tree)
    for step in range(7):
        w = normal(step, 8, M)

        def loss(t, w=w):
            return jnp.sum(jc.linear(X, t["a"]["kernel"]) * w)

        value, sketch = jc.value_and_grad(loss, space)(tree, step=step)
        plain = jax.grad(loss)(tree)
        updates, state = tx.update(sketch, state, tree, value=value)
        wanted, plain_state = inner.update(plain, plain_state, tree, value=value)
        found, wanted = (t["a"]["kernel"] for t in (updates, wanted))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_moment_of_another_shape_is_not_transferred():
    """What stands for rows alone has no coordinates in P's space."""

    class Rows(NamedTuple):
        mu: Any

    def update(updates, state, _):
        return updates, Rows(jax.tree.map(lambda g: g.sum(-1), updates))

    rows = optax.GradientTransformation(
        lambda t: Rows(jax.tree.map(lambda w: w.sum(-1), t)), update
    )
    tx, tree = jc.in_subspace(subspace(period=1), rows, moment="transfer"), params()
    state = tx.init(tree)
    for _ in range(2):
        _, state = tx.update(gradients(0), state, tree)
    assert state.inner.mu["a"]["kernel"].shape == (R,)


def test_an_inner_that_reads_parameters_gets_their_sketch():
    tree, space = params(), subspace()
    tx = jc.in_subspace(space, optax.add_decayed_weights(1.0))
    zeros = jax.tree.map(jnp.zeros_like, gradients(0))
    updates, _ = tx.update(zeros, tx.init(tree), tree)
    p = matrix(space, tree, 0)
    expected = p @ (p.T @ np.asarray(tree["a"]["kernel"]))
    np.testing.assert_allclose(updates["a"]["kernel"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(updates["bias"], tree["bias"])


@pytest.mark.parametrize(
    ("inner", "products"), [(optax.scale_by_adam(), 1), (optax.adamw(0.1), 2)]
)
def test_parameters_are_sketched_for_an_inner_that_reads_them_alone(inner, products):
    """In the compiled update: P N, and P^T W only where weight decay wants it."""
    tx, tree = jc.in_subspace(subspace(), inner, moment="keep"), params()
    update = jax.jit(tx.update).lower(gradients(0), tx.init(tree), tree).compile()
    assert len(re.findall(r" dot\(", update.as_text())) == products


def test_a_centered_variance_outlives_a_new_projection():
    """A transferred mean whose square is above the mean square would give NaN."""
    tx = jc.in_subspace(
        subspace(), optax.rmsprop(1e-3, centered=True), moment="transfer"
    )
    tree = params()
    plain = jc.in_subspace(subspace(), optax.rmsprop(1e-3, centered=True))
    steady = {"a": {"kernel": gradients(0)["a"]["kernel"]}, "bias": jnp.ones(M)}
    state, other = tx.init(tree), plain.init(tree)
    for _ in range(8):
        updates, state = tx.update(steady, state, tree)
        expected, other = plain.update(steady, other, tree)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
        assert all(jnp.isfinite(u).all() for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("inner", [optax.lars, optax.adafactor])
def test_what_scales_by_parameters_takes_alpha(inner):
    """Steps of the exact ones' size: P^T W is sqrt(n/r) times as large as W."""
    n, r = 256, 16
    tree = {"kernel": normal(0, n, 128)}
    sketch = {"kernel": normal(1, r, 128)}
    whole = {"kernel": normal(2, n, 128)}

    def step(tx, grads):
        return jnp.linalg.norm(tx.update(grads, tx.init(tree), tree)[0]["kernel"])

    rules = {"kernel": jc.Projection(r, alpha=(r / n) ** 0.5)}
    tx = jc.in_subspace(jc.Subspace(rules, jax.random.key(3)), inner(1e-2))
    # Norms of 2048 normal numbers: 1.6 % each, and of P, 1 / sqrt(2 r) a column.
    assert abs(step(tx, sketch) / step(inner(1e-2), whole) - 1) < 0.2
