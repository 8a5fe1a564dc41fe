"""What exponentials are taken of has 8 bits: an error of it is one of all they make."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from tests.cases import slow
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("any_rank")


X = normal(3, 64, 32)
PARAMS = {"a": normal(1, 32, 64) / 5, "b": 1.6 * normal(2, 64, 16)}


def logits(p, x):
    return jax.nn.relu(x @ p["a"]) @ p["b"]


LABELS = logits(PARAMS, X).argmax(-1)  # confident and right, as trained ones are


def of_the_right(log_probabilities):
    return -jnp.mean(log_probabilities[jnp.arange(64), LABELS])


def in_parts(p, x):
    """Sums of logarithms that a loop adds up."""

    def step(total, part):
        x, labels = part
        loss = optax.softmax_cross_entropy_with_integer_labels(logits(p, x), labels)
        return total + loss.sum(), None

    parts = x.reshape(4, 16, 32), LABELS.reshape(4, 16)
    return jax.lax.scan(step, jnp.zeros(()), parts)[0]


def sampled(p, x):
    """Gumbel's softmax, nearly a choice."""
    noise = jax.random.gumbel(jax.random.key(0), (64, 16))
    choices = jax.nn.softmax((logits(p, x) / 16 + noise) / 0.1)
    return jnp.mean((choices @ p["b"].T[:, :32] - x) ** 2)


def deep_kernel(p, x):
    """A Gaussian process whose kernel is that of a network's outputs."""
    h = jnp.tanh(x[:24] @ p["a"] / 4) @ p["b"][:, :3] / 8
    distances = ((h[:, None] - h[None]) ** 2).sum(-1)
    factor = jnp.linalg.cholesky(jnp.exp(-distances / 2) + 0.01 * jnp.eye(24))
    solved = jax.scipy.linalg.cho_solve((factor, True), x[:24, 0])
    return x[:24, 0] @ solved / 2 + jnp.log(jnp.diag(factor)).sum()


def fast_sines(p, x):
    """SIREN."""
    h = jnp.sin(30 * (x[:, :2] @ p["a"][:2] / 2))
    return jnp.mean((jnp.sin(30 * (h @ p["b"] / 160)) - 1) ** 2)


def turns(p, x):
    """Angles as parts of a circle."""
    return jnp.mean((jnp.sin(2 * jnp.pi * (x @ p["a"]) + 1) @ p["b"] - x[:, :16]) ** 2)


def snake(p, x):
    """Each channel has a frequency of its own, which is learned."""
    h, a = x @ p["a"], 2 + p["b"][:, 0] / 2
    return jnp.mean(((h + jnp.sin(a * h) ** 2 / a) @ p["b"] - x[:, :16]) ** 2)


def few_phases(p, x):
    """Made again of few numbers."""
    h = x @ p["a"][:, :8]
    return jnp.mean((jnp.sin(4 * (h @ p["a"][:8])) @ p["b"] - x[:, :16]) ** 2)


def modulated(p, x):
    """Frequencies that are made of the input."""
    h, a = x @ p["a"], 5 * jax.nn.sigmoid(x @ p["a"])
    return jnp.mean((jnp.cos(h * a - h) @ p["b"] - x[:, :16]) ** 2)


def steep(function):
    """Of a sigmoid that a number makes steep; at 1 and 2 it would be as any other."""
    return lambda p, x: jnp.mean(function(x @ p["a"] @ p["b"] / 12) @ p["b"].T)


LOSSES = {
    "log softmax": lambda p, x: of_the_right(jax.nn.log_softmax(logits(p, x))),
    "log of softmax": lambda p, x: of_the_right(jnp.log(jax.nn.softmax(logits(p, x)))),
    "optax's": lambda p, x: optax.softmax_cross_entropy_with_integer_labels(
        logits(p, x), LABELS
    ).mean(),
    "binary": lambda p, x: optax.sigmoid_binary_cross_entropy(
        logits(p, x), jax.nn.one_hot(LABELS, 16)
    ).mean(),
    "logistic, by hand": lambda p, x: jnp.log(
        1 + jnp.exp((1 - 2 * jax.nn.one_hot(LABELS, 16)) * logits(p, x))
    ).mean(),
    "in a loop": in_parts,
    "sampled": sampled,
    "a deep kernel": deep_kernel,
    "fast sines": fast_sines,
    "turns": turns,
    "snake": snake,
    "few phases": few_phases,
    "modulated": modulated,
    "a soft threshold": steep(lambda h: h * jax.nn.sigmoid(20 * (h - 0.5))),
    "at a temperature": steep(lambda h: jnp.tanh(-h / 0.1)),
}


