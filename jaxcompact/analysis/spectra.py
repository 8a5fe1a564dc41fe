"""Spectra that are larger than what they are of: of a convolution's padded sequence.

What they are of is stored in their place. A channel that lies far from zero has all of
that in one frequency, beside which little is left of the others in few bits.
"""

import math

from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import renames
from jaxcompact.reals import reals_of

_SAME = "convert_element_type", "pad"
_LARGER = 1.5  # not a row's own, which has two numbers more


def is_spread(op: Op, graph: Graph) -> bool:
    """Whether a Fourier transform makes many more numbers than there were to it."""
    (result,), (source,) = op.outs, op.reads
    before = graph.made_by.get(source)
    while before and (before.kind in _SAME or renames(before)):
        source = before.reads[0]
        before = graph.made_by.get(source)
    made, of = (math.prod(reals_of(graph.avals[v])[0]) for v in (result, source))
    return made > _LARGER * of
