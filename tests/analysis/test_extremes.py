"""The largest, the smallest, the ends of a range: who of equals has the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from tests.analysis.decision_cases import NODES, ULPS, W, X, errors
from tests.draws import normal
from tests.residuals import weighted


@pytest.mark.parametrize(
    "decide",
    [
        lambda y: jnp.maximum(y, 0.0),
        lambda y: jnp.minimum(y[:, :32], y[:, 32:]),
        lambda y: jnp.clip(y, -1.0, 1.0),
        lambda y: jax.lax.clamp(-1.0, y, 1.0),
        jnp.abs,
        lambda y: jax.lax.top_k(y, 4)[0],
        lambda y: jnp.sort(y, axis=0),
        lambda y: jax.lax.sort((y, 2.0 * y[:, ::-1]), num_keys=1)[1],
        lambda y: jax.lax.reduce_window(
            y, -jnp.inf, jax.lax.max, (3, 3), (2, 2), ((1, 1), (0, 1))
        ),
        lambda y: jax.lax.reduce_window(
            y, jnp.inf, jax.lax.min, (2, 2), (1, 1), "VALID"
        ),
        lambda y: jax.ops.segment_max(y, NODES, 4),
        lambda y: jnp.zeros((4, 64)).at[NODES].max(y),
        lambda y: y[:4].at[NODES].min(y),
        lambda y: y.max(axis=1),
        lambda y: y.min(axis=0),
        lambda y: y.astype(jnp.bfloat16).max(axis=0).astype(jnp.float32),
    ],
)
def test_ties_are_shared_as_the_plain_gradient_shares_them(decide):
    """Products of small integers: many are equal, and many are zero."""
    w, x = (jnp.round(normal(seed, *a.shape)) for seed, a in ((1, W), (2, X)))
    assert (x @ w == 0.0).any()
    assert errors(lambda w, x: decide(x @ w), w, x) < ULPS


@pytest.mark.parametrize(
    "decide",
    [
        lambda y: y.max(axis=1),
        jnp.abs,
        lambda y: jnp.maximum(y, 0.1),
        lambda y: jnp.clip(y, -0.5, 0.5),
        jax.nn.relu,
        lambda y: jnp.sort(y, axis=-1),
    ],
)
def test_second_derivatives_where_nothing_is_rounded(decide):
    """Values of what was chosen are its own, which move."""

    def second(wrap):
        fun = wrap(lambda w, x: jnp.square(decide(x @ w)).sum())
        return jax.grad(lambda w: jnp.square(jax.grad(fun)(w, X)).sum())(W)

    policy = jc.policies.uniform(jc.Save())
    found = second(lambda fun: jc.checkpoint(fun, policy=policy, params=0))
    expected = second(lambda fun: fun)
    # Sums of 64 products, twice, in another order.
    assert np.linalg.norm(found - expected) < ULPS * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("read", "x"),
    [
        (lambda y: y, X.at[0, 0].set(jnp.nan)),
        (jnp.sin, X.at[0].set(-jnp.finfo(jnp.float32).max)),
    ],
    ids=["NaN", "the largest number"],
)
def test_a_maximum_of_what_is_no_ordinary_number(read, x):
    """The gradient is NaN there as well, and is no sum of equals that overflows."""

    def fun(b, x):
        return jnp.sum(read((x + b[None]).max(axis=1)))

    small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    found, expected = (jax.grad(f)(jnp.zeros(64), x) for f in (small, fun))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert jnp.isnan(x).any() == jnp.isnan(found).all()


def test_a_maximum_of_doubles():
    with jax.enable_x64(True):
        w, x = (jnp.asarray(a, jnp.float64) for a in (W, X))
        fun = weighted(lambda w, x: jnp.square((x @ w).max(axis=1)))
        policy = jc.policies.uniform(jc.Save())
        found, expected = (
            jax.grad(f)(w, x) for f in (jc.checkpoint(fun, policy=policy), fun)
        )
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_the_largest_of_many_is_a_place():
    """As of scores, whose bits would be as many as those of q and k: of 512 one is 2
    bytes, of 64 their bits are 8."""

    def fun(w, x):
        return (x @ w).max(), (x @ w).max(axis=1)

    rows = jc.explain(fun, W, X, policy=jc.policies.int4(), params=0).rows
    stored = {row.name: row.stored for row in rows if row.kind == "choice"}
    assert stored == {"reduce_max.0.choice": 2, "reduce_max.1.choice": 8 * 8}
    assert errors(lambda w, x: (x @ w).max()[None], W, X) < ULPS


@pytest.mark.parametrize("reverse", [False, True])
def test_running_extremes(reverse):
    def fun(w, x):
        y = x @ w
        return jax.lax.cummax(y, 1, reverse) + jax.lax.cummin(y, 0, reverse)

    assert errors(fun, W, X) < ULPS
