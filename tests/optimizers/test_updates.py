"""in_subspace's updates, against numpy, optax's GaLore and what is expected of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcompact as jc
from tests.draws import normal
from tests.optimizers.sketched import (
    M,
    N,
    R,
    gradients,
    matrix,
    params,
    subspace,
    updates_of,
)

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.mark.parametrize("moment", ["keep", "reset", "transfer"])
def test_adam_equals_the_formula_in_numpy(moment):
    """CompAct's algorithm 3 written out, across two changes of P, for one kernel."""
    space, b1, b2, eps = subspace(alpha=0.5), 0.9, 0.99, 1e-6
    tx = jc.scale_by_subspace_adam(space, b1, b2, eps, moment=moment)
    m, v = np.zeros((R, M)), np.zeros((R, M))
    for step, updates in enumerate(updates_of(tx, 8)):
        p = matrix(space, params(), step)
        if step and step % 3 == 0:
            if moment == "reset":
                m = np.zeros_like(m)
            elif moment == "transfer":
                m = R / N * p.T @ (matrix(space, params(), step - 1) @ m)
        g = np.asarray(gradients(step)["a"]["kernel"], np.float64)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1 ** (step + 1)), v / (1 - b2 ** (step + 1))
        expected = 0.5 * p @ (m_hat / (np.sqrt(v_hat) + eps))
        # float32 moments and products of R terms against float64.
        np.testing.assert_allclose(
            updates["a"]["kernel"], expected, rtol=2e-4, atol=2e-5
        )


def test_equals_optax_galore_with_the_same_projection():
    """optax.contrib.galore with our P put in its state: the same updates."""
    space = subspace(period=1000)
    tree = {"kernel": params()["a"]["kernel"]}
    space = jc.Subspace({"kernel": jc.Projection(R)}, jax.random.key(4), 1000)
    slot = space.slots(tree)["kernel"]
    p = slot.projection.matrix(slot.keys(space.key, 0), N)
    galore = optax.contrib.scale_by_galore(R, update_proj_gap=1000, scale=1.0)
    theirs = galore.init(tree)
    # Past step 0, at which it would take the projector from an SVD.
    theirs = theirs._replace(count=jnp.ones((), jnp.int32), projector={"kernel": p})
    tx = jc.scale_by_subspace_adam(space)
    ours = tx.init(tree)
    for step in range(5):
        full = {"kernel": normal(step, N, M)}
        sketch = {"kernel": p.T @ full["kernel"]}
        expected, theirs = galore.update(full, theirs, tree)
        got, ours = tx.update(sketch, ours, tree)
        np.testing.assert_allclose(
            got["kernel"], expected["kernel"], rtol=1e-5, atol=1e-6
        )


def test_sgd_is_unbiased():
    """The mean update over 2000 keys is the gradient, within 4.5 standard errors."""
    full = normal(1, N, M)
    tree = {"kernel": jnp.zeros((N, M))}

    def update(key):
        space = jc.Subspace({"kernel": jc.Projection(R)}, key, 1)
        slot = space.slots(tree)["kernel"]
        p = slot.projection.matrix(slot.keys(key, 0), N)
        tx = jc.in_subspace(space, optax.identity())
        return tx.update({"kernel": p.T @ full}, tx.init(tree), tree)[0]["kernel"]

    mean = jax.vmap(update)(jax.random.split(jax.random.key(9), 2000)).mean(0)
    error = float(jnp.sum((mean - full) ** 2) / jnp.sum(full**2))
    assert error < 4.5**2 * jc.Projection(R).variance(N) / 2000


def test_layers_have_their_own_projections():
    space, tree = subspace(), params(layers=(2, 3))
    tx = jc.in_subspace(space, optax.identity())
    grads = gradients(0, layers=(2, 3))
    updates, _ = tx.update(grads, tx.init(tree), tree)
    slot = space.slots(tree)["a/kernel"]
    keys = slot.keys(space.key, 0)
    for i in range(2):
        for j in range(3):
            p = slot.projection.matrix(keys[i, j], N)
            np.testing.assert_allclose(
                updates["a"]["kernel"][i, j],
                p @ grads["a"]["kernel"][i, j],
                rtol=1e-4,
                atol=1e-5,
            )


def test_alpha_is_per_path_and_leaves_the_rest_alone():
    tree = {
        "a": {"kernel": jnp.ones((N, M))},
        "b": {"kernel": jnp.ones((N, M))},
        "c": jnp.ones(3),
    }
    rules = {"a/kernel": jc.Projection(R, alpha=0.25), "b/kernel": jc.Projection(R)}
    plain = {".*/kernel": jc.Projection(R)}
    grads = {n: {"kernel": jnp.ones((R, M))} for n in "ab"} | {"c": jnp.ones(3)}

    def update(rules):
        tx = jc.in_subspace(jc.Subspace(rules, jax.random.key(0)), optax.identity())
        return tx.update(grads, tx.init(tree), tree)[0]

    scaled, full = update(rules), update(plain)
    np.testing.assert_allclose(
        scaled["a"]["kernel"], 0.25 * full["a"]["kernel"], rtol=1e-6
    )
    np.testing.assert_array_equal(scaled["b"]["kernel"], full["b"]["kernel"])
    np.testing.assert_array_equal(scaled["c"], grads["c"])


def test_adamw_decays_the_weights_themselves():
    tree, space = params(), subspace()
    tx = jc.subspace_adamw(0.1, space, weight_decay=0.5)
    plain = jc.subspace_adamw(0.1, space, weight_decay=0.0)
    grads = gradients(0)
    decayed, _ = tx.update(grads, tx.init(tree), tree)
    bare, _ = plain.update(grads, plain.init(tree), tree)
    difference = decayed["a"]["kernel"] - bare["a"]["kernel"]
    np.testing.assert_allclose(
        difference, -0.05 * tree["a"]["kernel"], rtol=1e-4, atol=1e-6
    )


def test_complex_parameters_keep_their_imaginary_part():
    tree = {"a": {"kernel": jnp.ones((N, M))}, "c": jnp.ones(2, jnp.complex64)}
    grads = {"a": {"kernel": jnp.ones((R, M))}, "c": jnp.array([1 + 2j, 3j])}
    tx = jc.in_subspace(subspace(), optax.trace(0.5))
    updates, state = tx.update(grads, tx.init(tree), tree)
    np.testing.assert_array_equal(updates["c"], grads["c"])
    updates, _ = tx.update(grads, state, tree)
    np.testing.assert_allclose(updates["c"], 1.5 * grads["c"])


def test_a_number_of_python_among_the_parameters():
    tree = params() | {"scale": 2.0}
    tx = jc.in_subspace(subspace(), optax.scale_by_adam())
    grads = gradients(0) | {"scale": jnp.float32(1)}
    updates, _ = tx.update(grads, tx.init(tree), tree)
    assert updates["scale"].dtype == jnp.float32
