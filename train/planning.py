"""A run's plan: made when it starts, and again when its weights have outgrown it.

What rounding does to gradients changes as a model learns. After 16 updates, and then
after twice as many each time, it is measured again on a few sequences; a plan whose
error has come to be a tenth more than it was planned with is made anew
(Adacc, arXiv 2508.00806, section 3: the policy modifier).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxcompact as jc
import plan_files
from attention import flash
from checkpoint import Checkpoints
from layers import default_attention
from plan_options import PlanOptions
from runs import out_of_memory
from training import State, Training

FIRST = 16  # updates before a plan is looked at again
WORSE = 1.1  # times the error that it was made with
TOKENS = 512  # or a sequence, if that is longer: what is measured on


class Planner:
    """Makes the plans of a run. ``make_training(policy=, attention=)`` is its method's.

    ``make_step`` and ``layers`` as of `jaxcompact.plan_step`.
    """

    def __init__(
        self,
        options: PlanOptions,
        make_training: Callable,
        make_step: Callable,
        layers: int,
    ):
        self.options, self.layers = options, layers
        self.make_training, self.make_step = make_training, make_step
        self.device = options.plan_device or jc.memory.here()
        self._measure = None

    def measure(self, params: Any, batch: Any) -> jc.Sensitivity:
        """What encoding does to the gradient now. Compiled once.

        ``batch`` is a microbatch, of which the first sequences are read.
        """
        count = -(-TOKENS // jax.tree.leaves(batch)[0].shape[1])
        batch = jax.tree.map(lambda x: jnp.asarray(x[:count] if x.ndim else x), batch)

        # What is kept for the next time are not these weights.
        shapes = jax.eval_shape(lambda *args: args, params, batch)

        def make_gradient(policy):
            dtype = self.make_training().dtype
            own = flash if default_attention(dtype) == "cudnn" else None
            training = self.make_training(policy=policy, attention=own)

            def gradient(params, batch):
                state = State(jnp.int32(0), params, opt_state=None)
                return training.gradients(state, _alone(batch))[1]

            return gradient, shapes

        if self._measure is None:
            self._measure, _ = jc.planner.measuring(make_gradient, probes=2)
        return self._measure(jax.random.key(0), params, batch)

    def plan(
        self, found: jc.Sensitivity, say: Callable[[str], Any] | None = None
    ) -> jc.Plan:
        """Raises ValueError if there is none in the budget."""
        return jc.plan_step(
            self.make_step,
            layers=self.layers,
            budget=self.options.memory_budget,
            device=self.device,
            max_error=self.options.allowed_error,
            sensitivity=found,
            progress=say or (lambda line: None),
        )

    def again(self, plan: jc.Plan, params: Any, batch: Any) -> tuple[jc.Plan, str]:
        """The plan to go on with, and what is to be said of it."""
        try:
            found = self.measure(params, batch)
            error = found.under(plan.actions).error(plan.actions)
        except jax.errors.JaxRuntimeError as problem:
            if not out_of_memory(problem):
                raise
            return plan, "no memory is left to measure what the plan does"
        # Of a gradient that is not finite, which the log will not miss either.
        except (ValueError, NotImplementedError) as problem:
            return plan, f"what the plan does was not measured: {problem}"
        text = f"gradient error of the plan {error:.2%}, planned {plan.error:.2%}"
        if error <= WORSE * plan.error:
            return plan, text
        try:
            other = self.plan(found)
        except (ValueError, NotImplementedError) as problem:
            return plan, f"{text}; it stays, for want of another: {problem}"
        except jax.errors.JaxRuntimeError as problem:
            if not out_of_memory(problem):
                raise
            return plan, f"{text}; it stays: no memory is left to measure another"
        if other == plan:
            return plan, f"{text}; it stays the best"
        return other, f"{text}; a new one has {other.error:.2%}"

    def front(self, found: jc.Sensitivity) -> jc.planner.Front:
        return jc.planner.front(
            self.make_step,
            layers=self.layers,
            device=self.device,
            max_error=self.options.allowed_error,
            sensitivity=found,
        )


@dataclass(frozen=True)
class Plans:
    """The plan of a run, or none, and the updates from which on it holds."""

    planner: Planner
    folder: Path
    plan: jc.Plan | None
    since: int = 0

    @classmethod
    def first(
        cls,
        planner: Planner,
        folder: Path,
        resume: bool,
        state: Callable[[], State],
        batch: Any,
    ) -> "Plans":
        """With the plan that was given, that of the run to resume, a new one, or none.

        A run without a checkpoint begins anew, and so does its planning.
        Raises ValueError if there is none that can be used.
        """
        asked, saved = planner.options, plan_files.file_of(folder, 0)
        if asked.plan:
            plan = plan_files.load(asked.plan, f"--plan {asked.plan}")
            return cls(planner, folder, plan)
        if not asked.memory_budget:
            return cls(planner, folder, None)
        if resume and Checkpoints(folder / "checkpoints").steps():
            if not saved.exists():
                raise ValueError(
                    f"{folder} cannot be resumed: its {saved.name} is gone"
                )
            return cls(planner, folder, plan_files.load(saved, saved))
        budget, device = asked.memory_budget, planner.device
        jc.planner.budget_bytes(budget, device)  # before the measuring
        print(f"{folder.name}: planning for {budget} of {device}")
        found = planner.measure(state().params, batch)
        if asked.plan_plot:
            front = planner.front(found)
            front.plot(asked.plan_plot)
            print(front)
        plan = planner.plan(found, lambda line: print(f"  {line}", flush=True))
        return cls(planner, folder, plan)

    def fixed(self) -> dict[str, Any]:
        """What a resumed run must have in common with its beginning."""
        asked, plan = self.planner.options, self.plan
        return {
            "plan": None if plan is None else json.loads(plan.to_json())["actions"],
            "memory_budget": asked.memory_budget,
            "max_error": asked.allowed_error if asked.memory_budget else None,
            "plan_device": self.planner.device if asked.memory_budget else None,
        }

    def at(self, start: int) -> "Plans":
        """With the plan of the checkpoint to continue from."""
        if not start or not self.planner.options.memory_budget:
            return self
        seal = Checkpoints(self.folder / "checkpoints").seal(start)
        plan, since = plan_files.in_force(self.folder, start, seal.get("plan"))
        return replace(self, plan=plan, since=since)

    def tell_size(self) -> None:
        """Says so where a resumed run's plan does not keep its budget on these devices.

        It was made for those that the run began on; another would change its losses.
        """
        asked = self.planner.options.memory_budget
        if asked is None:
            return
        device = self.planner.device
        step, args = self.planner.make_step(self.plan)
        try:
            needed = jc.memory.peak(step, *args, device=device).peak_bytes
        except NotImplementedError as problem:  # nothing here compiles for the card
            print(f"{self.folder.name}: its plan's memory is unknown: {problem}")
            return
        if needed > jc.planner.budget_bytes(asked, device):
            print(
                f"{self.folder.name}: of the budget of {asked} its plan takes "
                f"{needed / 2**20:,.1f} MiB on {jax.device_count()} devices"
            )

    def training(self) -> Training:
        """Raises ValueError, with its name, for a plan of another function."""
        if self.plan is not None:
            step, args = self.planner.make_step(self.plan)
            try:
                jax.eval_shape(step, *args)
            except ValueError as error:
                given = self.planner.options.plan
                file = plan_files.file_of(self.folder, self.since)
                name = f"--plan {given}" if given else file
                raise ValueError(f"{name}: {error}") from None
        return self.planner.make_training(policy=self.plan)

    def begin(self, start: int) -> None:
        """Puts the folder in order: later plans than the one to go on with are gone."""
        if self.plan is not None and not start:
            self.plan.save(plan_files.file_of(self.folder, 0))
        plan_files.drop_after(self.folder, self.since)

    def seal(self) -> list[int] | None:
        return plan_files.sealed(self.plan, self.since)

    def looks_again(self, updates: int) -> bool:
        return bool(self.planner.options.memory_budget) and looks_again(updates)

    def again(self, updates: int, params: Any, batch: Any) -> tuple["Plans", str]:
        """With the plan that is best now, saved if it is new; what is to be said."""
        plan, said = self.planner.again(self.plan, params, batch)
        if plan is self.plan:
            return self, said
        plan.save(plan_files.file_of(self.folder, updates))
        return replace(self, plan=plan, since=updates), said


def looks_again(updates: int) -> bool:
    """After 16, 32, 64, ... updates.

    >>> [n for n in range(100) if looks_again(n)]
    [16, 32, 64]
    """
    return updates >= FIRST and updates & (updates - 1) == 0


def _alone(batch: Any) -> Any:
    """The one microbatch of an update."""
    return jax.tree.map(lambda x: x[None], batch)
