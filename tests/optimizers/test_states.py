"""The state of in_subspace: resumed, found, of its own dtype and key."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcompact as jc
from jaxcompact.optimizers import SubspaceState
from tests.cases import slow
from tests.optimizers.sketched import M, R, gradients, params, subspace

pytestmark = pytest.mark.usefixtures("optax_promotion")


def test_resume_across_a_new_projection_is_bit_identical():
    """Only params and state go on; everything else is made again."""

    def run(tree, state, first, last):
        tx = jc.subspace_adamw(1e-2, subspace(period=3))
        state = tx.init(tree) if state is None else state
        update = jax.jit(tx.update)
        for step in range(first, last):
            updates, state = update(gradients(step), state, tree)
            tree = optax.apply_updates(tree, updates)
        return tree, state

    whole = run(params(), None, 0, 8)
    tree, state = run(params(), None, 0, 4)
    stored = [np.asarray(leaf) for leaf in jax.tree.leaves((tree, state))]
    tree, state = jax.tree.unflatten(jax.tree.structure((tree, state)), stored)
    resumed = run(tree, state, 4, 8)
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)


def test_the_state_may_be_donated():
    """Donation deletes the state's buffers; the subspace's key is not one of them."""
    space, tree = subspace(), params()
    tx = optax.chain(jc.scale_by_subspace_adam(space), jc.limit_norm_growth())
    state = jax.jit(tx.update, donate_argnums=1)(gradients(0), tx.init(tree), tree)[1]
    jax.jit(tx.update, donate_argnums=1)(gradients(1), state, tree)
    assert np.asarray(jax.random.key_data(space.key)).shape == (2,)  # reads it


def test_another_key_gives_nan_rather_than_the_wrong_projection():
    state = jc.scale_by_subspace_adam(subspace()).init(params())
    other = jc.Subspace(subspace().rules, jax.random.key(5), 3)
    updates, _ = jc.scale_by_subspace_adam(other).update(gradients(0), state, params())
    assert jnp.isnan(updates["a"]["kernel"]).all()


def test_another_kind_gives_nan_and_another_codec_changes_nothing():
    """Of a run that goes on in the middle of a period."""
    space = subspace()

    def of(**change):
        rules = {n: replace(p, **change) for n, p in space.rules.items()}
        other = jc.Subspace(rules, space.key, space.period)
        return jc.scale_by_subspace_adam(other)

    state = of().init(params())
    same, _ = of().update(gradients(0), state, params())
    updates, _ = of(codec=jc.Quantized(8)).update(gradients(0), state, params())
    jax.tree.map(np.testing.assert_array_equal, updates, same)
    updates, _ = of(kind="rademacher").update(gradients(0), state, params())
    assert jnp.isnan(updates["a"]["kernel"]).all()


@pytest.mark.parametrize("moment", [slow("reset"), "transfer", "keep"])
def test_moments_of_wide_parameters_are_wide(moment, optax_promotion):
    """In float64 ten updates differ from their like in float32 by its rounding."""
    with jax.enable_x64(True):

        def run(dtype):
            tree = {"kernel": jnp.ones((16, 3), dtype), "bias": jnp.ones(3, dtype)}
            space = jc.Subspace({"kernel": jc.Projection(4)}, jax.random.key(0), 3)
            tx = jc.scale_by_subspace_adam(space, moment=moment)
            state = tx.init(tree)
            for i in range(10):
                grads = {
                    "kernel": jnp.sin(i + jnp.arange(12.0, dtype=dtype)).reshape(4, 3),
                    "bias": jnp.cos(i + jnp.arange(3.0, dtype=dtype)),
                }
                updates, state = tx.update(grads, state, tree)
            return updates, state.inner.mu

        wide, narrow = run(jnp.float64), run(jnp.float32)
        for a, b in zip(*map(jax.tree.leaves, (wide, narrow)), strict=True):
            assert a.dtype == jnp.float64 and b.dtype == jnp.float32
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_update_count_finds_the_state_in_any_chain():
    tree = params()
    tx = optax.chain(
        optax.identity(), optax.named_chain(("s", jc.subspace_adamw(0.1, subspace())))
    )
    state = tx.init(tree)
    assert int(jc.update_count(state)) == 0
    _, state = tx.update(gradients(0), state, tree)
    assert int(jc.update_count(state)) == 1
    with pytest.raises(
        ValueError, match="opt_state must hold the state of an in_subspace"
    ):
        jc.update_count(optax.adam(0.1).init(tree))


def test_optax_finds_what_of_the_state_is_shaped_like_parameters():
    tree = params()
    tx = jc.subspace_adamw(1e-3, subspace())
    state = tx.init(tree)
    found = optax.tree_map_params(tx, lambda a: a + 1.0, state)
    (adam, *_), (before, *_) = found, state
    np.testing.assert_array_equal(
        adam.inner.mu["a"]["kernel"], before.inner.mu["a"]["kernel"] + 1.0
    )
    assert adam.inner.mu["a"]["kernel"].shape == (R, M) and adam.count == before.count


def test_state_is_float32_for_bfloat16_parameters():
    tree = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params())
    tx = jc.scale_by_subspace_adam(subspace())
    state = tx.init(tree)
    assert {m.dtype for m in jax.tree.leaves((state.inner.mu, state.inner.nu))} == {
        jnp.dtype(jnp.float32)
    }
    grads = gradients(0) | {"bias": jnp.ones(M, jnp.bfloat16)}
    updates, new = tx.update(grads, state, tree)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert isinstance(new, SubspaceState)
