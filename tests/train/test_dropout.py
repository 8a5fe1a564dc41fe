"""Dropout: how much, of what mean, and what its draws depend on."""

import jax.numpy as jnp
import numpy as np

from dropout import dropout, noise_of


def dropped(noise: int, place: int = 0, n: int = 0) -> np.ndarray:
    return np.asarray(dropout(0.25, jnp.int32(noise), place)(jnp.ones((400, 400)), n))


def test_the_share_and_the_mean_are_as_asked():
    x = dropped(3)
    assert set(np.unique(x)) == {0.0, np.float32(1 / 0.75)}
    # Four standard deviations of the share of 160,000 draws at 1/4.
    assert abs((x == 0).mean() - 0.25) < 4 * (0.25 * 0.75 / 160_000) ** 0.5


def test_each_noise_place_and_turn_has_a_draw_of_its_own():
    draws = [dropped(*which) for which in ((3, 0, 0), (4, 0, 0), (3, 1, 0), (3, 0, 1))]
    np.testing.assert_array_equal(dropped(3), draws[0])
    for i, a in enumerate(draws):
        for b in draws[:i]:
            # Independent ones agree in 1/16 + 9/16 of the places.
            assert abs((a == b).mean() - 0.625) < 4 * (0.625 * 0.375 / 160_000) ** 0.5


def test_nothing_drops_out_without_noise_or_rate():
    x = jnp.ones(8)
    assert dropout(0.5, None, 0)(x, 0) is x and dropout(0.0, jnp.int32(1), 0)(x, 0) is x


def test_no_two_microbatches_have_the_same_noise():
    seen = [
        int(n) for seed in (0, 1) for step in range(50) for n in noise_of(seed, step, 4)
    ]
    assert len(set(seen)) == len(seen)
