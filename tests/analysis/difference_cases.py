"""Losses near their end, of predictions within 0.3 % of their targets, and errors."""

import jax
import jax.numpy as jnp
import optax

import jaxcompact as jc
from tests.draws import normal

X, PARAMS = normal(0, 128, 32), {"a": normal(1, 32, 64) / 6, "b": normal(2, 64, 32) / 8}


def predicted(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


Y = predicted(PARAMS, X) + 0.003 * normal(3, 128, 32)


def rounded_codes(p, x):
    """Of a vector-quantized autoencoder: the second is near what it stands for."""
    h = predicted(p, x)
    book = jax.lax.stop_gradient(h) + 0.003 * normal(3, 128, 32)
    return jnp.mean((h - book[jnp.arange(128)]) ** 2)


def in_time(p, x):
    """Losses that a loop adds up."""

    def step(total, row):
        x, y = row
        return total + jnp.sum((predicted(p, x) - y) ** 2), None

    rows = x.reshape(4, 32, 32), Y.reshape(4, 32, 32)
    return jax.lax.scan(step, jnp.zeros(()), rows)[0]


def of_an_average(p, x):
    """Losses that a loop is given, of which it keeps a moving average."""

    def step(average, row):
        return 0.9 * average + jnp.sum(row**2), None

    return jax.lax.scan(step, jnp.zeros(()), predicted(p, x) - Y)[0]


def of_segments(p, x):
    """Examples of several graphs, of which the one with the largest loss counts."""
    rows = jnp.sum((predicted(p, x) - Y) ** 2, -1)
    return jax.ops.segment_sum(rows, jnp.arange(128) % 7, 7).max()


def mahalanobis(p, x):
    """Weighted by the inverse of a covariance."""
    d = predicted(p, x) - Y
    return jnp.mean(((d @ COVARIANCE) * d).sum(-1))


COVARIANCE = jnp.eye(32) + normal(9, 32, 32) @ normal(9, 32, 32).T / 32


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def quotient(p, x):
    """A cosine, as vectors' products by their lengths."""
    h = predicted(p, x)
    lengths = jnp.linalg.norm(h, axis=-1) * jnp.linalg.norm(Y, axis=-1)
    return -jnp.mean(jax.vmap(jnp.dot)(h, Y) / lengths)


def of_a_target_network(p, x):
    """BYOL's, SimSiam's: nothing flows into the other one."""
    slow = jax.tree.map(lambda a: 1.003 * a + 0.0003 * jnp.cos(1e4 * a), p)
    target = jax.lax.stop_gradient(unit(predicted(slow, x)))
    return -jnp.mean(jnp.sum(unit(predicted(p, x)) * target, -1))


def of_a_mixture(p, x):
    """Eight densities, of which one is at the target."""
    weights, means, sizes = jnp.split(predicted(p, x)[:, :24], 3, -1)
    sizes = jnp.exp(sizes / 4 - 4)
    terms = jax.nn.log_softmax(weights) - jnp.log(sizes)
    terms -= ((Y[:, 8:9] - means) / sizes) ** 2 / 2
    return -jnp.mean(jax.nn.logsumexp(terms, -1))


def deviations(p, x):
    return jnp.exp((x @ p["a"])[:, :32])


DRAWN = predicted(PARAMS, X) + deviations(PARAMS, X) * normal(5, 128, 32)


def by_deviations(p, x):
    """A Gaussian's density, of which each entry has a deviation of its own."""
    means, sizes = predicted(p, x), deviations(p, x)
    return -jax.scipy.stats.norm.logpdf(DRAWN, means, sizes).mean()


def to_the_nearest(p, x):
    """Chamfer's distance of two sets of points, of all pairs the least."""
    points = predicted(p, x).reshape(8, -1, 4)
    targets = Y.reshape(8, -1, 4)
    pairs = ((points[:, :, None] - targets[:, None]) ** 2).sum(-1)
    return pairs.min(1).mean() + pairs.min(2).mean()


def of_the_best(p, x):
    """Of four predictions of a row the nearest counts."""
    found = predicted(p, x).reshape(128, 4, 8)
    return jnp.mean(((found - Y[:, None, 8:16]) ** 2).mean(-1).min(1))


def concordance(p, x):
    """Lin's: twice the covariance by what it would be if they were the same."""
    h = predicted(p, x)
    mean, wanted = h.mean(0, keepdims=True), Y.mean(0, keepdims=True)
    both = jnp.mean((h - mean) * (Y - wanted), 0)
    return -jnp.mean(2 * both / (h.var(0) + Y.var(0) + (mean - wanted)[0] ** 2))


def multiplied_out(p, x):
    h = predicted(p, x)
    return jnp.mean(h * h - 2 * h * Y + Y * Y)


NEGATIVE, SIZES = -Y, jnp.exp(normal(8, 128, 1))
UNITS = 10.0 ** (jnp.arange(32.0)[None] / 8)


def in_units(p, x):
    """Columns of meters beside those of millimeters."""
    return jnp.mean(((predicted(p, x) * UNITS - Y * UNITS) / UNITS) ** 2)


LOSSES = {
    "a cosine": lambda p, x: optax.cosine_distance(predicted(p, x), Y).mean(),
    "a cosine's quotient": quotient,
    "of a target network": of_a_target_network,
    "of a mixture": of_a_mixture,
    "squared": lambda p, x: jnp.mean((predicted(p, x) - Y) ** 2),
    "optax's squared": lambda p, x: optax.l2_loss(predicted(p, x), Y).mean(),
    "of one column": lambda p, x: jnp.sum(
        (predicted(p, x)[:, :1].squeeze(-1) - Y[:, 0]) ** 2
    ),
    "weighted": lambda p, x: jnp.sum(jnp.exp(x) * (predicted(p, x) - Y) ** 2),
    "by a product": lambda p, x: jnp.sum(
        jnp.einsum("bd,bd->b", d := predicted(p, x) - Y, d)
    ),
    "huber": lambda p, x: optax.huber_loss(predicted(p, x), Y).sum(),
    "hyperbolic": lambda p, x: optax.log_cosh(predicted(p, x), Y).sum(),
    "hyperbolic, by softplus": lambda p, x: jnp.sum(
        (d := predicted(p, x) - Y) + jax.nn.softplus(-2 * d) - jnp.log(2.0)
    ),
    "of angles": lambda p, x: jnp.sum(1 - jnp.cos(predicted(p, x) - Y)),
    "of a function": lambda p, x: jnp.sum(
        (jax.nn.sigmoid(predicted(p, x)) - jax.nn.sigmoid(Y)) ** 2
    ),
    "by deviations": by_deviations,
    "in units": in_units,
    "a sum": lambda p, x: jnp.mean((predicted(p, x) + NEGATIVE) ** 2),
    "a sum, of minus the prediction": lambda p, x: jnp.mean(
        (Y + (-1) * predicted(p, x)) ** 2
    ),
    "a score's": lambda p, x: jnp.mean(
        (SIZES * predicted(p, x) + SIZES * NEGATIVE) ** 2
    ),
    "the difference twice": lambda p, x: jnp.mean(
        (predicted(p, x) - Y) * (predicted(p, x) - Y)
    ),
    "a product of the difference twice": lambda p, x: jnp.vdot(
        (h := predicted(p, x)) - Y, h - Y
    ),
    "of the hardest": lambda p, x: jnp.mean(
        jax.lax.top_k(((predicted(p, x) - Y) ** 2).mean(-1), 64)[0]
    ),
    "sorted": lambda p, x: jnp.mean(
        jnp.sort(((predicted(p, x) - Y) ** 2).mean(-1))[64:]
    ),
    "to the nearest": to_the_nearest,
    "of the best": of_the_best,
    "concordance": concordance,
    "multiplied out": multiplied_out,
    "of codes": rounded_codes,
    "in a loop": in_time,
    "in a loop that is given it": of_an_average,
    "in a branch": lambda p, x: jax.lax.cond(
        x[0, 0] > 9, jnp.sum, lambda d: jnp.sum(d**2), predicted(p, x) - Y
    ),
    "of segments": of_segments,
    "weighted by a product": lambda p, x: jnp.mean(
        (predicted(p, x) - Y) ** 2 @ jnp.arange(1.0, 33.0)
    ),
    "rows weighted by a product": lambda p, x: jnp.dot(
        jnp.exp(x[:, 0]), ((predicted(p, x) - Y) ** 2).mean(-1)
    ),
    "mahalanobis": mahalanobis,
    "mahalanobis, in one": lambda p, x: jnp.einsum(
        "bi,ij,bj->", d := predicted(p, x) - Y, COVARIANCE, d
    ),
    "sums up to each": lambda p, x: jnp.mean(jnp.cumsum((predicted(p, x) - Y) ** 2, 0)),
    "pooled": lambda p, x: jnp.max(
        jax.lax.reduce_window(
            (predicted(p, x) - Y) ** 2, 0.0, jax.lax.add, (4, 1), (4, 1), "VALID"
        )
    ),
    "smoothed": lambda p, x: jnp.mean(
        jnp.convolve(
            jnp.sum((predicted(p, x) - Y) ** 2, -1), jnp.array([0.25, 0.5, 0.25])
        )
    ),
}


def error(loss, policy, params=PARAMS, x=X):
    wrapped = jc.checkpoint(loss, policy=policy, params=0)
    found, exact = (jax.jit(jax.grad(fun))(params, x) for fun in (wrapped, loss))
    off = jax.tree.map(jnp.subtract, found, exact)
    return float(optax.tree.norm(off) / optax.tree.norm(exact))
