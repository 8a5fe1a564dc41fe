"""Functions that are flat beyond bounds: what they are of is stored within these.

The bounds of errors are several times what rounding costs by itself: of 8 bits 0.5 % of
a tensor, of 4 bits 7 %. Of what lies where a function is flat nothing else is left.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from jaxcompact.kernels import choice
from tests.cases import slow
from tests.draws import normal
from tests.kernels.machine_code import compiled, kernels_in

pytestmark = pytest.mark.usefixtures("standard_promotion")

FUNCTIONS = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "erf": jax.scipy.special.erf,
    "softcap": lambda h: 30 * jnp.tanh(4 * h / 30),
    "clip": lambda h: jnp.clip(h, -1, 1),
    "clamp": lambda h: jax.lax.clamp(h.dtype.type(-1), h, h.dtype.type(2)),
    "relu6": jax.nn.relu6,
    "two_sided": lambda h: jnp.minimum(jnp.maximum(h, 0), 6),
}
W = {"up": normal(1, 64, 128) / 8, "down": normal(3, 128, 64) / 8}
W["b"] = 0.3 * normal(2, 128)
X = normal(4, 256, 64)


def of(function):
    def fun(w, x):
        return function(x @ w["up"] + w["b"]) @ w["down"]

    return fun


def stored(fun, w, x, policy):
    said = jc.explain(fun, w, x, policy=policy, params=0)
    return {row.name: row.action for row in said.rows}


def wide(scale, dtype=jnp.float32):
    """Weights whose products are so many times larger."""
    w = {**W, "up": scale * W["up"]}
    return jax.tree.map(lambda a: a.astype(dtype), w), X.astype(dtype)


def errors(fun, w, x, policy):
    """Of each parameter's gradient and of x's, relative."""
    policy = jc.Policy({"x": jc.Save()}, default=policy)

    def gradient(fun):
        def loss(w, x):
            y = fun(w, x).astype(jnp.float32)
            return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(w, x))

    found = gradient(jc.checkpoint(fun, policy=policy, params=0))
    pairs = zip(found, gradient(fun), strict=True)
    pairs = [[np.asarray(a, np.float64) for a in pair] for pair in pairs]
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs if b.any()]


def test_what_is_bounded_is_not_standardized():
    codec = jc.Quantized(4, standardized=True)
    found = stored(of(jnp.tanh), W, X, jc.policies.compress(codec))
    assert found["dot_general.0"].startswith("Quantized(bits=4, bound=")
    assert found["x"] == "Quantized(bits=4, standardized=True)"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("scale", [slow(1), 4, 32])
@pytest.mark.parametrize(
    ("policy", "bound"),
    [slow("int8", 0.02), ("int4", 0.25)],
)
def test_gradients_are_near_whatever_the_size(name, scale, policy, bound):
    """Rounded as they are, 0.35 at 4 and above 1 at 32; a bias' is the largest."""
    policy = getattr(jc.policies, policy)()
    assert max(errors(of(FUNCTIONS[name]), *wide(scale), policy)) < bound


@pytest.mark.parametrize(
    "name",
    ["tanh", "clip", "relu6", *map(slow, ("sigmoid", "erf", "clamp", "two_sided"))],
)
def test_what_overflows_in_front_of_them_is_no_nan(name):
    """In float16, whose largest is 65504."""
    w, x = wide(2e4, jnp.float16)
    assert jnp.isinf(x @ w["up"]).any()
    assert max(errors(of(FUNCTIONS[name]), w, x, jc.policies.int4())) < 0.5


def test_nan_stays():
    w, x = wide(1.0)
    policy = jc.policies.int4()
    block = jc.checkpoint(of(jnp.tanh), policy=policy, params=0)
    found = jax.grad(lambda w: block(w, x.at[3, 5].set(jnp.nan)).sum())(w)
    assert jnp.isnan(found["up"]).any() and jnp.isnan(found["down"]).any()


