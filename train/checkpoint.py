"""Checkpoints: written by Orbax in the background, sealed, and checked before use.

    checkpoints/
      40/state/...       what Orbax writes
      40/seal.json       names, shapes, dtypes of the state; size and CRC of each file;
                         the step, the run and its plan
      60.unfinished/     being written: becomes 60 by one rename

A folder named by a number is therefore complete, and one that does not match its seal
was damaged later or comes from elsewhere. Orbax alone would load flipped bits.
"""

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

import hosts
from jaxcompact.paths import named_leaves
from metrics import NotFinite
from readers import crc_of

_UNFINISHED = ".unfinished"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or not be resumed from.

    The message names one that can be resumed from.
    """


class Checkpoints:
    """The newest ``keep`` checkpoints of one run; all of its processes save and load.

    A context manager: leaving it waits for the checkpoint that is being written.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder, self.keep = Path(folder).absolute(), keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if hosts.several() and kind not in (None, NotFinite):
            return  # others may not come to write their part
        self.wait()
        self._writer.shutdown()

    def steps(self) -> list[int]:
        """Steps of the checkpoints, damaged ones too, in order."""
        if not self.folder.is_dir():
            return []
        names = (p.name for p in self.folder.iterdir() if p.name.isdecimal())
        return sorted(int(name) for name in names if name == str(int(name)))

    def save(self, step: int, state: Any, **sealed: Any) -> None:
        """Writes a pytree of arrays in the background; they may be donated at once.

        ``sealed`` is what else the seal says: ``run``, a number that `check` compares,
        and ``plan``. Waits for the checkpoint before, and raises CheckpointError if its
        writing failed.
        """
        self.wait()
        unfinished = self.folder / f"{step}{_UNFINISHED}"
        if hosts.is_first():
            unfinished.mkdir(parents=True)
        hosts.wait_for_all(f"{unfinished} is there")
        leaves = _describe(state)
        # The caller may donate the state as soon as this returns: it is on the host by
        # then. On a CPU that is a view, and JAX donates no buffer that has one.
        response = ocp.save_async(unfinished / "state", _without_empty(state))
        self._pending = self._writer.submit(
            self._finish,
            unfinished,
            sealed | {"step": step, "leaves": leaves},
            response,
        )

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, step: int, abstract: Any) -> Any:
        """The state saved at ``step``, placed as ``abstract``'s leaves say.

        ``abstract`` is a tree of `jax.ShapeDtypeStruct`. Use `check` first.
        """
        loaded = ocp.load(self._path(step) / "state", _without_empty(abstract))
        return jax.tree.map(
            lambda a, x: (
                jnp.zeros(a.shape, a.dtype, device=a.sharding) if x is None else x
            ),
            abstract,
            loaded,
        )

    def check(self, step: int, abstract: Any, run: int | None = None) -> None:
        """Raises CheckpointError if it is not there, not whole, or of another tree.

        So it does for one of another ``run``, where its seal says of which. Reads every
        file. The error names the newest earlier one that is good.
        """
        fault = self._fault(step, abstract, run)
        if fault is None:
            return
        message = f"checkpoint {self._path(step)} {fault}"
        for earlier in reversed([s for s in self.steps() if s < step]):
            if self._fault(earlier, abstract, run) is None:
                raise CheckpointError(
                    f"{message}; the previous good one is step {earlier}, "
                    f"{self._path(earlier)}: continue from it with --resume {earlier}"
                )
        raise CheckpointError(f"{message}; there is no good one before it")

    def seal(self, step: int) -> dict[str, Any]:
        """Raises OSError or ValueError if it cannot be read."""
        return dict(json.loads((self._path(step) / "seal.json").read_text()))

    def drop_after(self, step: int) -> None:
        """Removes later checkpoints, and what a killed run left unfinished.

        Of earlier ones the newest ``keep`` stay, which may be fewer than before.
        """
        for later in self.steps():
            if later > step:
                _remove(self._path(later))
        for unfinished in self.folder.glob(f"*{_UNFINISHED}"):
            _remove(unfinished)
        self._keep_newest()

    def _keep_newest(self) -> None:
        for old in self.steps()[: -self.keep]:
            _remove(self._path(old))

    def _path(self, step: int) -> Path:
        return self.folder / str(step)

    def _finish(self, unfinished: Path, seal: dict[str, Any], response) -> None:
        path = self._path(seal["step"])
        try:
            response.result()
            if not hosts.is_first():
                return
            seal = seal | {"files": _files(unfinished)}
            (unfinished / "seal.json").write_text(json.dumps(seal, indent=1))
            unfinished.rename(path)
            self._keep_newest()
        except Exception as error:  # TensorStore raises its own for a full disk
            raise CheckpointError(
                f"checkpoint {path} could not be written: {error}"
            ) from error

    def _fault(self, step: int, abstract: Any, run: int | None) -> str | None:
        """What is wrong with a checkpoint, None if nothing is."""
        path = self._path(step)
        if path.is_file():
            return "is a file and must be a folder: remove it"
        if not path.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            return f"does not exist (steps there: {there})"
        try:
            seal = self.seal(step)
            leaves, files = dict(seal["leaves"]), dict(seal["files"])
        except FileNotFoundError:
            return "has no seal.json: it was not written by this program"
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return "is damaged: its seal.json cannot be read"
        if seal.get("step") != step:
            return f"is of another step by its seal.json, {seal.get('step')}"
        if run is not None and seal.get("run", run) != run:  # older ones do not say it
            return "is of another run by its seal.json"
        here = _describe(abstract)
        for name in here | leaves:
            if leaves.get(name) != here.get(name):
                return (
                    f"is of another state: {name} is {leaves.get(name, 'absent')} in "
                    f"it, {here.get(name, 'absent')} in this run"
                )
        found = _files(path)
        for name, entry in files.items():
            if name not in found:
                return f"is damaged: {name} is missing"
            if found[name] != entry:
                return f"is damaged: the content of {name} has changed"
        return None


def _without_empty(tree: Any) -> Any:
    """None for each array of no elements (GaLore has some): Orbax refuses them."""
    return jax.tree.map(lambda x: x if x.size else None, tree)


def _describe(tree: Any) -> dict[str, str]:
    return {
        name: f"{leaf.dtype.name}{list(leaf.shape)}"
        for name, leaf in named_leaves(tree)
    }


def _remove(path: Path) -> None:
    """A folder, or the file that is in its place."""
    path.unlink() if path.is_file() else shutil.rmtree(path)


def _files(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of each file below, the seal left out, by relative path."""
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, crc_of(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "seal.json"
    }
