"""The command line of pretrain.py; options.py has what finetune.py's shares."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from configs import MODELS
from methods import Method
from options import (
    DEFAULTS,
    FolderOptions,
    MethodOptions,
    UpdateOptions,
    option,
    positive,
    read,
    require_batch,
    require_steps,
)
from plan_options import PlanOptions
from sharding import parse_mesh


@dataclass(frozen=True)
class ModelOptions:
    model: str | None = option(
        None,
        "shape of a LLaMA, a GPT-2, or a RoBERTa, which learns masked words "
        "(default: tiny)",
        choices=tuple(MODELS),
    )
    weights: str | None = option(
        None,
        "trained ones of a LLaMA or GPT-2 to go on from, in place of --model: a folder "
        "with config.json, model.safetensors and tokenizer.json, such as --export "
        "writes, or hf:NAME of the hub",
    )
    dropout: float | None = option(
        None,
        "of a GPT-2's hidden states in training (default: 0.1, or what the weights' "
        "config.json says)",
        float,
    )
    dtype: str | None = option(
        None,
        "of the computation (default: bfloat16 on a GPU, float32 on a CPU)",
        choices=("float32", "bfloat16"),
    )
    param_dtype: str = option(
        "float32", "of the parameters", choices=("float32", "bfloat16")
    )

    def __post_init__(self):
        if self.model and self.weights:
            raise ValueError("--weights has a shape of its own: --model excludes it")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout must be in [0, 1), got {self.dropout}")

    @property
    def name(self) -> str:
        if self.weights:
            return Path(self.weights.removeprefix("hf:")).resolve().name
        return self.model or "tiny"


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
        require_steps(self.steps)


@dataclass(frozen=True)
class DataOptions:
    data: str | None = option(
        None,
        "a file or directory of text, JSON lines (also .gz, .xz, .zst) or Parquet, or "
        "hf:allenai/c4 (default: the source of Python's standard library). In a "
        "directory the words train and valid, val, dev, eval or test in names tell the "
        "splits; test is not read. Its tokens are kept in jaxcompact/ of "
        "XDG_CACHE_HOME, or of ~/.cache",
    )
    tokenizer: str | None = option(
        None,
        "bytes, bpe:8192, roberta:8192 for a RoBERTa, or the path of a tokenizer.json "
        "(default: that of --weights, else bytes). Documents end with the eos_token of "
        "the tokenizer_config.json beside it, else with one of the usual names",
    )
    max_tokens: int | None = option(
        None, "of the training text to read (default: all; of hf: what is needed)", int
    )
    batch_size: int = option(16, "sequences an update", int)
    accumulate: int = option(1, "microbatches that an update's batch is cut into", int)
    seq_len: int = option(128, "tokens a sequence", int)

    def __post_init__(self):
        positive(self, "max_tokens", "batch_size", "accumulate", "seq_len")
        require_batch(self.batch_size)


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
        out = self.output.out or Path("runs") / self.model.name
        return out / self.method.name

    @property
    def reads(self) -> dict[str, Any]:
        """The options that name files."""
        return {
            "--weights": self.model.weights,
            "--plan": self.plan.plan,
            "--data": self.data.data,
            "--tokenizer": self.data.tokenizer,
        }

    def fixed(self) -> dict[str, Any]:
        """What a resumed run must have in common with its beginning."""
        parts = (self.model, self.method, self.optimizer, self.data)
        together = {k: v for part in parts for k, v in asdict(part).items()}
        # Data and weights are known by what is in them: see pretrain.prepare.
        others = ("data", "weights", "tokenizer", "max_skipped")
        kept = {k: v for k, v in together.items() if k not in others}
        model = None if self.model.weights else self.model.name
        # Losses are of the same held-out text to the end.
        return kept | {"model": model, "eval_batches": self.output.eval_batches}


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
    description = "Pretrain a LLaMA or a GPT-2, or a RoBERTa by masked words."
    model, method, plan, optimizer, data, device, output = read(
        "pretrain.py", description, parts, argv
    )
    plan.check(method.checkpoint, method.names)
    configs = []
    for name in method.names:
        lr = optimizer.lr or DEFAULTS[name]["lr"]
        opt = replace(optimizer, lr=lr)
        configs.append(Config(model, method.of(name), plan, opt, data, device, output))
    return configs
