"""What takes so little of all that is stored that encoding it saves nothing.

Gates of heads, rows that a mean has pooled, what conditions a layer: each of their
numbers multiplies a whole row of others, with its error.
"""

from collections.abc import Collection, Mapping
from itertools import groupby

from jaxcompact.analysis.tensor import Tensor

_SHARE = 100  # of the bytes that would be stored as they are


def find_small(
    found: Mapping[int, Tensor], frozen: Collection[int], extremes: Collection[int] = ()
) -> set[int]:
    """The smallest of those that are stored, which together take a hundredth of all;
    of several that are as large, all or none.

    ``frozen``: inputs that are kept by reference; ``extremes``: of many entries, which
    are made again if they are not small.
    """
    each = (v for v, t in found.items() if v in extremes or _is_stored(t))
    stored = [v for v in each if v not in frozen]
    sizes = {v: found[v].nbytes for v in stored}
    left = sum(sizes.values()) / _SHARE
    small: set[int] = set()
    for nbytes, alike in groupby(sorted(sizes, key=sizes.__getitem__), sizes.get):
        values = {*alike}
        left -= nbytes * len(values)
        if left < 0:
            break
        small |= values
    return small


def _is_stored(tensor: Tensor) -> bool:
    """Whether a policy that encodes would, and not make it again."""
    again = tensor.cheap or tensor.few_terms or tensor.kind == "function"
    return tensor.floating and not again
