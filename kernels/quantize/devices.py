"""A kernel in a program that XLA splits over devices: each runs it on its own rows."""

import math
from collections.abc import Callable, Sequence

import jax
from jax.experimental.custom_partitioning import custom_partitioning


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
