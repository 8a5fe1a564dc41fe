"""What a loop or a branch keeps of its state, of its weights and of its inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.policies import uniform
from tests.cases import slow
from tests.errors import relative
from tests.residuals import (
    LAYERS,
    Q4,
    Q8,
    X,
    checkpointed,
    crossing,
    layers,
    nbytes,
    references,
    slots,
    weighted,
)


@pytest.mark.parametrize("inside", [True, False])
def test_a_loop_stores_its_carry_encoded_and_no_weights_again(inside):
    if inside:
        small = checkpointed(layers, uniform(Q4))
    else:
        step = checkpointed(lambda w, x: jnp.tanh(x @ w), uniform(Q4))

        def small(w, x):
            return jax.lax.scan(lambda x, w: (step(w, x), None), x, w)[0]

    held = crossing(small, LAYERS, X)
    assert all(jnp.issubdtype(aval.dtype, jnp.unsignedinteger) for aval in held)
    # The carry of three layers, and their products, that tanh' is made of.
    assert nbytes(held) == 3 * 2 * Q4.nbytes(X.shape)
    assert references(small, LAYERS, X) == [LAYERS.shape]


def test_a_loop_in_a_loop_stores_no_weights_again():
    def fun(w, x):
        return jax.lax.scan(lambda x, w: (layers(w, x), None), x, w)[0]

    w = jnp.stack([LAYERS, LAYERS])
    held = crossing(checkpointed(fun, uniform(Q4)), w, X)
    assert not any(64 * 64 <= aval.size for aval in held)
    assert nbytes(held) == 6 * 2 * Q4.nbytes(X.shape)


def recurrent(w, x, begin=jnp.zeros_like):
    """As recurrent networks and linear attention: the state begins as a constant."""

    def step(carry, x):
        state, scale = carry
        return (jnp.tanh(scale * (x + state @ w[0])), scale), state

    start = begin(x[:2]), jnp.float32(0.5)
    (state, _), states = jax.lax.scan(step, start, x.reshape(4, 2, 64))
    return states @ w[1] + state[None]


@pytest.mark.parametrize(("begin", "tensors"), [(jnp.zeros_like, 3), (jnp.sin, 4)])
def test_a_loops_state_is_encoded_however_it_begins(begin, tensors):
    fun = partial(recurrent, begin=begin)
    assert slots(fun, uniform(Q4), LAYERS, X).get("x") == (Q4 if tensors == 4 else None)
    held = crossing(checkpointed(fun, uniform(Q4)), LAYERS, X)
    codes = [aval for aval in held if jnp.issubdtype(aval.dtype, jnp.unsignedinteger)]
    # Four times 2 of x's 8 rows: the state, and the sum of its product and x, which is
    # read where the loop begins alone. The states that come out of the loop are read by
    # another product, and a scale is a constant.
    assert nbytes(codes) == tensors * Q4.nbytes(X.shape)
    assert sum(aval.size for aval in held) - sum(aval.size for aval in codes) <= 4


def test_a_loops_state_that_is_made_of_weights_is_never_encoded():
    def step(carry, w):
        x, power = carry
        return (jnp.tanh(x @ power), power @ w), None

    def fun(w, x):
        return jax.lax.scan(step, (x, w[0]), w)[0][0]

    held = crossing(checkpointed(fun, uniform(Q4)), LAYERS, X)
    codes = [aval for aval in held if aval.dtype.itemsize < 4]
    assert nbytes(codes) == 3 * 2 * Q4.nbytes(X.shape)  # as of `layers`
    assert [aval.shape for aval in held if aval not in codes] == [(3, 64, 64)]


def online(w, x):
    """Attention by blocks of keys: its state is a maximum, a sum and an output."""
    blocks = (x @ w[0]).reshape(4, 2, 64)

    def step(carry, keys):
        top, total, out = carry
        scores = x @ keys.T / 8
        new = jnp.maximum(top, scores.max(-1))
        terms, rescaled = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
        out = out * rescaled[:, None] + terms @ keys
        return (new, total * rescaled + terms.sum(-1), out), None

    begin = jnp.full(8, -jnp.inf), jnp.zeros(8), jnp.zeros((8, 64))
    (_, total, out), _ = jax.lax.scan(step, begin, blocks)
    return out / total[:, None]


@pytest.mark.slow
def test_the_small_state_of_a_loop_is_stored_as_it_is():
    """Encoded, an attention's maxima and sums would change all of its weights."""
    small = checkpointed(online, uniform(Q8))
    held = [a for a in crossing(small, LAYERS, X) if a.shape == (4, 8)]
    assert [aval.dtype.itemsize for aval in held] == [4, 4]
    exact = jax.grad(weighted(online))(LAYERS, X)
    assert relative(jax.grad(weighted(small))(LAYERS, X), exact) < 0.03


BEGINS = {
    "written": lambda rows, largest: rows.at[0].set(-largest),
    "multiplied": lambda rows, largest: rows.at[1].set(-largest * rows[0]),
    "added": lambda rows, largest: rows.at[0].set(2 - (rows[0] + largest)),
    "closed over": lambda rows, largest: rows.at[:1].set(np.float32([[-largest]])),
    "a logarithm": lambda rows, largest: jnp.log(rows - jnp.eye(2, 64)),
}


