"""What is read as a sum alone is stored as one tensor."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from tests.analysis.candidates import W, X, candidates
from tests.analysis.test_parts import summed


def adapted(w, x, frozen=0.3):
    """A weight and what is learned beside it, of rank 4 (LoRA)."""
    return x @ (frozen * jnp.ones((16, 16))) + 2 * (x @ w[:, :4]) @ w[:4]


@pytest.mark.parametrize(
    ("fun", "names"),
    [
        (adapted, {"dot_general.1", "add.0"}),
        (lambda w, x: adapted(w, x) + w[0], {"dot_general.1", "add.0"}),
        (lambda w, x: checkpoint_name(adapted(w, x), "y"), {"dot_general.1", "y"}),
        (lambda w, x: x @ w - (x @ w.T).astype(jnp.float16) / 8, {"sub.0"}),
        (lambda w, x: -(x @ w) * jnp.arange(16.0) + (x + 1) @ w + 1, {"add.1"}),
        (lambda w, x: (y := x @ w) + y, {"dot_general.0"}),
        (lambda w, x: (y := x @ w) * y, {"dot_general.0"}),
        (
            lambda w, x: x @ w + jnp.zeros((8, 16)).at[jnp.arange(8) % 3].add(x),
            {"add.2"},
        ),
        (lambda w, x: x @ w + jnp.fft.irfft(jnp.fft.rfft(x), n=16), {"fft.0", "add.0"}),
        # What a gradient reads: a factor's, and what has two readers.
        (lambda w, x: (x @ w) * w[0] + x @ w, {"dot_general.0", "add.0"}),
        (lambda w, x: 1 / (x @ w) + x @ w, {"dot_general.0", "dot_general.1"}),
        (
            lambda w, x: (y := x @ w) + x @ w.T + y[0],
            {"dot_general.0", "add.0"},
        ),
    ],
)
@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_what_is_read_as_a_sum_alone_is_stored_as_that(fun, names):
    found = candidates(lambda w, x: jnp.sin(fun(w, x)), W, X)
    assert {name for name, tensor in found.items() if not tensor.cheap} == {"x", *names}


def branch(w, x):
    return jnp.tanh(x @ w) @ w


def dropped(x, rate=0.5):
    keep = jax.random.bernoulli(jax.random.key(0), rate, x.shape)
    return jax.lax.select(keep, x / rate, jnp.zeros_like(x))


def normed(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("fun", "stored"),
    [
        (lambda w, x: x + branch(w, x), "add.0"),
        (lambda w, x: x - 0.1 * branch(w, x), "sub.0"),
        (lambda w, x: x + dropped(branch(w, x)), "add.1"),
        (lambda w, x: x + (branch(w, x) + w[0]), "add.1"),
        (lambda w, x: x + jnp.arange(16.0) * branch(w, x), "add.0"),
        (lambda w, x: x + branch(w, x).astype(jnp.float16).astype(x.dtype), "add.0"),
        # After the norm; of two branches at once; a branch that has another in it.
        (lambda w, x: normed(x) + branch(w, x), "add.1"),
        (lambda w, x: x + branch(w, x) + jnp.tanh(x @ w.T) @ w, "dot_general.2 add.1"),
        (lambda w, x: x + adapted(w, jnp.tanh(x @ w)), "add.1"),
        # Of a smaller float than the sum: encoded they are the same, kept they are not.
        (
            lambda w, x: x + branch(w.astype(jnp.float16), x.astype(jnp.float16)),
            "dot_general.1",
        ),
        # A gradient reads what is scaled by parameters, or by what else moves.
        (lambda w, x: x + w[0] * branch(w, x), "dot_general.1"),
        (lambda w, x: x + x * branch(w, x), "dot_general.1"),
        (lambda w, x: x + jnp.sin(branch(w, x)), "dot_general.1"),
        # Most of such a sum may be a few large entries.
        (lambda w, x: jnp.exp(4 * x) + branch(w, x), "dot_general.1"),
        (lambda w, x: 1 / x + branch(w, x), "dot_general.1"),
        # What else is not stored, and a name that the user gave.
        (lambda w, x: jnp.arange(16.0) + branch(w, x), "dot_general.1"),
        (lambda w, x: x + checkpoint_name(branch(w, x), "y"), "y"),
    ],
)
@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_a_residual_stream_is_stored_in_the_place_of_what_is_added(fun, stored):
    found = candidates(lambda w, x: jnp.sin(fun(w, x)), W, X)
    whole = {name for name, t in found.items() if t.shape == (8, 16) and not t.cheap}
    assert whole - {"x", "dot_general.0"} == {*stored.split()}


@pytest.mark.parametrize("params", [0, None])
def test_what_is_added_to_an_input_that_is_kept_is_stored_itself(params):
    """It is the smaller one: its rounding is, too."""
    found = candidates(lambda w, x: jnp.sin(x + branch(w, x)), W, X, params=params)
    assert ("add.0" in found) == (params == 0)
    assert ("dot_general.1" in found) == (params is None)


def test_what_keeps_residuals_of_its_own_is_no_term():
    found = candidates(lambda w, x: jnp.sin(summed(x @ w) + x @ w.T), W, X)
    assert {"custom_vjp_call.0", "add.0"} < set(found)


def test_what_is_rather_made_again_is_no_term():
    """Products of two activations, which a policy may keep out by their terms."""
    found = candidates(lambda w, x: jnp.sin(x @ x.T + x @ w[:, :8]), W, X)
    assert {"dot_general.0", "dot_general.1"} < set(found)
