"""What is divided by, or steep in another way, and what is normalized."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.analysis.candidates import S, W, X, candidates
from tests.draws import normal
from tests.errors import relative


@jax.custom_vjp
def by_hand(y):
    return jnp.log(y)


by_hand.defvjp(lambda y: (jnp.log(y), 2 * y), lambda y, c: (2 * c / y,))


@jax.custom_vjp
def inverse(y):
    return jnp.linalg.inv(y)


inverse.defvjp(lambda y: (inverse(y),) * 2, lambda z, c: (-z.T @ c @ z.T,))


@jax.custom_jvp
def turned(y):
    return jnp.linalg.inv(y)


@turned.defjvp
def turned_forward(primals, tangents):
    z = turned(*primals)
    return z, -z @ tangents[0] @ z


@pytest.mark.parametrize("solve", [jnp.linalg.inv, jnp.linalg.pinv, inverse, turned])
def test_inverses_by_rules_of_their_own_are_exact(solve):
    """Terms cancel, if what a rule reads is the inverse of what it read: all whole."""
    w, x, c = normal(0, 64, 64, scale=1 / 8), normal(1, 64, 64), normal(2, 32, 32)

    def f(w, x):
        return solve(jnp.tanh(x @ w)[:32, :32] + 4 * jnp.eye(32))

    def gradient(f):
        return jax.jit(jax.grad(lambda w: jnp.sum(f(w, x) * c)))(w)

    found = gradient(jc.checkpoint(f, policy=jc.policies.int4(), params=0))
    exact = gradient(f)
    assert jnp.linalg.norm(found - exact) < 1e-4 * jnp.linalg.norm(exact)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: x / y,
        lambda x, y: x / (y[:, :1] + 1e-6),
        lambda x, y: x / jnp.maximum(y.T.reshape(x.shape), 1e-6),
        lambda x, y: x * jnp.log(2.0 * y),
        lambda x, y: x * jax.lax.rsqrt(y.astype(jnp.bfloat16)).astype(jnp.float32),
        lambda x, y: x * y**-2,
        lambda x, y: x / y[jnp.arange(8) % 3],
        lambda x, y: jnp.hypot(x, y),
        lambda x, y: x * jax.scipy.special.logit(y),
        # distances: of pairs of points, and of points in three dimensions
        lambda x, y: (
            x[:, :8] * jnp.sqrt((x * x).sum(-1)[:, None] + 4.0 - 2.0 * y[:, :8])
        ),
        lambda x, y: x[:, :1] * jnp.linalg.norm(y[:, :3], axis=-1, keepdims=True),
        # sums that may be small as a whole, products
        lambda x, y: y / y.sum(-1, keepdims=True),
        lambda x, y: x[:, :1] / y[:, :8].sum(-1, keepdims=True),
        lambda x, y: x * jnp.log(jnp.prod(y, -1, keepdims=True)),
        # steep elsewhere than at zero
        lambda x, y: x * jnp.log2(y),
        lambda x, y: x * jnp.log1p(-0.9 * y),
        lambda x, y: x * jnp.arccosh(1 + y),
        lambda x, y: x * jnp.log(1.0 + y),
        # what is zero where y is: by itself, and beside one
        lambda x, y: x / jnp.tanh(y),
        lambda x, y: x * jnp.log(1 - jnp.exp(-jnp.abs(y))),
        lambda x, y: x * jnp.log(jnp.sort(y)),
        lambda x, y: x[:, :1] * jnp.linalg.norm(y - y[::-1], axis=-1, keepdims=True),
        lambda x, y: jnp.fmod(x, y),
        lambda x, y: x / jnp.cos(y),
        # steep where a cosine is zero
        lambda x, y: x * jnp.tan(y),
        lambda x, y: jnp.tanh(jax.lax.complex(x, y)).imag,
        # inside of loops, branches, other transforms; and what goes through them
        lambda x, y: x * jax.lax.map(jnp.log, y),
        lambda x, y: jax.lax.scan(lambda c, v: (c + v[0] / v[1], 0), x[0], (x, y))[0],
        lambda x, y: jax.lax.scan(lambda c, x: (x / c, 0), y[0], x)[0],
        lambda x, y: jax.lax.scan(lambda c, y: (y, 1 / c), x[0], y)[1],
        lambda x, y: jax.lax.cond(x[0, 0] < 0, jnp.divide, jnp.multiply, x, y),
        lambda x, y: x * jax.checkpoint(jnp.log)(y),
        lambda x, y: x / jax.checkpoint(lambda y: 2 * y)(y),
        lambda x, y: x * jc.checkpoint(jnp.log)(y),
        lambda x, y: x * by_hand(y),
    ],
)
def test_what_is_divided_by(use):
    found = candidates(lambda w, x: use(jax.lax.logistic(x), x @ w), W, X)
    kept = [n for n, t in found.items() if t.divisor and not t.cheap]
    assert kept == ["dot_general.0"]


@pytest.mark.parametrize("returned", [True, False])
def test_what_a_metric_divides_by_is_none(returned):
    """It has no gradient, whether it is returned or dead."""

    def fun(w, x):
        y = x @ w
        metric = jnp.log(jax.lax.stop_gradient(y)).sum() + (y > jnp.sin(y)).mean(
            dtype=jnp.float32
        )
        loss = jnp.tanh(y).sum()
        return (loss, metric) if returned else loss

    found = candidates(fun, W, X)
    assert not found["dot_general.0"].divisor
    assert not [t for t in found.values() if t.kind == "mask"]


@pytest.mark.parametrize(
    "divisor",
    [
        lambda y: jnp.tanh(y).sum(-1),
        lambda y: 1 / jnp.log1p(jax.nn.softplus(y).sum(-1) / 16),
        lambda y: (jax.nn.softmax(y) * jnp.linspace(-1, 1, 16)[None]).sum(-1) + 2,
        lambda y: (jnp.tanh(y).sum(-1)[:, None] * jnp.sin(y)).sum(-1),
    ],
)
def test_of_a_long_sum_that_has_no_gradient_the_sum_is_stored(divisor):
    """As of a target that a critic gives itself; of others the gradient is of terms
    beside their sum."""

    def fun(w, x, stop):
        y = x @ w
        return jnp.tanh(y).sum(-1) * x[:, 0] / stop(divisor(y))

    def kept(stop):
        found = candidates(lambda w, x: fun(w, x, stop), W, X)
        return [n for n, t in found.items() if t.divisor and not t.cheap]

    (name,) = kept(jax.lax.stop_gradient)
    assert name.startswith("reduce_sum")
    assert kept(lambda d: d) == ["dot_general.0"]


def test_terms_that_are_read_beside_their_sum_are_as_whole():
    """Also beside one that has no gradient."""

    def fun(w, x):
        y = x @ w
        return jnp.tanh(y / jax.lax.stop_gradient(y.sum(-1, keepdims=True)))

    found = candidates(fun, W, X)
    kept = [n for n, t in found.items() if t.divisor and not t.cheap]
    assert kept == ["dot_general.0"]


def test_gradients_of_what_a_long_sum_divides():
    """As far off as those of other functions of what is rounded; in fewer bytes."""

    def fun(w, x):
        y = jnp.tanh(x @ w)
        return (y.sum(-1) / (4 + jax.lax.stop_gradient((y * y[:, :1]).sum(-1)))).sum()

    w, x = normal(0, 16, 64) / 4, normal(1, 64, 16)
    small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    assert relative(jax.jit(jax.grad(small))(w, x), jax.grad(fun)(w, x)) < 0.1
    assert jc.explain(small, w, x).stored < 0.3 * 64 * 64 * 4


def mixture(y, t):
    """Of 32 densities of Cauchy's, some of them narrow."""
    return jnp.log((jax.nn.softplus(t) / (1 + (12 * (y[:, :1] - y)) ** 2)).sum(-1))


