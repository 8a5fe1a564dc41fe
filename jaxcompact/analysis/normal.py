"""Normal equations, ``(h^T h + c) w = b``: the features ``h`` that are solved for.

What is solved with has a gradient of ``h`` that is many times smaller than its terms,
which cancel: of rounded features nothing of it is left. (Ridge regression as a last
layer, as R2-D2's; the log-determinant of a Gaussian process.)
"""

from jaxcompact.analysis.differences import MULTIPLES, narrow
from jaxcompact.graph import Graph, Op, behind
from jaxcompact.kinds import (
    ADDITIONS,
    LAYOUT,
    LINEAR_ALGEBRA,
    expensive,
    renames,
    rules_algebra,
)


def find_features(graph: Graph) -> set[int]:
    """They, and all that they are cheaply made of.

    Not of a matrix that is masked, or whose rows have factors of their own, as a delta
    rule's: it is near one, and its inverse no larger.
    """

    def same(op: Op) -> bool:
        """Whether it adds to a matrix, or multiplies it as a whole."""
        if op.kind in ADDITIONS:
            return True
        scaled = op.kind in MULTIPLES and len({*op.reads}) == 1
        return op.kind in LAYOUT or renames(op) or scaled

    solve = (o for o in graph.ops if o.kind in LINEAR_ALGEBRA or rules_algebra(o))
    matrices = (v for op in solve for v in op.reads)
    makers = map(graph.made_by.get, behind(matrices, graph, same))
    products = (op for op in makers if op and op.kind == "dot_general")
    factors = ({narrow(v, graph) for v in op.reads} for op in products)
    features = (v for of in factors if len(of) == 1 for v in of)
    return {*behind(features, graph, lambda op: not expensive(op))}
