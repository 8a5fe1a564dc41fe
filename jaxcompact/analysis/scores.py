"""Which tensors attention reads: its errors are not those of other operations."""

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from math import prod

from jax.extend.core import Literal

from jaxcompact.analysis.exponents import exponents_of
from jaxcompact.analysis.tensor import TERMS
from jaxcompact.graph import (
    Graph,
    Op,
    behind,
    bodies,
    graph_of,
    scanned_inputs,
    state_of,
)
from jaxcompact.kinds import CHEAP, is_entered

_FEW = 2 * TERMS  # of scores that are made again
_LARGE = 2  # times what is multiplied
_RULES = frozenset("checkpoint custom_vjp_call custom_vmap_call remat2".split())


@dataclass
class Attention:
    """The tensors of a graph that attention reads or makes.

    Attributes:
        scores: operands of scores, products of two activations that reach a softmax's
            exponential, which turns their absolute error into a relative one, or a sine
            that turns fast, or what a norm makes as large as any other, if it was small
            (linear attention's); and the axis along which their tokens lie.
        tables: the same of products with a table of parameters, if of none of those.
        fused: the "operand"s and "result"s of operations that keep a softmax's
            normalization for their backward pass (flash attention): there the errors of
            scores, values and result do not cancel, as they do where softmax is made
            again.
    """

    scores: dict[int, int] = field(default_factory=dict)
    tables: dict[int, int] = field(default_factory=dict)
    fused: dict[int, str] = field(default_factory=dict)


def find_attention(
    graph: Graph,
    fixed: set[int],
    stops: set[int],
    known: bool,
    norms: Iterable[int] = (),
    tables: Collection[Op] = (),
    moving: Collection[int] = (),
) -> Attention:
    """Found by following a graph backwards from its exponentials, and the like.

    Args:
        graph: where to look.
        fixed: values made of parameters alone.
        stops: the candidates.
        known: whether it is known which inputs are parameters.
        norms: of products that are made again, as of ``(q k^T) v``.
        tables: products with parameters that are made again (`find_tables`).
        moving: values with cotangents, as steps that are learned.
    """
    made_by = graph.made_by
    learned = {v for v in moving if v in fixed}
    found = Attention()

    def sources(op: Op) -> list[int]:
        return [v for v in op.reads if v not in fixed]

    def origins(value: int, axis: int | None) -> dict[int, int | None]:
        """The candidates that a value is cheaply made of, and where its axis lies.

        What has a name alone is made again of others, if the policy does not keep it.
        """
        ends: dict[int, int | None] = {}
        todo, seen = [(value, axis)], dict[int, int | None]()
        while todo:
            value, axis = todo.pop()
            if value in seen and (axis is None or seen[value] is not None):
                continue  # a way through a norm may have come first, and have none
            seen[value] = axis
            op = made_by.get(value)
            end = op is None or op.kind not in CHEAP or not sources(op)
            if end or value in stops:
                ends[value] = axis
            if not end:
                todo += [
                    (v, _axis_before(op, v, axis, graph)) for v in sources(op)[::-1]
                ]
        return ends

    def add(operands: dict[int, int], value: int, axis: int | None) -> None:
        for origin, at in origins(value, axis).items():
            ndim = graph.avals[origin].ndim
            if ndim:  # a number has no tokens
                operands.setdefault(origin, max(ndim - 2, 0) if at is None else at)

    def products(value: int) -> Iterable[Op]:
        """Those of two activations that a value is cheaply made of."""
        todo, seen = [value], set()
        while todo:
            value = todo.pop()
            op = made_by.get(value)
            if op is None or value in seen:
                continue
            seen.add(value)
            product = is_product(op, fixed, known) or op in tables
            if product and terms_of(op) > 1:  # one of single entries is none
                yield op
            elif product or op.kind in CHEAP:
                todo += sources(op)[::-1]

    def add_products(value: int) -> None:
        for op in products(value):
            operands = found.tables if op in tables else found.scores
            for operand, axis in zip(op.reads, _free_axes(op, graph), strict=True):
                if operand not in fixed:
                    add(operands, operand, axis)

    for norm in norms:
        for op in products(norm):
            for operand in op.reads:
                add_products(operand)
    for op in graph.ops:
        inner = None
        if raised := exponents_of(op, graph, learned):
            for source in raised:
                if source not in fixed:
                    add_products(source)
        elif op.kind in _RULES or op.kind in ("scan", "cond", "shard_map"):
            inner = _scores_inside(op, fixed, known)
        elif "attention" in op.kind.lower():
            inner = {v: 1 if graph.avals[v].ndim == 4 else None for v in op.reads[:2]}
        for value, axis in (inner or {}).items():
            add(found.scores, value, axis)
        if inner and _keeps_its_softmax(op):
            for source in sources(op):
                for origin in origins(source, None):
                    found.fused.setdefault(origin, "operand")
            found.fused.update(dict.fromkeys(op.outs, "result"))
    for value in found.scores.keys() & found.tables.keys():
        del found.tables[value]
    return found


