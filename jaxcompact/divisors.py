"""Which tensors others are divided by: near zero, a rounded one is no substitute."""

from collections.abc import Collection, Mapping

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.graph import Graph, Op, bodies, state_of
from jaxcompact.kinds import LAYOUT, REDUCTIONS, SOLVES, renames

# A small absolute error in what these read is a large one in what they make: at zero,
# at one, at infinity.
_STEEP_AT_ONE = frozenset("acos acosh asin atanh erf_inv log1p".split())
_STEEP = _STEEP_AT_ONE | frozenset(
    "atan2 cbrt digamma lgamma log log2 polygamma rsqrt sqrt".split()
)
# What these make can only be zero, or have another sign, if what they read has.
_THROUGH = frozenset(
    """abs add asin asinh atan clamp complex convert_element_type div erf expm1 imag
    integer_pow log1p max min mul neg real reduce_prod select_n sin sinh sort square
    sub tan tanh top_k""".split()
)
_ONE_AT_ZERO = frozenset("cos cosh exp exp2 logistic".split())  # or another constant
_POSITIVE = frozenset("abs cosh erfc exp exp2 logistic sqrt square".split())
_SQUARED = frozenset("convert_element_type div mul reduce_sum select_n".split())
_SUMS = frozenset("add convert_element_type div max mul reduce_max reduce_sum".split())
_TERMS = 8  # of the longest sum of squares that might vanish as a whole
_GUARD = 0.1  # a constant that keeps what it is added to from zero, as in 1 + x^2


def find_divisors(
    graph: Graph, fixed: Collection[int], steep: Collection[int] = ()
) -> set[int]:
    """Values that are divided by, as numbers or matrices, or in a logarithm or a root.

    Followed back through layout, sums, powers, loops and branches, not through longer
    sums of squares, nor in squares through longer sums: a norm or a variance says
    nothing of the tensor that is normalized. ``steep``: values that are read so outside
    of the graph.
    """
    made_by = {value: op for op in graph.ops for value in op.outs}
    found: set[tuple[int, bool]] = set()

    def follow(value: int, squared: bool = False) -> None:
        floating = jnp.issubdtype(graph.avals[value].dtype, jnp.inexact)
        if (value, squared) in found or value in fixed or not floating:
            return
        found.add((value, squared))
        op = made_by.get(value)
        if op is not None:
            squared |= _squares(op)
            for source in _sources(op, value, squared, graph, made_by):
                follow(source, squared)

    for value in steep:
        follow(value)
    for op in graph.ops:
        for value in steeply_read(op):
            follow(value)
            source = made_by.get(value)
            if op.kind in _STEEP_AT_ONE and source and source.kind in ("add", "sub"):
                for term in source.reads:
                    follow(term)
    return {value for value, _ in found}


def find_norms(graph: Graph, fixed: Collection[int]) -> set[int]:
    """Where `find_divisors` ends: norms, variances, and what is made of them and read.

    Of a row or channel that is small beside its neighbours nothing may be left once it
    is rounded; its norm, made again, would be zero. In front of a broadcast.
    """
    made_by = {value: op for op in graph.ops for value in op.outs}

    def is_norm(value: int, squared: bool, seen: set[tuple[int, bool]]) -> bool:
        op = made_by.get(value)
        if op is None or value in fixed or (value, squared) in seen:
            return False
        seen.add((value, squared))
        squared |= _squares(op)
        sources = _sources(op, value, squared, graph, made_by)
        if op.kind in REDUCTIONS and not sources:
            return True
        return any(is_norm(v, squared, seen) for v in sources)

    found = set()
    for op in graph.ops:
        for value in (_narrow(v, made_by) for v in steeply_read(op)):
            near = [value]
            source = made_by.get(value)
            if op.kind in _STEEP_AT_ONE and source and source.kind in ("add", "sub"):
                near += source.reads
            if any(is_norm(v, False, set()) for v in near):
                found.add(value)
    return found


def steeply_read(op: Op) -> list[int]:
    """What an operation, or one inside it, divides by or takes a logarithm of."""
    if op.kind in ("div", "rem"):
        return [v for v in op.reads if v == op.ins[1]]
    if op.kind == "pow" or (op.kind == "integer_pow" and op.eqn.params["y"] < 0):
        return [v for v in op.reads if v == op.ins[0]]
    if op.kind in _STEEP or op.kind in SOLVES:
        return op.reads
    return _steep_inputs(op)