def ratio(y, t):
    """Of two sums that may cancel."""
    return jnp.tanh((y * jnp.sign(t)).sum(-1) / (y * jax.nn.relu(jnp.sign(t))).sum(-1))


@pytest.mark.parametrize("loss", [mixture, ratio])
def test_terms_beside_their_sum_are_as_whole(loss):
    def fun(w, x):
        y, t = jnp.split(x @ w, 2, axis=-1)
        return loss(y, jax.lax.stop_gradient(t)).sum()

    w, x = normal(0, 16, 64) / 4, normal(1, 64, 16)
    small = jc.checkpoint(fun, policy=jc.policies.int8(), params=0)
    assert relative(jax.jit(jax.grad(small))(w, x), jax.grad(fun)(w, x)) < 0.02


@pytest.mark.parametrize("least", [1e-12, None])
def test_distances_of_all_pairs_are_made_again_of_points(least):
    """Whose roots are taken, as a triplet loss does: neither they nor their products
    are stored, but the points, whole."""

    def fun(w, x):
        z = jnp.tanh(x @ w)
        norms = (z**2).sum(-1)
        square = norms[:, None] + norms[None] - 2 * z @ z.T
        square = square + 0.1 if least is None else jnp.maximum(square, least)
        return jax.nn.logsumexp(-jnp.sqrt(square), axis=-1).mean()

    w, x = normal(0, 16, 32) / 4, normal(1, 256, 16)
    small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    said = jc.explain(small, w, x)
    kept = {row.name: row.stored for row in said.rows if row.stored > 256 * 4}
    assert kept.pop("dot_general.0") == 256 * 32 * 4
    assert sum(kept.values()) < 256 * 256 / 2  # of the maximum a choice
    grads = (jax.jit(jax.grad(f))(w, x) for f in (small, fun))
    assert relative(*grads) < 1e-3


