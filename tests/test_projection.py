"""Projections: E[P P^T] = I, the variance that each kind promises, and its algebra."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from tests.cases import slow
from tests.draws import normal
from tests.kernels.machine_code import compiled

KINDS = ("gaussian", "rademacher", "sparse", "countsketch", "orthonormal")
# Width, rank, blocks: ranks that divide the width, that do not, one, the width itself.
MORE = [(24, 8, 1), (10, 1, 1), (12, 12, 1), (24, 6, 2)]
SIZES = [
    (24, 7, 1),
    (24, 8, 4),
    *(slow(*s) for s in MORE),
]


KINDS_OF_P = ("gaussian", "rademacher", "sparse", "countsketch", "orthonormal")


@pytest.mark.parametrize("kind", KINDS_OF_P)
def test_p_does_not_depend_on_the_width_of_jaxs_dtypes(kind):
    """Or a run resumed under another would go on with another P."""
    projection, key = jc.Projection(8, kind), jax.random.key(3)
    narrow = projection.matrix(key, 16)
    with jax.enable_x64(True):
        wide = projection.matrix(key, 16)
    assert wide.dtype == narrow.dtype == jnp.float32
    np.testing.assert_array_equal(wide, narrow)


@pytest.mark.parametrize("kind", KINDS_OF_P)
@pytest.mark.parametrize("rows", [3, 5, 8])
def test_a_sketch_of_another_rank_is_refused(kind, rows):
    projection = jc.Projection(4, kind)
    with pytest.raises(ValueError, match=rf"sketch must have .* 4 rows.*\({rows}, 2\)"):
        projection.lift(jax.random.key(0), jnp.ones((rows, 2)), 12)
    with pytest.raises(ValueError, match=r"must have two axes and 4 rows.*\(2, 4, 3\)"):
        projection.lift(jax.random.key(0), jnp.ones((2, 4, 3)), 12)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
def test_integers_are_projected_as_floats(dtype):
    key, x = jax.random.key(0), jnp.arange(32).reshape(2, 16).astype(dtype)
    found = jc.Projection(4).project(key, x)
    expected = jc.Projection(4).project(key, x.astype(jnp.float32))
    np.testing.assert_array_equal(found, expected)
    encoding = jc.Projection(4, codec=jc.Quantized(8))
    codes = (encoding.stored(key, x).codes for x in (x, x.astype(jnp.float32)))
    np.testing.assert_array_equal(*codes)


@pytest.mark.parametrize("kind", ["gaussian", "countsketch"])
def test_complex_numbers_are_not_encoded(kind):
    projection = jc.Projection(64, kind, codec=jc.Quantized(8))
    with pytest.raises(ValueError, match="can't encode dtype complex64"):
        projection.stored(jax.random.key(0), jnp.ones((2, 128), jnp.complex64))


def test_a_rank_of_one_is_no_whole_rank():
    assert jc.Projection(1) != jc.Projection(1.0) == jc.Projection(1.0)
    assert len({jc.Projection(1), jc.Projection(1.0), jc.Projection(1)}) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "rank", "blocks"), SIZES)
def test_unbiased_with_the_promised_variance(kind, width, rank, blocks):
    """Over 4000 keys: the mean of P P^T G is G, its spread is `variance`.

    The mean of K draws has relative error sqrt(variance / K); 4.5 of them is beyond
    1 - 1e-5 of the draws by normal theory. The measured variance is
    a mean of K positive numbers, whose own spread is measured and allowed 5 times.
    """
    projection = jc.Projection(rank=rank, kind=kind, blocks=blocks)
    g = normal(3, width, 3)
    if kind == "countsketch" and width % rank:
        g /= jnp.linalg.norm(g, axis=1, keepdims=True)

    def estimate(key):
        p = projection.matrix(key, width)
        return p @ (p.T @ g)

    draws = jax.vmap(estimate)(jax.random.split(jax.random.key(0), 4000))
    norm = float(jnp.sum(g**2))
    variance = projection.variance(width)
    bias = float(jnp.sum((draws.mean(0) - g) ** 2)) / norm
    assert bias <= 4.5**2 * variance / 4000 + 1e-10
    errors = np.asarray(jnp.sum((draws - g[None]) ** 2, axis=(1, 2))) / norm
    spread = 5 * errors.std() / np.sqrt(4000)
    assert abs(errors.mean() - variance) <= spread + 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "rank", "blocks"), SIZES)
def test_project_and_lift_multiply_by_the_matrix(kind, width, rank, blocks):
    projection = jc.Projection(rank=rank, kind=kind, blocks=blocks)
    key = jax.random.key(5)
    p = projection.matrix(key, width)
    assert p.shape == (width, rank) and p.dtype == jnp.float32
    x = normal(1, 2, 5, width)
    n = normal(2, rank, 4)
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(projection.project(key, x), x @ p, **close)
    np.testing.assert_allclose(projection.lift(key, n, width), p @ n, **close)
    # Nothing outside of the blocks, and no two blocks alike.
    parts = p.reshape(blocks, width // blocks, blocks, rank // blocks)
    inside = np.moveaxis(np.diagonal(parts, axis1=0, axis2=2), -1, 0)
    assert np.count_nonzero(p) == np.count_nonzero(inside)
    assert len(np.unique(inside, axis=0)) == blocks


@pytest.mark.parametrize("kind", ["orthonormal", "countsketch"])
def test_columns_are_orthogonal(kind):
    p = jc.Projection(rank=6, kind=kind).matrix(jax.random.key(0), 24)
    np.testing.assert_allclose(p.T @ p, 4 * np.eye(6), atol=1e-5)


def test_orthonormal_at_full_rank_is_exact_and_gaussian_is_not():
    g = normal(3, 16, 3)
    exact = jc.Projection(rank=1.0, kind="orthonormal").matrix(jax.random.key(0), 16)
    np.testing.assert_allclose(exact @ (exact.T @ g), g, atol=1e-5)
    assert jc.Projection(rank=1.0).variance(16) == pytest.approx(17 / 16)


def test_matrix_is_a_function_of_the_key_alone():
    projection = jc.Projection(rank=4)
    key = jax.random.key(0)
    once, again = (
        projection.matrix(key, 16),
        jax.jit(projection.matrix, static_argnums=1)(key, 16),
    )
    np.testing.assert_array_equal(once, again)
    other = projection.matrix(jax.random.key(1), 16)
    assert np.abs(np.corrcoef(once.ravel(), other.ravel())[0, 1]) < 0.5


@pytest.mark.parametrize(
    ("rank", "width", "expected"),
    [
        (0.25, 1024, 256),
        (0.25, 2736, 704),  # 684 is no multiple of 64
        (0.125, 128, 16),  # too narrow for 64
        (0.25, 344, 64),
        (1.0, 100, 100),
        (0.001, 16, 1),
        (8, 768, 8),
        (1, 768, 1),
    ],
)
def test_rank_of(rank, width, expected):
    assert jc.Projection(rank=rank).rank_of(width) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank must be a positive int or float of Python, got 0"),
        ({"rank": -0.5}, "rank must be a positive int or float of Python, got -0.5"),
        (
            {"rank": float("nan")},
            "rank must be a positive int or float of Python, got nan",
        ),
        ({"rank": True}, "rank must be a positive int or float of Python, got True"),
        ({"rank": 1.5}, "fraction of the width of at most 1.0, got 1.5"),
        ({"rank": 4, "kind": "fourier"}, "kind must be one of .*, got 'fourier'"),
        ({"rank": 4, "alpha": 0.0}, "alpha must be positive and finite, got 0.0"),
        ({"rank": 4, "blocks": 0}, "blocks must be a positive int, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        jc.Projection(**arguments)


def test_a_rank_above_the_width_is_refused():
    with pytest.raises(ValueError, match="above the layer's input width 16, got 32"):
        jc.Projection(rank=32).rank_of(16)


@pytest.mark.parametrize(("width", "rank"), [(18, 4), (16, 6)])
def test_blocks_that_do_not_divide_are_refused(width, rank):
    told = f"blocks must divide the layer's input width {width} and its rank {rank}"
    with pytest.raises(ValueError, match=f"{told}, got 4"):
        jc.Projection(rank=rank, blocks=4).rank_of(width)


def test_countsketch_is_one_pass_over_its_input():
    """On a card: in the inputs' order, with nothing gathered, sorted or transposed."""
    projection = jc.Projection(rank=0.25, kind="countsketch")
    key = jax.eval_shape(jax.random.key, 0)
    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    n = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    for fun, args in (
        (projection.project, (key, x)),
        (lambda k, n: projection.lift(k, n, 1024), (key, n)),
    ):
        program = compiled(fun, *args)
        assert not re.findall(
            r" (gather|scatter|sort|transpose|dot|custom-call)\(", program
        )
        assert len(re.findall(r"\n  .* fusion\(", program)) <= 2  # signs, and the pass
