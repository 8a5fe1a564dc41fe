"""Where a run's arrays lie: a mesh of all devices, and a rule for each parameter.

    data      each device has all weights, and its share of a batch
    fsdp      a share of the batch, and of each weight and its moments: a layer's
              weights are gathered when it is their turn
    tensor    a share of each matrix product

The axes are explicit ones: the type of an array says how it lies, and a model says it
of each product's result. Which numbers a run finds does not depend on the mesh, up to
the order of sums.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcompact.paths import map_named

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

# What of the mesh shares each axis of a parameter, of its gradient (a sketch's r stands
# for n) and of its moments. The axis that a product sums over is fsdp's: shared along
# the other one, products would be as in tensor parallelism, of all tokens. The axis of
# layers, which is scanned over, stays whole.
RULES = {
    r"layers/(attn/(q|k|v)|mlp/(gate|up))/kernel": P(None, "fsdp", "tensor"),
    r"layers/(attn/o|mlp/down)/kernel": P(None, "tensor", "fsdp"),
    r"embed/embedding": P(("tensor", "fsdp"), None),
    r"head/kernel": P("fsdp", "tensor"),
}


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes by axis.

    >>> parse_mesh("fsdp=4,tensor=2")
    {'fsdp': 4, 'tensor': 2}
    """
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or not int(size):
            raise ValueError(
                f"--mesh must be sizes of {', '.join(AXES)}, as fsdp=4,tensor=2, "
                f"got {text!r}"
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(text: str | None) -> Mesh:
    """A mesh of every device there is; those that ``text`` leaves over are data's."""
    sizes = parse_mesh(text) if text else {}
    devices = jax.device_count()
    others = math.prod(sizes.get(axis, 1) for axis in AXES[1:])
    sizes = {"data": max(1, devices // others)} | sizes
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if math.prod(shape) != devices:
        raise ValueError(
            f"--mesh must have as many places as there are devices, {devices}, got "
            f"{text!r}: {' * '.join(map(str, shape))}"
        )
    # Of one device there is nothing to say: its program is the one without a mesh.
    kind = AxisType.Explicit if devices > 1 else AxisType.Auto
    return jax.make_mesh(shape, AXES, axis_types=(kind,) * len(AXES))


def shares_of_batch(mesh: Mesh) -> int:
    return mesh.shape["data"] * mesh.shape["fsdp"]


def placed(abstract: Any, mesh: Mesh) -> Any:
    """The shapes of a state with the sharding of each leaf, from its path."""

    def leaf(name, x):
        sharding = NamedSharding(mesh, spec_of(name, x.shape, mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return map_named(leaf, abstract)


def spec_of(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The rule for a parameter, or for what the optimizer keeps of it; P() without one.

    An axis of the mesh that does not divide the array's is left out of it, and one of a
    single device: a type that named it would have the weight gathered nevertheless.
    """
    name, layer = re.fullmatch(r"(.*?)(/\d+)?", name).groups()
    rules = (s for pattern, s in RULES.items() if re.fullmatch(f".*/{pattern}", name))
    spec = next(rules, P())
    if layer:  # one of those that are stacked: GaLore takes them apart
        spec = P(*spec[1:])
    if len(spec) != len(shape):
        return P()
    return _dividing(shape, spec, {axis: n for axis, n in mesh.shape.items() if n > 1})


def _dividing(shape: tuple[int, ...], spec: Iterable[Any], sizes: Mapping) -> P:
    def kept(size: int, axes: Any) -> Iterator[str]:
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            if axis in sizes and size % sizes[axis] == 0:
                size //= sizes[axis]
                yield axis

    pairs = zip(shape, spec, strict=True)
    return P(*(tuple(kept(size, axes)) or None for size, axes in pairs))


def in_force() -> jax.sharding.AbstractMesh | None:
    """The mesh that is traced for (`jax.set_mesh`), whose types say how arrays lie."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == AXES and mesh.are_all_axes_explicit else None


def gathers_weights() -> bool:
    """Whether devices have shares of a weight that each needs whole."""
    mesh = in_force()
    return mesh is not None and mesh.shape["fsdp"] > 1


def laid_out(x: jax.Array, *axes: Any) -> jax.Array:
    """``x``, each of whose axes the mesh in force shares so; without one, ``x``."""
    lies = type_of(x.shape, *axes)
    return x if lies is None else jax.sharding.reshard(x, lies)


def type_of(shape: tuple[int, ...], *axes: Any) -> P | None:
    """How what the mesh in force shares so lies; None without one.

    An axis of the mesh that does not divide the array's is left out.
    """
    mesh = in_force()
    return None if mesh is None else _dividing(shape, axes, mesh.shape)


def product(
    linear: Any, x: jax.Array, last: str | None = None, unit: int = 1
) -> jax.Array:
    """A layer's ``linear(x)``, which lies as `of_batch` says.

    A device has whole ones of so many ``unit`` numbers along the last axis.
    """
    axes = BATCH, *(None,) * (x.ndim - 2), last
    units = *x.shape[:-1], linear.out_features // unit
    return linear(x, out_sharding=type_of(units, *axes))


def rows(table_vd: jax.Array, ids: jax.Array) -> jax.Array:
    """``table[ids]``, of a batch; NaN for an id that the table does not have.

    Of a table that is gathered first: its gradient is summed on each device, and not
    that of all tokens sent.
    """
    shape = (*ids.shape, table_vd.shape[-1])
    out = type_of(shape, BATCH, *(None,) * ids.ndim)
    return laid_out(table_vd, None, None).at[ids].get(mode="fill", out_sharding=out)


def of_batch(x: jax.Array, last: str | None = None) -> jax.Array:
    """Activations: the first axis is the batch's, the last may be ``"tensor"``'s."""
    return laid_out(x, BATCH, *(None,) * (x.ndim - 2), last)


def from_parts(
    read: Callable[[int, int], np.ndarray], abstract: jax.ShapeDtypeStruct, axis: int
) -> jax.Array:
    """An array of which each process reads what its own devices hold.

    ``read(start, stop)`` gives that part of the sharded ``axis``; called once for each.
    """
    known: dict[tuple[int, int], np.ndarray] = {}

    def part(index):
        start, stop, _ = index[axis].indices(abstract.shape[axis])
        if (start, stop) not in known:
            known[start, stop] = read(start, stop)
        return known[start, stop]

    return jax.make_array_from_callback(abstract.shape, abstract.sharding, part)
