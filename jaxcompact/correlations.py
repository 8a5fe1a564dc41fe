"""Products of two tensors whose squares a loss adds up: matrices of correlations.

Off the diagonal they are small beside those on it, and gradients are proportional to
them: rounded beside each other they are nothing but rounding. (Barlow Twins, VICReg,
W-MSE, spectral contrastive losses.)
"""

from collections.abc import Set

from jaxcompact.differences import given_by, is_square
from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import (
    ADDITIONS,
    LAYOUT,
    expensive,
    is_of_expensive,
    renames,
)

_MULTIPLES = frozenset("convert_element_type div mul neg select_n".split())
_SQUARES = frozenset("integer_pow mul square".split())


def find_correlations(
    graph: Graph, data: Set[int], fixed: Set[int], known: bool
) -> tuple[set[int], set[int]]:
    """The products, of ``data``, and what is multiplied and all it is cheaply made of.

    ``fixed``: values made of parameters and constants alone, as the diagonal that is
    subtracted; ``known``: whether it is known which inputs are parameters.
    """
    squares = [op for op in graph.ops if op.kind in _SQUARES and is_square(op)]
    given = given_by(graph) if squares else set()
    made_by = {value: op for op in graph.ops for value in op.outs} if given else {}
    products: set[int] = set()
    factors: set[int] = set()
    terms = {v for op in squares if not given.isdisjoint(op.outs) for v in op.reads}
    todo = list(terms)
    for value in todo:
        op = made_by.get(value)
        if op is None:
            continue
        if op.kind == "dot_general" and data.issuperset(op.reads):
            # A parameter is an input, or cheaply made of one.
            if known or all(is_of_expensive(v, made_by) for v in op.reads):
                products.add(value)
                factors.update(op.reads)
        elif _is_of_one(op, fixed):
            new = {v for v in op.reads if v not in fixed} - terms
            terms.update(new)
            todo += new
    todo = list(factors)
    for value in todo:
        op = made_by.get(value)
        if op is not None and not expensive(op):
            new = {*op.reads} - factors
            factors.update(new)
            todo += new
    return products, factors


def _is_of_one(op: Op, fixed: Set[int]) -> bool:
    """Whether it is a tensor's multiple, entries, or difference from a fixed one."""
    if op.kind in LAYOUT or renames(op):
        return True
    moving = {v for v in op.reads if v not in fixed}
    return op.kind in _MULTIPLES | ADDITIONS and len(moving) == 1
