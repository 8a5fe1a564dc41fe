"""The fastest choice that fits, as a mixed integer linear program.

Of a block with items i, their options o and operations p::

    minimize    sum_p seconds_p again_p + sum_io (seconds_io + price noise_io) stored_io
    needed_i    = sum_o stored_io + remade_i
    again_p    >= remade_i                of what p makes
    needed_v   >= again_p                 of what p reads
    needed_v    = 1                       of what the backward pass reads
    stored_s    <= 1 - rounded_i          of a statistic and what it is made of
    sum_io bytes_io stored_io            <= bytes
    sum_io noise_io stored_io            <= noise

or, of so many layers of it at each stage t of a backward pass::

    cotangents_t + stored_t + decoded_t + made_t  <= bytes           see `Lifetimes`

``stored`` are 0 or 1; the rest follows. A parent that several tensors are made of is
made again once. All the noise that is allowed has the price of a hundredth of the
block's forward pass: models of time are no better than that.

Source: Adacc (arXiv 2508.00806), which prints no formulation; the closure is that of
Checkmate (arXiv 1910.02653) for one block.
"""

from dataclasses import dataclass

import numpy as np

from jaxcompact.planner.integer import IntegerProgram
from jaxcompact.planner.items import Option
from jaxcompact.planner.lifetimes import Lifetimes
from jaxcompact.planner.problem import Problem
from jaxcompact.transform.sources import Residual

_NODES = 200  # of a search with lifetimes, which are modelled: it could take minutes
_PRICE = 0.01  # of a forward pass: of all the noise that is allowed
_TIE = 1e-6  # microseconds for all bytes together: of equal plans, the smaller


@dataclass(frozen=True)
class Solution:
    """What to do with each item of a problem.

    Attributes:
        chosen: an option for each item, or None where it is made again or not needed.
        seconds: beside those of keeping everything, of one layer.
        nbytes: stored, of one layer.
        noise: mean square that it adds to the gradient, relative to the gradient's.
        cost: the seconds, and the price of the noise.
    """

    chosen: tuple[Option | None, ...]
    seconds: float
    nbytes: int
    noise: float
    cost: float

    @property
    def away(self) -> bool:
        """Whether the host's memory holds any."""
        return any(option and option.away for option in self.chosen)


