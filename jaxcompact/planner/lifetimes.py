"""What is in memory in each stage of a backward pass, as rows of an integer program.

What `alive` follows for one solution is a matter of several choices here, so a variable
of its own, 0 or 1. With ``again_v`` for what is made again, ``by_vt`` for what is there
by stage t, and every u that is made of v::

    by_vt       = again_v                    at v's own first use
    by_vt      >= by_ut + again_v - 1
    by_vt      >= by_vs                      of a stage s before
    decoded_vt >= by_ut + encoded_v - 1

That is exact for small functions (`tests/planner/test_milp.py`), but for what is made
again many stages before its own use: a long chain would have a variable for each pair.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from jaxcompact.graph import Op
from jaxcompact.kinds import expensive
from jaxcompact.planner.integer import IntegerProgram
from jaxcompact.planner.items import Item
from jaxcompact.planner.problem import Problem
from jaxcompact.transform.sources import Residual, Source

Terms = dict[int, float]
_EARLIER = 8  # stages by which something is there, that are told apart


class Lifetimes:
    """Rows for a problem of so many layers.

    Args:
        problem: what is chosen among.
        program: its program, which gets more variables and rows.
        stored: the variable of each item's source and option.
        remade: of what is made again, by source.
        ran: of what runs again.
        layers: how many there are; one frees what it stored after the last use.

    Attributes:
        rows: bytes of each variable in each stage, beside cotangents.
    """

    def __init__(
        self,
        problem: Problem,
        program: IntegerProgram,
        stored: Mapping[tuple[Source, int], int],
        remade: Mapping[Source, int],
        ran: Mapping[Op, int],
        layers: int,
    ):
        self.problem, self.program, self.stored = problem, program, stored
        stages, self.sizes = problem.stages, problem.stages.sizes
        self.rows: list[Terms] = [{} for _ in stages.cotangents]
        statistics = {i.source for i in problem.items if i.tensor.statistic}
        # What is made again by itself: the rest runs within what reads it.
        self.again = {
            v: ran[op] for op in problem.runs if expensive(op) for v in op.outs
        }
        self.again |= {s: x for s, x in remade.items() if s in problem.makers}
        self.again = {v: x for v, x in self.again.items() if v not in statistics}
        self.uses, self.operands, self.loaded = (
            _with_elementwise(problem, at, self.again)
            for at in (stages.uses, stages.operands, stages.loaded)
        )
        self.encoded: dict[Source, list[int]] = {}
        for item in problem.items:
            self._store(item, layers)
        residuals = {s: s.op for s in stages.uses if isinstance(s, Residual)}
        every = _with_elementwise(problem, stages.uses, ())
        self.last = {source: max(at) for source, at in every.items() if at}
        for source, op in (problem.makers | residuals).items():
            if expensive(op) and (at := self.uses.get(source)):
                self._add(ran[op], source, range(min(at), self.last[source] + 1))
        self._make_again()

    def _add(self, variable: int, source: Source, where: Iterable[int]) -> None:
        self._add_bytes(variable, self.sizes[source], where)

    def _add_bytes(self, variable: int, nbytes: float, where: Iterable[int]) -> None:
        for stage in where:
            row = self.rows[stage]
            row[variable] = row.get(variable, 0.0) + float(nbytes)

    def _any(self, some: Iterable[Terms], where: Terms | None = None) -> int:
        """A variable that is 1 where one of ``some`` is, and ``where`` is too."""
        found = self.program.variable()
        for terms in some:
            less = {k: -v for k, v in (terms | (where or {})).items()}
            self.program.row({found: 1.0, **less}, -1 if where else 0, np.inf)
        return found

    def _store(self, item: Item, layers: int) -> None:
        source, at = item.source, self.uses.get(item.source)
        until = max(at) + 1 if at and layers == 1 else len(self.rows)
        operands = self.operands.get(source, set())
        for k, option in enumerate(item.options):
            variable = self.stored[source, k]
            self._add_bytes(variable, layers * option.nbytes, range(until))
            if option.away:  # fetched as the pass begins
                self._add(variable, source, operands.union(range(max(at or [0]))))
            elif option.encoded:
                self._add(variable, source, operands)
                self.encoded.setdefault(source, []).append(variable)
            else:
                self._add(variable, source, self.loaded.get(source, ()))

    def _make_again(self) -> None:
        below, parents = self._parents()
        for value, at in self.problem.stages.loaded.items():
            made = below.get(value, frozenset()) & self.again.keys()
            if made:  # is there for what loads it
                operand = self._any({self.again[v]: 1.0} for v in made)
                self._add(operand, value, at)
        by: dict[Source, dict[int, int]] = {v: {} for v in parents}
        for value in reversed(parents):  # what reads it came before
            op, own = self.problem.makers[value], self.uses.get(value)
            stages = {t: x for t, x in by[value].items() if not own or t < min(own)}
            if own:
                stages[min(own)] = self.again[value]
            times = sorted(stages)[-_EARLIER:]
            for one, other in itertools.pairwise(times):
                self.program.row({stages[other]: 1.0, stages[one]: -1.0}, 0, np.inf)
                if expensive(op):
                    self._add(stages[one], value, range(one, other))
            if times and not own and expensive(op) and value in self.last:
                end = self.last[value] + 1
                self._add(stages[times[-1]], value, range(times[-1], end))
            for t in set(self.operands.get(value, ())) - set(times):
                self._decode(parents[value], {self.again[value]: 1.0}, t)
            for t in times:
                self._decode(parents[value], {stages[t]: 1.0}, t)
                for parent in parents[value] & by.keys():
                    there = self._any([{self.again[parent]: 1.0}], {stages[t]: 1.0})
                    if t in by[parent]:
                        self.program.row({by[parent][t]: 1.0, there: -1.0}, 0, np.inf)
                    else:
                        by[parent][t] = there

    def _decode(self, sources: Collection[Source], where: Terms, stage: int) -> None:
        """What is encoded of what an operation reads that runs again."""
        for source in sources:
            encoded = self.encoded.get(source)
            if encoded and stage not in self.uses.get(source, ()):
                decoded = self._any([dict.fromkeys(encoded, 1.0)], where)
                self._add(decoded, source, [stage])

    def _parents(self) -> tuple[dict[Source, frozenset], dict[int, frozenset]]:
        """What each value, and what is made again, is elementwise made of."""
        inputs = {i.source for i in self.problem.items} - self.problem.makers.keys()
        below: dict[Source, frozenset[Source]] = {s: frozenset([s]) for s in inputs}
        parents = {}
        for op in self.problem.runs:
            made_of = frozenset().union(*(below.get(v, ()) for v in op.reads))
            for value in op.outs:
                again = value in self.again
                below[value] = frozenset([value]) if again else made_of
                if again:
                    parents[value] = made_of
        return below, parents


def _with_elementwise(
    problem: Problem, at: Mapping[Source, Collection[int]], apart: Collection[Source]
) -> dict[Source, set[int]]:
    """The stages of each source and of all that is elementwise made of it, but for
    what may be stored or made ``apart``."""
    found = {source: set(stages) for source, stages in at.items()}
    for op in reversed(problem.runs):
        if not expensive(op):
            above = set().union(*(found.get(v, ()) for v in op.outs if v not in apart))
            for value in op.reads:
                found.setdefault(value, set()).update(above)
    return found
