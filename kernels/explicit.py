"""Under explicit sharding: arrays whose types say how they lie on several devices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax


def typed(x: Any) -> bool:
    """Whether the type, of an array or of what describes one, says how it lies.

    On all axes of the mesh but those of a `jax.shard_map` around it.
    """
    mesh = sharding_of(x).mesh
    devices = math.prod(mesh.shape[axis] for axis in mesh.explicit_axes)
    return devices > 1 and not mesh.auto_axes


def part(x: Any) -> tuple[int, ...]:
    """The shape of what one device has of it, as the type says."""
    sharding = sharding_of(x)
    return tuple(
        size // math.prod(sharding.mesh.shape[name] for name in names([shared]))
        for size, shared in zip(x.shape, sharding.spec, strict=True)
    )


def sharding_of(x: Any) -> jax.NamedSharding:
    return (x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)).sharding


def names(spec: Sequence[Any]) -> tuple[str, ...]:
    """The mesh's axes in part of a spec."""
    nested = ((x,) if isinstance(x, str) else x or () for x in spec)
    return tuple(name for group in nested for name in group)


def on_parts(
    kernel: Callable,
    arrays: Sequence[jax.Array],
    specs: Sequence[jax.P],
    out: jax.P,
) -> Any:
    """What the kernel makes of each device's parts; it lies as ``out`` says."""
    mesh = sharding_of(arrays[0]).mesh
    arrays = [
        jax.sharding.reshard(a, jax.NamedSharding(mesh, spec))
        for a, spec in zip(arrays, specs, strict=True)
    ]

    @jax.jit  # eager, it would not find its devices
    def run(*arrays):
        return jax.shard_map(
            kernel,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=out,
            # Within another shard_map, over what it leaves.
            axis_names=set(mesh.explicit_axes if mesh.manual_axes else ()),
        )(*arrays)

    return run(*arrays)


def gathered(x: jax.Array, *axes: int) -> jax.Array:
    """``x``, each of whose ``axes`` lies whole on each device.

    For operations that take no shared axis. XLA finds it by itself on axes of its own.
    """
    sharding = without(x, *axes)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def without(x: jax.Array, *axes: int) -> jax.NamedSharding | None:
    """How x lies, but that none of ``axes`` is shared; None if none is."""
    sharding = jax.typeof(x).sharding
    spec = list(sharding.spec)
    for axis in axes:
        spec[axis] = None
    if spec == list(sharding.spec):
        return None
    return jax.NamedSharding(sharding.mesh, jax.P(*spec))
