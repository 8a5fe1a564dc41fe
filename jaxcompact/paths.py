"""Names of the leaves of a tree."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.core import meta

_BOXES = nnx.Variable, meta.AxisMetadata  # hold what is theirs as an attribute


def path_name(path: tuple) -> str:
    """A path as a name, ``"layers/attn/q/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_with_path(tree: Any) -> list[tuple[tuple, Any]]:
    """`jax.tree.leaves_with_path`, the same in NNX and Linen as in plain trees."""
    found = []
    nodes = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, _BOXES))
    for path, node in nodes:
        if isinstance(node, _BOXES):
            inside = jax.tree.leaves_with_path(node)
            found += [((*path, *rest), leaf) for (_, *rest), leaf in inside]
        else:
            found.append((path, node))
    return found


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(path_name(path), leaf) for path, leaf in leaves_with_path(tree)]


def map_named(fun: Callable, tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` of ``fun(name, leaf, *others)``."""
    structure = jax.tree.structure(tree)
    columns = map(structure.flatten_up_to, rest)
    rows = zip(named_leaves(tree), *columns, strict=True)
    return structure.unflatten(fun(*named, *others) for named, *others in rows)
