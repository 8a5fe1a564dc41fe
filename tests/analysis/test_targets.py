"""Soft targets within a checkpoint, near the end: logits 0.3 % from what is asked for.

Rounded in 8 bits, to within 0.5 % of the largest of a group, nothing would be left of
what softmax and target differ by: gradients were 1.1 to 2.5 times themselves off.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcompact as jc
from tests.analysis.difference_cases import PARAMS, X, Y, error, predicted
from tests.cases import slow
from tests.draws import normal


@jax.custom_vjp
def by_rule(logits, targets):
    """As T5X's and MaxText's, which keep exponentials."""
    return by_rule_forward(logits, targets)[0]


def by_rule_forward(logits, targets):
    shifted = logits - logits.max(-1, keepdims=True)
    raised = jnp.exp(shifted)
    total = raised.sum(-1, keepdims=True)
    loss = -jnp.sum(targets * (shifted - jnp.log(total)), -1)
    return loss, (targets, raised, total)


def by_rule_backward(kept, ct):
    targets, raised, total = kept
    return ct[:, None] * (raised / total - targets), jnp.zeros_like(targets)


by_rule.defvjp(by_rule_forward, by_rule_backward)


def again(target):
    """A cross-entropy whose rule makes the softmax again, of the logits."""

    @jax.custom_vjp
    def loss(logits, kept):
        return optax.softmax_cross_entropy(logits, target(kept))

    loss.defvjp(
        lambda logits, kept: (loss(logits, kept), (logits, kept)),
        lambda both, ct: (
            ct[:, None] * (jax.nn.softmax(both[0]) - target(both[1])),
            None,
        ),
    )
    return loss


pytestmark = pytest.mark.usefixtures("any_rank", "standard_promotion")

SOFT, RATES, LIKELY = jax.nn.softmax(Y), jnp.exp(Y), jax.nn.sigmoid(Y)
HALF = (jnp.arange(128) < 64)[:, None]  # of the tokens


def between(p, q):
    """Jensen and Shannon's divergence."""
    mean = (p + q) / 2
    return p * jnp.log(p / mean) + q * jnp.log(q / mean)


RANKS = jnp.argsort(Y, -1)


def ranked(z):
    """Plackett and Luce's, and Cox's for rows of times."""
    return jax.lax.cumlogsumexp(40 * z, axis=1) - 40 * z


def capped(p, x):
    return 5 * jnp.tanh(predicted(p, x) / 5)


LOSSES = {
    "cross-entropy": lambda p, x: optax.softmax_cross_entropy(predicted(p, x), SOFT),
    "divergence": lambda p, x: optax.kl_divergence(
        jax.nn.log_softmax(predicted(p, x)), SOFT
    ),
    "the other divergence": lambda p, x: optax.kl_divergence(
        jax.nn.log_softmax(Y), jax.nn.softmax(predicted(p, x))
    ),
    "the other divergence, by logarithms": lambda p, x: (
        jax.nn.softmax(o := predicted(p, x))
        * (jax.nn.log_softmax(o) - jax.nn.log_softmax(Y))
    ),
    "by samples": lambda p, x: jnp.exp(off := predicted(p, x) - Y) - off - 1,
    "between": lambda p, x: between(jax.nn.softmax(predicted(p, x)), SOFT),
    "weighing what is not theirs": lambda p, x: (
        jnp.exp(o := predicted(p, x))
        - RATES * o
        + 1e-4 * jax.lax.stop_gradient(o) * (x @ p["a"][:, :32])
    ),
    "of ranks": lambda p, x: ranked(jnp.take_along_axis(predicted(p, x), RANKS, -1)),
    "at a temperature": lambda p, x: (
        -jnp.sum(jax.nn.softmax(Y / 2) * jax.nn.log_softmax(predicted(p, x) / 2), -1)
    ),
    "of some tokens": lambda p, x: HALF * SOFT * jax.nn.log_softmax(predicted(p, x)),
    "in one product": lambda p, x: -jnp.vdot(SOFT, jax.nn.log_softmax(predicted(p, x))),
    "capped": lambda p, x: optax.softmax_cross_entropy(
        capped(p, x), jax.nn.softmax(5 * jnp.tanh(Y / 5))
    ),
    "rates": lambda p, x: jnp.exp(o := predicted(p, x)) - RATES * o,
    "rates by halves": lambda p, x: (
        jnp.exp(o := predicted(p, x)) - RATES / 2 * (2.0 * o)
    ),
    "sigmoids": lambda p, x: optax.sigmoid_binary_cross_entropy(
        predicted(p, x), LIKELY
    ),
    "softplus": lambda p, x: jax.nn.softplus(o := predicted(p, x)) - LIKELY * o,
    "by a rule": lambda p, x: by_rule(predicted(p, x), SOFT),
    "by a rule, again": lambda p, x: again(lambda t: t)(predicted(p, x), SOFT),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("policy", "bound"), [slow("int8", 0.01), ("int4", 0.15)])
