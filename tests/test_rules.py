"""What backward rules decide: windows, clips; of exact values, one bit an entry."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc

pytestmark = pytest.mark.usefixtures("any_rank")

WIDTH, MANY, ROWS = 32, 128, 64
PARAMS = {
    name: jax.random.normal(jax.random.key(i), shape) / shape[0] ** 0.5
    for i, (name, shape) in enumerate(
        {"up": (WIDTH, MANY), "down": (MANY, WIDTH)}.items()
    )
} | {"at": jnp.full(MANY, 0.3)}
X = jax.random.normal(jax.random.key(7), (ROWS, WIDTH))
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
