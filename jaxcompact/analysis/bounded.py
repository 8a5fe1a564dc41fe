"""Functions that are flat beyond bounds: what they are of is stored within these.

Beyond them it may be of any size, infinite in float16; what is rounded with it would
be as coarse as that, or nothing. A sigmoid's operand has a bound, and a clip's; what
was clipped is stored by itself. In the place of relu's operand its result is stored.
"""

from collections.abc import Collection, Mapping

from jaxcompact.analysis.spans import Span, find_spans, span_of
from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import ADDITIONS, renames

# Where a hundredth is left of the slope, or less.
_SIGMOIDS = {"erf": 2.2, "logistic": 6.0, "tanh": 3.0}
_CLIPS = frozenset("clamp max min".split())
_SAME = frozenset("broadcast_in_dim convert_element_type neg".split())
# Times the bound, where something is added that is not known, as a bias.
_BIASED_SIGMOID, _BIASED_CLIP = 4 / 3, 2.0
_LEAST, _MOST = 1e-30, 1e30  # that `Quantized` takes


def find_bounds(
    graph: Graph, fixed: Collection[int], candidates: Collection[int]
) -> dict[int, float]:
    """Of those of which such a function alone is read, once something is added to them,
    or they are scaled."""
    spans, found = find_spans(graph), {}
    for value in candidates:
        bound = _Chain(spans).bound(value, graph, fixed)
        if _LEAST <= bound <= _MOST:
            found[value] = bound
    return found


class _Chain:
    """What x is made into: ``scale * x + shift``, and a bias that is not known."""

    def __init__(self, spans: Mapping[int, Span]):
        self.spans = spans
        self.scale, self.shift, self.biased = 1.0, 0.0, False
        self.ends: dict[str, float] = {}  # that it was clipped to just now

    def bound(self, at: int, graph: Graph, fixed: Collection[int]) -> float:
        """The least of those of all functions in a row."""
        bound, readers = float("inf"), graph.readers
        while len(readers[at]) == 1 and self.scale:  # or it became too small
            (op,) = readers[at]
            if not _is_of_one(op, at, fixed):
                break
            if op.kind in _SIGMOIDS:
                b = _SIGMOIDS[op.kind]
                return min(bound, self._of(-b, b, _BIASED_SIGMOID))
            if op.kind in _CLIPS:
                if not self._clip(op, at):
                    break
                if len(self.ends) == 2:
                    low, high = self.ends["max"], self.ends["min"]
                    bound = min(bound, self._of(low, high, _BIASED_CLIP))
            elif not self._move(op, at):
                break
            (at,) = op.outs
        return bound

    def _of(self, low: float, high: float, biased: float) -> float:
        ends = (abs(end - self.shift) for end in (low, high))
        return max(ends) / abs(self.scale) * (biased if self.biased else 1.0)

    def _clip(self, op: Op, at: int) -> bool:
        by = [span_of(v, self.spans) for v in op.ins if v != at]
        kinds = ("max", "min") if op.kind == "clamp" else (op.kind,)
        if None in by or len(by) < len(kinds):  # by itself
            return False
        for kind, (low, high) in zip(kinds, by, strict=True):
            self.ends[kind] = low if kind == "max" else high
        return True

    def _move(self, op: Op, at: int) -> bool:
        """Whether it is known what an operation makes of it."""
        self.ends = {}
        if op.kind in _SAME or renames(op):
            sign = -1 if op.kind == "neg" else 1
            self.scale, self.shift = sign * self.scale, sign * self.shift
            return True
        other = next((v for v in op.ins if v != at), at)
        low, high = span_of(other, self.spans) or (None, None)
        known = low is not None and low == high
        if op.kind in ADDITIONS:
            if op.kind == "sub" and op.ins[1] == at:
                self.scale, self.shift = -self.scale, -self.shift
            elif op.kind == "sub" and known:
                low = -low
            self.shift += low if known else 0.0
            self.biased |= not known
            return True
        divides = op.kind == "div" and op.ins[0] == at
        if known and low and (op.kind == "mul" or divides):
            factor = 1 / low if divides else low
            self.scale, self.shift = factor * self.scale, factor * self.shift
            return True
        return False


def _is_of_one(op: Op, value: int, fixed: Collection[int]) -> bool:
    return len(op.outs) == 1 and all(v == value or v in fixed for v in op.reads)


def find_results(
    graph: Graph,
    fixed: Collection[int],
    candidates: Collection[int],
    steps: Collection[int],
    named: Collection[int],
) -> dict[int, int]:
    """Of those of which alone relu is read, once something is added, what it makes.

    ``steps``: what relus make; ``named``: values that may have a rule of their own.
    """
    found, readers = {}, graph.readers
    for value in candidates:
        at, aval = value, graph.avals[value]
        while len(readers[at]) == 1 and (at == value or at not in named):
            (op,) = readers[at]
            if not _is_of_one(op, at, fixed):
                break
            if not (op.outs[0] in steps or op.kind in ADDITIONS or renames(op)):
                break
            (at,) = op.outs
            if at in steps:
                made = graph.avals[at]
                if (made.dtype, made.size) == (aval.dtype, aval.size):
                    found[value] = at
                break
    return found
