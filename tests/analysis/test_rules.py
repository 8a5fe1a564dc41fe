"""What rules decide: windows, clips, maxima; of exact values, in few bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from tests.analysis.rule_cases import (
    MANY,
    PARAMS,
    ROWS,
    WIDTH,
    X,
    keeping,
    layer_of,
    tangents,
)
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("any_rank")

COARSE = jc.Policy(default=jc.Quantized(2))
FEW = 0.05  # a window's width: 4 bits have steps of 0.3, 8 bits of 0.02


def inside(x, width):
    return (jnp.abs(x) < width / 2).astype(x.dtype)


def ruled(forward, backward):
    fun = jax.custom_vjp(forward)
    fun.defvjp(lambda *args: (forward(*args), args), backward)
    return fun


def over(x, at):
    return x * (x > at).astype(x.dtype)


# Of a sparse autoencoder: thresholds are moved by what is near to them.
jump = ruled(
    over,
    lambda kept, g: (
        g * (kept[0] > kept[1]).astype(g.dtype),
        -(kept[1] / FEW * inside(kept[0] - kept[1], FEW) * g).sum(0),
    ),
)
straight = ruled(
    lambda x, at: jnp.round(x / at),
    lambda kept, g: (g * (jnp.abs(kept[0]) <= 0.5).astype(g.dtype), None),
)
spike = ruled(
    lambda v, at: (v > at).astype(v.dtype),
    lambda kept, g: (g * inside(kept[0] - kept[1], FEW) / FEW, None),
)
by_halves = ruled(  # a mask that is read by itself and in another
    over,
    lambda kept, g: (
        jnp.concatenate(
            [
                half * ((a & (v < 0.6)).astype(g.dtype) + a.astype(g.dtype))
                for half, v, a in zip(
                    *(jnp.split(y, 2) for y in (g, kept[0], kept[0] > 0.3)), strict=True
                )
            ]
        ),
        None,
    ),
)
by_floor = ruled(over, lambda kept, g: (g * jnp.floor(4 * kept[0]), None))
by_both = ruled(over, lambda kept, g: (jnp.where(kept[0] > 100 * g, g, 0.0), None))


def layer(rule):
    def fun(p, x):
        return rule(jnp.sin(x @ p["up"]), p["at"]) @ p["down"]

    return fun


def spiking(p, x):
    def step(v, _):
        v = 0.9 * v + x @ p["up"] / 4
        s = spike(v, p["at"])
        return v * (1 - jax.lax.stop_gradient(s)), s

    start = jnp.zeros((ROWS, MANY))
    return jax.lax.scan(step, start, length=8)[1].mean(0) @ p["down"]


FUNCTIONS = {
    "a threshold's window": layer(jump),
    "a clip": layer(straight),
    "a spike's surrogate": spiking,
    "a mask in a mask, in parts": layer(by_halves),
    "a rounding": layer(by_floor),
    "beside the cotangent": layer(by_both),
}


@pytest.mark.parametrize(("policy", "most"), [("int8", 0.02), ("int4", 0.2)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_near(name, policy, most):
    """As near as what the rule multiplies is; decided by decoded values it is not."""

    def gradient(fun):
        return jax.grad(lambda p: jnp.mean((fun(p, X) - X) ** 2))(PARAMS)

    fun, policy = FUNCTIONS[name], getattr(jc.policies, policy)()
    found, exact = gradient(jc.checkpoint(fun, policy=policy, params=0)), gradient(fun)
    for name in PARAMS:
        off = jnp.linalg.norm(found[name] - exact[name])
        assert off <= most * jnp.linalg.norm(exact[name]), name


def actions_of(rule):
    policy = jc.policies.int4()
    said = jc.explain(layer(rule), PARAMS, X, policy=policy, params=0)
    return {row.name: row.action for row in said.rows}


def test_masks_are_one_bit_an_entry_and_what_they_are_of_is_as_ever():
    actions = actions_of(jump)
    masks = [name for name, action in actions.items() if action == "BitMask()"]
    assert masks == [f"custom_vjp_call.0.residual{k}" for k in (2, 3)]
    assert actions["dot_general.0"] == "Quantized(bits=4)"


def test_a_rule_that_decides_nothing_is_replayed():
    smooth = ruled(over, lambda kept, g: (g * jnp.cos(kept[0]), None))
    assert not [name for name in actions_of(smooth) if "residual" in name]


# --- what is kept of the forward pass ---


def relu_and_mask(y):
    return jnp.maximum(y, 0.0), y > 0.0


def rounded_and_clipped(y):
    q = jnp.round(y / 0.3)
    return jnp.clip(q, -2, 2) * 0.3, ((jnp.abs(q) <= 2), jnp.clip(q, -2, 2))


def largest(y):
    return y.reshape(*y.shape[:-1], 8, 4).max(-1)


def largest_and_place(y):
    return largest(y), jnp.argmax(y.reshape(*y.shape[:-1], 8, 4), -1)


def at_place(place, g):
    return ((jax.nn.one_hot(place, 4) * g[..., None]).reshape(*g.shape[:-1], 32),)


def leaky(y):
    return jnp.where(y > 0.0, y, 0.1 * y)


def pooled(y):
    """By a rule that gives the places, by which something else is read."""
    largest, place = pooling(y)
    return largest * jnp.cos(place.astype(y.dtype))


def sided(made_by):
    def forward(y):
        return 2 * y, y > 0.0

    fun = made_by(forward)
    if made_by is jax.custom_vjp:
        fun.defvjp(lambda y: (forward(y), None), lambda _, ct: (2 * ct[0],))
    else:
        no_tangent = lambda t: np.zeros(t.shape, jax.dtypes.float0)  # noqa: E731
        fun.defjvp(lambda y, t: (forward(*y), (2 * t[0], no_tangent(t[0]))))

    def chosen(y):
        twice, above = fun(y)
        return jnp.where(above, twice, 3.0 * y)

    return chosen


def chain(y):
    """Of rules: what the second keeps is of what the first made."""
    return relu_and_slope(box(y) - 0.1)


box = tangents(lambda y: y, lambda y, t: t * (jnp.abs(y) < 0.5).astype(t.dtype))
relu_and_slope = keeping(
    lambda y: (leaky(y), jnp.where(y > 0.0, 1.0, 0.1)), lambda slope, g: (slope * g,)
)
pooling = keeping(
    lambda y: ((made := largest_and_place(y)), made[1]),
    lambda place, ct: at_place(place, ct[0]),
)
reverse = ruled(lambda x, by: x, lambda kept, g: (-kept[1] * g, None))
KEPT = {
    "a mask": keeping(relu_and_mask, lambda m, g: (jnp.where(m, g, 0.0),)),
    "a mask as numbers": keeping(
        lambda y: (y, (y > 0.3).astype(y.dtype)), lambda m, g: (m * g,)
    ),
    "a mask and whole numbers": keeping(
        rounded_and_clipped, lambda kept, g: (jnp.where(kept[0], kept[1], 0.0) * g,)
    ),
    "a place": keeping(largest_and_place, at_place, largest),
    "a sign": keeping(
        lambda y: (y, jnp.sign(y)), lambda s, g: ((2.0 + s) * g,), lambda y: y
    ),
    "a slope of two": relu_and_slope,
    "two tangents": tangents(leaky, lambda y, t: jnp.where(y > 0.0, t, 0.1 * t)),
    "a tangent in a window": box,
    "a tangent by a sign": tangents(jnp.abs, lambda y, t: jnp.sign(y) * t),
    "one after the other": chain,
    "in a jitted function": jax.jit(box),
    "a place that is given": pooled,
    "a number that is given": lambda x: reverse(x, 0.3),
    "an array of one that is given": lambda x: reverse(x, jnp.float32(0.3)),
    "a mask that is given": sided(jax.custom_vjp),
    "a mask that is given, by tangents": sided(jax.custom_jvp),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_of_the_forward_pass_decides(name):
    """The function is linear but for that, and x is exact: so is the gradient."""
    fun, w = KEPT[name], normal(1, WIDTH, 32) / WIDTH**0.5
    weights = jax.random.normal(jax.random.key(2), jax.eval_shape(fun, X @ w).shape)

    def gradient(wrap):
        layer = wrap(lambda w, x: fun(x @ w))
        return jax.grad(lambda w: jnp.sum(weights * layer(w, X)))(w)

    exact = gradient(lambda layer: layer)
    found = gradient(lambda f: jc.checkpoint(f, policy=COARSE, params=0))
    assert exact.any()
    assert jnp.abs(found - exact).max() <= 1e-5 * jnp.abs(exact).max()


def residuals_of(rule, *args, policy=COARSE):
    said = jc.explain(rule, *args, policy=policy, params=0)
    return [row.action for row in said.rows if row.stored and "residual" in row.name]


def test_what_is_kept_is_in_the_fewest_bits():
    for name, action in {
        "a mask": "BitMask()",
        "a mask as numbers": "Narrow(limit=2, least=0)",
        "a sign": "Narrow(limit=2, least=-1)",
        "a place": "Narrow(limit=4)",
        "a tangent in a window": "Narrow(limit=2, least=0)",
    }.items():
        rule = KEPT[name]
        fun = lambda p, x: rule(jnp.sin(x @ p["up"])[:, :32])  # noqa: B023, E731
        assert residuals_of(fun, PARAMS, X) == [action], name


def test_what_is_exact_when_made_again_is_not_stored():
    """What labels decide; and all where nothing is rounded."""

    def kept(y, labels):
        probabilities = jax.nn.softmax(y)
        return probabilities[..., :1].sum(), (probabilities, labels > 0)

    weighed = jax.custom_vjp(lambda y, labels: kept(y, labels)[0])
    weighed.defvjp(
        kept, lambda kept, g: (g * jnp.where(kept[1][:, None], kept[0], 0.0), None)
    )
    labels = jnp.arange(ROWS) % 3
    fun = lambda p, x, labels: weighed(x @ p["up"], labels)  # noqa: E731
    assert not residuals_of(fun, PARAMS, X, labels)
    fun = layer(lambda y, at: KEPT["a mask"](y))
    assert not residuals_of(fun, PARAMS, X, policy=jc.Policy(default=jc.Save()))


def test_guards_against_zero_are_no_decisions():
    """They fit what is made again; what is kept beside them need not be stored."""
    rule = tangents(jnp.sin, lambda y, t: jnp.where(y == 0.0, t, t * jnp.cos(y)))
    fun = layer_of(rule)
    assert not residuals_of(fun, PARAMS, X, policy=jc.policies.int4())


def test_of_what_is_whole_nothing_is_kept():
    fun = layer_of(jax.scipy.special.i1)
    assert not residuals_of(fun, PARAMS, X, policy=jc.policies.int4())


def test_a_rule_that_decides_by_what_relu_leaves():
    """It is exact, and not in the place of relu's operand, which is rounded."""
    decide = ruled(
        lambda y, w: y @ w,
        lambda kept, g: (
            jnp.where(kept[0] > 0.5, g @ kept[1].T, 0.0),
            (kept[0] > 0.5).astype(g.dtype).T @ g,
        ),
    )
    w, x = (normal(i, 32, 32) for i in (0, 1))

    def fun(w, x):
        return (decide(jax.nn.relu(x @ w), w) * jnp.cos(jnp.arange(32.0))).sum()

    policy = jc.policies.int4()
    found = jax.grad(jc.checkpoint(fun, policy=policy, params=0))(w, x)
    expected = jax.grad(fun)(w, x)
    off = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    # x alone is rounded, which dw is linear in: 4 bits are a tenth; it was more than
    # twice that.
    assert off < 0.12
    rows = {r.name: r for r in jc.explain(fun, w, x, policy=policy, params=0).rows}
    assert rows["relu.0"].action == "Save(), BitMask()"


