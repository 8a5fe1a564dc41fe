"""A run's plan: made when it starts, and again when its weights have outgrown it.

What rounding does to gradients changes as a model learns. After 16 updates, and then
after twice as many each time, it is measured again on a few sequences; a plan whose
error has come to be a tenth more than it was planned with is made anew
(Adacc, arXiv 2508.00806, section 3: the policy modifier).
"""

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcompact as jc
from attention import flash
from checkpoint import CheckpointError
from layers import default_attention
from pretrain_options import PlanOptions
from runs import out_of_memory
from training import State

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

    def measure(self, params: Any, tokens_bt: np.ndarray) -> jc.Sensitivity:
        """What encoding does to the gradient now. Compiled once."""
        length = tokens_bt.shape[1] - 1
        tokens_bt = jnp.asarray(tokens_bt[: max(1, TOKENS // length)])

        # What is kept for the next time are not these weights.
        shapes = jax.eval_shape(lambda *args: args, params, tokens_bt)

        def make_gradient(policy):
            dtype = self.make_training().dtype
            own = flash if default_attention(dtype) == "cudnn" else None
            training = self.make_training(policy=policy, attention=own)

            def gradient(params, tokens_bt):
                state = State(jnp.int32(0), params, opt_state=None)
                return training.gradients(state, tokens_bt[None])[1]

            return gradient, shapes

        if self._measure is None:
            self._measure, _ = jc.planner.measuring(make_gradient, probes=2)
        return self._measure(jax.random.key(0), params, tokens_bt)

    def plan(
        self, found: jc.Sensitivity, say: Callable[[str], Any] | None = None
    ) -> jc.Plan:
        """Raises ValueError if there is none in the budget."""
        return jc.plan_step(
            self.make_step,
            layers=self.layers,
            budget=self.options.memory_budget,
            device=self.device,
            max_error=self.options.max_error,
            sensitivity=found,
            progress=say or (lambda line: None),
        )

    def again(
        self, plan: jc.Plan, params: Any, tokens_bt: np.ndarray
    ) -> tuple[jc.Plan, str]:
        """The plan to go on with, and what is to be said of it."""
        try:
            found = self.measure(params, tokens_bt)
        except jax.errors.JaxRuntimeError as problem:
            if not out_of_memory(problem):
                raise
            return plan, "no memory is left to measure what the plan does"
        # Of a gradient that is not finite, which the log will not miss either.
        except (ValueError, NotImplementedError) as problem:
            return plan, f"what the plan does was not measured: {problem}"
        error = found.error(plan.actions)
        text = f"gradient error of the plan {error:.2%}, planned {plan.error:.2%}"
        if error <= WORSE * plan.error:
            return plan, text
        try:
            other = self.plan(found)
        except (ValueError, NotImplementedError) as problem:
            return plan, f"{text}; it stays, for want of another: {problem}"
        if other == plan:
            return plan, f"{text}; it stays the best"
        return other, f"{text}; a new one has {other.error:.2%}"

    def front(self, found: jc.Sensitivity) -> jc.planner.Front:
        return jc.planner.front(
            self.make_step,
            layers=self.layers,
            device=self.device,
            max_error=self.options.max_error,
            sensitivity=found,
        )


def looks_again(updates: int) -> bool:
    """After 16, 32, 64, ... updates.

    >>> [n for n in range(100) if looks_again(n)]
    [16, 32, 64]
    """
    return updates >= FIRST and updates & (updates - 1) == 0


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
