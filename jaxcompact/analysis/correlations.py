"""Products of two tensors whose squares a loss adds up: matrices of correlations.

Off the diagonal they are small beside those on it, and gradients are proportional to
them: rounded beside each other they are nothing but rounding. (Barlow Twins, VICReg,
W-MSE, spectral contrastive losses.)
"""

from collections.abc import Set

from jaxcompact.analysis.differences import MULTIPLES, is_square
from jaxcompact.graph import Graph, Op, behind
from jaxcompact.kinds import ADDITIONS, LAYOUT, expensive, is_of_expensive, renames


def find_correlations(
    graph: Graph, given: Set[int], data: Set[int], fixed: Set[int], known: bool
) -> tuple[set[int], set[int]]:
    """The products, of ``data``, and what is multiplied and all it is cheaply made of.

    ``given``: what outputs are made of; ``fixed``: values made of parameters and
    constants alone, as the diagonal that is subtracted; ``known``: whether it is known
    which inputs are parameters.
    """
    squares = (op for op in graph.ops if is_square(op))
    squared = [v for op in squares if not given.isdisjoint(op.outs) for v in op.reads]
    if not squared:
        return set(), set()

    def same(op: Op) -> bool:
        """Whether it is a tensor's multiple, entries, or distance from a fixed one."""
        moving = {v for v in op.reads if v not in fixed}
        linear = op.kind in MULTIPLES or op.kind in ADDITIONS
        return op.kind in LAYOUT or renames(op) or (linear and len(moving) == 1)

    def correlates(op: Op) -> bool:
        """A parameter, where they are not known, is cheaply made of inputs."""
        return (
            op.kind == "dot_general"
            and data.issuperset(op.reads)
            and (known or all(is_of_expensive(v, graph) for v in op.reads))
        )

    made_by = graph.made_by
    ends = [made_by[v] for v in behind(squared, graph, same) if v in made_by]
    found = list(filter(correlates, ends))
    factors = behind(
        (v for op in found for v in op.reads), graph, lambda op: not expensive(op)
    )
    return {op.outs[0] for op in found}, {*factors}