DIVIDING = {
    "by what is kept": ruled(lambda y: y, lambda kept, g: (g / jnp.abs(kept[0]),)),
    "what is kept": keeping(
        lambda y: (y, 1 / y), lambda kept, g: (g * kept,), primal=lambda y: y
    ),
    "a tangent": tangents(lambda y: y, lambda y, t: t / jnp.abs(y)),
    "a square root": tangents(lambda y: y, lambda y, t: t * jax.lax.rsqrt(y**2)),
}


@pytest.mark.parametrize("name", DIVIDING)
def test_rules_divide_by_exact_values(name):
    """Of 64 x 128 numbers in 4 bits one in ten is zero. Where one is small its gradient
    is all there is, and is that of the product that is made again."""

    def loss(p, x):
        y = jnp.tanh(DIVIDING[name](x @ p["up"]))
        return ((y @ p["down"]) * jnp.cos(jnp.arange(WIDTH))).sum()

    exact = jax.grad(loss)(PARAMS, X)["up"]
    for policy, most in ((jc.policies.int4(), 0.25), (COARSE, 0.8)):
        small = jc.checkpoint(loss, policy=policy, params=0)
        found = jax.grad(small)(PARAMS, X)["up"]
        assert np.linalg.norm(found - exact) < most * np.linalg.norm(exact)


def test_a_step_with_another_output_that_nothing_reads():
    @jax.custom_jvp
    def spike(y):
        return (y > 0).astype(y.dtype), 2 * y

    @spike.defjvp
    def _(primals, tangents):
        (y,), (t,) = primals, tangents
        return spike(y), (t / (1 + y * y), 2 * t)

    def loss(w, x):
        spikes, membrane = spike(x @ w)
        return (spikes * jnp.cos(jnp.arange(32.0))).sum(), membrane

    w, x = normal(0, 32, 32), normal(1, 32, 32)
    exact, _ = jax.grad(loss, has_aux=True)(w, x)
    small = jc.checkpoint(loss, policy=jc.policies.int4(), params=0)
    found, _ = jax.grad(small, has_aux=True)(w, x)
    assert np.linalg.norm(found - exact) < 0.12 * np.linalg.norm(exact)
