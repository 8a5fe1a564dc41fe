"""Where a run's plans lie, and which one a checkpoint was trained with."""

import re
import zlib
from pathlib import Path
from typing import Any

import jaxcompact as jc
from checkpoint import CheckpointError


def file_of(folder: Path, updates: int) -> Path:
    """Where the plan lies that holds from a number of updates on."""
    return folder / (f"plan.{updates}.json" if updates else "plan.json")


def load(path: Path, name: str | Path) -> jc.Plan:
    """Raises ValueError, with the name, for a file that holds none."""
    try:
        return jc.Plan.load(path)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None


def sealed(plan: jc.Plan | None, updates: int) -> list[int] | None:
    """What checkpoints say of the plan that holds from a number of updates on."""
    return None if plan is None else [updates, zlib.crc32(plan.to_json().encode())]


def in_force(folder: Path, step: int, seal: Any) -> tuple[jc.Plan, int]:
    """The plan of the checkpoint of a step, and the updates from which on it held.

    ``seal`` is what `sealed` gave, None of an older version's checkpoint. Raises
    CheckpointError for another plan than that, ValueError for a file that holds none.
    """
    match seal:
        case None:
            number = max(n for n in _files(folder) if n <= step)
        case [int(number), int()]:
            pass
        case _:
            raise CheckpointError(
                f"the seal.json of step {step} in {folder} is damaged"
            )
    path = file_of(folder, number)
    plan = load(path, f"{folder} cannot be resumed from step {step}: {path}")
    if seal and sealed(plan, number) != seal:
        raise CheckpointError(
            f"{folder} cannot be resumed from step {step}: {path} is not the plan that "
            f"it was trained with"
        )
    return plan, number


def drop_after(folder: Path, updates: int) -> None:
    """Removes later plans than that which holds from so many updates on."""
    for number, path in _files(folder).items():
        if number > updates:
            path.unlink()


def _files(folder: Path) -> dict[int, Path]:
    found = {0: file_of(folder, 0)}
    for path in folder.glob("plan.*.json"):
        if match := re.fullmatch(r"plan\.(\d+)\.json", path.name):
            found[int(match[1])] = path
    return found
