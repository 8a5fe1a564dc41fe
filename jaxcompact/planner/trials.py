"""Plans that are compiled for the card until one fits: the model, corrected by each."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jaxcompact import policies
from jaxcompact.actions import Action
from jaxcompact.memory.peak import gib, peak
from jaxcompact.planner.arguments import arrays_of
from jaxcompact.planner.candidates import Candidates
from jaxcompact.planner.milp import Solution
from jaxcompact.planner.plan import Plan
from jaxcompact.planner.problem import Problem, named
from jaxcompact.policy import ChoosesActions
from jaxcompact.transform.traced import Plan as Traces

_COMPILES = 3
_MORE_COMPILES = 6
_FAR = 0.9  # of the budget: what takes less may not be the fastest
_NEAR = 0.98  # of the budget: no other plan is looked for above that
_HOPE = 1.1  # of the budget: what is larger by the model is not tried
_SLOW = 0.5  # of a forward pass: by that a plan may be slower than one that missed
_SAFE = 0.99  # of it, where nothing that fits is known: a corrected model errs by 1 %


class _TooSmall(ValueError):
    """A budget; ``least`` is the smallest plan, which takes more."""

    def __init__(self, message: str, least: Plan):
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Trials:
    """A step that is to fit on a card.

    Attributes:
        make_step: as of `plan_step`.
        layers: how often the block runs before its backward passes begin.
        limit: of the step, in bytes.
        device: the card.
        say: is called with a line for each compile.
    """

    make_step: Callable[[ChoosesActions], tuple[Callable, tuple]]
    layers: int
    limit: int
    device: str
    say: Callable[[str], Any]

    def fastest(
        self, problems: Iterable[tuple[Traces, Problem]], max_error: float
    ) -> Plan:
        """Of the first problem that has a plan; those that are fast by the model first.

        ``problems`` is of one block, the one that takes the least first. Raises
        ValueError if none has a plan within the limit and the error.
        """
        noise = max_error * max_error
        each = [
            (traces.traced.label, Candidates(asked, self.layers, noise))
            for traces, asked in problems
        ]
        # The least that a step can take beside what its blocks store.
        rest = _nbytes(self.make_step(policies.int4())[1])

        def place(k: int) -> tuple[float, int]:
            found = each[k][1].fastest(self.limit - rest) if len(each) > 1 else None
            # The last is the most exact; where none fits by the model, the first may.
            return (found.cost, -k) if found else (math.inf, k)

        failed = []
        for k in sorted(range(len(each)), key=place):
            try:
                return _Search(self, *each[k], max_error, rest).run()
            except _TooSmall as error:
                failed.append(error)
        raise ValueError(str(min(failed, key=lambda error: error.least.peak_bytes)))


class _Trial(NamedTuple):
    """A solution that was compiled; ``beside``: what it took beside its model."""

    solution: Solution
    plan: Plan
    beside: int


class _Search:
    """For the fastest plan of one problem, beside which a step takes ``rest`` or more.

    Attributes:
        tried: all that were compiled.
        best: the fastest of them that fits.
    """

    def __init__(
        self,
        trials: Trials,
        block: str,
        candidates: Candidates,
        max_error: float,
        rest: int,
    ):
        self.trials, self.block, self.candidates = trials, block, candidates
        self.max_error, self.rest, self.limit = max_error, rest, trials.limit
        self.slow = _SLOW * sum(candidates.asked.runs.values())
        self.tried: list[_Trial] = []
        self.best: _Trial | None = None

    def run(self) -> Plan:
        while len(self.tried) < self._compiles():
            solution, beside = self._following()
            if solution is None:
                break
            self._compile(solution, beside)
        if self.best and not self._is_slow(self.best.solution):
            return self.best.plan
        smallest = list(self.candidates.smallest())
        for solution in filter(self._is_new, smallest):
            if self._is_worth_it(solution):
                beside = self.tried[-1].beside if self.tried else None
                self._compile(solution, beside)
        if self.best:
            return self.best.plan
        # Of these alone: with that budget they are tried again.
        every = list(map(self._actions, smallest))
        plans = (trial.plan for trial in self.tried if trial.plan.actions in every)
        raise self._refusal(min(plans, key=lambda plan: plan.peak_bytes))

    def _following(self) -> tuple[Solution | None, int | None]:
        """What to compile next, and what it is expected to take beside its model."""
        if not self.tried:
            return self._fastest(self.limit - self.rest), None
        now = self.tried[-1].beside
        if self.best:  # as the last one, or halfway to the best one
            for beside in (now, (now + self.best.beside) // 2):
                solution = self._fastest(self.limit - beside)
                if solution and solution.cost < self.best.solution.cost:
                    return solution, beside
            return None, None
        solution = self._fastest(self.limit - now)
        most = max(trial.beside for trial in self.tried)
        safe = self._fastest(_SAFE * self.limit - most)
        near = safe and now + self.candidates.nbytes(safe) >= _NEAR * self.limit
        if near or len(self.tried) == _COMPILES - 1:
            solution = safe
        if solution is None or solution.away and self._is_slow(solution):
            solution = next(filter(self._is_new, self.candidates.alone), solution)
        return solution, now

    def _compiles(self) -> int:
        """More, where the model was far from what a plan takes, or what is known to fit
        is slow beside what is not."""
        if self.best is None:
            return _COMPILES
        share = self.best.plan.peak_bytes / self.limit
        if share < _FAR or self._is_slow(self.best.solution):
            return _MORE_COMPILES
        return _COMPILES if share < _NEAR else 0

    def _is_slow(self, solution: Solution) -> bool:
        return solution.cost > self.slow + min(t.solution.cost for t in self.tried)

    def _may_be_better(self, solution: Solution) -> bool:
        least = min(trial.beside for trial in self.tried)
        fits = least + self.candidates.nbytes(solution) <= self.limit
        return fits and solution.cost < self.best.solution.cost

    def _is_worth_it(self, solution: Solution) -> bool:
        """To compile one of the smallest; the least say what a plan takes."""
        more = solution in self.candidates.next
        if self.best:
            return not more and self._may_be_better(solution)
        size = self.rest + self.candidates.nbytes(solution)
        return not more or size <= _HOPE * self.limit

    def _is_new(self, solution: Solution) -> bool:
        actions = self._actions(solution)
        return all(trial.plan.actions != actions for trial in self.tried)

    def _fastest(self, room: float) -> Solution | None:
        """That takes no more beside the rest, and was not compiled yet."""
        return self.candidates.fastest(room, self._is_new)

    def _actions(self, solution: Solution) -> dict[str, Action]:
        asked = self.candidates.asked
        return asked.actions | named(asked.items, solution.chosen)

    def _compile(self, solution: Solution, beside: int | None) -> None:
        """``beside``: what it is expected to take beside its model."""
        modelled = self.candidates.nbytes(solution)
        plan = Plan(
            self.block,
            self._actions(solution),
            self.trials.device,
            self.limit,
            solution.seconds,
            solution.nbytes,
            solution.noise**0.5,
            0,
        )
        step, args = self.trials.make_step(plan)
        nbytes = peak(step, *args, device=self.trials.device).peak_bytes
        time, size = f"{solution.seconds * 1e6:.0f} us", gib(solution.nbytes)
        line = f"{gib(nbytes)}: {time} and {size} a layer"
        if beside is not None:
            line += f"; {gib(beside + modelled)} expected"
        self.trials.say(line)
        found = _Trial(solution, replace(plan, peak_bytes=nbytes), nbytes - modelled)
        self.tried.append(found)
        if nbytes <= self.limit:  # and of less cost than any before that fits
            self.best = found

    def _refusal(self, least: Plan) -> _TooSmall:
        layers = self.trials.layers
        beside = gib(least.peak_bytes - layers * least.nbytes)
        return _TooSmall(
            f"budget must be {gib(_rounded_up(least.peak_bytes))} or more, which the "
            f"smallest plan found takes (error {self.max_error:g}, as modelled): "
            f"{gib(least.nbytes)} in each of {layers} layers, and {beside} beside "
            f"them; got {gib(self.limit)}",
            least,
        )


def _rounded_up(nbytes: int) -> int:
    """To what its text says, or a little more."""
    unit = 2**30 if nbytes >= 2**30 else 2**20
    return math.ceil(math.ceil(100 * nbytes / unit) * unit / 100)


def _nbytes(args: Any) -> int:
    """Of arrays or their shapes, on one device."""
    total = 0
    for leaf in arrays_of(args):
        aval, sharding = jax.typeof(leaf), getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(aval.shape) if sharding else aval.shape
        total += math.prod(shape) * aval.dtype.itemsize
    return total
