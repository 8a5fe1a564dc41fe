"""Command lines: a small dataclass for each concern that programs share."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, get_args

from jaxcompact.optimizers import Moment
from jaxcompact.projection import Kind
from methods import CHECKPOINT, Method, Name

# The options that a method reads; of `Method` itself all others stay as they are.
READS = {
    "exact": ("checkpoint",),
    "remat": (),
    "compact": (
        "checkpoint",
        "rank",
        "kind",
        "period",
        "alpha",
        "output_alpha",
        "bits",
        "moment",
        "blocks",
    ),
    "galore": ("checkpoint", "rank", "period", "alpha", "output_alpha"),
}

# Found by a coarse search on the tiny model, 300 steps of the default data; galore's
# are those of its paper.
DEFAULTS = {
    "exact": {"lr": 3e-3},
    "remat": {"lr": 3e-3},
    "compact": {"lr": 1e-2, "alpha": 0.5},
    "galore": {"lr": 1e-2, "alpha": 0.25},
}


def option(default: Any, help: str, type: Any = str, **keywords) -> Any:
    """A dataclass field and the command-line option that fills it."""
    if default is not None and default is not False:
        help += f" (default: {default})"
    return field(default=default, metadata={"help": help, "type": type, **keywords})


def rank(text: str) -> int | float:
    return float(text) if "." in text else int(text)


@dataclass(frozen=True)
class MethodOptions:
    method: str = option(
        "exact,compact",
        f"{', '.join(get_args(Name))}; those of a comma list are trained in turn, on "
        "the same batches, and compared",
    )
    checkpoint: str | None = option(
        None,
        "what the backward pass finds of a block: a policy of jax.checkpoint or of "
        "jaxcompact.checkpoint; remat finds nothing",
        choices=tuple(CHECKPOINT),
    )
    rank: int | float | None = option(
        None,
        "of compact and galore: 0.25 is a fraction of the width, 128 a number "
        f"(default: {Method.rank})",
        rank,
    )
    kind: str | None = option(
        None,
        f"of compact's random projection (default: {Method.kind})",
        choices=get_args(Kind),
    )
    period: int | None = option(
        None, f"updates between two projections (default: {Method.period})", int
    )
    alpha: float | None = option(
        None,
        "scale of the update of the compressed matrices (default: compact "
        f"{DEFAULTS['compact']['alpha']}, galore {DEFAULTS['galore']['alpha']})",
        float,
    )
    output_alpha: float | None = option(
        None,
        "the same of attention's output matrix, which is not compressed "
        f"(default: {Method.output_alpha})",
        float,
    )
    bits: int | None = option(
        None,
        f"of compact's saved sketches: 16 for the dtype's own, 8 or 4 "
        f"(default: {Method.bits})",
        int,
    )
    moment: str | None = option(
        None,
        f"what becomes of the first moment at a new projection "
        f"(default: {Method.moment})",
        choices=get_args(Moment),
    )

    blocks: int | None = option(
        None,
        "into which compact cuts the inputs of the MLP's down, each with a projection "
        "of its own: a multiple of --mesh's tensor, whose devices then need no inputs "
        f"of each other (default: {Method.blocks})",
        int,
    )

    own: ClassVar[dict[str, dict[str, Any]]] = DEFAULTS

    def __post_init__(self):
        positive(self, "period", "alpha", "output_alpha", "blocks")

    @property
    def names(self) -> list[str]:
        names = self.method.split(",")
        for name in names:
            if name not in get_args(Name) or names.count(name) > 1:
                raise ValueError(
                    f"--method must be one or several of {', '.join(get_args(Name))}, "
                    f"with commas between, got {self.method!r}"
                )
        return names

    def of(self, name: str) -> Method:
        """The method of that name, with its own defaults and with what was given."""
        given = {k: v for k, v in asdict(self).items() if k in READS[name]}
        own = {k: v for k, v in self.own[name].items() if k in given}
        return Method(name, **own | {k: v for k, v in given.items() if v is not None})

    def check(self) -> None:
        read = {option for name in self.names for option in READS[name]}
        for name, value in asdict(self).items():
            if name != "method" and value is not None and name not in read:
                raise ValueError(f"{flag(name)} is not an option of {self.method}")


@dataclass(frozen=True)
class UpdateOptions:
    """What every optimizer here has."""

    warmup: float = option(
        0.1,
        "fraction of the steps in which the rate rises; then a cosine to 10 %%",
        float,
    )
    weight_decay: float = option(
        0.0, "decoupled, times the learning rate, of all parameters", float
    )
    clip: float = option(1.0, "largest norm of the gradient", float)
    max_skipped: int = option(
        10,
        "steps in a row whose loss or gradient is not finite: they change nothing; one "
        "more stops the run",
        int,
    )
    seed: int = option(0, "of initial weights, projections and order of the data", int)

    def __post_init__(self):
        if not self.clip > 0:  # inf clips nothing
            raise ValueError(f"--clip must be positive, got {self.clip}")
        if self.max_skipped < 0:
            raise ValueError(
                f"--max-skipped must not be negative, got {self.max_skipped}"
            )
        if not 0 <= self.warmup < 1:
            raise ValueError(f"--warmup must be in [0, 1), got {self.warmup}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"--weight-decay must be 0 or more, and finite, got {self.weight_decay}"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be in [0, 2^32), got {self.seed}")


@dataclass(frozen=True)
class FolderOptions:
    """What a run leaves behind."""

    out: Path | None = option(
        None,
        "folder of the run, each method in one of its own (default: runs/MODEL)",
        Path,
    )
    resume: int | bool = option(
        False,
        "continue from the latest checkpoint, or from that of STEP; what lies after it "
        "is dropped. A method without a checkpoint starts from the beginning",
        int,
        nargs="?",
        const=True,
        metavar="STEP",
    )
    overwrite: bool = option(
        False, "start anew in a folder that holds a run", None, action="store_true"
    )
    export: bool = option(
        False,
        "write the trained weights and the tokenizer to METHOD/weights, as Hugging "
        "Face has them",
        None,
        action="store_true",
    )
    checkpoint_every: int = option(100, "steps", int)
    keep: int = option(2, "checkpoints, the newest", int)
    log_every: int = option(20, "steps", int)

    def __post_init__(self):
        positive(self, "checkpoint_every", "keep", "log_every")
        if self.resume is not False and self.overwrite:
            raise ValueError("--resume and --overwrite exclude each other")


def read(
    program: str, description: str, parts: dict[str, type], argv: Sequence[str] | None
) -> list[Any]:
    """The parts, of which one has the key "method" and one "output", filled."""
    parser = argparse.ArgumentParser(
        program,
        usage="%(prog)s [options]",
        description=description,
        allow_abbrev=False,
    )
    for title, part in parts.items():
        group = parser.add_argument_group(title)
        for f in fields(part):
            keywords = {k: v for k, v in f.metadata.items() if v is not None}
            if "type" in keywords:
                keywords["type"] = _not_empty(keywords["type"])
            group.add_argument(flag(f.name), default=f.default, **keywords)
    values = vars(parser.parse_args(argv))
    filled = {
        title: part(**{f.name: values[f.name] for f in fields(part)})
        for title, part in parts.items()
    }
    filled["method"].check()
    if type(filled["output"].resume) is int and len(filled["method"].names) > 1:
        raise ValueError("--resume STEP needs one --method: each has its own steps")
    return list(filled.values())


def require_batch(size: int | None) -> None:
    """Raises ValueError for more than a batch's numbers count."""
    if size is not None and size >= 2**31:
        raise ValueError(f"--batch-size must be below 2^31, got {size}")


def require_steps(steps: float) -> None:
    """Raises ValueError for more than the optimizer's count holds."""
    if steps >= 2**31:
        raise ValueError(f"steps must be below 2^31, got {steps:g}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _not_empty(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """As in ``--data "$UNSET"``, which would be the current folder."""

    def given(text: str) -> Any:
        if not text:
            raise argparse.ArgumentTypeError("must not be empty")
        return read(text)

    given.__name__ = read.__name__  # which errors show
    return given


def positive(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            rule = "finite" if value == math.inf else "positive"
            raise ValueError(f"{flag(name)} must be {rule}, got {value}")
