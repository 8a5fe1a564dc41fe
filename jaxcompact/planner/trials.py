"""Plans that are compiled for the card until one fits: the model, corrected by each."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxcompact import policies
from jaxcompact.memory.peak import gib, peak
from jaxcompact.planner.arguments import arrays_of
from jaxcompact.planner.candidates import Candidates
from jaxcompact.planner.milp import Solution
from jaxcompact.planner.plan import Plan
from jaxcompact.planner.problem import Problem, named
from jaxcompact.policy import Action, ChoosesActions
from jaxcompact.traced import Plan as Traces

_COMPILES = 3
_MORE_COMPILES = 6
_FAR = 0.9  # of the budget: what takes less may not be the fastest
_NEAR = 0.98  # of the budget: no other plan is looked for above that
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
                return self._of(*each[k], max_error, rest)
            except _TooSmall as error:
                failed.append(error)
        raise min(failed, key=lambda error: error.least.peak_bytes)

    def _of(
        self, block: str, candidates: Candidates, max_error: float, rest: int
    ) -> Plan:
        """Of one problem; beside it a step takes ``rest`` or more."""
        asked, limit = candidates.asked, self.limit
        tried: list[tuple[Solution, Plan]] = []
        beside: list[int] = []  # what each of them took beside its model
        best: tuple[Solution, Plan] | None = None
        # Slower by that is slower, whatever a model is worth.
        slow = _SLOW * sum(asked.runs.values())

        def compiled(
            solution: Solution, beside_it: int | None
        ) -> tuple[Solution, Plan]:
            plan = Plan(
                block,
                _actions(asked, solution),
                self.device,
                limit,
                solution.seconds,
                solution.nbytes,
                solution.noise**0.5,
                0,
            )
            step, args = self.make_step(plan)
            nbytes = peak(step, *args, device=self.device).peak_bytes
            time, size = f"{solution.seconds * 1e6:.0f} us", gib(solution.nbytes)
            line = f"{gib(nbytes)}: {time} and {size} a layer"
            if beside_it is not None:
                line += f"; {gib(beside_it + candidates.nbytes(solution))} expected"
            self.say(line)
            beside.append(nbytes - candidates.nbytes(solution))
            tried.append((solution, replace(plan, peak_bytes=nbytes)))
            return tried[-1]

        def fastest(room: float) -> Solution | None:
            """That takes no more beside the rest, and was not compiled yet."""
            return candidates.fastest(room, is_new)

        def is_new(solution: Solution) -> bool:
            actions = _actions(asked, solution)
            return all(plan.actions != actions for _, plan in tried)

        def following() -> tuple[Solution | None, int | None]:
            """And what it is expected to take beside its model."""
            if not tried:
                return fastest(limit - rest), None
            now = beside[-1]
            if best:  # as the last one, or halfway to the best one
                for each in (now, (now + beside[tried.index(best)]) // 2):
                    solution = fastest(limit - each)
                    if solution and solution.cost < best[0].cost:
                        return solution, each
                return None, None
            solution, last = fastest(limit - now), len(tried) == _COMPILES - 1
            safe = fastest(_SAFE * limit - max(beside))
            if last or safe and now + candidates.nbytes(safe) >= _NEAR * limit:
                return safe, now
            return solution, now

        def compiles() -> int:
            """More, where the model was far from what a plan takes, or what is known to
            fit is slow beside what is not."""
            if best is None:
                return _COMPILES
            share = best[1].peak_bytes / limit
            if share < _FAR or is_slow():
                return _MORE_COMPILES
            return _COMPILES if share < _NEAR else 0

        def is_slow() -> bool:
            return best is None or best[0].cost > slow + min(s.cost for s, _ in tried)

        while len(tried) < compiles():
            solution, expected = following()
            if solution is None:
                break
            found = compiled(solution, expected)
            if found[1].peak_bytes <= limit:
                best = found
        smallest = list(candidates.smallest()) if is_slow() else []
        if not best and not smallest:
            raise ValueError(
                f"max_error must be reachable, got {max_error!r}: no plan is"
            )
        for solution in filter(is_new, smallest):
            if not best or solution.cost < best[0].cost:
                found = compiled(solution, beside[-1] if beside else None)
                best = found if found[1].peak_bytes <= limit else best
        if best:
            return best[1]
        # Of these alone: with that budget they are tried again.
        asked_for = [_actions(asked, solution) for solution in smallest]
        least = min(
            (plan for _, plan in tried if plan.actions in asked_for),
            key=lambda p: p.peak_bytes,
        )
        raise self._refusal(least, max_error)

    def _refusal(self, least: Plan, max_error: float) -> _TooSmall:
        beside = gib(least.peak_bytes - self.layers * least.nbytes)
        return _TooSmall(
            f"budget must be {gib(_rounded_up(least.peak_bytes))} or more, which the "
            f"smallest plan within max_error={max_error:g} takes: {gib(least.nbytes)} "
            f"in each of {self.layers} layers, and {beside} beside them; got "
            f"{gib(self.limit)}",
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


def _actions(asked: Problem, solution: Solution) -> dict[str, Action]:
    return asked.actions | named(asked.items, solution.chosen)
