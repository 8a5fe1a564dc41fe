"""How long operations take: measured if the card is here, else by its roofline.

What takes time by the roofline runs compiled, on arrays of its shapes, again and again;
so do a codec's encoding and decoding, each by itself. Elementwise operations are fused
with what reads them: they run with it, and take no time of their own. Times are kept in
``~/.cache/jaxcompact`` (``JAXCOMPACT_CACHE``), by card, version and program.
"""

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.codecs import Codec
from jaxcompact.graph import Op, read
from jaxcompact.kinds import ELEMENTWISE, renames
from jaxcompact.memory.cache import cache_folder, write_whole
from jaxcompact.memory.cards import Device, present
from jaxcompact.planner import roofline

_LONG = 0.02  # seconds that runs in a row take, so that starting them is no matter
_RUNS = 50  # in a row, at most


def operation_seconds(
    op: Op, card: Device, makers: Mapping[int, Op] = MappingProxyType({})
) -> float:
    """Of one operation, as `roofline.operation_seconds` has it.

    ``makers``: value -> the operation that makes it; those that are elementwise run
    with it, from what is in memory on.
    """
    modelled, here = roofline.operation_seconds(op, card), present(card)
    if here is None or not modelled:
        return modelled
    ops = _fused(op, makers)
    avals = {
        v: x.aval
        for o in ops
        for v, x in zip(o.ins, o.eqn.invars, strict=True)
        if not isinstance(v, Literal)
    }
    made = {v for o in ops for v in o.outs}
    inputs = [v for v in avals if v not in made]

    def run(*values):
        env = dict(zip(inputs, values, strict=True))
        for o in ops:
            outs = o.bind(*(read(env, v) for v in o.ins))
            env.update(zip(o.outs, outs, strict=True))
        return [env[v] for v in op.outs]

    seconds = _seconds(run, [avals[v] for v in inputs], here)
    return modelled if seconds is None else seconds


def _fused(op: Op, makers: Mapping[int, Op]) -> list[Op]:
    """The operation, after the elementwise ones that it is fused with."""
    ops: dict[Op, None] = {}

    def add(o: Op) -> None:
        for maker in filter(None, map(makers.get, o.reads)):
            if maker not in ops and (maker.kind in ELEMENTWISE or renames(maker)):
                add(maker)
        ops[o] = None

    add(op)
    return list(ops)


def codec_seconds(
    codec: Codec, shape: tuple[int, ...], dtype: Any, card: Device
) -> float:
    """Of encoding and decoding one tensor once, as `roofline.codec_seconds` has it."""
    here = present(card)
    # Of what is fetched from the host a program by itself would copy nothing.
    if here is not None and not codec.host_nbytes(shape, dtype):
        x = jax.ShapeDtypeStruct(shape, dtype)
        passes = (codec.encode, x), (codec.decode, jax.eval_shape(codec.encode, x))
        each = [_seconds(fun, [of], here) for fun, of in passes]
        if None not in each:
            return sum(each)
    return roofline.codec_seconds(codec, shape, dtype, card)


def _seconds(fun: Callable, args: Sequence[Any], device: jax.Device) -> float | None:
    """None for what cannot run alone: of several devices, too large, with keys."""
    leaves = jax.tree.leaves(args)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves):
        return None
    if any(getattr(x.sharding, "num_devices", 1) > 1 for x in leaves):
        return None
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    program = str(jax.make_jaxpr(fun)(*shapes))
    parts = device.device_kind, importlib.metadata.version("jaxlib"), program
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    file = cache_folder("times") / f"{name}.json"
    try:
        return float(file.read_text())
    except (OSError, ValueError):  # not there, or spoiled
        pass
    try:
        with jax.default_device(device):
            arrays = jax.tree.map(_array, shapes)
            seconds = _timed(jax.jit(fun).lower(*arrays).compile(), arrays)
    except jax.errors.JaxRuntimeError:  # no memory is left, most often
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, f"{seconds}\n")
    except OSError:  # costs the next one a measurement
        pass
    return seconds


def _array(x: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.random.normal(jax.random.key(0), x.shape, x.dtype)
    return jnp.zeros(x.shape, x.dtype)


def _timed(compiled: Callable, args: Sequence[Any]) -> float:
    def runs(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            out = compiled(*args)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / count

    runs(1)
    count = max(2, min(_RUNS, int(_LONG / runs(1))))
    return min(runs(count) for _ in range(3))