def errors(loss, policy):
    def gradient(loss):
        return jax.jit(jax.grad(loss))(PARAMS, X)

    off = jax.tree.map(
        lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b),
        gradient(jc.checkpoint(loss, policy=policy, params=0)),
        gradient(loss),
    )
    return max(map(float, jax.tree.leaves(off)))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bits", [4, slow(3)])
def test_gradients_are_near(name, bits):
    """Several times the rounding of what else is stored, 7 and 15 %.

    With as many bits for the logits most would be 0.5 to 16 off.
    """
    policy = {4: jc.policies.int4(), 3: jc.policies.int3()}[bits]
    bound = {4: 0.25, 3: 0.4}[bits] * (2 if name == "a deep kernel" else 1)
    assert errors(LOSSES[name], policy) < bound


@pytest.mark.parametrize(
    ("function", "bits"),
    [
        (lambda h: jax.nn.softplus(100 * h) / 100, 8),
        (lambda h: jax.nn.softplus(2 * h), 4),
        (lambda h: jax.nn.sigmoid((h - 0.5) / 0.1), 8),
        (lambda h: h * jax.nn.sigmoid(1.702 * h), 4),
        (lambda h: jax.lax.erf(-8 * h), 8),
        (lambda h: 30 * jnp.tanh(h / 30), 4),
        (jax.nn.gelu, 4),
        (jax.nn.silu, 4),
        (lambda h: jax.nn.log_sigmoid(h), 4),
        (lambda h: jax.nn.sigmoid(0.1 / (1 + h * h)), 4),
    ],
)
def test_what_a_number_makes_steep_has_8_bits(function, bits):
    policy = jc.policies.int4()
    said = jc.explain(steep(function), PARAMS, X, policy=policy, params=0)
    (product,) = (row for row in said.rows if row.name == "dot_general.1")
    assert product.action.startswith(f"Quantized(bits={bits}")


def straight_through(h):
    return h + jax.lax.stop_gradient(jnp.round(h) - h)


@jax.custom_vjp
def by_rule(h):
    return jnp.round(h)


by_rule.defvjp(lambda h: (jnp.round(h), None), lambda _, ct: (ct,))


@pytest.mark.parametrize("rounds", [straight_through, by_rule])
@pytest.mark.parametrize("width", [32, 64])
def test_the_gradient_of_a_step_that_is_learned(rounds, width):
    """As LSQ's (arXiv 1902.08153): of what rounding leaves over, 0.29 of a step.

    In 8 bits of five standard deviations, it is off by 0.006 of one, which is 0.1 of
    that at a step of 0.2. In 4 bits it would be off by 1 and more.
    """
    cts = normal(7, 64, width)

    def loss(step, x):
        h = rounds(jnp.clip(x @ PARAMS["a"][:, :width] / step, -8, 7)) * step
        return (h * cts).sum()

    small = jc.checkpoint(loss, policy=jc.policies.int4(), params=0)
    for step in (0.2, 0.3, 0.4):
        found, exact = (jax.grad(f, argnums=(0, 1))(step, X)[0] for f in (small, loss))
        assert abs(found - exact) < 0.25 * jnp.linalg.norm(cts) * 0.29


def stored(fun, *args):
    said = jc.explain(fun, *args, policy=jc.policies.int4(), params=0)
    return {row.name: row.action for row in (*said.rows, *said.inside)}


def test_what_is_no_exponent_has_four_bits():
    """Activations with an exponential inside, whose results are not a loss.

    And sines of no more than what is stored.
    """
    by_hand = (
        jnp.sin,
        lambda h: jnp.cos(h / 1.5 + 1),
        lambda h: h / (1 + jnp.exp(-h)),
        lambda h: h * jnp.tanh(jnp.log1p(jnp.exp(h))),
    )
    known = jax.nn.silu, jax.nn.softplus, jax.nn.elu, jax.nn.gelu
    for activation in (*known, *by_hand):

        def mlp(p, x, activation=activation):
            return activation(x @ p["a"]) @ p["b"]

        found = stored(mlp, PARAMS, X)
        assert found["x"] == "Quantized(bits=4)"
        assert found["dot_general.0"].startswith("Quantized(bits=4")
    assert stored(logits, PARAMS, X)["dot_general.1"] == "drop"


def test_a_name_on_the_way_changes_nothing():
    """It is made again of what is stored, which has as many bits as without."""

    def scores(p, x, name=checkpoint_name):
        q, k = (name(x @ p["a"] / 8 + n, f"q{n}") for n in range(2))
        attended = jax.nn.softmax(q @ k.T) @ x
        return of_the_right(jax.nn.log_softmax(name(attended @ p["a"] / 8, "logits")))

    named = stored(scores, PARAMS, X)
    plain = stored(partial(scores, name=lambda x, name: x), PARAMS, X)
    assert {n: action for n, action in named.items() if n in plain} == plain
    assert {named[n] for n in ("q0", "q1", "logits")} == {"Recompute()"}
    assert sum("bits=8" in action for action in plain.values()) == 3


