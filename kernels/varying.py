"""In a `jax.shard_map`: a kernel's results vary over the axes that its arrays do."""

from typing import Any

import jax


def varying_as(arrays: Any, results: Any) -> Any:
    """The results, of a kernel on these arrays, which says nothing of it."""
    kinds = (jax.typeof(x).manual_axis_type for x in jax.tree.leaves(arrays))
    axes = frozenset().union(*(kind.varying for kind in kinds))

    def varying(x: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(varying, results)
