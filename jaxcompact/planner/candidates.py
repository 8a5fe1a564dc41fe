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
        self.frontier = frontier(asked, noise)

    def nbytes(self, solution: Solution) -> int:
        """In all layers, at the peak of a backward pass."""
        return self.layers * solution.nbytes + alive(self.asked, solution.chosen)

    def fastest(self, limit: float) -> Solution | None:
        """That takes no more than that, if there is one."""
        fits = [self.nbytes(solution) <= limit for solution in self.frontier]
        if not any(fits):
            return None
        after = fits.index(True)
        found = self.frontier[after]
        if after == 0:
            return found
        # Another may lie between that and the last that is too large.
        low, high = found.nbytes, self.frontier[after - 1].nbytes
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            between = solve(self.asked, nbytes=middle, noise=self.noise)
            if self.nbytes(between) <= limit:
                found, low = between, middle
            else:
                high = between.nbytes
        return found

    def smallest(self) -> Iterator[Solution]:
        """Without the host's help and, more slowly, with it."""
        for within in (without_host(self.asked), self.asked):
            least = solve(within, noise=self.noise, smallest=True)
            if least is not None:
                yield min((least, *frontier(within, self.noise)), key=self.nbytes)
