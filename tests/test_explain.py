"""The report says what is stored, and its bytes are those that are stored."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from tests.draws import normal

X = normal(0, 16, 64)
PARAMS = {
    "up": normal(1, 64, 128) / 8,
    "down": normal(2, 128, 64) / 11,
}


def block(params, x):
    hidden = checkpoint_name(x @ params["up"], "hidden")
    return x + jax.nn.relu(hidden) @ params["down"]


def rows(said) -> dict:
    return {row.name: row for row in said.rows}


def test_every_tensor_has_its_action_and_a_reason():
    said = rows(jc.explain(block, PARAMS, X, policy=jc.policies.int4(), params=0))
    assert {name: row.action for name, row in said.items()} == {
        "params/up": "keep",
        "params/down": "keep",
        "x": "Quantized(bits=4)",
        "hidden": "Quantized(bits=4)",
        "add.0": "drop",
        "relu.0": "BitMask()",
    }
    assert said["hidden"].shape == (16, 128) and said["hidden"].dtype == "float32"
    assert said["hidden"].where.startswith("test_explain.py:")
    assert all(row.reason for row in said.values())
    assert "does not read it" in said["add.0"].reason


def test_bytes_are_those_of_the_residuals():
    small = jc.checkpoint(block, policy=jc.policies.int4(), params=0)
    said = jc.explain(small, PARAMS, X)
    _, backward = jax.vjp(small, PARAMS, X)
    held = [x for x in jax.tree.leaves(backward) if x.dtype in (jnp.uint8, jnp.uint16)]
    assert said.stored == sum(x.nbytes for x in held)
    # 4 bits an entry and a bfloat16 scale for each 64; a bit for each of relu's.
    assert said.stored == 16 * (64 + 128) // 2 + 16 * 3 * 2 + 16 * 128 // 8
    assert said.exact == 4 * 16 * (64 + 128)


def test_codes_of_a_loops_body_are_told_from_what_is_whole():
    def loop(params, x):
        def step(h, x):
            return jnp.tanh(x @ params["up"] + h), None

        return jax.lax.scan(step, jnp.zeros((8, 128)), x)[0]

    x = normal(3, 4, 8, 64)
    said = rows(jc.explain(loop, PARAMS, x, policy=jc.policies.int4(), params=0))
    codes = [r for r in said.values() if r.name.startswith("scan.0.residual")]
    assert {row.dtype for row in codes if row.stored} == {"uint8", "uint16"}
    assert {row.reason for row in codes if row.stored} == {"as its body stores it"}


def test_what_is_closed_over_is_not_differentiated():
    """Octaves of an angle, which stays whole beside them: here as in the gradient."""
    bands = 2.0 ** jnp.arange(8.0)

    def waves(params, x):
        angles = (x @ params["up"])[..., None] * bands[None, None]
        return jnp.sum(jnp.sin(angles))

    small = jc.checkpoint(waves, policy=jc.policies.int4(), params=0)
    assert rows(jc.explain(small, PARAMS, X))["dot_general.0"].action == "Save()"
    of = jax.make_jaxpr(lambda p: jax.vjp(small, p, X)[1])(PARAMS)
    kept = [aval.dtype for aval in of.out_avals if aval.shape == (16, 128)]
    assert kept == [jnp.uint32]


def test_without_params_inputs_are_kept_and_the_report_says_why():
    said = rows(jc.explain(block, PARAMS, X, policy=jc.policies.int4()))
    assert said["x"].action == "keep" and "`params` was not given" in said["x"].reason
    assert said["hidden"].action == "Quantized(bits=4)"


def test_bodies_of_loops_are_reported_by_themselves():
    def layers(stack, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    stack = jnp.ones((3, 64, 64))
    said = jc.explain(layers, stack, X, policy=jc.policies.int4(), params=0)
    inside = {row.name: row for row in said.inside}
    assert inside["scan.0/dot_general.0"].stored == 16 * 64 // 2 + 16 * 2
    residuals = sum(row.stored for row in said.rows if row.kind == "residual")
    assert residuals == 3 * sum(row.stored for row in said.inside)
    # Three times the layer's input and its product, in float32.
    assert said.exact == 3 * 2 * 16 * 64 * 4 and said.stored == residuals


def test_bodies_are_reported_once_and_those_inside_them_too():
    """jax differentiates a loop over again until it knows what of its state moves."""

    def fun(w, x):
        def inner(x, _):
            return jnp.tanh(x @ w), None

        def outer(carry, _):
            still, x = carry
            x, _ = jax.lax.scan(inner, x, length=2)
            return (still + x.mean(), x), None

        return jax.lax.scan(outer, (jnp.zeros(()), x), length=3)[0]

    said = jc.explain(fun, jnp.ones((64, 64)), X, policy=jc.policies.int4(), params=0)
    names = [row.name for row in said.inside]
    assert names.count("scan.0/scan.0/dot_general.0") == 1
    assert len(names) == len(set(names))


def test_tensors_on_the_host_take_no_bytes_of_the_device():
    policy = jc.policies.uniform(jc.Chain(jc.Quantized(8), jc.Offload()))
    said = rows(jc.explain(block, PARAMS, X, policy=policy, params=0))
    assert said["hidden"].stored == 0 and said["relu.0"].stored == 256


def test_what_is_on_the_host_is_among_what_there_was_to_store():
    for codec in (jc.Offload(), jc.Chain(jc.Quantized(8), jc.Offload())):
        host, here = (
            jc.explain(block, PARAMS, X, policy=jc.policies.uniform(c), params=0)
            for c in (codec, jc.Quantized(8))
        )
        assert host.exact == here.exact > 0
        away = {row.name: row.host for row in host.rows}
        assert away["hidden"] == codec.host_nbytes((16, 128)) > 0


def test_what_nothing_is_encoded_of_is_stored_as_it_is():
    """Of a policy that decides on statistics as well, in loops."""

    @dataclass(frozen=True)
    class All:
        statistics = True

        def decide(self, tensor):
            return (jc.Save() if tensor.floating else jc.Recompute()), "all"

    def layers(w, x):
        def layer(x, _):
            y = x @ w
            return jnp.sin(y) / (1 + jnp.sum(y * y, -1, keepdims=True)), None

        return jax.lax.scan(layer, x, length=4)[0]

    said = jc.explain(layers, jnp.ones((64, 64)), X, policy=All(), params=0)
    assert said.stored == said.exact > 0


@pytest.mark.parametrize("before", [(), (jc.Quantized(8),)])
def test_nor_do_those_of_loops(before):
    def layers(w, x):
        layer = lambda x, _: (jnp.tanh(jnp.tanh(x @ w) @ w), None)  # noqa: E731
        return jax.lax.scan(layer, x, length=8)[0]

    policy = jc.policies.uniform(jc.Chain(*before, jc.Offload()))
    said = jc.explain(layers, jnp.ones((64, 64)), X, policy=policy, params=0)
    assert said.stored == 0 and said.exact == 8 * 3 * 4 * X.size


def test_it_prints_as_a_table():
    text = str(jc.explain(block, PARAMS, X, policy=jc.policies.int4(), params=0))
    header, *lines, total = text.splitlines()
    assert header.split()[0] == "tensor" and len(lines) == 6
    assert total == "stored: 1,888 bytes, of 12,288"


def test_nothing_is_computed_for_shapes_alone():
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, X))
    said = jc.explain(block, *shapes, policy=jc.policies.int4(), params=0)
    assert said == jc.explain(block, PARAMS, X, policy=jc.policies.int4(), params=0)


def test_data_that_jax_cant_differentiate_does_not_count():
    """A minimum over windows has no gradient: as if the padding were closed over."""
    padding = jnp.zeros((8, 64))

    def padded(w, x, padding):
        there = jax.lax.reduce_window(padding, 1.0, jax.lax.min, (1, 4), (1, 1), "SAME")
        return jax.nn.relu(x @ w) * (1 - there)

    w, x = normal(1, 64, 64), normal(2, 8, 64)
    said = jc.explain(padded, w, x, padding, policy=jc.policies.int4(), params=0)
    rows = {row.name: row for row in said.rows}
    assert rows["relu.0"].stored == 8 * 64 // 8 and rows["x"].stored > 0
    assert said.exact > 8 * 64 * 4


def test_a_plain_function_needs_a_policy():
    with pytest.raises(ValueError, match="policy must be given"):
        jc.explain(block, PARAMS, X)


def test_a_checkpointed_function_has_a_policy():
    """Explained under another, its own codes would be what that one keeps."""
    small = jc.checkpoint(block, policy=jc.policies.int4(), params=0)
    with pytest.raises(ValueError, match="policy must be left out .*checkpointed"):
        jc.explain(small, PARAMS, X, policy=jc.policies.int8())


@pytest.mark.parametrize("policy", [None, jc.policies.int4()])
def test_what_is_no_function_is_said(policy):
    with pytest.raises(ValueError, match="fun must be a function, got 3"):
        jc.explain(3, X, policy=policy)


def test_an_argument_that_is_called_params():
    small = jc.checkpoint(block, policy=jc.policies.int4(), params=0)
    with pytest.raises(ValueError, match="params must be left out .*checkpointed"):
        jc.explain(small, params=PARAMS, x=X)
