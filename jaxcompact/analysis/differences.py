"""Two tensors that may be near each other: a prediction and its target.

What is left when two rounded tensors are subtracted may be no more than their rounding.
The difference itself is rounded beside what it is. A cosine's gradient is such a
difference too, of directions, as is a square's that is multiplied out, but there is
none to be stored.
"""

import math
from collections.abc import Iterator, Mapping, Set

from jax.extend.core import Literal

from jaxcompact.analysis.tensor import GROUP
from jaxcompact.arrays import is_float
from jaxcompact.graph import Graph, Op, behind, bodies, outside
from jaxcompact.kinds import (
    ELEMENTWISE,
    EXPONENTIALS,
    LAYOUT,
    REDUCTIONS,
    expensive,
    renames,
)

# Zero where what they read is.
MULTIPLES = frozenset(
    "abs clamp convert_element_type div max min mul neg select_n".split()
)
# Of others a difference may be infinite: exponentials of what is less a maximum.
_EVEN = frozenset("cos cosh square".split())
_TERMS = frozenset("add convert_element_type div mul neg reduce_sum sub".split())
_OF_TWO = frozenset("custom_jvp_call dot_general mul".split())  # logaddexp(x, -x)
_SUMS_UP = (
    ELEMENTWISE
    | REDUCTIONS
    | frozenset(
        """approx_top_k cumlogsumexp cumsum custom_jvp_call reduce_window_sum
    scatter-add sort top_k""".split()
    )
)
_WEIGHS = "dot_general", "conv_general_dilated"
_LEAST = 0.1  # of a constant that a prediction may be near; not what guards a root


def find_differences(
    graph: Graph, given: Set[int], data: Set[int], fixed: Set[int], moving: Set[int]
) -> tuple[set[int], set[int]]:
    """Those, made of ``data``, whose squares the graph gives, or the like: losses.

    Not norms, which others are divided by. And those whose terms are to be kept: whose
    squares an exponential is taken of, as of a mixture's densities (its large ones say
    nothing of the small), and those of all pairs, larger than their terms. ``fixed``:
    values made of parameters and constants; ``moving``: those that are differentiated.
    """
    found: set[int] = set()
    bells: set[int] = set()
    constants = {v for op in graph.ops if _is_from_constant(op) for v in op.outs}
    made_by = graph.made_by
    subtracted = [op for op in graph.ops if op.kind == "sub"]
    pairs = {v for op in subtracted if pair(op, graph) for v in op.outs}
    crossed = {v for op in subtracted if _crosses(op, graph) for v in op.outs}
    added = [op for op in graph.ops if op.kind == "add" and len({*op.reads}) == 2]
    sums = {v for op in added for v in op.outs} - constants
    begins = data & (constants | pairs | crossed | sums)
    if not begins:
        return found, bells
    exponents = _exponents(graph, moving)
    multiples = _multiples(graph, begins, moving)
    for op in graph.ops:
        of_each = [multiples[v] for v in op.reads if v in multiples]
        if of_each and begins.isdisjoint(op.outs) and not given.isdisjoint(op.outs):
            if is_square(op) and not exponents.isdisjoint(op.outs):
                bells.update(*of_each)
            elif is_square(op):
                found.update(*of_each)
            elif op.kind in _EVEN:
                found.update(set().union(*of_each) - sums)  # features, rather
            elif op.kind in _OF_TWO and len(of_each) == 2:
                if not _is_of_products(op, graph, begins, moving):
                    found |= of_each[0] & of_each[1]
            elif op.kind == "custom_jvp_call" and len(data.intersection(op.reads)) < 2:
                # logaddexp(x, 0), not relu or softplus of logits with a bias
                found.update(set().union(*of_each) - sums - constants)
            elif op.kind in ("cond", "scan"):
                found.update(*_squared_inside(op, multiples))

    def is_difference(value: int) -> bool:
        op = made_by[value]
        return value not in sums or _has_data(op, graph, fixed, moving)

    found, bells = ({*filter(is_difference, values)} for values in (found, bells))
    bells |= found & crossed
    return found - bells, bells


