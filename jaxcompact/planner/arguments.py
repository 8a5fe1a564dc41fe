"""Arguments: counts; of a user's function arrays, and what may be static."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax


def require_positive(name: str, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} must be a positive int, got {count!r}")


def is_array(leaf: Any) -> bool:
    """Or says what one would be."""
    return hasattr(leaf, "shape")


def arrays_of(args: Sequence[Any]) -> list[Any]:
    return list(filter(is_array, jax.tree.leaves(tuple(args))))


def of_arrays(function: Callable, args: Sequence[Any]) -> Callable[[Iterable], Any]:
    """The function of such arrays; what else there is in ``args`` stays as it is."""
    leaves, tree = jax.tree.flatten(tuple(args))

    def run(arrays: Iterable) -> Any:
        given = iter(arrays)
        each = [next(given) if is_array(leaf) else leaf for leaf in leaves]
        return function(*jax.tree.unflatten(tree, each))

    return run