def test_what_an_op_keeps_that_divides_is_no_substitute_either():
    @jax.custom_vjp
    def product(y):
        return jnp.log(y) @ y.T

    @jax.custom_vjp
    def tempered(t, y):
        return (y / t) @ y.T

    product.defvjp(lambda y: (product(y), 2 * y), lambda y, c: (c @ y / (y * y),))
    tempered.defvjp(
        lambda t, y: (tempered(t, y), (t, 2 * y)),
        lambda kept, c: (kept[0], c @ kept[1] / kept[0]),
    )

    def action(fun, residual):
        said = jc.explain(fun, W, X, policy=jc.policies.int4(), params=0)
        actions = {row.name: row.action for row in said.rows}
        return actions[f"custom_vjp_call.0.residual{residual}"]

    assert action(lambda w, x: product(x @ w), 0) == "Save()"
    # A parameter is no tensor that is rounded.
    assert action(lambda w, x: tempered(w[0, 0], x @ w), 1) == "Quantized(bits=4)"


def test_matrices_of_solves_and_factorizations_are_divisors():
    def solve(w, x):
        y = x @ w
        return jax.scipy.linalg.solve_triangular(y[:, :8], y[:, 8:])

    found = candidates(solve, W, X)
    assert [n for n, t in found.items() if t.divisor] == [
        "dot_general.0",
        "triangular_solve.0",
    ]
    found = candidates(lambda w, x: jnp.linalg.qr(x @ w), W, X)
    assert [n for n, t in found.items() if t.divisor] == ["qr.0.0", "qr.0.1"]


def normed(y):
    return y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)


def rotary(y, put):
    """Each pair is turned by its place; put side by side or one after the other."""
    first, second = jnp.split(y, 2, -1)
    angle = jnp.arange(y.shape[0], dtype=y.dtype)[:, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return put([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize(
    "unlike",
    [
        lambda a, b, c, s: [a * c - b * s, b * c - a * s],
        lambda a, b, c, s: [a * c - b * s, jnp.sin(b) * c + a * s],
    ],
)
def test_what_is_not_turned_may_vanish(unlike):
    def use(w, x):
        (first, second), factor = jnp.split(x @ w, 2, -1), jnp.arange(8.0)[:, None]
        return normed(jnp.concatenate(unlike(first, second, factor, 2 * factor), -1))

    assert candidates(use, W, X)["dot_general.0"].divisor


@pytest.mark.parametrize(
    ("use", "shape"),
    [
        (lambda y: y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6), (8, 1)),
        (lambda y: (y - y.mean()) / y.std(), ()),
        (lambda y: y / jnp.linalg.norm(y), ()),
        (
            lambda y: (
                y * jax.lax.rsqrt((y**2).mean(-1) - y.mean(-1) ** 2 + 1e-6)[:, None]
            ),
            (8,),
        ),
        (lambda y: y / jnp.abs(y).max(-1, keepdims=True), (8,)),
        (lambda y: normed(rotary(y, jnp.concatenate)), (8, 1)),
        (lambda y: normed(rotary(y, jnp.stack).reshape(8, -1)), (8, 1)),
        (lambda y: jnp.arccosh(1 + (y * y).sum(-1)), (8,)),
    ],
)
def test_norms_are_kept_and_not_what_is_normalized(use, shape):
    found = candidates(lambda w, x: use(x @ w), W, X)
    (norm,) = (t for t in found.values() if t.divisor)
    assert norm.shape == shape and not norm.cheap


def test_of_groups_a_variance_is_kept_as_it_is_before_it_is_repeated():
    """As by Flax's GroupNorm of tokens, before a constant is added."""

    def normed(y):
        groups = y.reshape(8, 4, -1)
        variance = jnp.repeat(groups.var(-1), groups.shape[-1], axis=-1)
        return y * jax.lax.rsqrt(variance + 1e-6)

    found = candidates(
        lambda w, x: normed(x @ w), jax.ShapeDtypeStruct((16, 64), jnp.float32), X
    )
    (norm,) = (t for t in found.values() if t.divisor)
    assert norm.shape == (8, 4) and not norm.cheap


@pytest.mark.parametrize(
    "use",
    [
        lambda y: jax.lax.map(lambda row: row / row.std(), y),
        lambda y: jax.nn.softplus(y) + jax.nn.logsumexp(y) + jax.nn.log_softmax(y),
        jax.checkpoint(jax.nn.softmax),
        lambda y: jax.nn.softmax(y),
        lambda y: jnp.exp(y) / jnp.exp(y).sum(-1, keepdims=True),
        lambda y: y / 3.0,
        lambda y: 1.0 / (1.0 + y * y),
    ],
)
def test_what_is_normalized_is_no_divisor(use):
    found = candidates(lambda w, x: use(x @ w), W, X)
    assert not [n for n, t in found.items() if t.divisor]


def test_a_softmax_over_segments_is_made_again_as_a_whole():
    """Its terms rounded and its sum not, it would not be normalized."""

    def fun(w, x, segments):
        logits = x @ w
        largest = jax.ops.segment_max(logits, segments, 4)
        terms = jnp.exp(logits - largest[segments])
        return terms / jax.ops.segment_sum(terms, segments, 4)[segments]

    found = candidates(fun, W, X, S((8,), jnp.int32))
    assert {
        n for n, t in found.items() if t.kind in ("op", "input") and t.floating
    } == {
        "x",
        "dot_general.0",
        "scatter-add.0",
    }
    assert found["scatter-add.0"].cheap