def _keeps_its_softmax(op: Op) -> bool:
    alone = op.kind == "shard_map" and not is_entered(op)
    return alone or op.kind == "custom_vjp_call" or "attention" in op.kind.lower()


def _scores_inside(op: Op, fixed: set[int], known: bool) -> dict[int, int | None]:
    """Operands of scores among what an operation with a body reads, and their axes."""
    found: dict[int, int | None] = {}
    scanned = scanned_inputs(op)
    for body, first in _bodies(op):
        same = _same(body, op, first, fixed)
        inside = find_attention(body, same | {*body.constants}, set(), known).scores
        outer = zip(body.inputs, op.ins[first:], strict=True)
        for i, (v, o) in enumerate(outer):
            if v in inside and v not in same and not isinstance(o, Literal):
                found.setdefault(o, inside[v] + (i in scanned))
    return found


def _same(body: Graph, op: Op, first: int, fixed: set[int]) -> set[int]:
    """A body's inputs that are given what is fixed; not a loop's state, new each time,
    whatever it begins as."""
    state, outer = state_of(op), zip(body.inputs, op.ins[first:], strict=True)
    return {
        v
        for i, (v, o) in enumerate(outer)
        if i not in state and (isinstance(o, Literal) or o in fixed)
    }


def _bodies(op: Op) -> Iterable[tuple[Graph, int]]:
    """Each body's graph, and the first of the operation's inputs that it reads."""
    if op.kind in _RULES:
        return [(graph_of(op.jaxprs[0]), 0)]
    return bodies(op)


def is_product(op: Op, fixed: set[int], known: bool) -> bool:
    """Whether it multiplies two activations.

    Where parameters are not ``known``, only products in batches count.
    """
    if op.kind != "dot_general" or not fixed.isdisjoint(op.reads):
        return False
    _, (batch, _) = op.eqn.params["dimension_numbers"]
    return len(op.reads) == 2 and (known or bool(batch))


def find_tables(
    graph: Graph, exponents: Set[int], fixed: set[int], known: bool
) -> set[Op]:
    """Products of few terms with parameters, that ``exponents`` are and that are large:
    scores of relative positions, of learned queries, random features.

    Not of what is made again of products, as after attention: that has the errors of
    values, not of scores.
    """
    made_by = graph.made_by

    def again(value: int) -> bool:
        op = made_by.get(value)
        return op is not None and is_product(op, fixed, known) and terms_of(op) <= _FEW

    found = set()
    for op in graph.ops:
        if op.kind != "dot_general" or exponents.isdisjoint(op.outs):
            continue
        moving = [v for v in op.reads if v not in fixed]
        if len(op.reads) != 2 or len(moving) != 1 or terms_of(op) > _FEW:
            continue
        large = graph.avals[op.outs[0]].size >= _LARGE * graph.avals[moving[0]].size
        of = behind(moving, graph, lambda op: op.kind in CHEAP)
        if large and not any(map(again, of)):
            found.add(op)
    return found


def terms_of(op: Op) -> int:
    ((axes, _), _) = op.eqn.params["dimension_numbers"]
    return prod(op.eqn.invars[0].aval.shape[axis] for axis in axes)


def multiplies(op: Op, fixed: set[int], known: bool) -> bool:
    """Whether it is a product of two activations, or a loop in which there is one."""
    if op.kind != "scan":
        return is_product(op, fixed, known)
    for body, first in bodies(op):
        new = {*body.inputs} - _same(body, op, first, fixed)
        same = body.independent_of(new)
        if any(multiplies(inner, same, known) for inner in body.ops):
            return True
    return False


def _axis_before(op: Op, source: int, axis: int | None, graph: Graph) -> int | None:
    """Where an axis of an operation's output lies in one of its inputs."""
    if axis is None:
        return None
    before = graph.avals[source].shape
    after = graph.avals[op.outs[0]].shape
    match op.kind:
        case "transpose":
            return op.eqn.params["permutation"][axis]
        case "broadcast_in_dim":
            kept = list(op.eqn.params["broadcast_dimensions"])
            return kept.index(axis) if axis in kept else None
        case "squeeze":
            gone = op.eqn.params["dimensions"]
            return [i for i in range(len(before)) if i not in gone][axis]
        case "unstack":
            return axis + (op.eqn.params["axis"] <= axis)
        case "reshape":
            for i, size in enumerate(before):
                if size == after[axis] and prod(before[:i]) == prod(after[:axis]):
                    return i
            return None
    return axis if len(before) == len(after) else None


def _free_axes(op: Op, graph: Graph) -> list[int | None]:
    contracting, batch = op.eqn.params["dimension_numbers"]
    free = []
    for value, gone, shared in zip(op.reads, contracting, batch, strict=True):
        shape = graph.avals[value].shape
        axes = [i for i in range(len(shape)) if i not in (*gone, *shared)]
        free.append(max(axes, key=lambda i: shape[i]) if axes else None)
    return free
