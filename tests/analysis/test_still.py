"""Data made of data, as resampled images, are stored where they end."""

import jax
import jax.numpy as jnp
import pytest
from jax.scipy.ndimage import map_coordinates

import jaxcompact as jc
from tests.cases import slow
from tests.draws import normal
from tests.errors import relative
from tests.residuals import replay

N = 64
W = normal(0, N, 8) / 8
IMAGES = normal(1, 4, N, N)
TURNS = jnp.eye(2)[None] + 0.1 * normal(2, 4, 2, 2)
KERNEL = normal(3, N, N) / 8
GRID = jnp.stack(jnp.meshgrid(*[jnp.arange(float(N))] * 2, indexing="ij"), -1)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def turned(images, turns):
    def turn(image, turn):
        places = GRID @ turn
        return map_coordinates(image, [places[..., 0], places[..., 1]], order=1)

    return jax.vmap(turn)(images, turns)


def shapes(fun, policy, *args):
    """Of what is stored where the parameters alone are differentiated."""
    slots = replay(fun, policy, *args, wrt=[0]).slots
    return sorted(slot.tensor.shape for slot in slots)


def loss(w, images, turns):
    return jnp.mean(jax.nn.relu(turned(images, turns) @ w) ** 2)


@pytest.mark.parametrize(
    ("policy", "most"),
    [(jc.policies.int4(), 0.1), slow(jc.policies.int8(), 0.01)],
    ids=["int4", "int8"],
)
def test_a_resampled_image_is_stored_in_place_of_its_places(policy, most):
    """Which are two arrays as large, to be kept whole."""
    exact = jax.jit(jax.grad(loss))(W, IMAGES, TURNS)
    small = jc.checkpoint(loss, policy=policy, params=0)
    assert relative(jax.jit(jax.grad(small))(W, IMAGES, TURNS), exact) < most
    stored = [(4, N, 8), (4, N, 8), (4, N, N)]  # and what relu decided
    assert shapes(loss, policy, W, IMAGES, TURNS) == stored


@pytest.mark.parametrize(
    ("fun", "stored"),
    [
        # Of few numbers, or of the data itself, it is made again.
        (lambda w, x: jnp.sin(x[:, :1] * jnp.arange(float(N))) @ w, [(N, 8)]),
        (lambda w, x: jnp.log1p(x**2) @ w, [(N, 8)]),
        (
            lambda w, x: jnp.sin(x[:, :3] @ x[:, :3].T).sum(1)[:, None] * (x @ w),
            [(N, 8)],
        ),
        (lambda w, x: jnp.tanh(x @ KERNEL) @ w, [(N, 8), (N, N)]),
        # Two products in one; and in two, which together are no less.
        (lambda w, x: (x @ KERNEL) * (x @ KERNEL.T) @ w, [(N, 8), (N, N)]),
        (
            lambda w, x: (
                ((y := x @ KERNEL) * (z := x @ KERNEL.T) @ w)
                * ((y + z) @ w)
                * ((y - z) @ w)
            ),
            [(N, 8)] * 3 + [(N, N)] * 2,
        ),
        # Not as many as it is spread to.
        (
            lambda w, x: (
                (x @ w) * jnp.cos((x @ KERNEL).sum(1)[:, None] - jnp.arange(8.0))
            ),
            [(N,), (N, 8)],
        ),
        # Nor what is looked up: its place, and whether that is counted from the end.
        (
            lambda w, x: (x @ w) * KERNEL[(x @ KERNEL).argmax(1), :8],
            [(N,), (N,), (N, 8)],
        ),
        # Of what moves, it is made again with that.
        (
            lambda w, x: (
                (y := x @ w) * jax.lax.stop_gradient(jnp.tanh(y).sum(1))[:, None]
            ),
            [(N, 8)],
        ),
    ],
)
def test_which_ends_are_stored(fun, stored):
    def loss(w, x):
        return jnp.sum(jnp.tanh(fun(w, x)) * jnp.cos(jnp.arange(8.0)))

    assert shapes(loss, jc.policies.int4(), W, IMAGES[0]) == stored
