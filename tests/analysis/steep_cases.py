"""Functions that a rounded tensor could make infinite or wrong, and their errors."""

import jax
import jax.numpy as jnp
from jax.experimental.ode import odeint

import jaxcompact as jc
from tests.analysis.attention_cases import ATTENTION, W, X
from tests.draws import normal

IDS = jax.random.randint(jax.random.key(5), (128,), 0, 50)


def experts(p, ids):
    """Each takes the tokens that it likes best."""
    h = p["e"][ids] @ p["w"]
    v, i = jax.lax.top_k(jax.nn.sigmoid(h @ p["g"]).T, 32)
    y = jnp.einsum("ecd,edf->ecf", h[i], p["x"]) * v[..., None]
    return jnp.zeros_like(h).at[i].add(y)


def interpolated(p, x):
    """A table, read between its entries."""
    t = 30 * jax.nn.sigmoid(x @ p["w"])
    i = jnp.floor(t)
    k = jax.lax.stop_gradient(i).astype(jnp.int32)
    return p["v"][0, k] * (1 - t + i) + p["v"][0, k + 1] * (t - i)


def corners(t, i):
    """A cell, and the weight of the second of its corners, of both of them."""
    weights = 1 - jnp.abs(t[..., None] - (i[..., None] + ENDS))
    return i.astype(jnp.int32), weights[..., 1]


ENDS = jnp.arange(2.0)

# What is read of a position: its cell, and how far it is from there.
CELLS = {
    "an integer": lambda t: ((i := jnp.floor(t).astype(jnp.int32)), t - i),
    "cut off": lambda t: ((i := t.astype(jnp.int32)), t - i),
    "parts of it": lambda t: ((parts := jnp.modf(t))[1].astype(jnp.int32), parts[0]),
    "the next corner": lambda t: (
        (i := jnp.floor(t)).astype(jnp.int32),
        1 - jnp.abs(t - (i + 1)),
    ),
    "both corners": lambda t: corners(t, jnp.floor(t)),
    "a constant": lambda t: (
        (i := jnp.floor(jax.lax.stop_gradient(t))).astype(jnp.int32),
        t - i,
    ),
    "rounded below": lambda t: ((i := jnp.round(t - 0.5)).astype(jnp.int32), t - i),
    "a grid's": lambda t: ((i := 2 * jnp.floor(t / 2)).astype(jnp.int32), (t - i) / 2),
}


def read_between(cell):
    """A table, at positions that are spread over many of its entries."""

    def fun(p, x):
        i, w = cell(8 + 4 * (x @ p["w"]))
        i = jnp.clip(i, 0, 30)
        return p["v"][0, i] * (1 - w) + p["v"][0, i + 1] * w

    return fun


def hats(p, x):
    """A table by weights of all entries, which are those of the two next ones."""
    t = 8 + 4 * (x @ p["w"])
    w = jnp.maximum(0.0, 1 - jnp.abs(t[..., None] - jnp.arange(32.0)))
    return w @ p["v"][0]


def searched(p, x):
    """A table between its knots, which are searched."""
    knots = jnp.linspace(-1.0, 1.0, 32)
    return jnp.interp(jnp.tanh(x @ p["w"]).ravel(), knots, p["v"][0]).reshape(x.shape)


def spline(p, x):
    """Cubic, of a Kolmogorov-Arnold network: compared with each knot."""
    h, knots = jnp.tanh(x @ p["w"])[..., None], jnp.linspace(-1.6, 1.6, 12)
    basis = ((h >= knots[:-1]) & (h < knots[1:])).astype(h.dtype)
    for k in range(1, 4):
        left = (h - knots[: -k - 1]) / (knots[k:-1] - knots[: -k - 1])
        right = (knots[k + 1 :] - h) / (knots[k + 1 :] - knots[1:-k])
        basis = left * basis[..., :-1] + right * basis[..., 1:]
    return jnp.einsum("ndk,de->nek", basis, p["v"])


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvp(lambda x, t: (straight_through(*x), *t))


@jax.custom_vjp
def spike(v):
    return (v > 0.5).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g / (1 + jnp.abs(v)),))


@jax.custom_vjp
def linear_relu(x, w):
    return jax.nn.relu(x @ w)


def linear_relu_backward(residuals, g):
    x, w, y = residuals
    g = jnp.where(y > 0, g, 0)
    return g @ w.T, x.T @ g


