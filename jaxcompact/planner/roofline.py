"""How long operations take on a card, from their sizes.

Seconds of an operation are those of its arithmetic or of its bytes, whichever are more;
copies to the host's memory and back are not hidden behind anything.
Elementwise operations take none: they are fused with what reads them. The rates are a
card's data sheet's; two thirds of the arithmetic are what large products reach. Of
values whose types say that they are shared by several devices it is one's part of them;
what devices send each other is not counted.
"""

import math
from typing import Any

import jax.numpy as jnp

from jaxcompact.arrays import on_host
from jaxcompact.codecs import Codec
from jaxcompact.graph import Op, graph_of
from jaxcompact.kernels.explicit import part
from jaxcompact.kinds import REDUCTIONS, expensive
from jaxcompact.memory.cards import Device

REACHED = 2 / 3  # of the data sheet's rate of products


def operation_seconds(op: Op, card: Device) -> float:
    """Of one operation on a card.

    A scan's body counts as often as it runs, a while loop's once, a cond's longest
    branch.
    """
    ins = [v.aval for v in op.eqn.invars if hasattr(v.aval, "shape")]
    outs = [v.aval for v in op.eqn.outvars if hasattr(v.aval, "shape")]
    moved = sum(map(nbytes_of, ins + outs)) / card.memory_bandwidth
    if op.kind in REDUCTIONS:
        return moved
    if op.kind == "device_put":
        pairs = zip(ins, outs, strict=True)
        across = sum(nbytes_of(a) for a, b in pairs if on_host(a) != on_host(b))
        if across:  # without a link that is known, never
            return across / card.host_bandwidth if card.host_bandwidth else math.inf
        return moved
    if not expensive(op):
        return 0.0
    if inner := list(map(graph_of, op.jaxprs)):
        each = [sum(operation_seconds(o, card) for o in g.ops) for g in inner]
        if op.kind == "scan":
            return op.eqn.params["length"] * sum(each)
        return max(each) if op.kind == "cond" else sum(each)
    rate = card.flops * REACHED
    floats = (a.dtype for a in ins[:2] if jnp.issubdtype(a.dtype, jnp.floating))
    if any(dtype.itemsize > 2 for dtype in floats):
        rate /= 2  # TF32
    return max(moved, _flops(op, ins, outs) / rate)


def codec_seconds(codec: Codec, shape: tuple[int, ...], dtype: Any, card: Device):
    """Of encoding and decoding one tensor once: what is read and written.

    Encoding reads it twice, for the scales and for the codes.
    """
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    stored = codec.nbytes(shape, dtype)
    away = codec.host_nbytes(shape, dtype)
    if away:
        return 2 * away / card.host_bandwidth
    return (3 * nbytes + 2 * stored) / card.memory_bandwidth


def _flops(op: Op, ins: list[Any], outs: list[Any]) -> float:
    size = math.prod(part(outs[0])) if outs else 0
    if op.kind == "dot_general":
        ((axes, _), _) = op.eqn.params["dimension_numbers"]
        return 2 * size * math.prod(part(ins[0])[a] for a in axes)
    if op.kind == "conv_general_dilated":
        numbers = op.eqn.params["dimension_numbers"]
        kernel = part(ins[1])
        return 2 * size * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    if "attention" in op.kind and len(ins[0].shape) == 4:  # cuDNN's
        (batch, tokens, heads, width), others = part(ins[0]), part(ins[1])[1]
        products = 5 if "bwd" in op.kind else 2
        return 2 * products * batch * heads * tokens * others * width
    return 0


def nbytes_of(aval: Any) -> int:
    """On one device, where types say how values lie on several."""
    return math.prod(part(aval)) * aval.dtype.itemsize
