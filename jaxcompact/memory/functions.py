"""What users' functions must be, and must return."""

from collections.abc import Callable, Sequence
from typing import Any


def require_function(name: str, value: Any) -> None:
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {value!r}")


def made_by(
    make: Callable, name: str, kind: str, *args: Any
) -> tuple[Callable, Sequence[Any]]:
    """The function, of that kind, and its arguments that ``make(*args)`` returns.

    Raises ValueError, with the ``name`` of ``make``, if it returns anything else.
    """
    require_function(name, make)
    made = make(*args)
    got = type(made).__name__
    if isinstance(made, tuple | list) and len(made) == 2:
        function, arguments = made
        if callable(function) and isinstance(arguments, tuple | list):
            return function, arguments
        got = f"({type(function).__name__}, {type(arguments).__name__})"
    raise ValueError(
        f"{name} must return ({kind}, args), a function and a tuple, got {got}"
    )
