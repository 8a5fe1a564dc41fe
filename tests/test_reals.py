"""Complex tensors: stored as real ones, their two parts."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.reals import as_reals, from_reals
from tests.draws import normal
from tests.errors import relative

pytestmark = pytest.mark.usefixtures("any_rank")
Q4 = jc.Quantized(4)


def complex_normal(seed, *shape):
    return jax.lax.complex(normal(seed, *shape), normal(seed + 100, *shape))


def by_parts(f):
    """A real function of either part."""
    return lambda z: jax.lax.complex(f(z.real), f(z.imag))


# Sums of 128 float32 products in another order: sqrt(128) * 2^-24 is 7e-7.
ULPS = 2e-6
W = complex_normal(1, 2, 64, 64) / 11
Z = complex_normal(2, 16, 64)
CT = complex_normal(3, 16, 64)


def mlp(w, z):
    return by_parts(jnp.tanh)(z @ w[0]) @ w[1]


def coded(z, codec=Q4):
    return from_reals(codec.decode(codec.encode(as_reals(z))))


def test_the_backward_pass_by_hand():
    """A cotangent is multiplied by what is linear as it is, unconjugated."""

    @jax.jit
    def by_hand(w, z, ct):
        y, backward = jax.vjp(by_parts(jnp.tanh), coded(z @ w[0]))
        (dh,) = backward(ct @ w[1].T)
        return jnp.stack([coded(z).T @ dh, y.T @ ct]), dh @ w[0].T

    small = jc.checkpoint(mlp, policy=jc.policies.uniform(Q4), params=0)
    got = jax.vjp(small, W, Z)[1](CT)
    assert relative(got, by_hand(W, Z, CT)) < ULPS
    # Loose: 4 bits of N(0, 1) err by 0.095 of its norm; tanh' adds as much again.
    assert 0.02 < relative(got, jax.vjp(mlp, W, Z)[1](CT)) < 0.2


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_bytes_and_dtypes(dtype, bits):
    """Two numbers of so many bits for one, in groups of one part each."""
    policy = jc.policies.uniform(jc.Quantized(bits))
    with jax.enable_x64(True):
        w, z = W.astype(dtype), Z.astype(dtype)
        said = jc.explain(mlp, w, z, policy=policy, params=0)
        small = jc.checkpoint(mlp, policy=policy, params=0)
        grads = jax.vjp(small, w, z)[1](CT.astype(dtype))
    assert said.stored == 2 * 2 * Z.size * (bits + 16 / 64) / 8
    row = next(row for row in said.rows if row.name == "dot_general.0")
    assert row.shape == (2, *Z.shape) and row.nbytes == z.nbytes
    assert {str(g.dtype) for g in grads} == {dtype}


@pytest.mark.slow
def test_parts_of_other_sizes_are_apart():
    """What is small in one of them is not lost beside the other."""
    z = jax.lax.complex(1e3 * normal(5, 16, 64), normal(6, 16, 64))
    assert relative(coded(z).imag, z.imag) < 0.1


def test_saved_or_made_again_it_is_exact():
    exact = jax.vjp(mlp, W, Z)[1](CT)
    for action in (jc.Save(), jc.Recompute()):
        small = jc.checkpoint(mlp, policy=jc.Policy(default=action), params=0)
        assert relative(jax.vjp(small, W, Z)[1](CT), exact) < ULPS


def state_space(p, x):
    """S4D's: complex modes, carried by a scan."""
    decay = jnp.exp(jax.lax.complex(-jnp.exp(p["size"]), p["angle"]))

    def step(h, x):
        h = decay * h + jax.lax.complex(x, 0 * x)[..., None]
        return h, jnp.sum(jax.lax.complex(p["c"], 0 * p["c"]) * h, -1).real

    start = jnp.zeros((*x.shape[1:], 8), jnp.complex64)
    return jax.nn.gelu(jax.lax.scan(step, start, x)[1]) @ p["w"]


