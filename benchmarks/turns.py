"""Many processes compile at once; one at a time measures, and none compiles meanwhile.

`TURNS` names a file that they share; a process without it is alone.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Beside others that compile: XLA tries products on the device."""
    file = _locked(fcntl.LOCK_SH)
    try:
        yield
    finally:
        if file is not None:
            os.close(file)


def measure() -> None:
    """Waits until no other compiles or measures, nor may until this process ends."""
    _locked(fcntl.LOCK_EX)


def _locked(kind: int) -> int | None:
    if not (name := os.environ.get("TURNS")):
        return None
    file = os.open(name, os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, kind)
    return file
