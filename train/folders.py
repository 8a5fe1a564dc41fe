"""The folder of a run: which run it holds, and from where that can go on."""

import dataclasses
import functools
import json
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import hosts
import metrics
from checkpoint import Checkpoints
from training import State

try:
    import fcntl
except ImportError:  # no Unix
    fcntl = None

_held: set[Path] = set()  # locks of this process, to its end

# What runs that are compared have in common; not all of these are in each program's.
_COMMON = ("task", "model", "data", "data_and_weights", "seed", "steps")
_COMMON += ("batch_size", "seq_len", "accumulate", "eval_batches", "threshold")
_COMMON += ("weights", "dropout", "dtype", "param_dtype")
_COMMON += ("warmup", "weight_decay", "clip", "text_columns", "label_column")


def hold(folder: Path) -> None:
    """Keeps other programs from writing to a run's folder until this one ends.

    Raises ValueError where another does. The lock lies beside the folder, which may be
    emptied.
    """
    path = folder.parent.resolve() / f".{folder.name}.lock"
    if fcntl is None or path in _held or not hosts.is_first():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"another run is writing to {folder}") from None
    except OSError:  # a file system without locks
        os.close(lock)
        return
    _held.add(path)


def begin_folder(folder: Path, fixed: dict[str, Any]) -> None:
    """Empties a folder of the run that it holds, and says which run is next.

    The folder itself stays, as it may be a link to where there is room.
    """
    for path in folder.iterdir() if holds_run(folder) else ():
        whole = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path) if whole else path.unlink()
    (folder / "config.json").write_text(json.dumps(fixed, indent=1))


def holds_run(folder: Path) -> bool:
    checkpoints = Checkpoints(folder / "checkpoints")
    return (folder / "config.json").exists() or bool(checkpoints.steps())


def require_free(config: Any) -> None:
    """Raises ValueError for a folder that can hold no run, or must not be emptied."""
    folder, output = config.folder, config.output
    steps = Checkpoints(folder / "checkpoints").steps()
    folders = (folder / "checkpoints", folder, *folder.parents)
    if taken := [f for f in folders if f.exists() and not f.is_dir()]:
        raise ValueError(f"--out must be a folder, but {taken[0]} is a file")
    if not holds_run(folder):
        return
    if output.resume is False and not output.overwrite:
        raise ValueError(
            f"{folder} holds a run already: --resume continues it, --overwrite "
            f"starts anew, --out names another folder"
        )
    if output.resume is not False and steps:
        return
    for name, path in config.reads.items():
        if path and Path(path).resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"{name} must not be in {folder}, which is emptied: {path}"
            )


def find_start(config: Any, fixed: dict[str, Any], abstract: State) -> int:
    """The step to begin at: a checkpoint's that fits and is whole, or 0.

    Raises ValueError for a run that cannot go on from there, and changes nothing.
    """
    folder, output = config.folder, config.output
    hold(folder)
    require_free(config)  # another run may have filled it meanwhile
    if output.resume is False:
        return 0
    checkpoints = Checkpoints(folder / "checkpoints")
    steps = checkpoints.steps()
    if output.resume is True and not steps:
        print(f"{folder} holds no checkpoint: starting from the beginning")
        return 0
    require_same(folder, fixed)
    step = steps[-1] if output.resume is True else output.resume
    checkpoints.check(step, abstract, fingerprint(fixed))
    metrics.require_rows(folder / "metrics.jsonl", step)
    return step


def require_same(folder: Path, fixed: dict[str, Any]) -> None:
    """Raises ValueError for what differs from the run in a folder, with both values."""
    try:
        before = _described(folder)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{folder} cannot be resumed: which run it holds is unknown, its "
            f"config.json cannot be read ({error})"
        ) from error
    differences = [
        f"{name} was {before.get(name)!r} and is {value!r} now"
        for name, value in fixed.items()
        if json.dumps(before.get(name)) != json.dumps(value)
    ]
    if differences:
        raise ValueError(f"{folder} cannot be resumed: {'; '.join(differences)}")


def compared(folder: Path) -> list[Path]:
    """The folders of runs that differ from the one in ``folder`` in method alone."""
    own, found = _described(folder), []
    for path in sorted(folder.parent.glob("*/config.json")):
        try:
            other = _described(path.parent)
        except (OSError, ValueError, TypeError, RecursionError):  # not of a run
            continue
        if all(other.get(name) == own.get(name) for name in _COMMON):
            found.append(path.parent)
    return found


def _described(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def fingerprint(fixed: dict[str, Any]) -> int:
    """A number by which a checkpoint knows its run, of what config.json says."""
    return zlib.crc32(json.dumps(fixed, sort_keys=True).encode())


def told(error: Exception, folder: Path) -> str:
    """What stopped a run, and from where it can go on."""
    what = str(error).partition("\n")[0]
    if hosts.several():
        what = f"process {jax.process_index()} of {jax.process_count()}: {what}"
    checkpoints = Checkpoints(folder / "checkpoints")
    steps = checkpoints.steps()
    if not steps:
        return f"{what}; there is no checkpoint yet"
    return f"{what}; the last good checkpoint is step {steps[-1]}, {checkpoints.folder}"


def crc(arrays: Iterable[np.ndarray]) -> int:
    """A checksum of all their shapes, dtypes and bytes."""

    def add(crc: int, x: np.ndarray) -> int:
        kind = f"{x.dtype.name}{x.shape}".encode()
        return zlib.crc32(np.ascontiguousarray(x).view(np.uint8), zlib.crc32(kind, crc))

    return functools.reduce(add, arrays, 0)


def shape_bytes(cfg: Any) -> np.ndarray:
    """What says how a model's weights are read, for `crc`."""
    text = json.dumps(dataclasses.asdict(cfg), sort_keys=True)
    return np.frombuffer(text.encode(), np.uint8)
