"""One process for each host, by JAX's distributed runtime. One alone is the first.

All run the same program on the same arguments and take every decision alike. The first
alone prints, and writes what is not a checkpoint.
"""

import json
import os
import signal
import sys
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def join(coordinator: str, processes: int | None, process: int | None) -> None:
    """Connects the processes of a run; ``"auto"`` asks the cluster who they are."""
    try:
        if coordinator == "auto":
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(coordinator, processes, process)
    except RuntimeError as error:  # nobody is there, or it is too late
        raise ValueError(f"--coordinator {coordinator}: {error}") from error
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def is_first() -> bool:
    return jax.process_index() == 0


def several() -> bool:
    return jax.process_count() > 1


def wait_for_all(what: str) -> None:
    if several():
        multihost_utils.sync_global_devices(what)


def require_same(**values: Any) -> None:
    """Raises ValueError if processes differ in a value, as of JSON. Waits for all."""
    if not several():
        return
    texts = (json.dumps(value, sort_keys=True) for value in values.values())
    sums = np.array([zlib.crc32(text.encode()) for text in texts], np.uint32)
    of_all = multihost_utils.process_allgather(sums)
    for name, column in zip(values, of_all.T, strict=True):
        for other in np.flatnonzero(column != column[0]):
            raise ValueError(
                f"all processes must have the same {name}; those of process 0 and "
                f"process {other} differ"
            )


def leave(code: int) -> int:
    """The exit code; with a fault, a process of several ends here.

    At a proper end each waits for all others, which can't go on without this one.
    """
    if several() and code in (1, 2):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class Interrupt:
    """Takes note of the first SIGTERM or Ctrl-C; a second one kills."""

    received: signal.Signals | None = None
    _asked: jax.Array | None = None

    def __enter__(self) -> "Interrupt":
        both = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._note) for number in both}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            # None where it was not Python's: JAX's runtime has one for SIGTERM.
            signal.signal(number, handler or signal.SIG_DFL)

    def agreed(self) -> signal.Signals | None:
        """What any process has received, to be called by all at each step.

        Of several processes it is what there was a step ago, when they were asked:
        nobody has to wait for an answer.
        """
        if not several():
            return self.received
        answer, self._asked = self._asked, _largest(self.received or 0)
        number = 0 if answer is None else int(answer)
        return signal.Signals(number) if number else None

    def _note(self, number: int, frame: Any) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)


def _largest(value: int) -> jax.Array:
    """Over all processes."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    sharding = NamedSharding(mesh, P("all"))
    values = jax.make_array_from_callback(
        (jax.device_count(),), sharding, lambda _: np.array([value], np.int32)
    )
    return _max(values)


_max = jax.jit(jnp.max)
