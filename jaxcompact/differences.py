"""Differences of two tensors that may be near each other: a prediction, its target.

What is left when two rounded tensors are subtracted may be no more than their rounding.
The difference itself is rounded beside what it is.
"""

from collections.abc import Collection, Mapping

from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import ELEMENTWISE, LAYOUT, REDUCTIONS, renames

# Zero where what they read is.
_MULTIPLES = frozenset(
    "abs clamp convert_element_type div max min mul neg select_n".split()
)
# Of others a difference may be infinite: exponentials of what is less a maximum.
_EVEN = frozenset("cos cosh square".split())
_OF_TWO = frozenset("custom_jvp_call dot_general mul".split())  # logaddexp(x, -x)
_THROUGH = ELEMENTWISE | {"custom_jvp_call"}


def find_differences(graph: Graph, data: Collection[int]) -> set[int]:
    """Those, made of ``data``, whose squares the graph gives, or the like: losses.

    Not norms, which others are divided by.
    """
    if all(op.kind != "sub" for op in graph.ops):
        return set()
    made_by = {value: op for op in graph.ops for value in op.outs}
    given = _given(graph)
    multiples: dict[int, set[int]] = {}  # value -> differences that it is a multiple of
    found: set[int] = set()
    for op in graph.ops:
        if op.kind == "sub" and op.outs[0] in data and pair(op, graph, made_by):
            multiples[op.outs[0]] = {*op.outs}
            continue
        of_each = [multiples[v] for v in op.reads if v in multiples]
        if not of_each:
            continue
        if not given.isdisjoint(op.outs):
            if is_square(op) or op.kind in _EVEN:
                found.update(*of_each)
            elif op.kind in _OF_TWO and len(of_each) == 2:
                found |= of_each[0] & of_each[1]
        if op.kind in _MULTIPLES or op.kind in LAYOUT or renames(op):
            multiples |= dict.fromkeys(op.outs, set().union(*of_each))
    return found


def _given(graph: Graph) -> set[int]:
    """What an output is made of entry by entry or as sums, divided by nothing of it."""
    found = {v for v in graph.outputs if isinstance(v, int)}
    for op in reversed(graph.ops):
        if found.isdisjoint(op.outs) or op.kind in ("pow", "rsqrt"):
            continue
        if op.kind == "div":
            found.update(v for v in op.reads if v == op.ins[0])
        elif op.kind in _THROUGH or op.kind in LAYOUT or op.kind in REDUCTIONS:
            found.update(op.reads)
    return found


def pair(op: Op, graph: Graph, made_by: Mapping[int, Op]) -> list[int]:
    """The terms of a difference, unless one has fewer entries, as a mean has."""
    size = graph.avals[op.outs[0]].size
    sizes = [graph.avals[narrow(v, made_by)].size for v in op.reads]
    return op.reads if len(sizes) == 2 and min(sizes) >= size else []


def narrow(value: int, made_by: Mapping[int, Op]) -> int:
    """In front of a broadcast."""
    op = made_by.get(value)
    while op and (op.kind in LAYOUT or renames(op)) and len(op.reads) == 1:
        value = op.reads[0]
        op = made_by.get(value)
    return value


def is_square(op: Op) -> bool:
    even = op.kind == "integer_pow" and op.eqn.params["y"] % 2 == 0
    twice = op.kind == "mul" and op.ins[0] == op.ins[1]
    return op.kind == "square" or even or twice
