"""Where a forward pass encodes and activates in one pass, and where it does not."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from jaxcompact.checkpoint import TRACERS
from jaxcompact.kernels import choice
from tests.cases import slow
from tests.draws import normal
from tests.kernels.machine_code import compiled, kernels_in
from tests.transform.in_one_pass import (
    INT4,
    changes_nothing,
    encoded_alone,
    interpreted,
)

Q4 = jc.Quantized(4)


def swiglu(w, x):
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def gated(w, x):
    """One has a bound, beyond which a twentieth lies; the other, as wide, has none."""
    gate, up = x @ w["gate"], x @ (8 * w["up"])
    return (jax.nn.sigmoid(3 * gate) * up) @ w["down"]


def gelu(w, x):
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def exact_gelu(w, x):
    return jax.nn.gelu(x @ w["up"], approximate=False) @ w["down"]


def biased(w, x):
    """As transformers' and Flax's layers are: a bias, and the exact GELU."""
    return jax.nn.gelu(x @ w["up"] + w["scale"][None, None], False) @ w["down"]


def two_functions(w, x):
    """Each of its own tensor."""
    gate, up = x @ w["gate"], x @ w["up"]
    return jnp.tanh(gate) @ w["down"] + (jax.nn.sigmoid(up) * up) @ w["down"]


def longest(w, x):
    """The function goes on to where the product reads it."""
    y = jnp.square(jnp.tanh(x @ w["up"]))
    return (2 * y + 1).reshape(-1, 128) @ w["down"]


def read_elsewhere(w, x):
    gate, up = x @ w["gate"], x @ w["up"]
    return (jax.nn.silu(gate) * up) @ w["down"] + up.sum()


def middle_read_elsewhere(w, x):
    gate, up = x @ w["gate"], x @ w["up"]
    sides = jax.nn.sigmoid(gate)
    return (gate * sides * up) @ w["down"] + sides.sum()


def is_returned(w, x):
    up = x @ w["up"]
    return jnp.tanh(up) @ w["down"], up


def one_is_not_stored(w, x):
    return (jnp.tanh(x @ w["up"]) * x[..., :1]) @ w["down"]


def of_a_row(w, x):
    return (jnp.tanh(x @ w["up"]) + w["rows"][None]) @ w["down"]


def weights(wide=128):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"gate": (64, wide), "up": (64, wide), "down": (wide, 64)}
    normal = jax.random.normal
    w = {n: normal(k, s) / 8 for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    along = jnp.cos(jnp.arange(wide, dtype=jnp.float32))
    return w | {"scale": along, "rows": jnp.ones((8, 1))}


X = normal(3, 2, 8, 64)


def regions(fun, policy=INT4):
    """Of each region the sources' names, and its operations' kinds."""
    of, inputs = TRACERS[jc.checkpoint(fun, policy=policy, params=0)](
        (weights(), X), {}
    )
    replay = of.plan((True,) * len(inputs)).replay
    run, slots = replay.forward, replay.slots
    return {
        tuple(slots[k].tensor.name for k in run.slots_of(region)): [
            op.kind for op in region.ops
        ]
        for region in run.regions
    }


def test_what_is_one_function_of_stored_tensors():
    gate, up = "dot_general.0", "dot_general.1"
    assert regions(swiglu) == {(gate, up): ["logistic", "mul", "mul"]}
    assert regions(two_functions) == {(gate,): ["tanh"], (up,): ["logistic", "mul"]}
    [(sources, kinds)] = regions(gelu).items()
    assert sources == (gate,) and kinds[0] == "integer_pow" and kinds[-1] == "mul"
    assert {"tanh", "add"} < {*kinds}
    [(sources, kinds)] = regions(exact_gelu).items()
    assert sources == (gate,) and {"erfc", "mul"} < {*kinds}
    [(sources, kinds)] = regions(biased).items()
    assert sources == (gate,) and kinds[0] == "add" and kinds[-1] == "mul"
    policy = jc.Policy({"dot_general.0": Q4})
    [(sources, kinds)] = regions(longest, policy).items()
    assert sources == (gate,) and kinds[-3:] == ["square", "mul", "add"]


@pytest.mark.parametrize(
    "fun",
    [read_elsewhere, middle_read_elsewhere, is_returned, one_is_not_stored, of_a_row],
)
def test_what_is_none(fun):
    assert not regions(fun)


def test_sources_have_one_codec_and_intermediates_are_not_stored():
    two = {"dot_general.0": Q4, "dot_general.1": jc.Quantized(8)}
    assert not regions(swiglu, jc.Policy(two))
    assert regions(swiglu, jc.Policy(two | {"dot_general.1": Q4}))
    silu = two | {"dot_general.1": Q4, "silu.0": Q4}
    assert ("dot_general.0", "dot_general.1") not in regions(swiglu, jc.Policy(silu))


@pytest.mark.parametrize("way", [None, "xla"])
def test_without_the_kernel_the_program_is_what_it_was(monkeypatch, way):
    assert changes_nothing(monkeypatch, "find_regions", way, swiglu, weights(), X)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "fun",
    [swiglu, slow(gelu), slow(exact_gelu), slow(biased), gated],
    ids=lambda fun: fun.__name__,
)
def test_gradients_are_those_without_the_kernel(monkeypatch, fun):
    """Interpreted; the same codes, and what XLA fuses in another order."""
    from jaxcompact.kernels.activate import mosaic_gpu

    kernel, together, alone = mosaic_gpu.activate, [], encoded_alone(monkeypatch)
    monkeypatch.setattr(
        mosaic_gpu,
        "activate",
        lambda f, xs, p, **k: together.append(len(xs)) or kernel(f, xs, p, **k),
    )
    expected = interpreted("xla", fun, weights(), X)
    sources = 2 if fun in (swiglu, gated) else 1
    assert not together and alone.count((2, 8, 128)) == sources
    alone.clear()
    found = interpreted("mosaic_gpu", fun, weights(), X)
    assert together == [sources] and alone == [X.shape]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


@pytest.mark.slow
def test_a_stack_of_layers_reads_gate_and_up_once():
    """Compiled for an H200: besides the products nothing else works on their shape.

    Below 32 MB XLA makes one product of the two, and would cut it in two for a kernel.
    """
    layers, tokens, wide = 2, 32768, 2736
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((layers, *a.shape), jnp.bfloat16),
        weights(wide),
    )
    x = jax.ShapeDtypeStruct((tokens, 64), jnp.bfloat16)
    of_this_shape = rf"= \w+\[{tokens},{wide}\]\S* (\w+)\("

    def forward(w, x, way):
        fun = jc.checkpoint(swiglu, policy=INT4, params=0)

        def layers(w):
            return jax.lax.scan(lambda x, w: (x + fun(w, x), None), x, w)[0]

        with choice.using(way):
            return jax.vjp(layers, w)

    text = compiled(partial(forward, way="mosaic_gpu"), shapes, x)
    assert kernels_in(text) == 1  # x, equalized, is encoded by XLA
    assert text.count(f"(bf16[{tokens},{wide}]{{1,0}}, u8[{tokens},1376]{{1,0}}, u8[")
    others = {"dot", "fusion", "parameter", "bitcast"}
    assert {*re.findall(of_this_shape, text)} <= others
    text = compiled(partial(forward, way="xla"), shapes, x)
    assert {"exponential", "multiply"} <= {*re.findall(of_this_shape, text)}