def solve(
    problem: Problem,
    *,
    nbytes: float = np.inf,
    noise: float = np.inf,
    layers: int | None = None,
    smallest: bool = False,
) -> Solution | None:
    """The fastest within ``nbytes`` and ``noise``, or the smallest; None if none is.

    ``nbytes`` are stored by one layer; with ``layers`` all that is there of so many.
    """
    if nbytes < 0 or noise < problem.noise:
        return None
    program = IntegerProgram()
    price = 0.0
    if 0 < noise < np.inf:
        price = _PRICE * sum(problem.runs.values()) / noise
    size, error, time = {}, {}, {}
    remade = {}
    needed: dict[object, int] = {}

    def need(source) -> int:
        if source not in needed:
            needed[source] = program.variable(least=source in problem.needed)
        return needed[source]

    stored, alike = {}, {}
    for item in problem.items:
        remade[item.source] = again = program.variable(most=item.again)
        row = {need(item.source): -1.0, again: 1.0}
        for k, option in enumerate(item.options):
            # 0 is exact, not a tolerance.
            allowed = noise > 0 or not option.lossy
            x = stored[item.source, k] = program.variable(most=allowed, binary=True)
            row[x] = 1.0
            size[x], time[x] = option.nbytes, option.seconds
            error[x] = option.noise
            # A plan knows tensors by name: those of one name are stored alike.
            same = alike.setdefault((item.tensor.name, option.action), x)
            if same != x:
                program.row({x: 1.0, same: -1.0}, 0, 0)
        program.row(row, 0, 0)

    for item in problem.items:
        rounded = (k for k, o in enumerate(item.options) if o.lossy)
        row = {stored[item.source, k]: 1.0 for k in rounded}
        for statistic, items in problem.exact.items():
            if item.source in items and (statistic, 0) in stored:
                program.row({stored[statistic, 0]: 1.0, **row}, 0, 1)

    # Whether an item is rounded, or made again of what is.
    tainted = {item.source: program.variable() for item in problem.items}
    for item in problem.items:
        source, options = item.source, range(len(item.options))
        lossy = {stored[source, k]: -1.0 for k in options if item.options[k].lossy}
        program.row({tainted[source]: 1.0, **lossy}, 0, np.inf)
        kept = {stored[source, k]: 1.0 for k in options}
        for parent in problem.parents[source]:
            row = {tainted[parent]: -1.0, tainted[source]: 1.0, **kept}
            program.row(row, 0, np.inf)
            if source in problem.own:
                program.row({tainted[parent]: 1.0, remade[source]: 1.0}, 0, 1)

    ran = {op: program.variable() for op in problem.runs}
    for source, again in remade.items():
        # A block that runs again for one residual makes all of them.
        op = source.op if isinstance(source, Residual) else problem.makers.get(source)
        if op is not None:
            program.row({ran[op]: 1.0, again: -1.0}, 0, np.inf)
    for value, op in problem.makers.items():
        if value not in remade and value not in problem.free:
            program.row({ran[op]: 1.0, need(value): -1.0}, 0, np.inf)
    for op, seconds in problem.runs.items():
        time[ran[op]] = seconds
        for value in op.reads:
            if value not in problem.free:
                program.row({need(value): 1.0, ran[op]: -1.0}, 0, np.inf)

    if np.isfinite(nbytes) and layers is None:
        program.row(size, -np.inf, nbytes)
    elif np.isfinite(nbytes):
        rows = Lifetimes(problem, program, stored, remade, ran, layers).rows
        for row, cotangents in zip(rows, problem.stages.cotangents, strict=True):
            program.row(row, -np.inf, nbytes - cotangents)
    if np.isfinite(noise):
        program.row(error, -np.inf, noise - problem.noise)
    if smallest:
        cost = {k: float(v) for k, v in size.items()}
        cost |= {k: v for k, v in time.items() if k not in size}
    else:
        total = sum(size.values()) or 1
        cost = {
            k: (v + price * error.get(k, 0)) * 1e6 + _TIE * size.get(k, 0) / total
            for k, v in time.items()
        }
    found = program.minimize(cost, None if layers is None else _NODES)
    if found is None:
        return None
    chosen = []
    for item in problem.items:
        taken = (k for k in range(len(item.options)) if found[stored[item.source, k]])
        k = next(taken, None)
        chosen.append(None if k is None else item.options[k])
    seconds = sum(seconds for k, seconds in time.items() if found[k])
    added = problem.noise + sum(error[k] for k in error if found[k])
    return Solution(
        tuple(chosen),
        seconds,
        sum(option.nbytes for option in chosen if option),
        added,
        seconds + price * added,
    )


def frontier(problem: Problem, noise: float, count: int = 24) -> list[Solution]:
    """Solutions of which none costs less and is as small, the cheapest first.

    Not all: programs for ``count`` sizes are solved, each halfway where most bytes
    times seconds of cost lie between two. Empty if no solution is within ``noise``.
    """
    fast, slow = (solve(problem, noise=noise, smallest=s) for s in (False, True))
    if slow is None:
        return []
    slow = solve(problem, nbytes=slow.nbytes, noise=noise) or slow
    gaps = [(fast, slow, slow.nbytes)]  # and the size above which others may lie

    def hidden(gap: tuple[Solution, Solution, float]) -> float:
        fast, slow, above = gap
        return (fast.nbytes - above) * (slow.cost - fast.cost)

    for _ in range(count):
        gap = max(gaps, key=hidden)
        if hidden(gap) <= 0:
            break
        gaps.remove(gap)
        fast, slow, above = gap
        middle = (fast.nbytes + above) / 2
        found = solve(problem, nbytes=middle, noise=noise)
        gaps += [(fast, found, middle), (found, slow, above)]
    every = {s for gap in gaps for s in gap[:2]}
    best = []
    for solution in sorted(every, key=lambda s: (s.nbytes, s.cost)):
        if not best or solution.cost < best[-1].cost:
            best.append(solution)
    return best[::-1]
