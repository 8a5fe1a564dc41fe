"""What sines are taken of: data's angles, and multiples by known frequencies."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.cases import slow
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("any_rank")
POLICIES = {8: jc.policies.int8(), 4: jc.policies.int4()}


def uniform(seed, *shape):
    return jax.random.uniform(jax.random.key(seed), shape)


PARAMS = {"a": normal(1, 64, 48) / 8, "b": normal(2, 48, 16) / 7}
X, TIMES, Y = normal(3, 64, 64) / 8, 1000 * uniform(4, 64), normal(5, 64, 16)
POSE = {"pose": jnp.eye(3) + 0.05 * normal(6, 3, 3), "a": normal(7, 60, 48) / 8}
BANDS = 10 * normal(8, 2, 32)


def waves(angles):
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def read(p, features):
    return jnp.mean((jax.nn.silu(features @ p["a"]) @ p["b"] - Y) ** 2)


def frequencies(count):
    return 1e-4 ** (jnp.arange(float(count)) / count)


def of_times(p, x):
    """A diffusion model's."""
    return read(p, waves(jnp.einsum("b,d->bd", TIMES + 0 * x[:, 0], frequencies(32))))


def in_a_loop(p, x):
    angles = jnp.einsum("b,d->bd", TIMES + 0 * x[:, 0], frequencies(32))
    step = lambda s, part: (s + read(p, waves(angles * part)), None)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros(()), jnp.arange(1.0, 3.0))[0]


def mixed_times(p, x):
    """As wide as what it is made of."""
    return read(p, waves(x @ (100 * normal(9, 64, 32))))


def random_features(p, x, bands=BANDS):
    return read(p, waves(2 * jnp.pi * (x[:, :2] @ bands)))


def learned_features(p, x):
    return random_features(p, x, p["bands"])


def of_coordinates(p, x):
    """A radiance field's, behind a pose that is learned."""
    x = 8 * x[:, :3] @ p["pose"]
    bands = 2.0 ** jnp.arange(10.0)[:, None]
    return read(p, waves((x[:, None] * bands * jnp.pi).reshape(64, -1)))


def of_wavelengths(p, x):
    x = 8 * x[:, :3] @ p["pose"]
    return read(
        p, waves((x[:, None] / 0.5 ** jnp.arange(10.0)[:, None]).reshape(64, -1))
    )


def one_after_another(p, x):
    x = 8 * x[:, :3] @ p["pose"]
    each = [f(2.0**k * jnp.pi * x) for k in range(10) for f in (jnp.sin, jnp.cos)]
    return read(p, jnp.concatenate(each, -1))


def rotary(p, x):
    """Of packed documents."""
    positions = jnp.concatenate([jnp.arange(1980, 2000), jnp.arange(44)])[None]
    positions += x[None, :, 0].astype(jnp.int32)  # zeros, no constants
    angles = jnp.einsum("bs,d->bsd", positions.astype(x.dtype), frequencies(8))
    cos, sin = (f(angles)[:, :, None] for f in (jnp.cos, jnp.sin))

    def rotated(t):
        a, b = jnp.split(t, 2, -1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    q, k, v = jnp.split((8 * x @ p["a"]).reshape(1, 64, 3, 16), 3, 2)
    attended = jax.nn.dot_product_attention(rotated(q), rotated(k), v)
    return jnp.sum(attended.reshape(64, 16) * Y)


CASES = {
    "of times": (of_times, PARAMS),
    "in a loop": (in_a_loop, PARAMS),
    "mixed times": (mixed_times, PARAMS),
    "random features": (random_features, PARAMS),
    "learned features": (learned_features, PARAMS | {"bands": BANDS}),
    "of coordinates": (of_coordinates, PARAMS | POSE),
    "of wavelengths": (of_wavelengths, PARAMS | POSE),
    "one after another": (one_after_another, PARAMS | POSE),
    "rotary": (rotary, PARAMS),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bits", [slow(8), 4])
def test_gradients_are_near(name, bits):
    """Twice the rounding of what else is stored, 1 and 10 %.

    With codes of the angles they would be 0.07 to 1.5 off, but for rotary's of 8 bits.
    """
    loss, params = CASES[name]

    def gradient(loss):
        return jax.jit(jax.grad(loss))(params, X)

    off = jax.tree.map(
        lambda a, b: float(jnp.linalg.norm(a - b) / (jnp.linalg.norm(b) + 1e-30)),
        gradient(jc.checkpoint(loss, policy=POLICIES[bits], params=0)),
        gradient(loss),
    )
    assert max(off.values()) < {8: 0.02, 4: 0.2}[bits], off


def stored(fun, *args):
    said = jc.explain(fun, *args, policy=jc.policies.int4(), params=0)
    return {row.name: row.action for row in said.rows}


def test_what_stays_whole_is_the_narrowest():
    """Where the coordinates are differentiated as well."""
    pose = stored(of_coordinates, PARAMS | POSE, X)
    assert pose["dot_general.0"] == "Save()"
    assert pose["dot_general.1"].startswith("Quantized(bits=4")

    def fun(p, x):
        return random_features(p, x, 10 * normal(8, 2, 32))

    features = stored(fun, PARAMS, X[:, :2])
    assert (features["x"], features["dot_general.0"]) == ("keep", "Recompute()")


def test_what_is_rounded_of_what_is_whole_is_made_again():
    """Angles that are kept small, as mip-NeRF 360's, of coordinates that are whole."""

    def fun(p, x):
        angles = (x[:, :3] @ p["pose"])[..., None] * 2.0 ** jnp.arange(10.0)
        angles = angles.reshape(64, 30)
        near = jnp.where(abs(angles) < 100, angles, angles % 100)
        return read(p, waves(near))

    found = stored(fun, PARAMS | POSE, X)
    assert found["dot_general.0"] == "Save()" and found["rem.0"] == "Recompute()"
    policy = jc.Policy({"dot_general.0": jc.Quantized(8)}, default=jc.policies.int4())
    said = jc.explain(fun, PARAMS | POSE, X, policy=policy, params=0)
    assert {row.name: row.action for row in said.rows}["rem.0"] == "Save()"
    small = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    exact, found = (
        jax.jit(jax.grad(f))(PARAMS | POSE, X)["pose"] for f in (fun, small)
    )
    assert jnp.linalg.norm(found - exact) < 0.12 * jnp.linalg.norm(exact)


def test_other_sines_are_rounded():
    """Of a hidden layer, also by two numbers, and of what is scaled by less than 8.

    In 8 bits where that is 2 or more, or several numbers.
    """

    def hidden(p, x, scales=lambda: 30.0):
        h = jnp.sin(scales() * (jnp.tanh(x) @ p["a"]))
        return jnp.mean((h @ p["b"] - Y) ** 2)

    def slow(p, x):
        return hidden(p, x, lambda: jnp.where(jnp.arange(48) < 24, 1.0, 2.0))

    def slow_twice(p, x):
        return hidden(p, x, lambda: 1.5) + hidden(p, x, lambda: 3.0)

    wide = "Quantized(bits=8, symmetric=False)"
    assert stored(hidden, PARAMS, X)["dot_general.0"] == wide
    assert stored(slow_twice, PARAMS, X)["dot_general.0"] == "Quantized(bits=4)"
    assert stored(slow_twice, PARAMS, X)["dot_general.2"] == wide
    assert stored(slow, PARAMS, X)["dot_general.0"] == wide
