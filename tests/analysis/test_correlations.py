"""Losses of correlations: those of different features are small beside one."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.analysis.candidates import candidates
from tests.cases import slow
from tests.draws import normal

ROWS, N = 1024, 32
X = normal(0, ROWS, N)


def whitening():
    """Parameters whose features are hardly correlated, as after training."""
    p = {"a": normal(1, N, 96) / 6, "b": normal(2, 96, N) / 10}
    sizes, directions = jnp.linalg.eigh(jnp.cov((jnp.tanh(X @ p["a"]) @ p["b"]).T))
    return p | {"b": p["b"] @ directions @ jnp.diag(sizes**-0.5)}


PARAMS = whitening()
EYE = jnp.eye(N)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def views(p, x):
    """Of each row two, by features that are hardly correlated."""
    noise = 0.3 * normal(3, 2, ROWS, N)
    return (jnp.tanh((x + n) @ p["a"]) @ p["b"] for n in noise)


def correlated(p, x):
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in views(p, x))
    return a.T @ b / ROWS


def off_diagonal(c):
    return c.flatten()[:-1].reshape(N - 1, N + 1)[:, 1:].flatten()


def barlow_twins(p, x):
    c = correlated(p, x)
    on = jnp.sum((jnp.diag(c) - 1) ** 2)
    return 0.01 * on + jnp.sum(off_diagonal(c) ** 2)


def of_a_difference(p, x):
    return jnp.sum((correlated(p, x) - EYE) ** 2 * jnp.where(EYE > 0, 0.01, 1.0))


def by_a_sum_of_all(p, x):
    c = correlated(p, x)
    return jnp.sum(c**2) - jnp.sum(jnp.diag(c) ** 2)


def covariances(p, x):
    """VICReg's and W-MSE's, of one view."""
    z, _ = views(p, x)
    z -= z.mean(0)
    return jnp.sum(jnp.where(EYE > 0, 0.0, z.T @ z / (ROWS - 1)) ** 2)


LOSSES = [barlow_twins, of_a_difference, by_a_sum_of_all, covariances]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("policy", "bound"), [slow("int8", 0.02), ("int4", 0.25)])
def test_the_gradient_of_small_correlations(loss, policy, bound):
    """Codes of 4 bits, beside the diagonal, would leave nothing of it, of 8 a tenth."""
    wrapped = jc.checkpoint(loss, policy=getattr(jc.policies, policy)(), params=0)
    exact, found = (
        jnp.concatenate([g.ravel() for g in jax.tree.leaves(jax.grad(f)(PARAMS, X))])
        for f in (loss, wrapped)
    )
    assert jnp.linalg.norm(found - exact) < bound * jnp.linalg.norm(exact)


def test_they_are_whole_and_what_they_are_of_has_8_bits():
    wrapped = jc.checkpoint(barlow_twins, policy=jc.policies.int4(), params=0)
    rows = jc.explain(wrapped, PARAMS, X).rows
    actions = [row.action for row in rows if row.name.startswith("dot_general")]
    hidden, features = "Quantized(bits=4, bound=3.0)", "Quantized(bits=8)"
    assert actions == [hidden, features, hidden, features, "Save()"]


def test_products_that_others_read_are_none():
    """A network's last product, and scores of which a softmax is taken."""

    def fun(w, x):
        h = x @ w
        y = jax.nn.softmax(h @ h.T) @ h
        return jnp.sum((y - jnp.cos(x)) ** 2)

    found = candidates(fun, EYE, X[:64])
    assert [name for name, tensor in found.items() if tensor.near] == ["sub.1"]


@pytest.mark.parametrize("params", [0, None])
def test_a_product_with_parameters_is_none(params):
    def fun(w, x):
        return jnp.sum((jnp.tanh(x @ w) @ w) ** 2)

    found = candidates(fun, EYE, X[:64], params=params)
    assert not any(tensor.near for tensor in found.values())
    found = candidates(barlow_twins, PARAMS, X, params=params)
    assert found["dot_general.4"].near and not found["dot_general.0"].near
