"""What sines and cosines are taken of, where rounding would turn it by radians.

Angles that are not differentiated, of times, positions, random frequencies: they may be
as large as the data. What several known frequencies multiply, as in a positional
encoding of coordinates that are. Products of few numbers, data or by known frequencies,
are made again of them.
"""

from collections import defaultdict
from collections.abc import Collection, Set

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.analysis.differences import narrow
from jaxcompact.analysis.moving import moving_values
from jaxcompact.analysis.spans import Span, find_spans, span_of
from jaxcompact.graph import Graph, Op, bodies, state_of
from jaxcompact.kinds import expensive

_FAST = 8  # radians of a sine for one of what it is made of
_WIDER = 8  # times its operands: they take no more than its codes of 4 bits


def find_phases(
    graph: Graph,
    fixed: Collection[int],
    moving: Set[int],
    candidates: Collection[int],
) -> tuple[set[int], set[int]]:
    """Those of the ``candidates`` that stay whole, and products made again of them.

    ``fixed``: values made of parameters and constants alone; ``moving``: values that
    are differentiated.
    """
    whole: set[int] = set()
    again: set[int] = set()
    todo = [item for op in graph.ops for item in _angles(op, fixed, moving)]
    if not todo:
        return whole, again
    made_by = graph.made_by
    same = {v for v in fixed if v not in moving}
    fast = _multiplied(graph, same)
    seen: set[tuple[int, bool]] = set()
    while todo:
        value, known = item = todo.pop()
        op = made_by.get(value)
        if item in seen or value in fixed:
            continue
        seen.add(item)
        known |= value not in moving
        if op is not None and op.kind == "dot_general":
            operands = [v for v in op.reads if v not in fixed]
            size = graph.avals[value].size
            few = all(_WIDER * graph.avals[v].size <= size for v in operands)
            if few and (moving.isdisjoint(operands) or not same.isdisjoint(op.reads)):
                again.add(value)
                todo += [(v, True) for v in operands]
                continue
        if known:
            whole.add(value)
        if op is not None and not expensive(op):
            todo += [(v, known or op in fast) for v in op.reads]
    return whole.intersection(candidates), again.intersection(candidates)


def _angles(
    op: Op, fixed: Collection[int], moving: Collection[int]
) -> list[tuple[int, bool]]:
    """What it, or an operation inside it, takes sines of; whether that stays whole."""
    turns = op.kind == "exp" and jnp.iscomplexobj(op.eqn.invars[0].aval)
    if op.kind in ("sin", "cos") or turns:
        return [(v, False) for v in op.reads]
    found, state = [], state_of(op)
    for body, first in bodies(op):
        outer = op.ins[first:]
        new = [isinstance(v, int) and v not in fixed for v in outer]
        moves = [isinstance(v, int) and v in moving for v in outer]
        for i in state:
            new[i] = moves[i] = True
        inner = [v for v, n in zip(body.inputs, new, strict=True) if n]
        inside, _ = find_phases(
            body, body.independent_of(inner), moving_values(body, moves), inner
        )
        pairs = zip(outer, body.inputs, strict=True)
        found += [(v, True) for v, i in pairs if i in inside and isinstance(v, int)]
    return found


def _multiplied(graph: Graph, same: Collection[int]) -> set[Op]:
    """Multiplications by known frequencies, several of one value, by the high ones.

    They are an array, or numbers that multiply it one after another.
    """
    found, spans = set(), find_spans(graph)
    numbers: dict[int, dict[Op, Span]] = defaultdict(dict)  # of what they multiply
    for op in graph.ops:
        factors = {"mul": op.ins, "div": op.ins[1:]}.get(op.kind, ())
        for v in factors:
            written = isinstance(v, Literal)
            if not written and v not in same:
                continue
            span = span_of(v, spans)
            array = not written and graph.avals[narrow(v, graph)].size > 1
            if array and (span is None or _is_fast(op, span)):
                found.add(op)
            if span and not array:
                for value in op.reads:
                    numbers[value][op] = span
    for each in numbers.values():
        if len({*each.values()}) > 1:
            found |= {op for op, span in each.items() if _is_fast(op, span)}
    return found


def _is_fast(op: Op, span: Span) -> bool:
    sizes = map(abs, span)
    return not all(s < _FAST if op.kind == "mul" else s * _FAST > 1 for s in sizes)
