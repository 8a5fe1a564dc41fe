"""Attention, masked in any way and by any loop, and what stands in its place."""

import jax
import jax.numpy as jnp

from tests.draws import normal

X = normal(3, 64, 32)
W = normal(1, 32, 32) / 6
CAUSAL = jnp.tri(64, dtype=bool)


def scores(p, x):
    q, k = x @ p["q"], x @ p["k"]
    return jnp.where(CAUSAL, q @ k.T / 8, -jnp.inf)


def to_the_best(p, x):
    """Attention to eight keys; in the first rows fewer are allowed."""
    s, i = jax.lax.top_k(scores(p, x), 8)
    return jnp.einsum("tk,tkd->td", jax.nn.softmax(s), x[i])


def state_space(p, x):
    """Mamba-2's quadratic form: decays are exponentials of differences of sums."""
    a = jnp.cumsum(-jax.nn.softplus(x @ p["a"]), 0)
    decay = jnp.exp(jnp.where(CAUSAL, a - a.T, -jnp.inf))
    return (decay * ((x @ p["b"]) @ (x @ p["c"]).T)) @ x


def attention_free(p, x):
    e = jnp.exp(x @ p["w"])
    return jnp.cumsum(e * x, 0) / jnp.cumsum(e, 0)


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

QK = {"q": W, "k": normal(2, 32, 32) / 6}
GATED = QK | {"i": normal(4, 32, 1), "f": normal(5, 32, 1) / 6}
STATES = {
    name: normal(i, 32, 1 if name == "a" else 16) / 6 for i, name in enumerate("abc")
}
ATTENTION = {
    "attention to the best": (to_the_best, QK, X),
    "sorted": (lambda p, x: jax.nn.softmax(jnp.sort(scores(p, x))), QK, X),
    "state space": (state_space, STATES, X),
    "attention free": (
        attention_free,
        {"w": normal(1, 64, 64) / 8},
        normal(5, 256, 64),
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
    "retention": (retention, QK, X),
    "exponential gates": (exponential_gates, GATED, X),
    "attention block by block": (block_by_block, QK, X),
    "attention of queries in turn": (queries_in_turn, QK, X),
    "scores that a rule keeps": (
        lambda p, x: keeps_scores(x @ p["q"], x @ p["k"], x),
        QK,
        X,
    ),
}
