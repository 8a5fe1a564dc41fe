"""What lies beyond a codec's bound is stored coarsely: one number, or two."""

from typing import Any

from jaxcompact.kernels.quantize.levels import Bound


def ends_of(bound: float | Bound | None) -> Bound | None:
    """From where to where; a number is both.

    >>> ends_of(3.0), ends_of((-2.6, None))
    ((-3.0, 3.0), (-2.6, None))
    """
    return (-bound, bound) if _is_number(bound) else bound


def is_bound(x: Any) -> bool:
    """Whether it is a number from 1e-30 to 1e30, or two ends of such sizes, the lesser
    first, of which one may be None."""
    if _is_number(x):
        return 1e-30 <= x <= 1e30
    ends = [end for end in x if end is not None] if isinstance(x, tuple) else []
    if not ends or len(x) != 2 or not all(map(_is_number, ends)):
        return False
    return ends == sorted({*ends}) and all(is_bound(abs(end)) for end in ends)


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)
