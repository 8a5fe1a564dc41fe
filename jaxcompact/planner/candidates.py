"""Solutions by what they take in all: what is stored, and what lives beside it.

The latter is known of a solution alone, so that it is no row of the integer program.
"""

from collections.abc import Iterator

from jaxcompact.planner.alive import alive
from jaxcompact.planner.milp import Solution, frontier, solve
from jaxcompact.planner.problem import Problem, without_host

_HALVINGS = 10  # of what lies between two solutions


class Candidates:
    """The solutions of a problem with so many layers and so much noise."""

    def __init__(self, asked: Problem, layers: int, noise: float):
        self.asked, self.layers, self.noise = asked, layers, noise
        self.known = frontier(asked, noise)  # the fastest first

    def nbytes(self, solution: Solution) -> int:
        """In all layers, at the peak of a backward pass."""
        return self.layers * solution.nbytes + alive(self.asked, solution.chosen)

    def fastest(self, limit: float) -> Solution | None:
        """That takes no more than that, if there is one."""

        def fits(solution: Solution) -> bool:
            return self.nbytes(solution) <= limit

        fitting = [k for k, solution in enumerate(self.known) if fits(solution)]
        if not fitting:
            return None
        first = fitting[0]
        if first > 0:  # others may lie between that and the one before
            low, high = (self.known[k].nbytes for k in (first, first - 1))
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                between = solve(self.asked, nbytes=middle, noise=self.noise)
                self.known.append(between)
                low, high = (middle, high) if fits(between) else (low, between.nbytes)
            self.known.sort(key=lambda solution: solution.seconds)
        return next(filter(fits, self.known))

    def smallest(self) -> Iterator[Solution]:
        """Without the host's help and, more slowly, with it."""
        for within in (without_host(self.asked), self.asked):
            least = solve(within, noise=self.noise, smallest=True)
            if least is not None:
                yield min((least, *frontier(within, self.noise)), key=self.nbytes)
