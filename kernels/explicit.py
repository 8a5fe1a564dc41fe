"""Under explicit sharding: arrays whose types say how they lie on several devices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax


def typed(x: Any) -> bool:
    """Whether the type, of an array or of what describes one, says how it lies.

    On all axes of the mesh but those of a `jax.shard_map` around it; also on a mesh of
    one device, where jax asks for as much.
    """
    mesh = sharding_of(x).mesh
    return bool(mesh.explicit_axes) and not mesh.auto_axes


def part(x: Any) -> tuple[int, ...]:
    """The shape of what one device has of it, as the type says."""
    sharding = sharding_of(x)
    return tuple(
        size // math.prod(sharding.mesh.shape[name] for name in names([shared]))
        for size, shared in zip(x.shape, sharding.spec, strict=True)
    )


def sharding_of(x: Any) -> jax.NamedSharding:
    return (x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)).sharding


def like(x: Any) -> jax.NamedSharding | None:
    """The ``out_sharding`` of what lies as ``x``; None where types say nothing."""
    return sharding_of(x) if typed(x) else None


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


def laid_as(
    x: jax.Array, other: jax.Array, axes: Sequence[int | None] | None = None
) -> jax.Array:
    """``x``, whose axes are shared as those of ``other`` are, where that divides x's.

    ``axes``: which one of other's for each of x's; by default its last ones.
    """
    if not typed(other):
        return x
    sharding = sharding_of(other)
    spec = sharding.spec
    if axes is not None:
        spec = [None if axis is None else spec[axis] for axis in axes]
    return jax.sharding.reshard(x, _dividing(x.shape, spec, sharding.mesh))


def placed_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """As `laid_as`, of arrays whose types do not say how they lie."""
    arrays = not any(isinstance(a, jax.core.Tracer) for a in (x, other))
    sharding = getattr(other, "sharding", None) if arrays else None
    if typed(other) or not isinstance(sharding, jax.NamedSharding):
        return x
    spec = [*sharding.spec, *[None] * (other.ndim - len(sharding.spec))]
    return jax.device_put(x, _dividing(x.shape, spec, sharding.mesh))


def _dividing(shape: tuple[int, ...], spec: Sequence[Any], mesh: Any) -> Any:
    """What of the spec's last parts divides the axes of an array."""

    def kept(size: int, shared: Any) -> Any:
        parts = math.prod(mesh.shape[name] for name in names([shared]))
        return None if size % parts else shared

    last = [*spec][len(spec) - len(shape) :]
    return jax.NamedSharding(mesh, jax.P(*map(kept, shape, last)))


def beside(weight: jax.Array, x: jax.Array) -> jax.Array:
    """``weight``, gathered over what of the mesh shares all but x's last axis.

    What shares the tokens can't share the weight that they are multiplied by.
    """
    tokens = set(names(sharding_of(x).spec[:-1]))

    def left(shared: Any) -> Any:
        return tuple(name for name in names([shared]) if name not in tokens) or None

    sharding = sharding_of(weight)
    if tokens.isdisjoint(names(sharding.spec)):
        return weight
    kept = jax.P(*map(left, sharding.spec))
    return jax.sharding.reshard(weight, jax.NamedSharding(sharding.mesh, kept))


def without(x: jax.Array, *axes: int) -> jax.NamedSharding | None:
    """How x lies, but that none of ``axes`` is shared; None if none is."""
    sharding = jax.typeof(x).sharding
    spec = list(sharding.spec)
    for axis in axes:
        spec[axis] = None
    if spec == list(sharding.spec):
        return None
    return jax.NamedSharding(sharding.mesh, jax.P(*spec))