def _is_of_products(op: Op, graph: Graph, begins: Set[int], moving: Set[int]) -> bool:
    """Whether it is of two products of differences and weights that are not
    differentiated: features, as a frozen gate's, or queries and keys; no square."""

    def inside(op: Op) -> bool:
        return begins.isdisjoint(op.outs) and not _weighs(op, moving)

    made = [{*map(graph.made_by.get, behind([v], graph, inside))} for v in op.reads]
    a, b = ({op for op in ops if op and _weighs(op, moving)} for ops in made)
    return bool(a and b) and a.isdisjoint(b)


def _crosses(op: Op, graph: Graph) -> bool:
    """Whether it is of all pairs of two tensors' entries or rows."""
    size = graph.avals[op.outs[0]].size
    of = {v: graph.avals[narrow(v, graph)].size for v in op.reads}
    return len(of) == 2 and all(1 < n < size for n in of.values())


def _has_data(op: Op, graph: Graph, fixed: Set[int], moving: Set[int]) -> bool:
    """Whether a sum is one of a prediction and data: a target's negative, noise.

    Data is made of nothing that is differentiated; or, as far as is known, cheaply of
    inputs that the other term is not made of.
    """
    if not pair(op, graph):
        return False
    size = graph.avals[op.outs[0]].size
    terms = [(v, {*behind([v], graph)}) for v in op.reads]
    for (value, of), (_, other) in zip(terms, terms[::-1], strict=True):
        if moving.isdisjoint(of):
            whole = graph.avals[narrow(value, graph)].size == size
            if whole or value not in fixed:  # no bias that is frozen
                return True
        inputs = of.intersection(graph.inputs) - fixed
        cheap = not any(expensive(graph.made_by[v]) for v in of if v in graph.made_by)
        if inputs and cheap and inputs.isdisjoint(other):
            return True
    return False


def _multiples(
    graph: Graph, differences: Set[int], moving: Set[int]
) -> dict[int, set[int]]:
    """Value -> those that it is a multiple of, or of their squares; also as sums."""
    found = {v: {v} for v in differences}
    for op in graph.ops:
        of_each = [found[v] for v in op.reads if v in found]
        if not of_each or not differences.isdisjoint(op.outs):
            continue
        through = op.kind in MULTIPLES or op.kind in LAYOUT or renames(op)
        if through or is_square(op) or _weighs(op, moving):
            found |= dict.fromkeys(op.outs, set().union(*of_each))
    return found


def _squared_inside(op: Op, multiples: Mapping[int, set[int]]) -> Iterator[set[int]]:
    """Of the multiples that a loop or its like reads, those whose squares it gives."""
    for body, first in bodies(op):
        inputs = dict(zip(body.inputs, op.ins[first:], strict=True))
        read = {v: w for v, w in inputs.items() if isinstance(w, int)}
        begins = {v: multiples[w] for v, w in read.items() if w in multiples}
        moving = {*range(len(body.avals))}
        given, inside = given_by(body, moving), _multiples(body, {*begins}, moving)
        for inner in filter(is_square, body.ops):
            for value in inside.keys() & inner.reads if inner.outs[0] in given else ():
                yield from map(begins.__getitem__, inside[value])


def _is_from_constant(op: Op) -> bool:
    literals = (v for v in op.ins if isinstance(v, Literal))
    constants = [v.val for v in literals if is_float(v.aval)]
    one = op.kind in ("add", "sub") and len(constants) == len(op.reads) == 1
    return one and abs(constants[0]) >= _LEAST


def find_scaled(graph: Graph, differences: Set[int], moving: Set[int]) -> set[int]:
    """Of which some count more than their neighbours do.

    They or their squares have factors or divisors, as by deviations or units, that
    differ within what is rounded together; or the least are chosen of them.
    """
    found: set[int] = set()
    multiples = _multiples(graph, differences, moving)
    for op in graph.ops:
        of_each = [multiples[v] for v in op.reads if v in multiples]
        factors = (v for v in op.reads if v not in multiples)
        if of_each and op.kind in ("mul", "div"):
            if any(_steps(v, op, graph) < GROUP for v in factors):
                found.update(*of_each)
        elif of_each and _weighs(op, moving):
            found.update(*of_each)
    return found | _chosen(graph, multiples)


