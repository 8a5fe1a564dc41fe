"""The methods of a run side by side: what they reached and what they hold in memory."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from methods import Method
from metrics import megabytes, perplexity, written
from training import Training

_FILE = "summary.json"
_DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


def forget(folder: Path) -> None:
    """Of a run that goes on from before its end."""
    (folder / _FILE).unlink(missing_ok=True)


def held_bytes(training: Training, batches: Any, tokens: int) -> dict[str, int | None]:
    """Bytes of one update's gradients, optimizer state and saved linear inputs.

    ``batches`` are what `Training.gradients` takes, ``tokens`` those of a microbatch.
    All three follow from shapes. What else the backward pass finds (attention, the
    activations between the linears) is the same for all methods and not in them.
    """
    state = training.abstract
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches)
    _, gradients = jax.eval_shape(training.gradients, state, shapes)
    return {
        "gradient_bytes": _size(gradients),
        "optimizer_bytes": _size(state.opt_state),
        "linear_input_bytes": linear_input_bytes(training, state.params, tokens),
    }


def linear_input_bytes(training: Training, params: Any, tokens: int) -> int | None:
    """Bytes that the compressible linears keep of their inputs between the passes.

    Linears that read one tensor, the families of `Subspace.slots` (q, k, v; gate, up),
    keep it once: x in the dtype of the computation, or z as its codec stores it. Under
    a checkpoint policy or plan, which decides what is kept of them, it is None.
    """
    if training.policy is not None:
        return None
    # Without a subspace, the families of one whose z would be as wide as x.
    subspace = training.subspace or Method("compact", rank=1.0).subspace(0)
    families = {
        (slot.family, slot.stack): slot for slot in subspace.slots(params).values()
    }
    total = 0
    for slot in families.values():
        codec = None if training.subspace is None else slot.projection.codec
        width = slot.width if training.subspace is None else slot.rank
        each = tokens * width * training.dtype.itemsize
        if codec is not None:
            each = codec.nbytes((tokens, width))
        total += math.prod(slot.stack) * each
    return total


def write(folder: Path, summary: dict[str, Any]) -> None:
    (folder / _FILE).write_text(json.dumps(summary, indent=1), encoding="utf-8")


def table(folders: Iterable[Path]) -> str:
    """A line for each finished run in these folders, all of one task.

    Of a fine-tuned one its scores, of a pretrained one its loss. Runs whose summary is
    damaged are left out, with a line that says so.
    """
    rows = {}
    for path in (folder / _FILE for folder in folders):
        try:
            rows[path.parent.name] = _cells(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            continue
        except _DAMAGED as error:
            print(f"{path} is left out: it cannot be read ({error})")
    columns = dict.fromkeys(name for cells in rows.values() for name in cells)
    lines = [["", *columns]]
    for name, cells in rows.items():
        lines.append([name, *(cells.get(column, "") for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for name, *cells in lines
    )


def _cells(summary: dict[str, Any]) -> dict[str, str]:
    """By column."""
    cells = {k: f"{100 * score:.2f}" for k, score in summary.get("scores", {}).items()}
    if not cells:
        loss = summary["valid_loss"]
        cells["validation loss"] = f"{loss:.4f}"
        cells["perplexity"] = written(perplexity(loss))
    cells["tokens/s"] = f"{summary['tokens_per_second']:,.0f}"
    inputs = summary["linear_input_bytes"]
    return cells | {
        "gradients": megabytes(summary["gradient_bytes"]),
        "optimizer state": megabytes(summary["optimizer_bytes"]),
        "linear inputs": "-" if inputs is None else megabytes(inputs),
    }


def _size(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