@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("largest", [jnp.inf, slow(1e9)])
def test_a_loops_state_that_begins_as_an_infinity_is_stored_as_it_is(largest, begin):
    def step(top, x):
        new = jnp.maximum(top, x)
        return new, jax.nn.sigmoid(top - new)

    def fun(w, x):
        x = (x @ w[0]).reshape(4, 2, 64)
        rows = BEGINS[begin](jnp.ones_like(x[0]), largest)
        return jax.lax.scan(step, rows, x)[1] * x

    exact = jax.grad(weighted(fun))(LAYERS, X)
    small = checkpointed(fun, uniform(Q8))
    assert relative(jax.grad(weighted(small))(LAYERS, X), exact) < 0.03
    assert [a.dtype.itemsize for a in crossing(small, LAYERS, X)].count(4) == 1


def routed(w, x, fill):
    """Its softmax is what is read of the state."""
    step = lambda s, x: (s + jax.nn.softmax(s) @ w[1] + x, None)  # noqa: E731
    start = jnp.full((2, 64), fill / 1e5)
    return jax.lax.scan(step, start, (x @ w[0]).reshape(4, 2, 64))[0]


def forward_algorithm(w, x, fill):
    """Of a hidden Markov model: the state is log-probabilities."""

    def step(state, x):
        state = jax.nn.logsumexp(state[:, :, None] + w[2][None], axis=1) + x
        return state, None

    start = jnp.full((2, 64), fill).at[:, 0].set(0.0)
    return jax.lax.scan(step, start, (x @ w[0]).reshape(4, 2, 64))[0]


@pytest.mark.parametrize("largest", [jnp.inf, 1e9])
def test_what_a_loop_writes_beside_its_state_is_stored_as_it_is(largest):
    """Soft dynamic time warping: a constant of its own, and a loop in the loop."""

    def softmin(*costs):
        return -jax.nn.logsumexp(-jnp.stack(costs), axis=0)

    def cell(left, given):
        up, corner, cost = given
        new = cost + softmin(left, up, corner)
        return new, new

    def row(last, costs):
        given = last[1:], last[:-1], costs
        _, new = jax.lax.scan(cell, jnp.float32(largest), given)
        return jnp.concatenate([jnp.array([largest]), new]), None

    def fun(w, x):
        costs = (x @ w[0]) ** 2 / 64
        begin = jnp.concatenate([jnp.zeros(1), largest * jnp.ones(64)])
        return jax.lax.scan(row, begin, costs)[0][None, 1:] * x

    exact = jax.grad(weighted(fun))(LAYERS, X)
    small = checkpointed(fun, uniform(Q8))
    assert relative(jax.grad(weighted(small))(LAYERS, X), exact) < 0.03


@pytest.mark.parametrize("table", [np.linspace(0, 1e5, 64), np.linspace(0, 1, 64)])
def test_a_loops_state_that_begins_as_data_is_encoded(table):
    """Closed over: of large values several, or none."""
    begin = np.tile(table.astype(np.float32), (2, 1))

    def fun(w, x):
        step = lambda s, x: (jnp.tanh(s) @ w[1] + x, None)  # noqa: E731
        return jax.lax.scan(step, begin, (x @ w[0]).reshape(4, 2, 64))[0]

    held = crossing(checkpointed(fun, uniform(Q4)), LAYERS, X)
    assert max(aval.dtype.itemsize for aval in held) < 4


@pytest.mark.parametrize("fill", [-3.0, -1e5])
@pytest.mark.parametrize("fun", [forward_algorithm, routed])
def test_a_loops_state_that_is_a_logarithm_is_stored_as_it_is(fun, fill):
    fun = partial(fun, fill=fill)
    small = checkpointed(fun, uniform(Q4))
    held = [a for a in crossing(small, LAYERS, X) if a.shape == (4, 2, 64)]
    assert [aval.dtype.itemsize for aval in held] == [4]
    exact = jax.grad(weighted(fun))(LAYERS, X)
    assert relative(jax.grad(weighted(small))(LAYERS, X), exact) < 0.2


@pytest.mark.parametrize("of_state", [jax.nn.softplus, jax.nn.mish, jax.nn.silu])
def test_a_loops_state_that_is_read_by_a_smooth_function_is_encoded(of_state):
    def fun(w, x):
        return jax.lax.scan(lambda x, w: (x + of_state(x) @ w, None), x, w)[0]

    held = crossing(checkpointed(fun, uniform(Q4)), LAYERS, X)
    assert max(aval.dtype.itemsize for aval in held) < 4


def test_a_branch_stores_no_weights_again():
    def fun(w, x):
        return jax.lax.cond(w[0, 0] > 0, lambda x: x @ w, lambda x: jnp.sin(x) @ w, x)

    held = crossing(checkpointed(fun, uniform(Q4)), LAYERS[0], X)
    assert not any(aval.shape == (64, 64) for aval in held)
