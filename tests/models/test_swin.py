"""Swin: the published number of weights; windows against attention over all places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import swin
from tests.draws import normal


@pytest.fixture(autouse=True)
def ordinary_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_swin_t_has_as_many_weights_as_published():
    shapes = jax.eval_shape(
        swin.Swin().init, jax.random.key(0), jnp.zeros((1, 224, 224, 3))
    )
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 28_288_354


@pytest.mark.parametrize("shift", [0, 2])
def test_a_place_sees_its_window_alone(shift):
    """Attention over the whole picture, masked to what the paper's Figure 2 joins."""
    w, height, width, d, heads = 4, 8, 12, 6, 2
    module = swin.Attention(heads, w, shift, jnp.float32)
    x = normal(0, 2, height, width, d)
    params = module.init(jax.random.key(1), x)
    bias = jax.random.normal(jax.random.key(2), params["params"]["bias"].shape)
    params["params"]["bias"] = bias

    rows, columns = np.indices((height, width)).reshape(2, -1)
    # Windows begin at shift - w, shift, shift + w, ...: cut off where the picture ends.
    window = (rows - shift) // w * 100 + (columns - shift) // w
    joined = window[:, None] == window[None]
    apart = (rows[:, None] - rows, columns[:, None] - columns)
    inside = (abs(apart[0]) < w) & (abs(apart[1]) < w)
    place = np.where(inside, (apart[0] + w - 1) * (2 * w - 1) + apart[1] + w - 1, 0)

    first, last = params["params"]["Dense_0"], params["params"]["Dense_1"]
    flat = x.reshape(2, height * width, d)
    qkv = (flat @ first["kernel"] + first["bias"]).reshape(2, -1, heads, 3 * d // heads)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / (d / heads) ** 0.5
    scores = jnp.where(joined, scores + bias[place].transpose(2, 0, 1), -jnp.inf)
    mixed = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores), v).reshape(flat.shape)
    expected = (mixed @ last["kernel"] + last["bias"]).reshape(x.shape)
    np.testing.assert_allclose(module.apply(params, x), expected, atol=1e-5)
