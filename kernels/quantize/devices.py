"""A kernel in a program for several devices: each runs it on its own part."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning

from jaxcompact.kernels.explicit import on_parts, part, typed
from jaxcompact.kernels.varying import varying_as

Kernel = Callable[..., jax.Array | tuple]


@dataclass(frozen=True)
class Division:
    """How a program runs a kernel of an array whose groups lie along an axis.

    Attributes:
        wrap: makes, of a kernel for what a device has, one for whole arrays.
        shape: of what a device has, where the array's type says it; else of the array.
        known: whether it is for several devices.
        broken: the rule that keeps a kernel from it; None if there is none.
    """

    wrap: Callable[[Kernel], Kernel]
    shape: tuple[int, ...]
    known: bool
    broken: str | None = None


def division(
    x: jax.Array | jax.core.ShapedArray,
    axis: int,
    group: int,
    *,
    size: int | None = None,
    by_place: bool = False,
) -> Division:
    """That of ``x``: of entries, or of the codes of ``size`` entries along the axis.

    ``by_place``: what an entry becomes depends on its place in the whole array, which
    a part does not know.
    """
    if typed(x):
        shape, broken = part(x), None
        if by_place and shape != x.shape:
            broken = f"noise is of places in the array, got {x.shape} as {shape}"
        elif shape[axis] < x.shape[axis]:
            parts = x.shape[axis] // shape[axis]
            if (x.shape[axis] if size is None else size) % (group * parts):
                broken = f"devices must have whole groups, got {x.shape} as {shape}"
        return Division(_on_parts, shape, True, broken)
    if axis == -1 and not by_place and split_by_xla(x):
        return Division(partial(on_each_device, group=group), x.shape, True)
    return Division(lambda kernel: kernel, x.shape, False)


def _on_parts(kernel: Kernel) -> Kernel:
    """Last axes correspond, those of what is stored too; scalars are everywhere."""

    def run(*arrays):
        spec = jax.typeof(arrays[0]).sharding.spec
        specs = [
            jax.P(*(at if size > 1 else None for at, size in _last(spec, array.shape)))
            for array in arrays
        ]

        def of_parts(*parts):
            return varying_as(parts, kernel(*parts))

        return on_parts(of_parts, arrays, specs, spec)

    return run


def _last(spec: jax.P, shape: tuple[int, ...]) -> Iterator[tuple[Any, int]]:
    return zip(spec[len(spec) - len(shape) :], shape, strict=True)


def split_by_xla(x: jax.Array | jax.core.ShapedArray) -> bool:
    """Whether it is known that XLA decides how x lies on several devices."""
    mesh = mesh_of(x)
    return mesh.size > 1 and mesh.are_all_axes_auto


def mesh_of(x: jax.Array | jax.core.ShapedArray) -> jax.sharding.AbstractMesh:
    """What the program is for, or x lies on; empty if neither is known."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        kind = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
        mesh = kind.sharding.mesh
    return mesh


def on_each_device(kernel: Callable, group: int) -> Callable:
    """The kernel, whose tensor and what is stored of it XLA splits alike.

    ``kernel`` encodes an array of any rank, or decodes several. Leading axes are split
    in any way; the last one between groups, else it is gathered.
    """
    split = custom_partitioning(kernel)

    def partition(mesh, args, out):
        [x] = args if len(args) == 1 else [out]
        spec = jax.P()  # jax gives no mesh if no array of the program was put on one
        if not mesh.empty:
            *leading, last = x.sharding.spec
            names = (last,) if isinstance(last, str) else last or ()
            if x.shape[-1] % (group * math.prod(mesh.shape[name] for name in names)):
                last = None
            spec = jax.P(*leading, last)
        sharding = jax.NamedSharding(mesh, spec)
        out, args = jax.tree.map(lambda _: sharding, (out, args))
        return mesh, kernel, out, args

    split.def_partition(partition, sharding_rule=_rule)
    return jax.jit(split)  # eager, it would not be split


def _rule(mesh, args: Sequence, out: Sequence) -> str:
    """All axes correspond: of the last one entries, bytes and groups."""
    args, out = (", ".join(["... i"] * len(arrays)) for arrays in (args, out))
    return f"{args} -> {out}"