def test_the_gradient_near_a_soft_target(name, policy, bound):
    """Two tensors are rounded: each by 10 % of its size with 4 bits, 0.6 % with 8."""

    def loss(p, x):
        return jnp.sum(LOSSES[name](p, x))

    assert error(loss, getattr(jc.policies, policy)()) < bound


LABELS = jax.random.randint(jax.random.key(4), (128,), 0, 32)


def one_hot(labels):
    return jax.nn.one_hot(labels, 32)


def smoothed(logits):
    """Without a tensor of targets, as fairseq does."""
    likely = jax.nn.log_softmax(logits)
    true = jnp.take_along_axis(likely, LABELS[:, None], 1)[:, 0]
    return -0.9 * true - 0.1 * likely.mean(-1)


@pytest.mark.parametrize(
    ("loss", "whole"),
    [
        (smoothed, True),
        (
            lambda z: optax.softmax_cross_entropy(
                z, optax.smooth_labels(one_hot(LABELS), 0.1)
            ),
            True,
        ),
        # Targets of zero and one.
        (lambda z: optax.softmax_cross_entropy(z, one_hot(LABELS)), False),
        (
            lambda z: optax.sigmoid_binary_cross_entropy(z, one_hot(LABELS)),
            False,
        ),
        (lambda z: again(one_hot)(z, LABELS), False),
        (lambda z: optax.softmax_cross_entropy_with_integer_labels(z, LABELS), False),
        (
            lambda z: (
                HALF[:, 0] * optax.softmax_cross_entropy_with_integer_labels(z, LABELS)
            ),
            False,
        ),
        # No targets.
        (lambda z: jnp.abs(Y[:, :1]) * jax.nn.log_softmax(z), False),
        (lambda z: jax.nn.softplus(-z), False),
        (lambda z: Y[:, 0] * jax.nn.log_softmax(z)[:, 0], False),
        (lambda z: Y * jnp.tanh(z), False),
        # Its difference is stored.
        (lambda z: jnp.square(jax.nn.sigmoid(z) - LIKELY), False),
    ],
)
def test_logits_are_whole_where_there_is_a_soft_target(loss, whole):
    rows = jc.explain(
        lambda p, x: jnp.sum(loss(predicted(p, x))),
        PARAMS,
        X,
        policy=jc.policies.int8(),
        params=0,
    ).rows
    (action,) = {row.action for row in rows if row.name == "dot_general.1"}
    assert (action == "Save()") == whole


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_exponentials_that_a_rule_keeps_for_labels(policy):
    """Memorized, as predictions of 0.99 are; nothing else is rounded. In 4 bits they
    would be zero or a seventh."""
    params = {"w": normal(5, 64, 32) / 8}
    x = one_hot(LABELS) @ params["w"].T * 8

    def loss(p, x):
        return jnp.sum(by_rule(x @ p["w"], one_hot(LABELS)))

    likely = jax.nn.softmax(x @ params["w"])
    assert 0.9 < jnp.median(likely[jnp.arange(128), LABELS]) < 0.999
    policy = jc.Policy({"x": jc.Save()}, default=getattr(jc.policies, policy)())
    assert error(loss, policy, params, x) < 1e-5


def test_labels_that_a_rule_subtracts_are_made_again():
    def loss(p, x, labels):
        return jnp.sum(by_rule(predicted(p, x), one_hot(labels)))

    rows = jc.explain(loss, PARAMS, X, LABELS, policy=jc.policies.int4(), params=0).rows
    stored = {row.name: row.action for row in rows if row.name.startswith("custom_vjp")}
    assert stored == {
        "custom_vjp_call.0.residual1": "Save()",
        "custom_vjp_call.0.residual2": "Save()",
    }


FEW = {"a": normal(7, 32, 256) / 6, "b": normal(8, 256, 16) / 16}
NEAR = predicted(FEW, X) + 0.003 * normal(3, 128, 16)


def contrasted(z):
    """Of pairs that are found already, as CLIP's are written down."""
    z, bank = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (z, NEAR))
    return -jnp.diag(jax.nn.log_softmax(z @ bank.T / 0.01))


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: optax.softmax_cross_entropy_with_integer_labels(
            40 * z, NEAR.argmax(-1)
        ),
        contrasted,
    ],
    ids=["memorized", "contrasted"],
)
def test_few_logits_are_whole_in_any_loss(loss):
    """A sixteenth as large as what they are made of."""

    def whole(p, x):
        return jnp.sum(loss(predicted(p, x)))

    assert error(whole, jc.policies.int8(), FEW) < 0.01
