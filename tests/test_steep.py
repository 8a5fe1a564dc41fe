"""Small errors of what is stored are small errors of the gradient.

Functions that a rounded tensor could make infinite, or much larger: steep ones,
decisions, sums that belong together. The bounds are several times what rounding causes
by itself: of 8 bits 0.5 % of a tensor, of 4 bits 7 %.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.ode import odeint

import jaxcompact as jc
from jaxcompact.planner.milp import solve
from jaxcompact.planner.problem import named, problem_of

pytestmark = pytest.mark.usefixtures("standard_promotion")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


X = normal(3, 64, 32)
W = normal(1, 32, 32) / 6
IDS = jax.random.randint(jax.random.key(5), (128,), 0, 50)
CAUSAL = jnp.tri(64, dtype=bool)


def scores(p, x):
    q, k = x @ p["q"], x @ p["k"]
    return jnp.where(CAUSAL, q @ k.T / 8, -jnp.inf)


def to_the_best(p, x):
    """Attention to eight keys; in the first rows fewer are allowed."""
    s, i = jax.lax.top_k(scores(p, x), 8)
    return jnp.einsum("tk,tkd->td", jax.nn.softmax(s), x[i])


def experts(p, ids):
    """Each takes the tokens that it likes best."""
    h = p["e"][ids] @ p["w"]
    v, i = jax.lax.top_k(jax.nn.sigmoid(h @ p["g"]).T, 32)
    y = jnp.einsum("ecd,edf->ecf", h[i], p["x"]) * v[..., None]
    return jnp.zeros_like(h).at[i].add(y)


def state_space(p, x):
    """Mamba-2's quadratic form: decays are exponentials of differences of sums."""
    a = jnp.cumsum(-jax.nn.softplus(x @ p["a"]), 0)
    decay = jnp.exp(jnp.where(CAUSAL, a - a.T, -jnp.inf))
    return (decay * ((x @ p["b"]) @ (x @ p["c"]).T)) @ x


def attention_free(p, x):
    e = jnp.exp(x @ p["w"])
    return jnp.cumsum(e * x, 0) / jnp.cumsum(e, 0)


def interpolated(p, x):
    """A table, read between its entries."""
    t = 30 * jax.nn.sigmoid(x @ p["w"])
    i = jnp.floor(t)
    k = jax.lax.stop_gradient(i).astype(jnp.int32)
    return p["v"][0, k] * (1 - t + i) + p["v"][0, k + 1] * (t - i)


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


def attended(row):
    """Attention whose masked scores are made in something with a body."""

    def fun(p, x):
        masked = row(x @ p["q"], x @ p["k"])
        return jax.nn.softmax(masked) @ x

    return fun


def masked(q, k):
    return jnp.where(CAUSAL, q @ k.T / 8, -jnp.inf)


@jax.custom_vjp
def masked_by_hand(q, k):
    return masked(q, k)


def masked_backwards(qk, g):
    (q, k), g = qk, jnp.where(CAUSAL, g, 0) / 8
    return g @ k, g.T @ q


masked_by_hand.defvjp(lambda q, k: (masked(q, k), (q, k)), masked_backwards)


def row_by_row(fill):
    return lambda q, k: jax.lax.map(
        lambda row: jnp.where(row[1], k @ row[0] / 8, fill), (q, CAUSAL)
    )


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


def retention(p, x):
    """RetNet's normalization: sums that cancel, guarded by one."""
    s = jnp.tril((x @ p["q"]) @ (x @ p["k"]).T) / 8
    return s / jnp.maximum(jnp.abs(s.sum(-1, keepdims=True)), 1.0) @ x


def exponential_gates(p, x):
    """xLSTM's matrix memory: the sums that cancel are of exponentials, up to e^20."""
    q, k = x @ p["q"], x @ p["k"]
    forget = jnp.cumsum(jax.nn.log_sigmoid((x @ p["f"])[:, 0] + 3))
    d = jnp.where(CAUSAL, forget[:, None] - forget + (x @ p["i"])[:, 0], -jnp.inf)
    m = d.max(-1, keepdims=True)
    s = (q @ k.T / 6) * jnp.exp(d - m)
    return s / (jnp.maximum(jnp.abs(s.sum(-1, keepdims=True)), jnp.exp(-m)) + 1e-6) @ x


def block_by_block(p, x):
    """Attention to some keys after others."""
    q, k = 3 * (x @ p["q"]), x @ p["k"]

    def step(state, kv):
        m, total, o = state
        s = q @ kv[0].T / 6
        new = jnp.maximum(m, s.max(-1))
        e, shrunk = jnp.exp(s - new[:, None]), jnp.exp(m - new)
        return (new, total * shrunk + e.sum(-1), o * shrunk[:, None] + e @ kv[1]), None

    begin = jnp.full(64, -jnp.inf), jnp.zeros(64), jnp.zeros((64, 32))
    blocks = k.reshape(4, 16, 32), x.reshape(4, 16, 32)
    (_, total, o), _ = jax.lax.scan(step, begin, blocks)
    return o / total[:, None]


