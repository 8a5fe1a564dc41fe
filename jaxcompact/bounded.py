"""Functions that are flat beyond bounds: what they are of is stored within these.

Beyond them it may be of any size, infinite in float16; what is rounded with it would be
as coarse as that, or nothing. A sigmoid's operand is stored within a bound, a clip's
within the larger of its two, and what was clipped by itself; of relu the result is.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import ADDITIONS, renames
from jaxcompact.spans import Span, find_spans, span_of

# Where a hundredth is left of the slope, or less.
_SIGMOIDS = {"erf": 2.2, "logistic": 6.0, "tanh": 3.0}
_CLIPS = frozenset("clamp max min".split())
_SHIFTS = ADDITIONS | {"convert_element_type"}


class Bounded(NamedTuple):
    """A value, and the bound within which it is stored, if it has one."""

    value: int
    bound: float | None = None


def find_bounded(
    graph: Graph,
    readers: Mapping[int, Sequence[Op]],
    fixed: Collection[int],
    moving: Collection[int],
    steps: Collection[int],
    candidates: Collection[int],
) -> dict[int, Bounded]:
    """What is stored for those of which such a function alone is read, once something
    is added to them, or they are scaled; ``steps``: what relus make."""
    spans = find_spans(graph)

    def follow(value: int) -> Bounded | None:
        at, aval = value, graph.avals[value]
        while len(readers[at]) == 1:
            (op,) = readers[at]
            others = set(op.reads) - {at}
            if len(op.outs) != 1 or not others.issubset(fixed):
                break
            (out,) = op.outs
            if op.kind in _SIGMOIDS:
                return Bounded(at, _SIGMOIDS[op.kind])
            if op.kind in _CLIPS:
                bound = _of_clip(at, readers, spans)
                return None if bound is None else Bounded(at, bound)
            if out in steps:
                return Bounded(out)
            scales = op.kind == "mul" or (op.kind == "div" and op.ins[0] == at)
            scales = scales and others.isdisjoint(moving)
            if not (scales or op.kind in _SHIFTS or renames(op)):
                break
            at, made = out, graph.avals[out]
            if (made.dtype, made.size) != (aval.dtype, aval.size):
                break
        return None

    found = ((v, follow(v)) for v in candidates)
    return {v: bounded for v, bounded in found if bounded is not None}


def _of_clip(
    value: int, readers: Mapping[int, Sequence[Op]], spans: Mapping[int, Span]
) -> float | None:
    """The larger of the bounds that a value is clipped to, one after the other, if it
    is on both sides, by known numbers."""
    ends: set[str] = set()
    bound, at = 0.0, value
    while len(readers[at]) == 1 and ends != {"max", "min"}:
        (op,) = readers[at]
        by = [span_of(v, spans) for v in op.ins if v != at]
        if op.kind not in _CLIPS or None in by:
            return None
        ends |= {"max", "min"} if op.kind == "clamp" else {op.kind}
        bound = max(bound, *(abs(end) for span in by for end in span))
        (at,) = op.outs
    return bound if ends == {"max", "min"} and 0 < bound < float("inf") else None
