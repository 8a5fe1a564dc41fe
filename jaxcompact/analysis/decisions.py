"""Decisions: made again of decoded values they could come out different."""

from collections.abc import Collection, Sequence

from jaxcompact.analysis.differences import narrow
from jaxcompact.arrays import is_float, is_inexact
from jaxcompact.graph import Graph, Op, graph_of, of_no_number
from jaxcompact.kinds import ELEMENTWISE, LAYOUT, is_any, renames

_ROUNDS = "ceil", "floor", "rem", "round"
_COMPARES = "eq", "ge", "gt", "le", "lt", "ne", "sign"
_ORDERS = "ge", "gt", "le", "lt"
_SCALES = frozenset("add convert_element_type div mul neg stop_gradient sub".split())


def decides(op: Op, value: int, graph: Graph, data: Collection[int]) -> bool:
    """Whether it makes a mask that something else reads, or rounds to integers.

    A sign is a choice of three.
    """
    aval, ruled = graph.avals[value], op.kind in ("custom_jvp_call", "custom_vjp_call")
    if ruled and is_inexact(aval):
        return any(map(_decides_inside, map(graph_of, op.jaxprs)))
    if not ruled and op.kind not in ELEMENTWISE:
        return False
    if aval.dtype == bool:
        return not all(_is_mask(r, graph) for r in graph.readers[value])
    rounded = any(v in data and is_inexact(graph.avals[v]) for v in op.reads)
    return rounded and (not is_inexact(aval) or op.kind in _ROUNDS)


# Exact of whole numbers, however XLA joins them.
EXACT = LAYOUT | frozenset(
    """add and clamp convert_element_type eq ge gt le lt max min ne neg not or
    sub""".split()
)


def in_a_cell(op: Op, graph: Graph, data: Collection[int]) -> int | None:
    """What it rounds, if that is less the result: a place in a cell, ``x - floor(x)``.

    Or less what is made of the result, as the next corner.
    """
    to_integer = op.kind == "convert_element_type" and not is_float(
        graph.avals[op.outs[0]]
    )
    of_data = all(v in data and is_float(graph.avals[v]) for v in op.reads)
    if not (op.kind in _ROUNDS or to_integer) or not op.reads or not of_data:
        return None
    made_by, readers = graph.made_by, graph.readers

    def before(value: int, kinds: Collection[str]) -> int:
        """What it is made of, by these and what is known."""
        while op := made_by.get(value):
            of = {v for v in op.reads if v in data}
            if len(of) != 1 or not (op.kind in kinds or renames(op)):
                break
            (value,) = of
        return value

    value = before(op.reads[0], _SCALES)
    part_of = before(value, _SCALES | LAYOUT)
    todo = [*op.outs]
    for made in todo:
        for reader in readers[made]:
            others = [v for v in reader.reads if v not in todo and v in data]
            if reader.kind == "sub" and others:
                whole = before(others[0], _SCALES | LAYOUT) == part_of
                read = any(o.kind != "stop_gradient" for o in readers[reader.outs[0]])
                if whole and read:
                    return value
            corner = reader.kind in _SCALES | LAYOUT and not others
            if corner or reader.kind in ("select_n", "clamp", "max", "min"):
                todo += [v for v in reader.outs if v not in todo]
    return None


def find_searched(
    graph: Graph, data: Collection[int], fixed: Collection[int]
) -> set[int]:
    """What is searched among known numbers, and is less one of them: its place in a
    cell, as in a table or a spline. Searched, or compared with each of them, also by
    what a hat takes the size of."""
    found: set[int] = set()
    made_by, readers = graph.made_by, graph.readers
    cheap = ELEMENTWISE | LAYOUT

    def known(value: int) -> bool:
        op = made_by.get(value := narrow(value, graph))
        if op and op.kind == "gather":
            value = op.reads[0]
        return value in fixed and graph.avals[value].size > 1

    def is_less(value: int) -> bool:
        todo = [value]
        for value in todo:
            for op in readers[value]:
                if op.kind == "sub" and any(map(known, op.reads)):
                    return True
                if op.kind in LAYOUT or renames(op):
                    todo += [v for v in op.outs if v not in todo]
        return False

    for op in graph.ops:
        hat = op.kind == "sub" and any(r.kind == "abs" for r in readers[op.outs[0]])
        searched = op.kind not in _ORDERS and not hat
        if searched and op.kind in cheap:
            continue
        if searched and all(is_inexact(graph.avals[v]) for v in op.outs):
            continue
        if not any(map(known, op.reads)):
            continue
        size = graph.avals[op.outs[0]].size
        for value in {narrow(v, graph) for v in op.reads if v in data}:
            each = searched or graph.avals[value].size < size
            if each and is_float(graph.avals[value]) and is_less(value):
                found.add(value)
    return found


def decided(rule: Graph, residuals: Sequence[int]) -> set[int]:
    """Which of them a backward rule compares with something, or rounds.

    As they are or after operations on each entry; or that it runs loops in a loop from:
    as a solver's that chooses its steps, which were chosen by what they began with.
    """
    origins = {v: {v} for v in residuals if is_inexact(rule.avals[v])}
    found: set[int] = set()
    for op in rule.ops:
        of_op = set().union(*(origins.get(v, ()) for v in op.reads))
        inside = (o for body in op.jaxprs for o in graph_of(body).ops)
        again = op.kind == "while" and any(is_any(o, ("while",)) for o in inside)
        if again or op.kind in _COMPARES or op.kind in _ROUNDS:
            found |= of_op
        elif op.kind in ELEMENTWISE or op.kind in LAYOUT or renames(op):
            origins |= dict.fromkeys(op.outs, of_op)
    return found


def _decides_inside(body: Graph) -> bool:
    """Whether it rounds, or gives steps between constants."""
    found = steps(body)
    return any(isinstance(v, int) and v in found for v in body.outputs) or any(
        op.kind in (*_ROUNDS, "sign")
        or (op.kind == "convert_element_type" and _is_discrete(op))
        for op in body.ops
    )


def steps(graph: Graph, whole: Collection[int] = ()) -> set[int]:
    """What is chosen among constants, as numbers of a mask, or is ``whole``, and that
    times a scale of less entries."""
    fixed, found = graph.independent_of(graph.inputs), {*whole}
    nan = of_no_number(graph)
    for op in graph.ops:
        chosen = op.kind == "select_n"
        if op.kind == "convert_element_type" and op.eqn.invars[0].aval.dtype == bool:
            found.update(op.outs)
        if not (chosen or op.kind in _SCALES or op.kind in LAYOUT):
            continue
        size = graph.avals[op.outs[0]].size
        of_nan = chosen and not nan.isdisjoint(op.reads[:1])
        ins = op.ins[1:2] if of_nan else op.ins[chosen:]
        moving = [v for v in ins if isinstance(v, int) and v not in fixed]
        if chosen and found.issuperset(moving):
            found.update(op.outs)
        elif not chosen and not found.isdisjoint(moving):
            if all(v in found or graph.avals[v].size < size for v in moving):
                found.update(op.outs)
    return found


def _is_discrete(op: Op) -> bool:
    """Whether it makes numbers of a mask, or integers of numbers."""
    before, after = op.eqn.invars[0].aval, op.eqn.outvars[0].aval
    return before.dtype == bool or (is_inexact(before) and not is_inexact(after))


def _is_mask(op: Op, graph: Graph) -> bool:
    return op.kind in ELEMENTWISE and graph.avals[op.outs[0]].dtype == bool
