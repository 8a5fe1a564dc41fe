"""Which tensors others are divided by: near zero, a rounded one is no substitute."""

from collections.abc import Collection, Mapping
from itertools import product

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.analysis.differences import is_square, narrow, pair
from jaxcompact.arrays import is_inexact
from jaxcompact.graph import Graph, Op, bodies, number, outside, state_of
from jaxcompact.kinds import (
    ELEMENTWISE,
    LAYOUT,
    REDUCTIONS,
    SOLVES,
    expensive,
    renames,
    rules_algebra,
)

# A small absolute error in what these read is a large one in what they make: at zero,
# at one, at infinity.
_STEEP_AT_ONE = frozenset("acos acosh asin atanh erf_inv log1p".split())
_STEEP = _STEEP_AT_ONE | frozenset(
    """atan2 bessel_i0e bessel_i1e cbrt digamma lgamma log log2 polygamma rsqrt sqrt
    tan""".split()
)
_POLES = frozenset("logistic tanh".split())  # of complex numbers
# What these make can only be zero, or have another sign, if what they read has.
_THROUGH = frozenset(
    """abs add asin asinh atan clamp complex convert_element_type cos div erf expm1 imag
    integer_pow log1p max min mul neg real reduce_prod select_n sin sinh sort square
    stop_gradient sub tan tanh top_k""".split()
)
_ONE_AT_ZERO = frozenset("cos cosh exp exp2 logistic".split())  # or another constant
_POSITIVE = frozenset("abs cosh erfc exp exp2 logistic sqrt square".split())
_SQUARED = frozenset("convert_element_type div mul reduce_sum select_n".split())
_SUMS = frozenset("add convert_element_type div max mul reduce_max reduce_sum".split())
_Followed = tuple[int, bool, bool]  # a value, whether it is squared, and guarded
_Sum = tuple[Op, bool]  # that a norm is made of, and whether it is of squares
_TERMS = 8  # of the longest sum of squares that might vanish as a whole
_MANY = 16  # of a sum that is stored in place of its terms
_GUARD = 1.0  # a constant that keeps what it is added to from zero, as in 1 + x^2