def queries_in_turn(p, x):
    q, k = 3 * (x @ p["q"]), x @ p["k"]
    rows = q.reshape(4, 16, 32)
    return jax.lax.map(lambda q: jax.nn.softmax(q @ k.T / 6) @ x, rows)


def padded(fill):
    """Logits of a head with an adapter; the last are no words."""
    mask = jnp.where(jnp.arange(32) < 28, 0, fill)
    return lambda p, x: jax.nn.softmax(x @ p["w"] + (x @ p["v"]) @ p["v"].T + mask)


@jax.custom_vjp
def keeps_scores(q, k, v):
    return keeps_scores_forward(q, k, v)[0]


def keeps_scores_forward(q, k, v):
    s = masked(q, k)
    lse = jax.nn.logsumexp(s, -1, keepdims=True)
    return jnp.exp(s - lse) @ v, (q, k, v, s, lse)


def keeps_scores_backward(residuals, g):
    q, k, v, s, lse = residuals
    p, dp = jnp.exp(s - lse), g @ v.T
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / 8
    return ds @ k, ds.T @ q, p.T @ g


keeps_scores.defvjp(keeps_scores_forward, keeps_scores_backward)


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


QK = {"q": W, "k": normal(2, 32, 32) / 6}
GATED = QK | {"i": normal(4, 32, 1), "f": normal(5, 32, 1) / 6}
EXPERTS = {"e": normal(0, 50, 32), "w": W, "g": normal(2, 32, 4) / 6}
EXPERTS["x"] = normal(3, 4, 32, 32) / 6
STATES = {
    name: normal(i, 32, 1 if name == "a" else 16) / 6 for i, name in enumerate("abc")
}
ONE = {"w": W}
TWO = {"w": W, "v": normal(2, 32, 32) / 6}
CASES = {
    "attention to the best": (to_the_best, QK, X),
    "sorted": (lambda p, x: jax.nn.softmax(jnp.sort(scores(p, x))), QK, X),
    "experts choose tokens, of ids": (experts, EXPERTS, IDS),
    "relu, of ids": (
        lambda p, i: jax.nn.relu(p["e"][i] @ p["w"]) @ p["w"],
        EXPERTS,
        IDS,
    ),
    "state space": (state_space, STATES, X),
    "attention free": (
        attention_free,
        {"w": normal(1, 64, 64) / 8},
        normal(5, 256, 64),
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
    "hyperbolic distance": (poincare, {"w": jnp.eye(32)}, NEAR_ONE),
    "pairs in one batch": (
        lambda p, x: jnp.linalg.norm((h := x @ p["w"])[::2] - h[1::2], axis=-1),
        ONE,
        jnp.repeat(X, 2, 0) + 0.003 * normal(6, 128, 32),
    ),
    "straight through": (lambda p, x: straight_through(x @ p["w"]) @ p["v"], TWO, X),
    "interpolated": (interpolated, TWO, X),
    "spikes": (lambda p, x: spike(x @ p["w"]) @ p["v"], TWO, X),
    "approximately the best": (
        lambda p, x: jax.lax.approx_max_k(x @ p["w"], 4)[0] ** 2,
        ONE,
        X,
    ),
    "masked in a map": (attended(row_by_row(-jnp.inf)), QK, X),
    "masked in a map by a large number": (attended(row_by_row(-1e9)), QK, X),
    "masked in a branch": (
        attended(
            lambda q, k: jax.lax.cond(q[0, 0] > 9, lambda q, k: q @ k.T, masked, q, k)
        ),
        QK,
        X,
    ),
    "masked in a checkpoint": (attended(jax.checkpoint(masked)), QK, X),
    "masked by hand": (attended(masked_by_hand), QK, X),
    "masked by what is added": (
        attended(lambda q, k: (q @ k.T / 8).at[jnp.triu_indices(64, 1)].add(-jnp.inf)),
        QK,
        X,
    ),
    "running maxima": (running_maxima, ONE, X),
    "retention": (retention, QK, X),
    "exponential gates": (exponential_gates, GATED, X),
    "attention block by block": (block_by_block, QK, X),
    "attention of queries in turn": (queries_in_turn, QK, X),
    "turned by an angle": (
        lambda p, x: jnp.abs(
            jnp.fft.fft(x @ p["w"]) * jnp.exp(-2j * jnp.pi * jnp.arange(32) / 32) + 1
        ),
        ONE,
        X,
    ),
    "padded words": (padded(-jnp.inf), TWO, X),
    "words padded by a large number": (padded(-1e30), TWO, X),
    "scores that a rule keeps": (
        lambda p, x: keeps_scores(x @ p["q"], x @ p["k"], x),
        QK,
        X,
    ),
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
    "remainder": (lambda p, x: jnp.mod(4 * (x @ p["w"]), 3.0) ** 2, ONE, X),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("policy", "bound"), [("int8", 0.02), ("int4", 0.2)])
def test_gradients_are_near(name, policy, bound):
    fun, params, x = CASES[name]
    largest = max(errors(fun, params, x, getattr(jc.policies, policy)()))
    assert largest < bound


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


def test_logarithms_that_a_loop_adds_up_are_not_rounded():
    """Their exponentials take the errors, of numbers in the hundreds, as factors."""
    [error] = errors(posterior, ONE, X, jc.policies.int8())
    assert error < 0.05


GUARDED = {
    "logarithm": lambda h: jnp.log(jnp.maximum(h, 0.2)),
    "reciprocal": lambda h: 1 / jnp.maximum(h, 0.2),
    "clamped": lambda h: jnp.log(jax.lax.clamp(0.1, h, 10.0)),
}


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize(("policy", "bound"), [("int8", 0.1), ("int4", 0.6)])
def test_a_guard_holds_for_what_is_rounded(name, policy, bound):
    """It was chosen not to be the guard; rounded it may be below, even negative."""
    policy = getattr(jc.policies, policy)()
    [error] = errors(lambda p, x: GUARDED[name](x @ p["w"]), ONE, X, policy)
    assert error < bound


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_a_factor_that_is_made_again_is_a_triangle(policy):
    """Of `cholesky` the primitive leaves the other one as it happens to be."""
    params = {"s": W @ W.T + jnp.eye(32)}

    def fun(p, x):
        return jnp.tanh(x @ jnp.linalg.cholesky(p["s"]).T)

    [error] = errors(fun, params, X, getattr(jc.policies, policy)())
    assert error < (0.02 if policy == "int8" else 0.2)


def test_long_chains_are_traced():
    """Sums of sums of quotients, followed once each; chains beyond Python's depth."""

    def normalized(w):
        a = jnp.exp(X @ w)
        for _ in range(14):  # four times as long for each, when followed each way
            a = a / a.sum(1, keepdims=True)
            a = a / a.sum(0, keepdims=True)
        return jnp.sum(a * a)

    def chain(w):
        h = (X @ w) ** 2 + 1.0
        for _ in range(1200):
            h = h + 1e-4 / h
        return jnp.sum(jax.nn.softmax(jnp.log(h)) * X)

    for fun in (normalized, chain):
        wrapped = jc.checkpoint(fun, policy=jc.policies.int8())
        jax.make_jaxpr(jax.grad(wrapped))(W)


SIZES = jnp.where(jnp.arange(32) % 2, 1.0, 0.03)
NORMS = {
    "rms of rows": (
        lambda p, x: (
            (h := x @ p["w"]) * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        ),
        W,
        X * jnp.tile(SIZES, 2)[:, None],
    ),
    "length of rows": (
        lambda p, x: (h := x @ p["w"]) / jnp.linalg.norm(h, axis=-1, keepdims=True),
        W,
        X * jnp.tile(SIZES, 2)[:, None],
    ),
    "largest of rows": (
        lambda p, x: (h := x @ p["w"]) / jnp.abs(h).max(-1, keepdims=True),
        W,
        X * jnp.tile(SIZES, 2)[:, None],
    ),
    "variance of channels": (
        lambda p, x: ((h := x @ p["w"]) - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5),
        W * SIZES[None],
        X,
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("policy", ["int8", "int4", "int3"])
def test_a_norm_of_what_is_rounded_away_stays(name, policy):
    """What is small beside its group decodes to zero: wrong by itself, by no more."""
    fun, w, x = NORMS[name]
    [error] = errors(fun, {"w": w}, x, getattr(jc.policies, policy)())
    assert error < 1


def test_a_plan_makes_no_norm_again_of_what_is_rounded():
    fun, w, x = NORMS["variance of channels"]

    def make_gradient(policy):
        wrapped = jc.checkpoint(fun, policy=policy, params=0)
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(wrapped({"w": w}, x)))), (w, x)

    found = jc.sensitivity(make_gradient, codecs=[jc.Quantized(2, 32)])
    card, codecs = jc.memory.devices()["h200"], [jc.Quantized(2, 32)]
    traces, asked = problem_of(make_gradient, card, 2.0, found, codecs)
    items = []
    for item in asked.items:  # the product is rounded
        if item.tensor.name == "dot_general.0":
            options = tuple(o for o in item.options if o.lossy)
            item = replace(item, options=options, again=False)
        items.append(item)
    asked = replace(asked, items=tuple(items))
    chosen = named(asked.items, solve(asked, smallest=True).chosen)
    assert isinstance(chosen["dot_general.0"], jc.Quantized)
    label, actions = traces.traced.label, asked.actions | chosen
    plan = jc.Plan(label, actions, "h200", 1, 0.0, 0, 0.0, 0)
    gradient = make_gradient(plan)[0](w, x)
    exact = jax.grad(lambda w: jnp.sum(jnp.sin(fun({"w": w}, x))))(w)
    assert jnp.linalg.norm(gradient - exact) < jnp.linalg.norm(exact)


def test_what_is_returned_may_be_a_bool():
    wrapped = jc.checkpoint(lambda w, x: (jnp.tanh(x @ w), True), params=0)
    gradient = jax.grad(lambda w: wrapped(w, X)[0].sum())(W)
    assert jnp.isfinite(gradient).all() and bool(wrapped(W, X)[1])