@pytest.mark.parametrize("policy", ["int8", "int4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_saturated_moves_nothing(policy, sign):
    """Optimizers that divide by a gradient's size would make much of a little: of
    sigmoids at 20 the slope is 2e-9."""

    def fun(w, x):
        return jax.nn.sigmoid(x @ w["up"]) @ w["down"]

    w, x = {**W, "up": jnp.full((64, 128), sign * 20 / 64)}, jnp.ones((256, 64))
    policy = getattr(jc.policies, policy)()
    block = jc.checkpoint(fun, policy=policy, params=0)
    found = jax.grad(lambda w: block(w, x).sum())(w)["up"]
    assert jnp.abs(found).max() < 1e-4


SHIFTED = {
    "clip": lambda h: jnp.square(jnp.clip(20 + h, 10.0, 30.0) - 20),
    "kelvins": lambda h: jnp.square((jnp.clip(300 + 10 * h, 200, 400) - 295) / 10),
    "sigmoid": lambda h: jax.nn.sigmoid(h - 8),
    "scaled": lambda h: jnp.square(jnp.clip(2 - h / 3, 1.5, 2.5) - 2),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_what_is_added_is_not_rounded(name):
    """Nor is what lies in a tail, where all of it does."""

    def fun(w, x):
        return SHIFTED[name](x @ w["up"]) @ w["down"]

    assert max(errors(fun, *wide(1), jc.policies.int8())) < 0.015


LARGE = float(jnp.finfo(jnp.float32).max)


@pytest.mark.parametrize(
    ("function", "bound"),
    [
        (lambda h: jax.nn.sigmoid(jnp.clip(h, -50, 50)), 6.0),
        (lambda h: jnp.clip(jnp.clip(h, -9, 9) - 1, -1, 1), 2.0),
        (lambda h: jnp.tanh(h.astype(jnp.float32) * 2), 1.5),
        (lambda h: jnp.tanh(h[:, None] + jnp.zeros((256, 2, 1)))[:, 0], 3.0),
        (lambda h: jnp.tanh(3 - h), 6.0),
        (lambda h: jnp.clip(h, -jnp.inf, 1), (None, 1.0)),
        (lambda h: jnp.minimum(h, 1), (None, 1.0)),
        (lambda h: jnp.clip(h, -LARGE, LARGE), None),
        (lambda h: jnp.clip(h, -1e-33, 1e-33), None),
        (lambda h: jnp.tanh(h * jnp.arange(128.0)), None),
    ],
)
def test_bounds(function, bound):
    """Of the product itself, in whatever is made of it."""
    w, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), wide(1))

    def fun(w, x):
        return function(x @ w["up"]).astype(jnp.float32) @ w["down"].astype(jnp.float32)

    found = stored(fun, w, x, jc.policies.int4())["dot_general.0"]
    said = "" if bound is None else f", bound={bound}"
    assert found == f"Quantized(bits=4{said})"


def test_in_a_shard_map():
    """Where the numbers that it is clipped to vary over devices by their types."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    fun = of(FUNCTIONS["clip"])
    block = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    actions = []

    def part(w, x):
        said = jc.explain(block, w, x)
        actions.extend(r.action for r in said.rows if r.name == "dot_general.0")
        return block(w, x)

    P = jax.P
    jax.shard_map(part, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))(W, X)
    assert actions == ["Quantized(bits=4, bound=2.0)"]


@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.relu])
@pytest.mark.parametrize("action", [jc.Save(), jc.Quantized(8), jc.Offload()])
def test_a_rule_for_what_is_named_on_the_way_wins(function, action):
    def fun(w, x):
        return function(checkpoint_name(x @ w["up"] + w["b"], "h")) @ w["down"]

    w, x = wide(1)
    policy = jc.Policy({"h": action}, default=jc.policies.int4())
    assert stored(fun, w, x, policy)["h"].startswith(type(action).__name__)
    assert max(errors(fun, w, x, policy)) < 0.015


def gated(w, x):
    return (jax.nn.sigmoid(x @ w["up"]) * (x @ w["gate"])) @ w["down"]


def test_each_tensor_of_a_function_has_its_own_bound():
    w, x = wide(32)
    w["gate"] = normal(5, 64, 128) / 8
    assert max(errors(gated, w, x, jc.policies.int4())) < 0.2
    found = stored(gated, w, x, jc.policies.int4())
    assert found["dot_general.0"] == "Quantized(bits=4, bound=6.0)"
    assert found["dot_general.1"] == "Quantized(bits=4)"


def of_bias(w, x):
    return jnp.tanh(x @ w["up"] + w["b"]) @ w["down"]


def of_gelu(w, x):
    return jax.nn.gelu(x @ w["up"] + w["b"]) @ w["down"]


@pytest.mark.parametrize("fun", [gated, of_bias, of_gelu])
def test_a_kernel_makes_codes_and_function_in_one_pass(fun):
    """On a card; the tensor is in no other operation."""
    S = jax.ShapeDtypeStruct
    shapes = {"up": (512, 2048), "gate": (512, 2048), "down": (2048, 512), "b": (2048,)}
    w = {name: S(shape, jnp.bfloat16) for name, shape in shapes.items()}
    policy = jc.Policy({"x": jc.Save()}, default=jc.policies.int4())
    block = jc.checkpoint(fun, policy=policy, params=0)

    def forward(w, x):
        with choice.using("mosaic_gpu"):
            return jax.vjp(lambda w: block(w, x), w)

    assert kernels_in(compiled(forward, w, S((4096, 512), jnp.bfloat16))) == 1


def lstm(w, x):
    """As a cell that makes its gates in one product."""

    def step(state, x):
        h, c = state
        gates = x @ w["up"] + h @ w["down"] + w["b"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    state = jnp.zeros((2, 8, 16))
    return jax.lax.scan(step, (state[0], state[1]), x.reshape(8, 8, 64)[:, :, :16])[1]


@pytest.mark.parametrize("scale", [1, 3])
def test_a_cell_with_wide_gates_is_near(scale):
    """Rounded together, and as they are, it was 0.39 off at 3."""
    w = {"up": normal(1, 16, 64) / 4, "down": normal(2, 16, 64) / 4, "b": W["b"][:64]}
    w = jax.tree.map(lambda a: scale * a, w)
    assert max(errors(lstm, w, X[:64], jc.policies.int4())) < 0.25


def read_twice(w, x):
    h = x @ w["up"]
    return jnp.tanh(h) @ w["down"] + h[:, :64]


def of_a_learned_size(w, x):
    return jnp.tanh((x @ w["up"]) * w["b"]) @ w["down"]


def learned_bounds(w, x):
    return jnp.clip(x @ w["up"], -w["b"], w["b"]) @ w["down"]


UNBOUNDED = [read_twice, of_a_learned_size, learned_bounds]


@pytest.mark.parametrize("fun", UNBOUNDED)
def test_what_is_not_flat_has_no_bound(fun):
    w, x = wide(1.0)
    w["b"] = jnp.abs(w["b"]) + 0.5
    found = stored(fun, w, x, jc.policies.int4())
    assert found["dot_general.0"] == "Quantized(bits=4)"
    assert max(errors(fun, w, x, jc.policies.int4())) < 0.2


def test_what_was_asked_for_is_kept():
    """A bound of one's own, other codecs, and what is stored by another name."""
    w, x = wide(1.0)
    fun, name = of(jnp.tanh), "dot_general.0"
    own = jc.Quantized(4, bound=2.0)
    assert stored(fun, w, x, jc.policies.uniform(own))[name] == repr_of(own)
    chain = jc.Chain(jc.Hadamard(64), jc.Quantized(4))
    for codec in (jc.Float8(), chain, jc.Save()):
        found = stored(fun, w, x, jc.Policy({}, default=codec))
        assert "bound=3" not in found[name]
    policy = jc.Policy({"relu.0": jc.Recompute()}, default=jc.policies.int4())
    assert stored(of(jax.nn.relu), w, x, policy)["relu.0"] == "Recompute()"


def repr_of(codec):
    return f"Quantized(bits={codec.bits}, bound={codec.bound})"


@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.relu])
def test_what_is_stored_is_what_is_measured(function):
    """Of wide numbers, by how much it moves the gradient."""
    w, x = wide(16)

    def make_gradient(policy):
        block = jc.checkpoint(of(function), policy=policy, params=0)

        def loss(w, x):
            y = block(w, x)
            return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

        return jax.grad(loss, (0, 1)), (w, x)

    def gradient(policy):
        of, args = make_gradient(policy)
        return jnp.concatenate([a.ravel() for a in jax.tree.leaves(of(*args))])

    policy = jc.Policy({"x": jc.Save()}, default=jc.policies.int4())
    exact, found = gradient(jc.Policy()), gradient(policy)
    error = float(jnp.sum((found - exact) ** 2) / jnp.sum(exact**2))
    effects = jc.sensitivity(make_gradient, probes=16).effects
    assert effects["dot_general.0"].errors[jc.Quantized(4)] == pytest.approx(
        error, rel=0.5
    )


@pytest.mark.parametrize(
    "fun",
    [
        lambda h: jnp.maximum(h, h),
        lambda h: jnp.minimum(h, h),
        lambda h: jax.lax.clamp(h, h, h),
    ],
)
def test_a_clip_at_itself_is_none(fun):
    assert max(errors(of(fun), *wide(1), jc.policies.int4())) < 0.25