def _chosen(graph: Graph, multiples: Mapping[int, Set[int]]) -> set[int]:
    """Of sums of whose few neighbours the least are chosen, or some by an index."""
    found: set[int] = set()
    summed = {v: (of, 1) for v, of in multiples.items()}  # and of how many neighbours
    for op in graph.ops:
        sources = [v for v in op.reads if v in summed]
        if not sources or not summed.keys().isdisjoint(op.outs):
            continue
        of, count = summed[sources[0]]
        if op.kind in ("gather", "reduce_min") and count < GROUP:
            found |= of
        elif op.kind == "reduce_sum":
            shape, axes = op.eqn.invars[0].aval.shape, op.eqn.params["axes"]
            last = range(len(shape) - len(axes), len(shape))
            count *= math.prod(shape[a] for a in last) if {*axes} == {*last} else 1
            summed[op.outs[0]] = of, count
        elif op.kind in MULTIPLES or op.kind in LAYOUT or renames(op):
            summed[op.outs[0]] = of, count
    return found


def _steps(value: int, op: Op, graph: Graph) -> float:
    """So many neighbours in its result have the same factor."""
    sizes = dict(enumerate(graph.avals[value].shape))
    source = graph.made_by.get(value)
    if source and source.kind == "broadcast_in_dim":
        axes = source.eqn.params["broadcast_dimensions"]
        sizes = dict(zip(axes, source.eqn.invars[0].aval.shape, strict=True))
    varying = [axis for axis, size in sizes.items() if size > 1]
    shape = graph.avals[op.outs[0]].shape
    return math.prod(shape[max(varying) + 1 :]) if varying else math.inf


def _exponents(graph: Graph, moving: Set[int]) -> set[int]:
    """What an exponential is taken of, and the terms of it."""
    found: set[int] = set()
    for op in reversed(graph.ops):
        if op.kind in EXPONENTIALS:
            found.update(op.reads)
        elif not found.isdisjoint(op.outs):
            through = op.kind in _TERMS or op.kind in LAYOUT or renames(op)
            if through or _weighs(op, moving):
                found.update(op.reads)
    return found


def given_by(graph: Graph, moving: Set[int]) -> set[int]:
    """What an output is made of entry by entry or as sums, divided by nothing of it.

    Weighted sums as well, if the weights are none of the ``moving`` values.
    """
    found = {v for v in graph.outputs if isinstance(v, int)}
    for op in reversed(graph.ops):
        if found.isdisjoint(op.outs) or op.kind in ("pow", "rsqrt"):
            continue
        if op.kind == "div":
            found.update(v for v in op.reads if v == op.ins[0])
        elif op.kind in _SUMS_UP or op.kind in LAYOUT or _weighs(op, moving):
            found.update(op.reads)
        elif op.kind == "cond":  # jnp.diag is one
            found |= outside(op, given_inside)
    return found


def given_inside(body: Graph) -> set[int]:
    """What a loop's or a branch's outputs are made of, all of which is moving."""
    return given_by(body, {*range(len(body.avals))})


def _weighs(op: Op, moving: Set[int]) -> bool:
    """Whether it is a product with weights that are not differentiated."""
    return op.kind in _WEIGHS and not moving.issuperset(op.reads)


def pair(op: Op, graph: Graph) -> list[int]:
    """The terms of a difference, of which one is as large and not the other's mean."""
    size = graph.avals[op.outs[0]].size
    sizes = {v: graph.avals[narrow(v, graph)].size for v in op.reads}
    large = [v for v, n in sizes.items() if n >= size]
    small = [v for v in op.reads if v not in large]
    if len(sizes) < 2 or not large or (small and _is_made_of(*small, *large, graph)):
        return []
    return op.reads


def _is_made_of(value: int, other: int, graph: Graph) -> bool:
    """Whether it is, as a mean or a maximum is; the nearest are looked at first."""
    other = _root(other, graph)
    return any(_root(v, graph) == other for v in behind([value], graph))


def _root(value: int, graph: Graph) -> int:
    """In front of what changes its dtype or shape alone."""
    op = graph.made_by.get(value)
    while op and (op.kind == "convert_element_type" or renames(op)) and op.reads:
        value = op.reads[0]
        op = graph.made_by.get(value)
    return value


