"""The command line of finetune.py; options.py has what pretrain.py's shares."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import options
from jaxcompact.projection import Kind
from methods import Method
from options import option, positive
from plan_options import PlanOptions
from tasks import OWN, TASKS, Task, own_task

# CompAct's (arXiv 2410.15352, table of GLUE), and GaLore's, whose table it extends.
_SUBSPACE = {"rank": 8, "period": 500}
DEFAULTS = {
    "exact": {},
    "remat": {},
    "compact": _SUBSPACE | {"kind": "gaussian"},
    "galore": _SUBSPACE,
}
_THRESHOLD = 0.5
_ALPHA = 16  # over the rank: 4 at rank 4, 2 at rank 8


@dataclass(frozen=True)
class TaskOptions:
    task: str | None = option(
        None,
        f"{', '.join(TASKS)}: GLUE's; one's own: classify, tag (several classes a "
        "text, or none), rate",
        choices=(*TASKS, *OWN),
    )
    task_data: Path | None = option(
        None,
        "folder with the task's train and dev files: GLUE's as they are; TSV, CSV or "
        "JSON lines (also .gz, .xz, .zst) of one's own, where one file will do: an "
        "object of JSON with a list of rows for each split, or a tenth is held out",
        Path,
    )
    text_columns: str | None = option(
        None,
        "of one's own: the column of the text, or of two with a comma between; by "
        "names, or by numbers from 1 for files without a header (default: text)",
    )
    label_column: str | None = option(
        None,
        "of one's own: that of the class or rating; of tag the classes with commas "
        "between, in JSON also a list (default: label)",
    )
    threshold: float | None = option(
        None,
        f"of tag: a text has the classes whose probability is above it "
        f"(default: {_THRESHOLD})",
        float,
    )
    seq_len: int = option(512, "longest example, in tokens; the rest is cut", int)
    batch_size: int | None = option(
        None, "examples an update (default: 32 of cola, 16 of all others)", int
    )
    accumulate: int = option(1, "microbatches that an update's batch is cut into", int)

    def __post_init__(self):
        if not self.task or not self.task_data:
            raise ValueError("--task and --task-data are needed")
        positive(self, "seq_len", "batch_size", "accumulate")
        options.require_batch(self.batch_size)
        if self.seq_len < 8:
            raise ValueError(f"--seq-len must be at least 8, got {self.seq_len}")
        for name in ("text_columns", "label_column"):
            if self.task in TASKS and getattr(self, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} is an option of {', '.join(OWN)}, not "
                    f"of {self.task}"
                )
        if self.threshold is not None and self.task != "tag":
            raise ValueError(f"--threshold is an option of tag, not of {self.task}")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ValueError(f"--threshold must be in (0, 1), got {self.threshold}")

    @property
    def described(self) -> Task:
        if self.task in TASKS:
            return TASKS[self.task]
        texts = "text" if self.text_columns is None else self.text_columns
        label = "label" if self.label_column is None else self.label_column
        return own_task(texts, label, self.task)


@dataclass(frozen=True)
class WeightOptions:
    weights: str | None = option(
        None,
        "folder with config.json, model.safetensors and tokenizer.json, such as "
        "pretrain.py --export writes; hf:FacebookAI/roberta-base from the hub",
    )
    tokenizer: str | None = option(
        None, "path of a tokenizer.json (default: that of the weights)"
    )
    dropout: float | None = option(
        None, "of hidden states (default: what the weights' config.json says)", float
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
        if not self.weights:
            raise ValueError("--weights is needed")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout must be in [0, 1), got {self.dropout}")


@dataclass(frozen=True)
class MethodOptions(options.MethodOptions):
    rank: int | float | None = option(
        None,
        "of compact and galore: 8 a number, 0.25 a fraction of the width "
        f"(default: {_SUBSPACE['rank']})",
        options.rank,
    )
    kind: str | None = option(
        None,
        "of compact's random projection (default: gaussian)",
        choices=get_args(Kind),
    )
    period: int | None = option(
        None,
        f"updates between two projections (default: {_SUBSPACE['period']})",
        int,
    )
    alpha: float | None = option(
        None,
        f"scale of the update of the compressed matrices (default: {_ALPHA} / rank, "
        f"of a fraction {Method.alpha})",
        float,
    )
    blocks: int | None = option(
        None,
        "into which compact cuts the inputs of the MLP's down, each with a projection "
        f"of its own (default: {Method.blocks})",
        int,
    )

    own = DEFAULTS

    def of(self, name: str) -> Method:
        method = super().of(name)
        by_rank = "alpha" in options.READS[name] and isinstance(method.rank, int)
        if self.alpha is None and by_rank:
            return replace(method, alpha=_ALPHA / method.rank)
        return method


@dataclass(frozen=True)
class OptimizerOptions(options.UpdateOptions):
    lr: float = option(2e-5, "peak learning rate", float)
    epochs: float = option(30.0, "passes over the training examples", float)
    warmup: float = option(
        0.06, "fraction of the steps in which the rate rises; then a line to 0", float
    )

    def __post_init__(self):
        super().__post_init__()
        positive(self, "lr", "epochs")


@dataclass(frozen=True)
class OutputOptions(options.FolderOptions):
    out: Path | None = option(
        None,
        "folder of the run, each method in one of its own (default: runs/TASK)",
        Path,
    )


@dataclass(frozen=True)
class Config:
    """All that one run of one method is made of."""

    task: TaskOptions
    weights: WeightOptions
    method: Method
    plan: PlanOptions
    optimizer: OptimizerOptions
    output: OutputOptions

    @property
    def folder(self) -> Path:
        return (self.output.out or Path("runs") / self.task.task) / self.method.name

    @property
    def batch_size(self) -> int:
        return self.task.batch_size or self.task.described.batch_size

    @property
    def threshold(self) -> float | None:
        if self.task.task != "tag":
            return None
        return self.task.threshold or _THRESHOLD

    @property
    def reads(self) -> dict[str, Any]:
        """The options that name files."""
        return {
            "--weights": self.weights.weights,
            "--plan": self.plan.plan,
            "--task-data": self.task.task_data,
            "--tokenizer": self.weights.tokenizer,
        }

    def fixed(self) -> dict[str, Any]:
        """What a resumed run must have in common with its beginning."""
        parts = (self.task, self.weights, self.method, self.optimizer)
        together = {k: v for part in parts for k, v in asdict(part).items()}
        # Data and weights are known by what is in them: see finetune.prepare.
        others = ("task_data", "weights", "tokenizer", "max_skipped")
        return {k: v for k, v in together.items() if k not in others}


def parse(argv: Sequence[str] | None = None) -> list[Config]:
    """One config for each method. Exits as argparse does; raises ValueError."""
    parts = {
        "task": TaskOptions,
        "weights": WeightOptions,
        "method": MethodOptions,
        "plan": PlanOptions,
        "optimizer": OptimizerOptions,
        "output": OutputOptions,
    }
    description = "Fine-tune a RoBERTa on a task of GLUE, or on one's own."
    task, weights, method, plan, optimizer, output = options.read(
        "finetune.py", description, parts, argv
    )
    plan.check(method.checkpoint, method.names)
    return [
        Config(task, weights, method.of(name), plan, optimizer, output)
        for name in method.names
    ]
