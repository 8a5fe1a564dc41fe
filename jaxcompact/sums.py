"""Sums whose terms nothing else reads: one tensor to store in place of several."""

from collections.abc import Collection, Iterable, Mapping

from jax.extend.core import Literal

from jaxcompact.graph import Graph, Op, Value, is_float
from jaxcompact.kinds import BLOCKS

_SUMS = frozenset("add add_any convert_element_type neg sub".split())


def find_sums(
    graph: Graph,
    readers: Mapping[int, list[Op]],
    fixed: Collection[int],
    candidates: Collection[int],
) -> dict[Op, list[int]]:
    """The last addition of each sum, and the two or more of the candidates in it.

    Terms, as of products, may be multiplied by constants, converted to other floats,
    and added to each other and to ``fixed`` values. All that reads one of them is
    linear, of a constant slope: no gradient needs it.
    """
    constants = graph.independent_of(graph.inputs)
    sums: dict[int, tuple[Op, list[int]]] = {}

    for op in graph.ops:
        moving = {v for v in op.reads if v not in fixed}
        single = len(op.outs) == 1 and op.kind not in BLOCKS
        if single and op.outs[0] in candidates:
            sums[op.outs[0]] = op, [*op.outs]
        elif (
            all(v in sums and len(readers[v]) == 1 for v in moving)
            and moving
            and _is_linear(op, graph, moving, constants)
        ):
            joined = [sums.pop(v) for v in moving]
            terms = [term for _, each in joined for term in each]
            # What is done to the whole of it, as to add a mask, is done again.
            sums[op.outs[0]] = op if len(joined) > 1 else joined[0][0], terms
    return {op: terms for op, terms in sums.values() if len(terms) > 1}


def _is_linear(
    op: Op, graph: Graph, moving: Iterable[int], constants: Collection[int]
) -> bool:
    """Whether it makes one array, a sum of multiples of those that move."""
    avals = [graph.avals[v] for v in (*moving, *op.outs)]
    if any(a.shape != avals[0].shape or not is_float(a) for a in avals):
        return False

    def constant(value: Value) -> bool:
        return isinstance(value, Literal) or value in constants

    if op.kind in ("div", "mul"):
        x, y = op.ins
        return constant(y) or (op.kind == "mul" and constant(x))
    return op.kind in _SUMS
