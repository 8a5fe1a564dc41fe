"""Solutions by what they take in all: what is stored, and what lives beside it.

The integer program knows the latter nearly; of a solution `alive` says it, by which the
program's limit is corrected. All sizes of what is stored are tried besides.
"""

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice

from jaxcompact.planner.alive import alive
from jaxcompact.planner.milp import Solution, frontier, solve
from jaxcompact.planner.problem import Problem, without_host

_STEPS = 16  # from one solution of the frontier to the next
_LEAST = 1e-5  # of what can be stored, in such a step: above the solver's tolerance
_CORRECTIONS = 8  # of the program's limit
_NEAR = 0.01  # of the limit: nothing is looked for between two that are so near
_HALVINGS = 8  # of where that may lie
_NEXT = 2  # of the smallest, before none is said to fit


class Candidates:
    """The solutions of a problem with so many layers and so much noise."""

    def __init__(self, asked: Problem, layers: int, noise: float):
        self.asked, self.layers, self.noise = asked, layers, noise
        self.frontier = frontier(asked, noise)
        self.known = [*self.frontier, *self._tightest(asked)]
        self.limits: set[float] = set()  # that it was asked for

    def nbytes(self, solution: Solution) -> int:
        """In all layers, at the peak of a backward pass."""
        return alive(self.asked, solution.chosen, self.layers)

    def fastest(
        self, limit: float, wanted: Callable[[Solution], bool] = lambda solution: True
    ) -> Solution | None:
        """That is wanted and takes no more than that, if there is one; of the least
        cost, which is its seconds and a little for its noise."""
        if limit not in self.limits:
            self.known += [*self._near(limit), *self._corrected(limit)]
            self.limits.add(limit)
        fitting = (s for s in self.known if self.nbytes(s) <= limit and wanted(s))
        return min(fitting, key=lambda s: s.cost, default=None)

    def _near(self, limit: float) -> Iterator[Solution]:
        """From the last of the frontier that is too large to the next that is not."""
        fits = [self.nbytes(solution) <= limit for solution in self.frontier]
        if True not in fits[1:] or fits[0]:
            return
        first = fits.index(True)
        high, low = (self.frontier[k].nbytes for k in (first - 1, first))
        for _ in range(_STEPS):
            high -= _LEAST * self.frontier[0].nbytes
            if high <= low:
                return
            between = solve(self.asked, nbytes=high, noise=self.noise)
            yield between
            if self.nbytes(between) <= limit:
                return
            high = between.nbytes

    def _corrected(self, limit: float) -> Iterator[Solution]:
        """By what each takes above the limit, or leaves; then between two that do."""
        aim, fits, over = limit, -math.inf, math.inf
        for _ in range(_CORRECTIONS):
            found = solve(self.asked, nbytes=aim, noise=self.noise, layers=self.layers)
            if found is None:
                return
            yield found
            left = limit - self.nbytes(found)
            fits, over = (aim, over) if left >= 0 else (fits, aim)
            if left == 0 or over - fits < _NEAR * limit:
                return
            between = math.isfinite(over - fits)
            aim = (fits + over) / 2 if between else aim + left

    def _tightest(self, within: Problem) -> Iterator[Solution]:
        """Towards the least limit that the program finds a solution for."""
        found = solve(within, noise=self.noise, smallest=True)
        if found is None:
            return
        yield found
        low, high = max(within.stages.cotangents), 2 * self.nbytes(found)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = solve(within, nbytes=middle, noise=self.noise, layers=self.layers)
            if found is None:
                low = middle
            else:
                high = middle
                yield found

    @cached_property
    def _without_host(self) -> list[Solution]:
        asked = without_host(self.asked)
        found = [*frontier(asked, self.noise), *self._tightest(asked)]
        return sorted({s.chosen: s for s in found}.values(), key=self.nbytes)

    @property
    def alone(self) -> tuple[Solution, ...]:
        """The smallest by each measure without the host's help."""
        measures = (self.nbytes, lambda solution: solution.nbytes)
        found = self._without_host
        return tuple(min(found, key=size) for size in measures) if found else ()

    @property
    def next(self) -> tuple[Solution, ...]:
        """After those: what lives beside one differs by more than their sizes do."""
        left = (s for s in self._without_host if s not in self.alone)
        return tuple(islice(left, _NEXT))

    def smallest(self) -> Iterator[Solution]:
        """Without the host's help and, more slowly, with it."""
        yield from self.alone
        yield from self.next
        if self.known:
            yield min(self.known, key=self.nbytes)
