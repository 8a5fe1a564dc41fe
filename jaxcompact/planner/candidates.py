"""Solutions by what they take in all: what is stored, and what lives beside it.

The latter is known of a solution alone, so that it is no row of the integer program.
"""

from collections.abc import Iterator

from jaxcompact.planner.alive import alive
from jaxcompact.planner.milp import Solution, frontier, solve
from jaxcompact.planner.problem import Problem, without_host

_STEPS = 16  # from one known solution to the next
_LEAST = 1e-5  # of what can be stored, in such a step: above the solver's tolerance


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
        # One may lie between the fastest of them and the last that is too large.
        first = fitting[0]
        low, high = (self.known[max(k, 0)].nbytes for k in (first, first - 1))
        for _ in range(_STEPS):
            high -= _LEAST * self.known[0].nbytes
            if high <= low:
                break
            between = solve(self.asked, nbytes=high, noise=self.noise)
            self.known.append(between)
            if fits(between):
                break
            high = between.nbytes
        self.known.sort(key=lambda solution: solution.seconds)
        return next(filter(fits, self.known))

    def smallest(self) -> Iterator[Solution]:
        """Without the host's help and, more slowly, with it."""
        for within in (without_host(self.asked), self.asked):
            least = solve(within, noise=self.noise, smallest=True)
            if least is not None:
                yield min((least, *frontier(within, self.noise)), key=self.nbytes)
