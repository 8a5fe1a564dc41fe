"""Where a forward pass encodes and normalizes in one pass, and where it does not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxcompact as jc
from jaxcompact.checkpoint import TRACERS
from jaxcompact.kernels import choice
from jaxcompact.transform.norms import Norm
from tests.cases import slow
from tests.draws import normal
from tests.kernels.machine_code import compiled, kernels_in
from tests.transform.in_one_pass import (
    INT4,
    changes_nothing,
    encoded_alone,
    interpreted,
)


def along(w, x):
    return w.reshape(*[1] * (x.ndim - 1), -1).astype(jnp.float32)


def rms_norm(w, x):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * along(w, x)).astype(x.dtype)


def layer_norm(w, x):
    wide = x.astype(jnp.float32)
    wide -= jnp.mean(wide, -1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * along(w, x) + along(w, x)).astype(x.dtype)


def mlp(w, x):
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def layer(w, x):
    return x + mlp(w, rms_norm(w["norm"], x))


def two_layers(w, x):
    """What the second reads is a sum, of two tensors that are stored each."""
    return layer(w, layer(w, x))


def centred(w, x):
    return x + mlp(w, layer_norm(w["norm"], x))


def as_flax_does(w, x):
    """Its variance is a difference, and zero where rounding makes that less."""
    return x + mlp(w, nn.LayerNorm().apply({"params": w["flax"]}, x))


def two_of_one(w, x):
    y = rms_norm(w["norm"], x) @ w["up"]
    return (y + layer_norm(w["norm"], x) @ w["gate"]) @ w["down"]


def middle_read_elsewhere(w, x):
    off = x - jnp.mean(x, -1, keepdims=True)
    r = jax.lax.rsqrt(jnp.mean(off**2, -1, keepdims=True) + 1e-6)
    return mlp(w, off * r) + jnp.tanh(off)


def statistic_returned(w, x):
    mean = jnp.mean(x**2, -1, keepdims=True) + 1e-6
    return mlp(w, x * jax.lax.rsqrt(mean)), mean


def read_elementwise(w, x):
    return mlp(w, jnp.sin(rms_norm(w["norm"], x)))


def no_sums(w, x):
    return mlp(w, x * along(w["norm"], x))


def of_two_tensors(w, x):
    y = x @ w["down"].T @ w["down"]
    r = jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return mlp(w, y * r)


def weights(wide=128):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"gate": (64, wide), "up": (64, wide), "down": (wide, 64), "norm": (64,)}
    normal = jax.random.normal
    w = {n: normal(k, s) / 8 for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    return w | {"flax": {"scale": 1 + w["norm"], "bias": w["norm"]}}


X = normal(3, 2, 8, 64)


def norms(fun, policy=INT4):
    """Of each norm the source's name, and those of the statistics that are stored."""
    of, inputs = TRACERS[jc.checkpoint(fun, policy=policy, params=0)](
        (weights(), X), {}
    )
    replay = of.plan((True,) * len(inputs)).replay
    run, slots = replay.forward, replay.slots
    names = {v: slots[ks[0]].tensor.name for v, ks in run.places.items()}
    return [
        (names[region.source], [names[v] for v in region.statistics])
        for region in run.regions
        if isinstance(region, Norm)
    ]


def test_norms_of_what_is_stored():
    """Mean squares are stored, epsilon included: what roots are taken of."""
    assert norms(layer) == [("x", ["add.0"])]
    assert norms(centred) == [("x", ["add.0"])]
    assert norms(as_flax_does) == [("x", ["add.0"])]
    assert norms(two_layers) == [("x", ["add.0"]), ("add.1", ["add.2"])]
    assert len(norms(two_of_one)) == 1  # the other is XLA's


@pytest.mark.parametrize(
    "fun",
    [
        middle_read_elsewhere,
        statistic_returned,
        read_elementwise,
        no_sums,
        of_two_tensors,
    ],
)
def test_what_is_none(fun):
    assert not norms(fun)


def test_a_tensor_that_is_kept_is_not_encoded():
    assert not norms(layer, jc.Policy({"x": jc.Save()}, default=INT4))
    assert norms(layer, jc.Policy({"x": jc.Quantized(8)}, default=INT4))


@pytest.mark.parametrize("way", [None, "xla"])
def test_without_the_kernel_the_program_is_what_it_was(monkeypatch, way):
    assert changes_nothing(monkeypatch, "find_norms", way, two_layers, weights(), X)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "fun",
    [slow(layer), slow(centred), slow(as_flax_does), two_of_one],
    ids=lambda f: f.__name__,
)
def test_gradients_are_those_without_the_kernel(monkeypatch, fun):
    """Interpreted. The codes of x are the same, and y within the bound of `rows`.

    Twice (n / 2 + 6) 2^-24 of 64 columns: 5e-6, in y and again in what is stored.
    """
    from jaxcompact.kernels.normalize import mosaic_gpu

    kernel, together, alone = mosaic_gpu.normalize, [], encoded_alone(monkeypatch)
    monkeypatch.setattr(
        mosaic_gpu,
        "normalize",
        lambda f, x, *a, **k: together.append(x.shape) or kernel(f, x, *a, **k),
    )
    expected = interpreted("xla", fun, weights(), X)
    assert not together and alone.count(X.shape) == 1
    alone.clear()
    found = interpreted("mosaic_gpu", fun, weights(), X)
    assert together == [(16, 64)] and X.shape not in alone
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
def test_a_stack_of_layers_sums_in_its_kernels():
    """Compiled for an H200: XLA adds nothing up and encodes nothing.

    Of groups along the channels; `int4` has none of so many tokens.
    """
    layers, tokens = 2, 32768
    policy = jc.policies.uniform(jc.Quantized(4))
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((layers, *a.shape), jnp.bfloat16), weights(2736)
    )
    x = jax.ShapeDtypeStruct((tokens, 64), jnp.bfloat16)

    def forward(w, x, way):
        fun = jc.checkpoint(layer, policy=policy, params=0)

        def layers(w):
            return jax.lax.scan(lambda x, w: (fun(w, x), None), x, w)[0]

        with choice.using(way):
            return jax.vjp(layers, w)

    text = compiled(partial(forward, way="mosaic_gpu"), shapes, x)
    assert kernels_in(text) == 2  # with SwiGLU's
    assert " reduce(" not in text
    by_xla = compiled(partial(forward, way="xla"), shapes, x)
    assert kernels_in(by_xla) == 0 and " reduce(" in by_xla