class _Facts:
    """What is known of a graph's values, each from those before it.

    Attributes:
        squares: whose entries are squares, or squares with factors.
        positive: whose entries are zero or more.
        ones: value -> what is zero where it is one, of an exponential say.
        differences: value, made of squares -> the terms of the difference that is
            squared, unless one is a mean or the like, or it is part of a rotation.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.squares: set[int] = set()
        self.positive: set[int] = set()
        self.ones: dict[int, list[int]] = {}
        self.differences: dict[int, list[int]] = {}
        adds = (op for op in graph.ops if op.kind == "add")
        self.added = set().union(*map(self._multiplied, adds))
        for op in graph.ops:
            self._add(op)

    def _add(self, op: Op) -> None:
        layout = op.kind in LAYOUT or renames(op)
        squared = is_square(op)
        if squared or (
            (op.kind in _SQUARED or layout) and not self.squares.isdisjoint(op.reads)
        ):
            self.squares.update(op.outs)
        self.positive.update(self._positive_outputs(op, layout, squared))
        if op.kind in _ONE_AT_ZERO:
            self.ones[op.outs[0]] = op.reads
        elif self.ones and (op.kind == "neg" or layout):
            self.ones |= dict.fromkeys(op.outs, _union(self.ones, op.reads))
        if op.kind == "sub":
            # a c - b s, beside b c + a s: of no length where a and b are of none alone.
            turned = not self.added.isdisjoint(self._multiplied(op))
            terms = [] if turned else pair(op, self.graph)
            self.differences[op.outs[0]] = terms
        elif self.differences and (
            squared or layout or (op.kind in _SQUARED and op.kind != "reduce_sum")
        ):
            terms = _union(self.differences, op.reads)
            self.differences |= dict.fromkeys(op.outs, terms)

    def _multiplied(self, op: Op) -> set[frozenset[int]]:
        """Of a sum of two products a factor of one with one of the other, each as large
        as the sum."""
        avals, made_by = self.graph.avals, self.graph.made_by

        def is_large(value: int) -> bool:
            return avals[narrow(value, self.graph)].size >= avals[op.outs[0]].size

        makers = [made_by[v] for v in op.reads if v in made_by]
        factors = [filter(is_large, o.reads) for o in makers if o.kind == "mul"]
        return set(map(frozenset, product(*factors))) if len(factors) == 2 else set()

    def _positive_outputs(self, op: Op, layout: bool, squared: bool) -> list[int]:
        if op.kind in _POSITIVE or squared:
            return list(op.outs)
        if op.kind == "max" and any(map(self.is_positive, op.ins)):
            return list(op.outs)
        if op.kind == "custom_jvp_call":  # as relu
            found = [(_Facts(body), body.outputs) for body, _ in bodies(op)]
            inside = [f.is_positive(v) for f, outputs in found for v in outputs]
            return list(op.outs) if inside and all(inside) else []
        through = op.kind in _SUMS or layout
        return list(op.outs) if through and all(map(self.is_positive, op.ins)) else []

    def is_positive(self, value: int | Literal) -> bool:
        if isinstance(value, Literal):
            return _is_above(value, 0)
        return value in self.positive


def _is_above(constant: Literal, bound: float) -> bool:
    value = number(constant)
    return value is not None and value >= bound


def _union(found: Mapping[int, list[int]], values: Collection[int]) -> list[int]:
    return list(dict.fromkeys(u for v in values for u in found.get(v, ())))


def find_divisors(
    graph: Graph,
    fixed: Collection[int],
    steep: Collection[int] = (),
    stored: Collection[int] = (),
) -> set[int]:
    """Values that are divided by, as numbers or matrices, or in a logarithm or a root.

    Followed back through layout, sums, powers, loops and branches, not through longer
    sums of squares, nor in squares through longer sums: a norm or a variance says
    nothing of the tensor that is normalized. What makes the terms of a sum that may
    cancel is followed whatever it is, exponentials too. ``steep``: values that are read
    so outside of the graph; ``stored``: which are followed no further.
    """
    facts = _Facts(graph)
    found: set[tuple[int, bool, bool]] = set()
    todo = [(v, False, False) for v in steep]
    for op in graph.ops:
        for value in steeply_read(op):
            near = value, *_beside_one(op, value, facts)
            todo += [(v, False, False) for v in near]
    while todo:
        value, squared, cancels = item = todo.pop()
        if item in found or value in fixed or not is_inexact(graph.avals[value]):
            continue
        found.add(item)
        op = facts.graph.made_by.get(value)
        if op is None or value in stored:
            continue
        squared |= is_square(op)
        if cancels and not expensive(op):
            todo += [(v, squared, True) for v in op.reads]
            continue
        sources = _sources(op, value, squared, facts)
        cancels = op.kind == "reduce_sum" and not all(map(facts.is_positive, op.reads))
        todo += [(v, squared, cancels and not squared) for v in sources]
    return {value for value, *_ in found}


def long_sums(graph: Graph, values: Collection[int]) -> set[int]:
    """Sums of many others, which nothing else reads: less to store than these are.

    Not of squares, of which a norm is taken, nor where the terms are read as well:
    divided by a sum that cancels they would be rounded beside it.
    """
    squares = _Facts(graph).squares
    found = set()
    for op in graph.ops:
        if op.kind == "reduce_sum" and not values.isdisjoint(op.outs):
            (terms,), (value,) = op.reads, op.outs
            alone = len(graph.readers[terms]) == 1 and terms not in squares
            if alone and graph.avals[terms].size >= _MANY * graph.avals[value].size:
                found.add(value)
    return found


def find_norms(graph: Graph, fixed: Collection[int]) -> dict[int, list[_Sum]]:
    """Where `find_divisors` ends: norms, variances, and what is made of them and read.

    Of a row or channel that is small beside its neighbours nothing may be left once it
    is rounded; its norm, made again, would be zero. In front of a broadcast. A sum that
    a constant guards is one as well. Each with what sums, and whether squares.
    """
    facts, neither = _Facts(graph), set()
    found = {}
    for op in graph.ops:
        for value in (_narrowest(v, graph) for v in steeply_read(op)):
            near = [value, *_beside_one(op, value, facts)]
            ends = [_end_of(v, fixed, facts, neither) for v in near]
            if sums := [end for end in ends if end is not None]:
                found[value] = sums
    return found


def _narrowest(value: int, graph: Graph) -> int:
    """The smallest that it is made of alone, cheaply: the variance of a group, which is
    repeated for its channels before a constant is added."""
    found = value = narrow(value, graph)
    while (op := graph.made_by.get(value)) and len(op.reads) == len(op.outs) == 1:
        if not (op.kind in ELEMENTWISE or op.kind in LAYOUT or renames(op)):
            break
        (value,) = op.reads
        if graph.avals[value].size < graph.avals[found].size:
            found = value
    return found


def _end_of(
    value: int, fixed: Collection[int], facts: _Facts, neither: set[_Followed]
) -> _Sum | None:
    """Of a norm what sums, by what is followed back, and whether squares; else None.

    ``neither``: what was followed before, to no norm.
    """
    seen: set[_Followed] = set()
    todo = [(value, False, False)]
    while todo:
        value, squared, guarded = item = todo.pop()
        op = facts.graph.made_by.get(value)
        if op is None or value in fixed or item in seen or item in neither:
            continue
        seen.add(item)
        squared |= is_square(op)
        over_devices = op.kind in ("psum", "psum_invariant")
        sources = op.reads if over_devices else _sources(op, value, squared, facts)
        if op.kind in REDUCTIONS and (guarded or not sources):
            return op, squared or not facts.squares.isdisjoint(op.reads)
        if guarded and op.kind in ("scatter-add", "dot_general"):
            return op, False  # degrees of nodes, of which the guard is a small one
        if op.kind in ("max", "clamp") and not sources:
            guarded, sources = True, op.reads
        todo += [(v, squared, guarded) for v in sources]
    neither |= seen
    return None


def _beside_one(op: Op, value: int, facts: _Facts) -> list[int]:
    """The terms of a sum whose difference from one is what counts."""
    source = facts.graph.made_by.get(value)
    steep = op.kind in _STEEP_AT_ONE and source and source.kind in ("add", "sub")
    return source.reads if steep else []


def steeply_read(op: Op) -> list[int]:
    """What an operation, or one inside it, divides by or takes a logarithm of."""
    if op.kind in ("div", "rem"):
        return [v for v in op.reads if v == op.ins[1]]
    if op.kind == "pow" or (op.kind == "integer_pow" and op.eqn.params["y"] < 0):
        return [v for v in op.reads if v == op.ins[0]]
    if op.kind in _STEEP or op.kind in SOLVES or rules_algebra(op):
        return op.reads
    if op.kind in _POLES and jnp.iscomplexobj(op.eqn.invars[0].aval):
        return op.reads
    return _steep_inputs(op)


def _steep_inputs(op: Op, outs: Collection[int] = ()) -> list[int]:
    """Of an operation with bodies; ``outs``: places of what is read so after it."""
    state = state_of(op)

    def inside(body: Graph) -> set[int]:
        ends = set(outs)
        while True:
            steep = [v for i in ends if isinstance(v := body.outputs[i], int)]
            found = find_divisors(body, body.constants.keys(), steep)
            again = {end for i, end in state.items() if body.inputs[i] in found}
            if again <= ends:
                return found
            ends |= again

    return sorted(outside(op, inside))


def _sources(op: Op, value: int, squared: bool, facts: _Facts) -> Collection[int]:
    """What is zero, or near it, where ``value`` is, which the operation made.

    ``squared``: what is divided by is a square of the value, or made of one.
    """
    if op.kind == "reduce_sum":
        (source,) = op.reads
        avals = facts.graph.avals
        terms = avals[source].size // max(avals[value].size, 1)
        norm = squared or source in facts.squares
        if norm and terms > _TERMS:  # only differences may vanish as a whole
            return facts.differences.get(source, ())
        return op.reads
    constants = [v for v in op.ins if isinstance(v, Literal)]
    least = op.ins[:1] if op.kind == "clamp" else op.ins
    if op.kind in ("max", "clamp"):
        if any(_is_above(v, _GUARD) for v in least if isinstance(v, Literal)):
            return ()
    if op.kind in ("add", "sub") and constants:
        if op.kind == "add" and _is_above(constants[0], _GUARD):
            if all(map(facts.is_positive, op.reads)):
                return ()
        return [*op.reads, *_union(facts.ones, op.reads)]
    if op.kind in LAYOUT or op.kind in _THROUGH or renames(op):
        return op.reads
    return _steep_inputs(op, [op.outs.index(value)])
