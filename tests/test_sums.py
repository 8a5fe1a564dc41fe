"""What is read as a sum alone is stored as one tensor."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from tests.candidates import W, X, candidates
from tests.test_parts import summed


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
        (lambda w, x: (x @ w) * w[0] + x @ w, {"dot_general.0", "dot_general.1"}),
        (lambda w, x: 1 / (x @ w) + x @ w, {"dot_general.0", "dot_general.1"}),
        (
            lambda w, x: (y := x @ w) + x @ w.T + y[0],
            {"dot_general.0", "dot_general.1"},
        ),
    ],
)
@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_what_is_read_as_a_sum_alone_is_stored_as_that(fun, names):
    found = candidates(lambda w, x: jnp.sin(fun(w, x)), W, X)
    assert {name for name, tensor in found.items() if not tensor.cheap} == {"x", *names}


def test_what_keeps_residuals_of_its_own_is_no_term():
    found = candidates(lambda w, x: jnp.sin(summed(x @ w) + x @ w.T), W, X)
    assert {"custom_vjp_call.0", "dot_general.1"} < set(found)


def test_what_is_rather_made_again_is_no_term():
    """Products of two activations, which a policy may keep out by their terms."""
    found = candidates(lambda w, x: jnp.sin(x @ x.T + x @ w[:, :8]), W, X)
    assert {"dot_general.0", "dot_general.1"} < set(found)