linear_relu.defvjp(
    lambda x, w: ((y := linear_relu(x, w)), (x, w, y)), linear_relu_backward
)


@jax.custom_vjp
def relu_linear(x, w):
    return jax.nn.relu(x) @ w


relu_linear.defvjp(
    lambda x, w: (relu_linear(x, w), (x, w)),
    lambda xw, g: (
        jnp.where(xw[0] > 0, g @ xw[1].T, 0),
        jax.nn.relu(xw[0]).T @ g,
    ),
)


@jax.custom_vjp
def scaled_linear(x, s, w):
    return (x / s) @ w


def scaled_linear_backward(residuals, g):
    x, s, w = residuals
    inside = jnp.abs(x / s) <= 2
    return inside * (g @ w.T) / s, None, (x / s).T @ g


scaled_linear.defvjp(
    lambda x, s, w: (scaled_linear(x, s, w), (x, s, w)), scaled_linear_backward
)


def quantization_aware(p, x):
    h = x @ p["w"]
    return scaled_linear(h, jnp.abs(h).max(-1, keepdims=True) / 3, p["v"])


def flow(p, x):
    times = jnp.linspace(0.0, 1.0, 3)
    return odeint(lambda y, t: jnp.tanh(y @ p["w"]), x, times)


NEAR_ONE = jnp.linspace(0.9, 0.999, 64)[:, None] * X
NEAR_ONE /= jnp.linalg.norm(X, axis=-1, keepdims=True)


def poincare(p, x):
    h = x @ p["w"]
    square = lambda a: jnp.sum(a * a, -1)  # noqa: E731
    volume = (1 - square(h)) * (1 - square(h[::-1]))
    return jnp.arccosh(1 + 2 * square(h - h[::-1]) / volume)


def running_maxima(p, x):
    """Each beside the one before; the first is minus infinity."""

    def step(m, row):
        new = jnp.maximum(m, row)
        return new, (m, jnp.exp(m - new))

    _, (before, shrunk) = jax.lax.scan(step, jnp.full(32, -jnp.inf), x @ p["w"])
    return jnp.exp(before) + shrunk * x


def posterior(p, x):
    """Of a hidden Markov model's states: alphas and betas of some -100."""
    e, rates = 3 * jax.nn.log_softmax(x @ p["w"])[:, :8], normal(5, 8, 8)

    def forth(a, e):
        a = jax.nn.logsumexp(a[:, None] + rates, 0) + e
        return a, a

    def back(b, e):
        return jax.nn.logsumexp(rates + (b + e)[None], 1), b

    last, alphas = jax.lax.scan(forth, jnp.zeros(8), e)
    _, betas = jax.lax.scan(back, jnp.zeros(8), e, reverse=True)
    return jnp.exp(alphas + betas - jax.nn.logsumexp(last))


def padded(fill):
    """Logits of a head with an adapter; the last are no words."""
    mask = jnp.where(jnp.arange(32) < 28, 0, fill)
    return lambda p, x: jax.nn.softmax(x @ p["w"] + (x @ p["v"]) @ p["v"].T + mask)


def scaled_logarithms(p, x):
    """A conditional random field's, at some temperature."""
    rates = normal(5, 8, 8)

    def step(a, e):
        return 2.0 * jax.nn.logsumexp((a[:, None] + rates) / 2.0, 0) + e, None

    return jax.lax.scan(step, jnp.zeros(8), (x @ p["w"])[:, :8])[0]


@jax.custom_jvp
def binarized(v):
    return jnp.where(v >= 0, 1.0, -1.0)


@binarized.defjvp
def _(primals, tangents):
    return binarized(*primals), tangents[0]


def nearly_upright(angle):
    return jnp.clip(angle, -1.4, 1.4)


