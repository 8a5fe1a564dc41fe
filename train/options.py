"""The command line: one small dataclass for each concern of pretrain.py."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

from configs import MODELS
from jaxcompact.memory import devices
from jaxcompact.optimizers import Moment
from jaxcompact.projection import Kind
from methods import CHECKPOINT, Method, Name
from sharding import parse_mesh

# The options that a method reads; of `Method` itself all others stay as they are.
READS = {
    "exact": ("checkpoint",),
    "remat": ("checkpoint",),
    "compact": (
        *(
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
class ModelOptions:
    model: str = option(
        "tiny",
        "shape: a LLaMA, or a RoBERTa that learns masked words",
        choices=tuple(MODELS),
    )
    dtype: str | None = option(
        None,
        "of the computation (default: bfloat16 on a GPU, float32 on a CPU)",
        choices=("float32", "bfloat16"),
    )
    param_dtype: str = option(
        "float32", "of the parameters", choices=("float32", "bfloat16")
    )


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
        "jaxcompact.checkpoint",
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
class PlanOptions:
    memory_budget: str | None = option(
        None,
        "of the training step, as 7GiB: which tensors of a block are kept, encoded, "
        "moved to the host or made again is planned for it",
    )
    plan: Path | None = option(
        None, "a plan.json to follow: a run's own, or an edited one", Path
    )
    plan_device: str | None = option(
        None,
        "card that is planned for (default: the one that is here, or h200)",
        choices=tuple(devices()),
    )
    max_error: float = option(
        0.08,
        "of the gradient, relative, that a plan may make by encoding; 0 is exact. As "
        "measured at the start, and again after 16, 32, 64, ... updates",
        float,
    )
    explain_plan: bool = option(
        False, "print the plan and stop", None, action="store_true"
    )
    plan_plot: Path | None = option(
        None,
        "with --explain-plan, a picture to make: memory against modelled time, beside "
        "jax.checkpoint's policies",
        Path,
    )

    def __post_init__(self):
        if not self.max_error >= 0:
            raise ValueError(f"--max-error must be 0 or more, got {self.max_error}")
        if self.plan_plot and not (self.explain_plan and self.memory_budget):
            raise ValueError("--plan-plot needs --explain-plan and --memory-budget")
        if self.plan and self.memory_budget:
            raise ValueError("--plan and --memory-budget exclude each other")
        if self.explain_plan and not (self.plan or self.memory_budget):
            raise ValueError("--explain-plan needs --memory-budget or --plan")
        if self.plan_device and not self.memory_budget:
            raise ValueError("--plan-device needs --memory-budget")


@dataclass(frozen=True)
class UpdateOptions:
    """What every optimizer here has."""

    warmup: float = option(
        0.1,
        "fraction of the steps in which the rate rises; then a cosine to 10 %%",
        float,
    )
    weight_decay: float = option(0.0, "decoupled, times the learning rate", float)
    clip: float = option(1.0, "largest norm of the gradient", float)
    max_skipped: int = option(
        10,
        "steps in a row whose loss or gradient is not finite: they change nothing; one "
        "more stops the run",
        int,
    )
    seed: int = option(0, "of initial weights, projections and order of the data", int)

    def __post_init__(self):
        positive(self, "clip")
        if self.max_skipped < 0:
            raise ValueError(
                f"--max-skipped must not be negative, got {self.max_skipped}"
            )
        if not 0 <= self.warmup < 1:
            raise ValueError(f"--warmup must be in [0, 1), got {self.warmup}")
        if not self.weight_decay >= 0:
            raise ValueError(
                f"--weight-decay must not be negative, got {self.weight_decay}"
            )
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, got {self.seed}")


@dataclass(frozen=True)
class OptimizerOptions(UpdateOptions):
    lr: float | None = option(
        None,
        "peak learning rate (default: "
        + ", ".join(f"{name} {own['lr']}" for name, own in DEFAULTS.items())
        + ", good for tiny)",
        float,
    )
    steps: int = option(400, "updates", int)

    def __post_init__(self):
        super().__post_init__()
        positive(self, "lr", "steps")


@dataclass(frozen=True)
class DataOptions:
    data: str | None = option(
        None,
        "a file or directory of text, JSON lines (also .gz, .xz, .zst) or Parquet, or "
        "hf:allenai/c4 (default: the source of Python's standard library)",
    )
    tokenizer: str = option(
        "bytes",
        "bytes, bpe:8192, roberta:8192 for a RoBERTa, or the path of a tokenizer.json",
    )
    max_tokens: int | None = option(
        None, "of the training text to read (default: all; of hf: what is needed)", int
    )
    batch_size: int = option(16, "sequences an update", int)
    accumulate: int = option(1, "microbatches that an update's batch is cut into", int)
    seq_len: int = option(128, "tokens a sequence", int)

    def __post_init__(self):
        positive(self, "max_tokens", "batch_size", "accumulate", "seq_len")


@dataclass(frozen=True)
class DeviceOptions:
    mesh: str | None = option(
        None,
        "sizes of data, fsdp and tensor, as fsdp=4,tensor=2, of all processes' devices "
        "together: copies of the weights, shares of weights and moments, shares of "
        "each matrix product (default: all are data's)",
    )
    coordinator: str | None = option(
        None,
        "host:port of the first of several processes, the same for all, or auto where "
        "the cluster knows (Slurm, Kubernetes, TPU). Each is one host's and sees the "
        "same --out",
    )
    processes: int | None = option(None, "how many there are", int)
    process: int | None = option(None, "which one this is, from 0", int)

    def __post_init__(self):
        positive(self, "processes")
        if self.mesh:
            parse_mesh(self.mesh)
        numbers = (self.processes, self.process)
        if self.coordinator in (None, "auto") and numbers != (None, None):
            raise ValueError("--processes and --process need --coordinator host:port")
        if self.coordinator not in (None, "auto"):
            _, _, port = self.coordinator.rpartition(":")
            if not port.isdecimal():
                raise ValueError(
                    f"--coordinator must be host:port or auto, got {self.coordinator!r}"
                )
            if None in numbers or not 0 <= self.process < self.processes:
                raise ValueError(
                    f"--process must be from 0 to --processes less 1, got "
                    f"{self.process} of {self.processes}"
                )


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


@dataclass(frozen=True)
class OutputOptions(FolderOptions):
    eval_every: int = option(50, "steps; always at the end", int)
    eval_batches: int = option(16, "batches of the held-out text", int)

    def __post_init__(self):
        super().__post_init__()
        positive(self, "eval_every", "eval_batches")


@dataclass(frozen=True)
class Config:
    """All that one run of one method is made of."""

    model: ModelOptions
    method: Method
    plan: PlanOptions
    optimizer: OptimizerOptions
    data: DataOptions
    device: DeviceOptions
    output: OutputOptions

    @property
    def folder(self) -> Path:
        out = self.output.out or Path("runs") / self.model.model
        return out / self.method.name

    def fixed(self) -> dict[str, Any]:
        """What a resumed run must have in common with its beginning."""
        parts = (self.model, self.method, self.optimizer, self.data)
        together = {k: v for part in parts for k, v in asdict(part).items()}
        # The data is known by what is in it, not by its path: see pretrain.prepare.
        others = ("data", "tokenizer", "max_skipped")
        return {k: v for k, v in together.items() if k not in others}


def parse(argv: Sequence[str] | None = None) -> list[Config]:
    """One config for each method. Exits as argparse does; raises ValueError."""
    parts = {
        "model": ModelOptions,
        "method": MethodOptions,
        "plan": PlanOptions,
        "optimizer": OptimizerOptions,
        "data": DataOptions,
        "devices": DeviceOptions,
        "output": OutputOptions,
    }
    description = "Pretrain a LLaMA, or a RoBERTa by masked words."
    model, method, plan, optimizer, data, device, output = read(
        "pretrain.py", description, parts, argv
    )
    if method.checkpoint and (plan.plan or plan.memory_budget):
        raise ValueError("--checkpoint and a plan exclude each other")
    configs = []
    for name in method.names:
        lr = optimizer.lr or DEFAULTS[name]["lr"]
        opt = replace(optimizer, lr=lr)
        configs.append(Config(model, method.of(name), plan, opt, data, device, output))
    return configs


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


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def positive(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{flag(name)} must be positive, got {value}")
