"""The options of a plan, of pretrain.py and finetune.py."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from jaxcompact.memory import devices
from jaxcompact.memory.search import parse_bytes
from options import option

MAX_ERROR = 0.08


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
        "card that is planned for (default: the one that is here, or h200). The step "
        "is this machine's: without a GPU say --dtype bfloat16, and attention is XLA's",
        choices=tuple(devices()),
    )
    max_error: float | None = option(
        None,
        "of the gradient, relative, that a plan may make by encoding; 0 is exact. As "
        f"measured at the start, and again after 16, 32, 64, ... updates (default: "
        f"{MAX_ERROR})",
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
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, "--memory-budget")
        if self.max_error is not None and not self.max_error >= 0:
            raise ValueError(f"--max-error must be 0 or more, got {self.max_error}")
        if self.plan_plot and not (self.explain_plan and self.memory_budget):
            raise ValueError("--plan-plot needs --explain-plan and --memory-budget")
        suffixes = (".png", ".pdf", ".svg")
        if self.plan_plot and self.plan_plot.suffix not in suffixes:
            raise ValueError(
                f"--plan-plot must end with {', '.join(suffixes)}, got {self.plan_plot}"
            )
        if self.plan_plot and not self.plan_plot.parent.is_dir():
            raise ValueError(
                f"--plan-plot must be in a folder that is there, got {self.plan_plot}"
            )
        if self.plan and self.memory_budget:
            raise ValueError("--plan and --memory-budget exclude each other")
        if self.explain_plan and not (self.plan or self.memory_budget):
            raise ValueError("--explain-plan needs --memory-budget or --plan")
        if self.plan_device and not self.memory_budget:
            raise ValueError("--plan-device needs --memory-budget")
        if self.max_error is not None and not self.memory_budget:
            raise ValueError("--max-error needs --memory-budget")

    @property
    def allowed_error(self) -> float:
        return MAX_ERROR if self.max_error is None else self.max_error

    def check(self, checkpoint: str | None, methods: Collection[str]) -> None:
        """Raises ValueError where a method has a policy already."""
        has_one = {"--checkpoint": checkpoint, "--method remat": "remat" in methods}
        for name, given in has_one.items():
            if given and (self.plan or self.memory_budget):
                raise ValueError(f"{name} and a plan exclude each other")
        if self.plan_plot and len(methods) > 1:
            raise ValueError("--plan-plot needs one --method: each has its own plans")