def _steep_inputs(op: Op, outs: Collection[int] = ()) -> list[int]:
    """Of an operation with bodies; ``outs``: places of what is read so after it."""
    found: set[int] = set()
    for body, first in bodies(op):
        state, ends = state_of(op), set(outs)
        while True:
            steep = [v for i in ends if isinstance(v := body.outputs[i], int)]
            inside = find_divisors(body, body.constants.keys(), steep)
            again = {
                state[i]
                for i, v in enumerate(body.inputs)
                if v in inside and i in state
            }
            if again <= ends:
                break
            ends |= again
        found |= {
            v
            for v, inner in zip(op.ins[first:], body.inputs, strict=True)
            if inner in inside and isinstance(v, int)
        }
    return sorted(found)


def _sources(
    op: Op, value: int, squared: bool, graph: Graph, made_by: Mapping[int, Op]
) -> Collection[int]:
    """What is zero, or near it, where ``value`` is, which the operation made.

    ``squared``: what is divided by is a square of the value, or made of one.
    """
    if op.kind == "reduce_sum":
        (source,) = op.reads
        terms = graph.avals[source].size // max(graph.avals[value].size, 1)
        norm = squared or _is_square(source, made_by)
        if norm and terms > _TERMS:  # only differences may vanish as a whole
            return _difference(source, graph, made_by)
        return op.reads
    constants = [v.val for v in op.ins if isinstance(v, Literal)]
    least = op.ins[:1] if op.kind == "clamp" else op.ins
    if op.kind in ("max", "clamp"):
        if any(isinstance(v, Literal) and v.val >= _GUARD for v in least):
            return ()
    if op.kind in ("add", "sub") and constants:
        if op.kind == "add" and constants[0] >= _GUARD:
            if all(_is_positive(v, made_by) for v in op.reads):
                return ()
        return [*op.reads, *(u for v in op.reads for u in _of_one(v, made_by))]
    if op.kind in LAYOUT or op.kind in _THROUGH or renames(op):
        return op.reads
    return _steep_inputs(op, [op.outs.index(value)])


def _difference(value: int, graph: Graph, made_by: Mapping[int, Op]) -> Collection[int]:
    """Of squares of a difference: its terms, unless one is a mean or the like."""
    op = made_by.get(value)
    if op is None:
        return ()
    if op.kind == "sub":
        size = graph.avals[value].size
        sizes = [graph.avals[_narrow(v, made_by)].size for v in op.reads]
        return op.reads if len(sizes) == 2 and min(sizes) >= size else ()
    through = op.kind in _SQUARED or _squares(op) or op.kind in LAYOUT or renames(op)
    reads = dict.fromkeys(op.reads if through and op.kind != "reduce_sum" else ())
    return [u for v in reads for u in _difference(v, graph, made_by)]


def _narrow(value: int, made_by: Mapping[int, Op]) -> int:
    """In front of a broadcast."""
    op = made_by.get(value)
    while op and (op.kind in LAYOUT or renames(op)) and len(op.reads) == 1:
        value = op.reads[0]
        op = made_by.get(value)
    return value


def _of_one(value: int, made_by: Mapping[int, Op]) -> Collection[int]:
    """What is zero where the value, an exponential say, is one."""
    op = made_by.get(value)
    if op is None:
        return ()
    if op.kind in _ONE_AT_ZERO:
        return op.reads
    through = op.kind == "neg" or op.kind in LAYOUT or renames(op)
    return [u for v in op.reads for u in _of_one(v, made_by)] if through else ()


def _is_positive(value: int | Literal, made_by: Mapping[int, Op]) -> bool:
    """Whether its entries are known to be zero or more."""
    if isinstance(value, Literal):
        return value.val >= 0
    op = made_by.get(value)
    if op is None:
        return False
    if op.kind in _POSITIVE or _squares(op):
        return True
    if op.kind == "max":
        return any(_is_positive(v, made_by) for v in op.ins)
    if op.kind == "custom_jvp_call":  # as relu
        outs = [(b, o) for b, _ in bodies(op) for o in b.outputs]
        inner = [({v: p for p in b.ops for v in p.outs}, o) for b, o in outs]
        return bool(inner) and all(_is_positive(o, by) for by, o in inner)
    through = op.kind in _SUMS or op.kind in LAYOUT or renames(op)
    return through and all(_is_positive(v, made_by) for v in op.ins)


def _is_square(value: int, made_by: Mapping[int, Op]) -> bool:
    """Whether its entries are squares, or squares with factors."""
    op = made_by.get(value)
    if op is None or _squares(op):
        return op is not None
    through = op.kind in _SQUARED or op.kind in LAYOUT or renames(op)
    return through and any(_is_square(v, made_by) for v in op.reads)


def _squares(op: Op) -> bool:
    even = op.kind == "integer_pow" and op.eqn.params["y"] % 2 == 0
    twice = op.kind == "mul" and op.ins[0] == op.ins[1]
    return op.kind == "square" or even or twice
