"""Which implementation of an op runs.

``"xla"`` is the reference, compiled by XLA; ``"mosaic_gpu"`` a kernel for NVIDIA's
Hopper and newer; None what was measured to be the faster one on the card that the
program is traced for. A card has figures in the ``config.json`` beside the kernel, or
takes XLA's.
"""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
# Of jax's own: what is traced with one value is not found with another.
_forced = jax.make_user_context(default_value=(None, None))


@contextmanager
def using(implementation: str | None, config: dict | None = None) -> Iterator[None]:
    """Within it, ops that are asked for None take this one where they can.

    ``config`` is that of kernels with such entries, in the place of their file's.

    Raises ValueError for an implementation that does not exist.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> with using("xla"):
    ...     encoded = jc.Quantized(4).encode(jnp.ones((8, 64)))
    """
    _require_known(implementation)
    with _forced((implementation, config and tuple(config.items()))):
        yield


def chosen(
    op: str,
    folder: Path,
    implementation: str | None,
    broken: str | None,
    *,
    splits: bool = False,
) -> dict | None:
    """How the kernel is to run, as its ``config.json`` says; None for XLA's.

    ``broken``: the rule that keeps the kernel from these arguments, or None.
    ``splits``: it says how XLA is to split it over devices.

    Raises ValueError for an unknown implementation, NotImplementedError if the kernel
    is asked for by name where it can't run.
    """
    forced, config = _forced.value
    _require_known(implementation)
    if implementation == "mosaic_gpu" and broken:
        raise NotImplementedError(f"{op}'s kernel can't: {broken}")
    if broken or (implementation or forced) == "xla":
        return None
    found = _configs(folder).get(op, {})
    if "mosaic_gpu" in (implementation, forced):
        config, default = dict(config or ()), found["default"]
        return (
            config if config.keys() == default.keys() else found.get(_card(), default)
        )
    return found.get(_card()) if splits or _on_one_device() else None


def _require_known(implementation: str | None) -> None:
    if implementation not in (*IMPLEMENTATIONS, None):
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)} or None, "
            f"got {implementation!r}"
        )


@functools.cache
def _configs(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def _card() -> str | None:
    """The name of the GPU that is traced for; None if it is none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.device_kind
    default = jax.config.jax_default_device  # a platform's name, as it may be
    device = jax.devices(default)[0] if isinstance(default, str | None) else default
    return device.device_kind if getattr(device, "platform", "") == "gpu" else None


def _on_one_device() -> bool:
    """XLA splits no kernel by itself: on several devices it must be in a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or mesh.are_all_axes_manual