EXPERTS = {"e": normal(0, 50, 32), "w": W, "g": normal(2, 32, 4) / 6}
EXPERTS["x"] = normal(3, 4, 32, 32) / 6
ONE = {"w": W}
TWO = {"w": W, "v": normal(2, 32, 32) / 6}
CASES = ATTENTION | {
    "experts choose tokens, of ids": (experts, EXPERTS, IDS),
    "relu, of ids": (
        lambda p, i: jax.nn.relu(p["e"][i] @ p["w"]) @ p["w"],
        EXPERTS,
        IDS,
    ),
    "log of one minus": (
        lambda p, x: jnp.log(1 - jnp.exp(-jnp.abs(x @ p["w"]))),
        ONE,
        X,
    ),
    "log of one plus": (
        lambda p, x: jnp.log(1.0 + x @ p["w"]),
        {"w": jnp.eye(32)},
        jnp.clip(X / 2, -0.999, 1.0),
    ),
    "log of sorted": (
        lambda p, x: jnp.log(1.0 + jnp.sort(jnp.tanh(x @ p["w"]))),
        ONE,
        X,
    ),
    "reciprocal, guarded": (
        lambda p, x: (x @ p["w"]) / (jax.nn.relu(x @ p["v"]) + 0.1),
        TWO,
        X,
    ),
    "log, guarded": (
        lambda p, x: (x @ p["w"]) * jnp.log((x @ p["v"]) ** 2 + 0.25),
        TWO,
        X,
    ),
    "bessel": (lambda p, x: jax.scipy.special.i0e(x @ p["w"]) @ p["v"], TWO, X),
    "hyperbolic distance": (poincare, {"w": jnp.eye(32)}, NEAR_ONE),
    "pairs in one batch": (
        lambda p, x: jnp.linalg.norm((h := x @ p["w"])[::2] - h[1::2], axis=-1),
        ONE,
        jnp.repeat(X, 2, 0) + 0.003 * normal(6, 128, 32),
    ),
    "straight through": (lambda p, x: straight_through(x @ p["w"]) @ p["v"], TWO, X),
    "interpolated": (interpolated, TWO, X),
    **{
        f"interpolated, {name}": (read_between(cell), TWO, X)
        for name, cell in CELLS.items()
    },
    "interpolated by hats": (hats, TWO, X),
    "searched": (searched, TWO, X),
    "spline": (spline, TWO, X),
    "spikes": (lambda p, x: spike(x @ p["w"]) @ p["v"], TWO, X),
    "approximately the best": (
        lambda p, x: jax.lax.approx_max_k(x @ p["w"], 4)[0] ** 2,
        ONE,
        X,
    ),
    "running maxima": (running_maxima, ONE, X),
    "turned by an angle": (
        lambda p, x: jnp.abs(
            jnp.fft.fft(x @ p["w"]) * jnp.exp(-2j * jnp.pi * jnp.arange(32) / 32) + 1
        ),
        ONE,
        X,
    ),
    "padded words": (padded(-jnp.inf), TWO, X),
    "words padded by a large number": (padded(-1e30), TWO, X),
    "logarithms with a factor": (scaled_logarithms, ONE, X),
    "binarized": (lambda p, x: binarized(x @ p["w"]) @ p["v"], TWO, X),
    "its result kept by hand": (
        lambda p, x: linear_relu(x, p["w"]) @ p["v"],
        TWO,
        X,
    ),
    "decided by hand": (lambda p, x: relu_linear(x @ p["w"], p["v"]), TWO, X),
    "decided by hand of a function": (
        lambda p, x: relu_linear(jnp.tanh(x @ p["w"]), p["v"]),
        TWO,
        X,
    ),
    "divided by hand": (quantization_aware, TWO, X),
    "differential equation": (flow, ONE, X),
    "secants": (lambda p, x: 1 / jnp.cos(nearly_upright(x @ p["w"])), ONE, X),
    "tangents": (lambda p, x: jnp.tan(nearly_upright(x @ p["w"])), ONE, X),
    "tangents of complex numbers": (
        lambda p, x: jnp.tanh(x @ p["w"] + 1j * nearly_upright(x @ p["v"])).imag,
        TWO,
        X,
    ),
    "remainder": (lambda p, x: jnp.mod(4 * (x @ p["w"]), 3.0) ** 2, ONE, X),
}


def errors(fun, params, x, policy):
    """Of the gradient by each parameter, relative."""

    def loss(params, fun):
        y = fun(params, x)
        return jnp.sum(normal(9, *y.shape) * y)

    @jax.jit
    def errors(params):
        wrapped = jc.checkpoint(fun, policy=policy, params=0)
        found, exact = (jax.grad(loss)(params, f) for f in (wrapped, fun))
        off = jax.tree.map(jnp.subtract, found, exact)
        norms = (map(jnp.linalg.norm, jax.tree.leaves(tree)) for tree in (off, exact))
        return list(map(jnp.divide, *norms))

    return list(map(float, errors(params)))
