"""What is near a target though nothing is subtracted: logits near soft targets.

The gradient of `logsumexp(x) - sum(t * x)`, `exp(x) - t * x`, `softplus(x) - t * x` is
a prediction less its target, but no difference of the function could be stored for it:
at the end of training it is smaller than what rounding x changes. Of targets of zero
and one it is not: a prediction near one changes as little as it lacks of one.
"""

from collections.abc import Collection, Set

from jax.extend.core import Literal

from jaxcompact.analysis.differences import is_of_rows, is_scaled, narrow
from jaxcompact.graph import Graph, Op, behind, number
from jaxcompact.kinds import ADDITIONS, ELEMENTWISE, EXPONENTIALS, is_any, renames


def find_targets(
    graph: Graph, given: Set[int], moving: Set[int], candidates: Collection[int]
) -> set[int]:
    """Of the candidates those that exponentials are taken of, and that data weighs
    entry by entry: them, or their softplus. Or all alike, as smoothed labels do.

    Data is what has no cotangent; made of decisions, as by `jax.nn.one_hot`, it is zero
    or one. ``given``: what outputs are made of entry by entry or as sums.
    """
    avals, made_by = graph.avals, graph.made_by
    raising = {v: op for op in graph.ops if _raises(op) for v in op.outs}

    def ends(value: int) -> set[int]:
        """The terms of it that are as large, themselves no sums."""
        terms = {*behind([value], graph, _is_sum)} & moving
        large = {v for v in terms if avals[v].size == avals[value].size}
        return {v for v in large if v not in made_by or not _is_sum(made_by[v])}

    def read_by(ops: Collection[Op]) -> set[int]:
        return set().union(*(ends(v) for op in ops for v in moving & {*op.reads}))

    def weighed(op: Op) -> set[int]:
        learned = moving.intersection(op.reads)
        data = {*op.reads} - learned
        if len(learned) != 1 or given.isdisjoint(op.outs):
            return set()
        (value,) = learned
        size = avals[value].size
        if op.kind == "reduce_sum":
            of = ends(value) & softmaxes
        elif len(data) == 1 and _weighs(op) and _is_soft(*data, size, graph):
            of = ends(value)
            if len(of) == 1 and (softplus := raising.get(*of)):
                of = read_by([softplus]) if is_any(softplus, ("log1p",)) else set()
        else:
            return set()
        # With an exponential beside it, it is no target, but all of a loss is weighed.
        return of if raising.keys().isdisjoint(of) else set()

    softmaxes = read_by([op for v, op in raising.items() if _is_summed(v, graph)])
    logits = set().union(*map(weighed, graph.ops)) & read_by(raising.values())
    made_of = behind(logits, graph, lambda op: op.kind in ELEMENTWISE)
    return {*made_of} & moving & {*candidates}


def find_subtracted(rule: Graph, residuals: Collection[int]) -> set[int]:
    """What a rule keeps and subtracts, entry by entry, from other that it keeps.

    As a softmax's logits and a soft target; exponentials whatever the target is, since
    rounded they make no softmax.
    """
    known = rule.independent_of({*rule.inputs}.difference(residuals))
    found: set[int] = set()
    for op in rule.ops:
        if op.kind != "sub" or len({*op.reads}) < 2 or not known.issuperset(op.outs):
            continue
        size = rule.avals[op.outs[0]].size
        if any(rule.avals[narrow(v, rule)].size != size for v in op.reads):
            continue
        kept = [{*behind([v], rule)}.intersection(residuals) for v in op.reads]
        if all(kept) and kept[0].isdisjoint(kept[1]):
            soft = all(_is_soft(v, size, rule) for v in op.reads)
            through = (lambda op: True) if soft else (lambda op: not _raises(op))
            found.update(behind(op.reads, rule, through))
    return found.intersection(residuals)


def _weighs(op: Op) -> bool:
    return op.kind == "mul" or is_of_rows(op)


def _raises(op: Op) -> bool:
    call = op.kind == "custom_jvp_call" and is_any(op, EXPONENTIALS)
    return op.kind in EXPONENTIALS or op.kind == "logistic" or call


def _is_summed(value: int, graph: Graph) -> bool:
    return any(op.kind == "reduce_sum" for op in graph.readers[value])


def _is_sum(op: Op) -> bool:
    """Of others, or one of them by itself, scaled by a number that is written there."""
    alone = len(op.reads) == 1 and (is_scaled(op) or renames(op))
    return op.kind in ADDITIONS or alone


def _is_soft(data: int, size: int, graph: Graph) -> bool:
    """Whether it says of each of ``size`` entries else than that it is so or not."""

    def whole(value: int) -> bool:
        return graph.avals[narrow(value, graph)].size == size

    def through(op: Op) -> bool:
        written = [number(v) for v in op.ins if isinstance(v, Literal)]
        turned = op.kind in ADDITIONS and written in ([0.0], [1.0])
        return is_scaled(op) or turned or renames(op)

    decided = (
        v for v in behind([data], graph, through) if graph.avals[v].dtype == bool
    )
    return size > 1 and whole(data) and not any(map(whole, decided))
