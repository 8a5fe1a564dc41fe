"""in_subspace: against numpy and optax's GaLore, and around inner transforms."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcompact as jc
from jaxcompact.optimizers import SubspaceState

pytestmark = pytest.mark.usefixtures("optax_promotion")

N, M, R = 12, 5, 4


def params(layers=()):
    kernel = jax.random.normal(jax.random.key(0), (*layers, N, M))
    return {"a": {"kernel": kernel}, "bias": jnp.ones(M)}


def gradients(step, layers=()):
    ka, kb = jax.random.split(jax.random.key(100 + step))
    return {
        "a": {"kernel": jax.random.normal(ka, (*layers, R, M))},
        "bias": jax.random.normal(kb, (M,)),
    }


def subspace(period=3, **kwargs) -> jc.Subspace:
    rules = {"a/kernel": jc.Projection(**({"rank": R} | kwargs))}
    return jc.Subspace(rules, jax.random.key(4), period)


def matrix(space, tree, step, layer=None):
    slot = space.slots(tree)["a/kernel"]
    keys = slot.keys(space.key, space.generation(step))
    return np.asarray(slot.projection.matrix(keys if layer is None else keys[layer], N))


def updates_of(tx, steps, tree=None):
    tree = params() if tree is None else tree
    state, update = tx.init(tree), jax.jit(tx.update)
    for step in range(steps):
        updates, state = update(gradients(step), state, tree)
        yield updates


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
        full = {"kernel": jax.random.normal(jax.random.key(step), (N, M))}
        sketch = {"kernel": p.T @ full["kernel"]}
        expected, theirs = galore.update(full, theirs, tree)
        got, ours = tx.update(sketch, ours, tree)
        np.testing.assert_allclose(
            got["kernel"], expected["kernel"], rtol=1e-5, atol=1e-6
        )


def test_sgd_is_unbiased():
    """The mean update over 2000 keys is the gradient, within 4.5 standard errors."""
    full = jax.random.normal(jax.random.key(1), (N, M))
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


def test_moments_in_dicts_are_reset_too():
    inner = optax.partition(
        {"all": optax.trace(0.9)}, lambda t: jax.tree.map(lambda _: "all", t)
    )
    tx, tree = jc.in_subspace(subspace(period=1), inner), params()
    state, ones = tx.init(tree), jax.tree.map(jnp.ones_like, gradients(0))
    for _ in range(3):
        _, state = tx.update(ones, state, tree)
    traces = [x for x in jax.tree.leaves(state.inner) if x.shape == (R, M)]
    np.testing.assert_array_equal(traces[0], 1.0)


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


@pytest.mark.parametrize("moment", ["reset", "transfer", "keep"])
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


def test_a_sketch_that_another_transform_gets_is_refused(optax_promotion):
    tree = {name: {"kernel": jnp.ones((16, 4))} for name in "ab"}
    space = jc.Subspace({"./kernel": jc.Projection(1)}, jax.random.key(0))
    labels = {"a": {"kernel": "sketched"}, "b": {"kernel": "other"}}
    inside = {"sketched": jc.subspace_adamw(0.1, space), "other": optax.sgd(0.1)}
    told = "'b/kernel' is in the subspace, but optax.partition .* leave it out"
    with pytest.raises(ValueError, match=told):
        optax.partition(inside, labels).init(tree)
    inside["sketched"] = jc.subspace_adamw(
        0.1, jc.Subspace({"a/kernel": jc.Projection(1)}, jax.random.key(0))
    )
    optax.partition(inside, labels).init(tree)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tx, s, t: tx.update(gradients(0), s), "params must be given"),
        (
            lambda tx, s, t: tx.update(t, s, t),
            r"gradient of 'a/kernel' must be its sketch of shape \(4, 5\), as "
            r"jaxcompact.*, got \(12, 5\) \(optax.MultiSteps goes inside",
        ),
    ],
)
def test_bad_updates(call, message):
    tx, tree = jc.scale_by_subspace_adam(subspace()), params()
    with pytest.raises(ValueError, match=message):
        call(tx, tx.init(tree), tree)


def test_complex_parameters_keep_their_imaginary_part():
    tree = {"a": {"kernel": jnp.ones((N, M))}, "c": jnp.ones(2, jnp.complex64)}
    grads = {"a": {"kernel": jnp.ones((R, M))}, "c": jnp.array([1 + 2j, 3j])}
    tx = jc.in_subspace(subspace(), optax.trace(0.5))
    updates, state = tx.update(grads, tx.init(tree), tree)
    np.testing.assert_array_equal(updates["c"], grads["c"])
    updates, _ = tx.update(grads, state, tree)
    np.testing.assert_allclose(updates["c"], 1.5 * grads["c"])


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
    tree = {"kernel": jax.random.normal(jax.random.key(0), (n, 128))}
    sketch = {"kernel": jax.random.normal(jax.random.key(1), (r, 128))}
    whole = {"kernel": jax.random.normal(jax.random.key(2), (n, 128))}

    def step(tx, grads):
        return jnp.linalg.norm(tx.update(grads, tx.init(tree), tree)[0]["kernel"])

    rules = {"kernel": jc.Projection(r, alpha=(r / n) ** 0.5)}
    tx = jc.in_subspace(jc.Subspace(rules, jax.random.key(3)), inner(1e-2))
    # Norms of 2048 normal numbers: 1.6 % each, and of P, 1 / sqrt(2 r) a column.
    assert abs(step(tx, sketch) / step(inner(1e-2), whole) - 1) < 0.2


@pytest.mark.parametrize("rank", [1, R])
def test_a_sketch_of_another_subspace_is_refused(rank):
    """One of rank 1 would broadcast over the kernel."""
    tree = {"a": {"kernel": jnp.ones((N, M))}, "b": {"kernel": jnp.ones((M, 3))}}
    space = jc.Subspace({"b/kernel": jc.Projection(2)}, jax.random.key(0))
    tx = jc.in_subspace(space, optax.scale_by_adam())
    grads = {"a": {"kernel": jnp.ones((rank, M))}, "b": {"kernel": jnp.ones((2, 3))}}
    with pytest.raises(ValueError, match="'a/kernel' must have the.*multi_transform"):
        tx.update(grads, tx.init(tree), tree)


def test_bad_moment():
    with pytest.raises(
        ValueError, match="moment must be one of keep, reset, transfer, got 'x'"
    ):
        jc.in_subspace(subspace(), optax.identity(), moment="x")


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


@pytest.mark.parametrize("moment", ["reset", "transfer", "keep"])
@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)])
def test_a_state_of_another_rank_is_refused(inner, moment, optax_promotion):
    """Moments of rank 1 would broadcast to any other."""
    params = {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}

    def of_rank(rank):
        subspace = jc.Subspace({"kernel": jc.Projection(rank)}, jax.random.key(0))
        tx = jc.in_subspace(subspace, inner, moment=moment)
        return tx, {"kernel": jnp.ones((rank, 8)), "bias": jnp.ones(8)}

    (one, of_one), (four, of_four) = of_rank(1), of_rank(4)
    for update in (four.update, jax.jit(four.update)):
        _, state = one.update(of_one, one.init(params), params)
        with pytest.raises(ValueError, match=r"kernel' must have the shape \(4, 8\)"):
            update(of_four, state, params)
        _, state = update(of_four, four.init(params), params)
        update(of_four, state, params)