@pytest.mark.parametrize(
    "of_scores",
    [jnp.exp, jnp.exp2, lambda s: 2.0**s, lambda s: jnp.sin(3 * s), jax.nn.softmax],
    ids=["exp", "exp2", "power", "sine", "softmax"],
)
def test_what_scores_are_made_again_of(of_scores):
    """Has 8 bits, whatever makes their errors large."""

    def attended(p, x):
        q, k = x @ p["a"], x @ p["a"][:, ::-1]
        weights = of_scores(q @ k.T / 8)
        return weights / (1 + jnp.abs(weights).sum(-1, keepdims=True)) @ x

    found = stored(attended, PARAMS, X)
    eight = "Quantized(bits=8, symmetric=False, axis=-2)"
    assert found["dot_general.0"] == found["dot_general.1"] == eight
    assert found["dot_general.2"] == "Recompute()"


@pytest.mark.parametrize("width", [16, 320])
def test_scores_of_a_table(width):
    """Of relative positions, of learned queries: as those of q and k, made again.

    Of many terms they are stored, as logits are, and of what values are made again.
    """
    shapes = {"q": (32, width), "table": (width, 640), "v": (640, 32)}
    p = {n: normal(i, *s) / s[0] ** 0.5 for i, (n, s) in enumerate(shapes.items())}

    def attended(p, x):
        return jax.nn.softmax((x @ p["q"]) @ p["table"]) @ p["v"]

    found = stored(attended, p, X)
    eight = "Quantized(bits=8, symmetric=False, axis=-2)"
    few = {"dot_general.0": eight, "dot_general.1": "Recompute()"}
    many = {"dot_general.0": "Quantized(bits=4)"}
    many["dot_general.1"] = "Quantized(bits=8, symmetric=False)"
    assert (few if width == 16 else many).items() <= found.items()
    rows = jc.explain(attended, p, X, policy=jc.policies.int8(), params=0).rows
    assert {r.action for r in rows if r.name in few} <= {
        "Quantized(bits=8)",
        "Quantized(bits=8, symmetric=False)",
        "Recompute()",
    }
    small = jc.checkpoint(attended, policy=jc.policies.int4(), params=0)
    wrt = [
        jax.grad(lambda p, f=f: jnp.square(f(p, X)).sum())(p) for f in (attended, small)
    ]
    off = optax.tree.norm(jax.tree.map(jnp.subtract, *wrt)) / optax.tree.norm(wrt[0])
    assert off < 0.1

    def after_attention(p, x):
        scores = x @ x.T
        return jax.nn.softmax(jax.nn.softmax(scores) @ (x @ p["q"]) @ p["table"])

    found = stored(after_attention, p, X)
    assert found["dot_general.3"] == many["dot_general.1"]


def test_only_the_nearest_has_eight_bits():
    wide = "Quantized(bits=8, symmetric=False)"
    for name in ("binary", "logistic, by hand"):  # losses, as no activations are
        assert stored(LOSSES[name], PARAMS, X)["dot_general.1"] == wide
    found = stored(LOSSES["log softmax"], PARAMS, X)
    assert found["dot_general.1"] == wide
    assert found["dot_general.0"] == found["x"] == "Quantized(bits=4)"
    loop = stored(in_parts, PARAMS, X)
    assert loop["scan.0/dot_general.1"] == wide
    assert loop["scan.0/dot_general.0"] == "Quantized(bits=4)"


def test_a_codec_of_ones_own_has_no_exception():
    """A policy that says so for scores alone is asked."""
    policy = jc.policies.uniform(jc.Quantized(4))
    rows = jc.explain(LOSSES["log softmax"], PARAMS, X, policy=policy, params=0).rows
    actions = {row.name: row.action for row in rows}
    assert actions["dot_general.1"] == actions["dot_general.0"]


@pytest.mark.parametrize("policy", [jc.policies.int8(), jc.policies.int4()])
def test_logits_far_from_zero(policy):
    """A softmax does not see it, as of tied embeddings. With codes around zero the
    gradient is 0.089 off."""
    labels, x = jnp.arange(96) % 64, normal(0, 96, 128)
    wanted = 12 * jax.nn.one_hot(labels, 64) + 2 * normal(1, 96, 64) - 30
    w = jnp.linalg.lstsq(x, wanted)[0]

    def loss(w, x):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
        return losses.mean()

    small = jc.checkpoint(loss, policy=policy, params=0)
    exact, found = (jax.jit(jax.grad(f))(w, x) for f in (loss, small))
    assert jnp.linalg.norm(found - exact) < 0.02 * jnp.linalg.norm(exact)
