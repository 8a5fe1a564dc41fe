"""What is in memory in a block's backward pass.

In each stage: what is stored, cotangents, what is decoded, and what was made again. A
block that runs once frees what it stored after its last use; where there are several,
the others' is there. What is encoded, and what is elementwise made of that, is decoded
for each stage that reads it. What expensive operations make again is there from the
stage that first needs it, be it to make something else again, to the last that reads
it. What is elementwise made of it, or of what is stored as it is, takes nothing where a
matrix product reads it. What lies in the host's memory is fetched as the pass begins.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence

from jaxcompact.graph import Op
from jaxcompact.kinds import expensive
from jaxcompact.planner.items import Option
from jaxcompact.planner.problem import Problem
from jaxcompact.planner.stages import loads
from jaxcompact.transform.sources import Residual, Source


def alive(problem: Problem, chosen: Sequence[Option | None], layers: int) -> int:
    """The most bytes in any stage, with an option for each item of a problem.

    None for an item that is made again, or is not needed. ``layers`` store as much.
    """
    stages, sizes = problem.stages, problem.stages.sizes
    pairs = zip(problem.items, chosen, strict=True)
    stored = {item.source: option for item, option in pairs if option}
    last = {s: max(at) for s in problem.needed if (at := stages.uses.get(s))}
    first = {s: min(stages.uses[s]) for s in last}
    need, again = _again(problem, stored, first)

    encoded = {s for s, option in stored.items() if option.encoded}
    away = {s for s, option in stored.items() if option.away}
    light = {*stored, *(s for s in need if s not in problem.makers)}
    there = {s for s in need if s in stages.loaded}
    read = defaultdict(set)  # value -> stages in which it is an operand
    for op, at in again.items():
        if expensive(op):
            there.update(op.outs)
            for value in op.reads:
                read[value].add(at)
                if loads(op):
                    there.add(value)
        elif all(value in light or value in problem.free for value in op.reads):
            light.update(op.outs)
            if not encoded.isdisjoint(op.reads):
                encoded.update(op.outs)
    for op, at in reversed(again.items()):
        end = at
        if not expensive(op):  # runs within what reads it
            end = max([at, *(last.get(v, at) for v in op.outs if v not in there)])
        last.update({v: max(last.get(v, end), end) for v in op.reads})

    total = list(stages.cotangents)
    for source, option in stored.items():
        freed = layers == 1 and source in last
        for stage in range(last[source] + 1 if freed else len(total)):
            total[stage] += layers * option.nbytes
    for source in need:
        if source in away:  # fetched early
            where = range(last.get(source, need[source]))
            where = read[source].union(where, stages.operands.get(source, ()))
        elif source in encoded:
            where = stages.operands.get(source, frozenset()) | read[source]
        elif source in light:
            where = stages.loaded.get(source, ())
        elif source in there:
            where = range(need[source], last.get(source, need[source]) + 1)
        else:
            where = ()
        for stage in where:
            total[stage] += sizes[source]
    return max(total)


def _again(
    problem: Problem, stored: Collection[Source], need: dict[Source, int]
) -> tuple[dict[Source, int], dict[Op, int]]:
    """The stage that first needs each value, and what runs again at which stage."""
    need, found = dict(need), {}
    waiting = [s for s in need if s not in stored]
    while waiting:
        source = waiting.pop()
        op = source.op if isinstance(source, Residual) else problem.makers.get(source)
        if op is None or found.get(op, math.inf) <= need[source]:
            continue
        found[op] = need[source]
        for value in op.reads:
            if value not in problem.free and need.get(value, math.inf) > found[op]:
                need[value] = found[op]
                if value not in stored:
                    waiting.append(value)
    return need, {op: found[op] for op in problem.runs if op in found}
