"""Rounding noise: uniform, and shared by no two entries, groups, tensors or steps.

A correlation over n independent pairs has standard deviation 1 / sqrt(n). All bounds
are 5 of those: with some 30 fixed draws, a sound hash fails one in 60000 times.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.kernels.quantize.noise import digested, mix, uniform
from jaxcompact.kernels.quantize.reference import quantize
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optimized")

GROUPS, GROUP = 4096, 64
N = GROUPS * GROUP


def noise(x, seed):
    return np.asarray(uniform(x, seed, -1), np.float64) + 0.5


def data(key: int) -> jax.Array:
    return normal(key, GROUPS, GROUP)


def correlation(a, b) -> float:
    return float(np.mean((a - 0.5) * (b - 0.5)) * 12)


DATA = {
    "normal": data(0),
    "zeros": jnp.zeros((GROUPS, GROUP)),
    "equal groups": jnp.broadcast_to(data(1)[:1], (GROUPS, GROUP)),
    "counting": jnp.arange(N, dtype=jnp.float32).reshape(GROUPS, GROUP),
}


@pytest.mark.parametrize("x", DATA.values(), ids=DATA)
class TestUniform:
    def test_moments_and_range(self, x):
        u = noise(x, 0)
        assert 0 <= u.min() and u.max() < 1
        # The variances of u, and of (u - 1/2)^2, are 1/12 and 1/180.
        assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * N)
        assert abs(((u - 0.5) ** 2).mean() - 1 / 12) < 5 / np.sqrt(180 * N)

    def test_all_bins_are_filled_alike(self, x):
        counts = np.histogram(noise(x, 0), 256, (0, 1))[0]
        chi = ((counts - N / 256) ** 2 / (N / 256)).sum()
        assert abs(chi - 255) < 5 * np.sqrt(2 * 255)

    @pytest.mark.parametrize("lag", [1, 2, 32, GROUP, 2 * GROUP, 17 * GROUP + 1])
    def test_neighbours_are_not_correlated(self, x, lag):
        u = noise(x, 0).ravel()
        assert abs(correlation(u[lag:], u[:-lag])) < 5 / np.sqrt(N - lag)

    @pytest.mark.parametrize("other", [1, 2**16, 2**31, -1])
    def test_seeds_are_not_correlated(self, x, other):
        assert abs(correlation(noise(x, 0), noise(x, other))) < 5 / np.sqrt(N)


def test_the_next_tensor_a_step_before_has_other_noise():
    """GACT seeds by tensor + step: tensor t now, and t + 1 a step ago, share theirs."""
    now, before = data(2), data(3)
    assert abs(correlation(noise(now, 7), noise(before, 8))) < 5 / np.sqrt(N)
    assert abs(correlation(noise(now, 7), noise(before, 7))) < 5 / np.sqrt(N)


@pytest.mark.parametrize("change", ["an entry's last bit", "two entries' order"])
def test_noise_of_a_group_follows_its_data(change):
    x = data(4)
    if change == "two entries' order":
        other = x.at[:, 0].set(x[:, 1]).at[:, 1].set(x[:, 0])
    else:
        other = x.at[:, 9].set(jnp.nextafter(x[:, 9], jnp.inf))
    a, b = noise(x, 0), noise(other, 0)
    assert (a != b).any(axis=1).all()
    assert abs(correlation(a, b)) < 5 / np.sqrt(N)


@pytest.mark.parametrize(
    "values",
    [[-1.0, 1.0], [0.0, 1.0], [0.0, 0.0, 0.0, 0.5, 1.0, 2.0], [1.0, 1.0078125]],
    ids=["signs", "masks", "powers of two", "a last bit of bfloat16"],
)
def test_groups_of_few_values_have_keys_of_their_own(values):
    """Of 4096 numbers of 25 bits two are alike in one of four draws, four in 10^4."""
    x = jnp.asarray(np.random.default_rng(0).choice(values, (GROUPS, GROUP)), float)
    digests = jnp.sum(
        digested(x, jnp.arange(GROUP, dtype=jnp.uint32)[None]), 1, jnp.uint32
    )
    assert len(np.unique(digests)) >= GROUPS - 3


def test_same_data_and_seed_give_the_same_noise_along_any_axis():
    x = data(5)
    np.testing.assert_array_equal(noise(x, 3), noise(x, 3))
    x = x.reshape(8, 512, 64)
    a = np.asarray(uniform(x, 3, -2), np.float64) + 0.5
    assert abs(a.mean() - 0.5) < 5 / np.sqrt(12 * N)
    assert abs(correlation(a[:, 1:], a[:, :-1])) < 5 / np.sqrt(N * 511 / 512)
    assert abs(correlation(a[..., 1:], a[..., :-1])) < 5 / np.sqrt(N * 63 / 64)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_compiled_rounding_is_the_eager_one(bits):
    """XLA must not take the rounding apart: some releases fold constants of floats."""
    x = normal(6, 16, 128)
    for seed in (None, 3):

        def codes(x, seed=seed):
            return quantize(x, bits=bits, group=64, seed=seed)[0]

        np.testing.assert_array_equal(jax.jit(codes)(x), codes(x))


def test_every_bit_moves_half_of_the_others():
    """lowbias32's worst cell is off by less than 0.01 over all inputs."""
    h = jnp.arange(2**14, dtype=jnp.uint32) * jnp.uint32(2654435761)
    for bit in range(32):
        moved = np.asarray(mix(h) ^ mix(h ^ jnp.uint32(1 << bit)))
        rates = np.unpackbits(moved.view(np.uint8)).reshape(-1, 32).mean(axis=0)
        # 32 rates of 2^14 coins each: 5.5 standard deviations, and the bias.
        assert np.abs(rates - 0.5).max() < 5.5 * 0.5 / 2**7 + 0.01


def test_what_is_a_code_already_stays_what_it_is():
    """2^18 draws of codes above 128: noise of 16 bits would move four of them."""
    x = jnp.broadcast_to(jnp.arange(256.0), (4096, 256))
    codes = quantize(x, bits=8, group=256, symmetric=False, seed=0)[0]
    np.testing.assert_array_equal(codes, x)
