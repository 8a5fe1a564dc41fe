"""Functions whose kernel encodes as well, beside the same without that kernel."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxcompact as jc
from jaxcompact.kernels import choice
from jaxcompact.transform import forward, stores

INT4 = jc.policies.int4()


def gradients(fun, w, x, policy=INT4):
    fun = jc.checkpoint(fun, policy=policy, params=0)

    def loss(w, x):
        y = fun(w, x).astype(jnp.float32)
        return (y * jnp.cos(jnp.arange(y.size).astype(y.dtype)).reshape(y.shape)).sum()

    return jax.value_and_grad(loss, (0, 1))(w, x)


def interpreted(way, fun, w, x):
    """The gradients by an implementation of the kernels."""
    with choice.using(way), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return jax.jit(partial(gradients, fun))(w, x)


def changes_nothing(monkeypatch, find, way, fun, w, x):
    """Whether the program is the same where ``find`` of `forward` finds nothing."""

    def program():
        with choice.using(way):
            lines = str(jax.make_jaxpr(partial(gradients, fun))(w, x)).splitlines()
        return [line for line in lines if " at 0x" not in line]

    found = program()
    monkeypatch.setattr(forward, find, lambda *args: [])
    return found == program()


def encoded_alone(monkeypatch):
    """The shapes that will be encoded by themselves."""
    encode, shapes = stores.Store.encode, []
    monkeypatch.setattr(
        stores.Store,
        "encode",
        lambda store, x: shapes.append(x.shape) or encode(store, x),
    )
    return shapes
