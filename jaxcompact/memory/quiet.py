"""Leaves out lines that compilers and solvers write past Python."""

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def without(noise: Sequence[bytes], descriptor: int) -> Iterator[None]:
    """Lines with any of ``noise`` are left out; 1 is stdout, 2 stderr.

    What else is written there comes afterwards.
    """
    try:
        shown = os.dup(descriptor)
    except OSError:  # it is closed
        yield
        return
    _flush()
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            _flush()
            os.dup2(shown, descriptor)
            os.close(shown)
            file.seek(0)
            with open(descriptor, "wb", closefd=False) as place:
                place.writelines(x for x in file if not any(n in x for n in noise))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # there is none, or it is closed
            stream.flush()
    if os.name == "posix":  # C's own buffers
        ctypes.CDLL(None).fflush(None)
