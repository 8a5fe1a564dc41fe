"""The memory that a step really takes, on the GPU that is here."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.memory.functions import require_function


def measure(step: Callable, *args: Any) -> int:
    """Runs ``step(*args)`` once, and asks the allocator for its peak bytes.

    Abstract arguments are filled with zeros. Once a process: the allocator's peak can't
    be set back, and what the process did before counts.

    Raises ValueError for a step that is no function; NotImplementedError where the
    backend does not count: on a CPU.
    """
    require_function("step", step)
    device = jax.local_devices()[0]
    if "peak_bytes_in_use" not in (device.memory_stats() or {}):
        raise NotImplementedError(f"{device.platform} does not count its memory")

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape)
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    step = step if hasattr(step, "lower") else jax.jit(step)
    compiled = step.lower(*args).compile()
    args = jax.tree.map(filled, list(args))
    jax.block_until_ready(compiled(*args))
    return device.memory_stats()["peak_bytes_in_use"]
