"""Names of the leaves of a tree."""

import jax


def path_name(path: tuple) -> str:
    """A leaf's name, ``"layers/attn/q/kernel"``, the same in NNX as in plain trees."""
    # NNX variables and Linen's partitioning boxes hold their array as an attribute.
    if path[-1:] == (jax.tree_util.GetAttrKey("value"),):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")