def of_products(p, x):
    """S5's: a complex state of products, all steps at once."""
    decay = jnp.exp(jax.lax.complex(-jnp.exp(p["size"][:, 0]), p["angle"][:, 0]))
    u = x.astype(jnp.complex64) @ p["b"]

    def join(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    _, h = jax.lax.associative_scan(join, (jnp.broadcast_to(decay, u.shape), u))
    return jax.nn.gelu((h @ p["b"].conj()).real) @ p["w"]


def of_modes(p, x):
    """A Fourier neural operator's."""
    modes = jnp.fft.rfft(x, axis=0) * p["modes"][:, None]
    return jax.nn.gelu(jnp.fft.irfft(modes, axis=0)) @ p["w"]


def of_spectrum(p, x):
    """Magnitudes, of which the smallest count as much as the largest."""
    return jnp.abs(jnp.fft.rfft(x @ p["w"], axis=0))


def attention(p, x):
    q, k, v = (x.astype(jnp.complex64) @ m for m in (p["b"], p["b"].T, p["b"].conj()))
    scores = jnp.einsum("tbi,sbi->bts", q, k.conj()).real / 8
    weights = jax.nn.softmax(scores).astype(jnp.complex64)
    return jnp.einsum("bts,sbi->tbi", weights, v).real @ p["w"]


PARAMS = {
    "size": normal(7, 64, 8) - 2,
    "angle": normal(8, 64, 8),
    "c": normal(9, 64, 8),
    "b": complex_normal(10, 64, 64) / 11,
    "modes": complex_normal(11, 17, 64),
    "w": normal(12, 64, 64) / 8,
}
X, Y = normal(13, 32, 4, 64), normal(14, 32, 4, 64)


@pytest.mark.parametrize(
    ("fun", "most"),
    [
        (state_space, 0.14),
        (of_products, 0.14),
        (of_modes, 0.14),
        (of_spectrum, 0.14),
        (attention, 0.3),  # 8 bits of q and k
    ],
)
def test_architectures(fun, most):
    """Stored before them: 0.4 to 1.0 of exact's bytes."""
    policy = jc.policies.int4()
    said = jc.explain(fun, PARAMS, X, policy=policy, params=0)
    assert said.stored < most * said.exact
    small = jc.checkpoint(fun, policy=policy, params=0)

    def loss(p, x, fun):
        y = fun(p, x)
        return jnp.mean((y - Y[: len(y)]) ** 2)

    found, exact = (
        jax.jit(partial(jax.grad(loss), fun=f))(PARAMS, X) for f in (small, fun)
    )
    for name in PARAMS:
        if jnp.any(exact[name]):
            assert relative(found[name], exact[name]) < 0.15, name


def test_scores_have_groups_of_tokens():
    said = jc.explain(attention, PARAMS, X, policy=jc.policies.int4(), params=0)
    tokens = [row for row in said.rows if "operand of scores" in row.reason]
    # [parts, tokens, batch, entries]
    assert len(tokens) == 2 and all("axis=-3" in row.action for row in tokens), said


def test_what_roots_and_logarithms_read_stays_whole():
    def spectrum(w, x):
        return jnp.log(jnp.abs(jnp.fft.rfft(x @ w, axis=0)) + 1e-3)

    said = jc.explain(spectrum, PARAMS["w"], X, policy=jc.policies.int4(), params=0)
    (row,) = (row for row in said.rows if row.name == "fft.0")
    assert row.action == "Save()" and "logarithm" in row.reason


@pytest.mark.slow
def test_measured_effects_are_those_of_rounding():
    """Predicted of the gradient's variance, and taken."""
    codecs = [jc.Quantized(bits, stochastic=True) for bits in (2, 4)]

    def gradient(policy):
        wrapped = jc.checkpoint(mlp, policy=policy, params=0)
        score = lambda wz: jnp.sum(jnp.abs(wrapped(*wz) - CT) ** 2)  # noqa: E731
        return jax.grad(score), ((W, Z),)

    found = jc.sensitivity(gradient, codecs=codecs, probes=64)
    assert set(found.effects) == {"z", "dot_general.0"}

    def grads(policy):
        fun, args = gradient(policy)
        return jax.tree.leaves(jax.jit(fun)(*args))

    exact = grads(jc.Policy(default=jc.Save()))
    for codec in codecs:
        policy = jc.Policy(dict.fromkeys(found.effects, codec), default=found.base)
        error = found.error(dict(policy.rules))
        assert error == pytest.approx(relative(grads(policy), exact), rel=0.1)


def test_errors_that_add_up_are_measured():
    """Beside an entry of 1 all others are zero in 4 bits: their whole part is lost."""
    angles = jax.random.uniform(jax.random.key(15), (64, 64), maxval=2 * jnp.pi)
    z = (0.05 * jnp.exp(jax.lax.complex(jnp.zeros_like(angles), angles))).at[:, 0]
    z = z.set(jax.lax.complex(jnp.ones(64), jnp.ones(64)))

    def gradient(policy):
        scaled = jc.checkpoint(lambda w, z: w[None] * z, policy=policy, params=0)
        score = lambda wz: jnp.sum(jnp.abs(scaled(*wz)) ** 2)  # noqa: E731
        return jax.grad(score), ((jnp.ones(64, z.dtype), z),)

    found = jc.sensitivity(gradient, codecs=[Q4], probes=64)
    fun, args = gradient(jc.Policy({"z": Q4}))
    exact, _ = gradient(jc.Policy(default=jc.Save()))
    error = relative(fun(*args), exact(*args))
    # The mean of 64 squares of a normal number, to 3 deviations of its root. Were each
    # entry's error by itself it would be an eighth.
    assert found.effects["z"].error(Q4) ** 0.5 == pytest.approx(error, rel=0.27)


def test_devices_keep_their_parts():
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spec = jax.sharding.PartitionSpec("data", None)
        z, ct = (jax.sharding.reshard(v, spec) for v in (Z, CT))
        w = jax.sharding.reshard(W, jax.sharding.PartitionSpec())
        small = jc.checkpoint(mlp, policy=jc.policies.int4(), params=0)
        found = jax.jit(lambda w, z, ct: jax.vjp(small, w, z)[1](ct))(w, z, ct)
        assert found[1].sharding.spec == spec
    alone = jax.vjp(small, W, Z)[1](CT)
    assert relative(found, alone) < ULPS