def find_angles(graph: Graph, given: Set[int], data: Set[int]) -> set[int]:
    """Tensors, made of ``data``, whose cosines with others the graph gives.

    With these, and what a product has made of the two. One of the two is divided by its
    norm, before they are multiplied and summed up or after it. Correlations are cosines
    of what is less its mean.
    """
    summed: set[int] = set()
    for op in reversed(graph.ops):
        if op.kind == "reduce_sum":
            summed.update(op.reads)
        elif not summed.isdisjoint(op.outs):
            if op.kind == "convert_element_type" or renames(op):
                summed.update(op.reads)
    whole: dict[int, int] = {}  # value -> what it is a multiple of, row by row
    normed: set[int] = set()
    products: list[tuple[int, ...]] = []
    for op in graph.ops:
        of = [whole.get(v, v) for v in op.reads]
        if is_square(op) and not summed.isdisjoint(op.outs):
            normed.update(of)
        elif op.kind in ("mul", "div") and len(of) == 2:
            a, b = of
            first, second = (graph.avals[narrow(v, graph)].size for v in op.reads)
            if second < first:
                whole[op.outs[0]] = a
            elif first < second and op.kind == "mul":
                whole[op.outs[0]] = b
            elif op.outs[0] in summed & given and a != b:
                products.append((a, b))
        elif len({*of}) == 2 and is_of_rows(op) and op.outs[0] in given:
            products.append((*of, op.outs[0]))
        elif op.kind == "sub" and (term := _centered(op, graph)) is not None:
            whole[op.outs[0]] = whole.get(term, term)
        elif len(of) == 1 and (renames(op) or is_scaled(op)):
            whole[op.outs[0]] = of[0]
    near = [p for p in products if not (normed.isdisjoint(p) or data.isdisjoint(p))]
    return {v for p in near for v in p}


def _centered(op: Op, graph: Graph) -> int | None:
    """What its mean, or the like, is subtracted from."""
    if len({*op.reads}) < 2 or pair(op, graph):
        return None
    term, _ = op.reads
    whole = graph.avals[narrow(term, graph)].size == graph.avals[op.outs[0]].size
    return term if whole else None


def find_expanded(graph: Graph, given: Set[int], data: Set[int]) -> set[int]:
    """Of ``data``, whose square, another's and twice their product the graph adds up.

    There is no difference to be stored of a square that is multiplied out.
    """
    found: set[int] = set()
    whole: dict[int, int] = {}  # value -> what it is a multiple of
    terms: dict[int, set[frozenset[int]]] = {}  # value -> the factors of each of its
    for op in graph.ops:
        of = frozenset(whole.get(v, v) for v in op.reads)
        before = [terms[v] for v in op.reads if v in terms]
        if op.kind in _TERMS and before and op.outs[0] in given:
            added = terms[op.outs[0]] = set().union(*before)
            for factors in added if len(before) == 2 else ():
                if len(factors) == 2 and all(frozenset([v]) in added for v in factors):
                    found |= factors
        elif is_square(op) or (len(of) == 2 and (op.kind == "mul" or is_of_rows(op))):
            terms[op.outs[0]] = {of}
        elif len(of) == 1 and (renames(op) or is_scaled(op)):
            (whole[op.outs[0]],) = of
    return set() if data.isdisjoint(found) else found


def is_scaled(op: Op) -> bool:
    """Whether it is its only operand, times a constant."""
    kinds = ("convert_element_type", "mul", "neg", "stop_gradient")
    return op.kind in kinds or (op.kind == "div" and op.ins[0] == op.reads[0])


def is_of_rows(op: Op) -> bool:
    """Whether it multiplies two tensors row by row and sums up."""
    if op.kind != "dot_general":
        return False
    contracting, batch = op.eqn.params["dimension_numbers"]
    return all(
        len(gone) + len(shared) == v.aval.ndim
        for v, gone, shared in zip(op.eqn.invars, contracting, batch, strict=True)
    )


def narrow(value: int, graph: Graph) -> int:
    """In front of a broadcast."""
    op = graph.made_by.get(value)
    while op and (op.kind in LAYOUT or renames(op)) and len(op.reads) == 1:
        value = op.reads[0]
        op = graph.made_by.get(value)
    return value


def is_square(op: Op) -> bool:
    even = op.kind == "integer_pow" and op.eqn.params["y"] % 2 == 0
    twice = op.kind == "mul" and op.ins[0] == op.ins[1]
    return op.kind == "square" or even or twice
