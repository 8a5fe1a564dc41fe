"""What is near a target though nothing is subtracted: logits, at the end of training.

The gradient of `logsumexp(x) - sum(t * x)`, `exp(x) - t * x`, `softplus(x) - t * x` is
a prediction less its target, but no difference of the function could be stored for it:
it is smaller than what rounding x changes. Of targets of zero and one it is not: a
prediction near one changes as little as it lacks of one.
"""

from collections.abc import Collection, Iterable, Set

from jax.extend.core import Literal

from jaxcompact.analysis.differences import is_of_rows, is_scaled, narrow
from jaxcompact.analysis.exponents import find_losses
from jaxcompact.graph import Graph, Op, behind, number
from jaxcompact.kinds import (
    ADDITIONS,
    CHEAP,
    ELEMENTWISE,
    EXPONENTIALS,
    LAYOUT,
    expensive,
    is_any,
    renames,
)


def find_logits(
    graph: Graph,
    given: Set[int],
    moving: Set[int],
    again: Set[Op],
    candidates: Collection[int],
) -> tuple[set[int], set[int]]:
    """Of the candidates those that a loss takes exponentials of, entry by entry, or of
    whose products that are made ``again``; and of the first those that are ranked, by
    sums up to each. ``given``: what outputs are made of entry by entry or as sums.
    """
    raising = _raising(graph, given)
    ranking = [op for op in raising if op.kind == "cumlogsumexp"]
    logits, ranks = ({*behind(_reads(o), graph, _is_each)} for o in (raising, ranking))
    products = again.intersection(map(graph.made_by.get, logits))
    logits.update(behind(_reads(products), graph, lambda op: op.kind in CHEAP))
    found = moving.intersection(candidates)
    return logits & found, ranks & found


def find_targets(
    graph: Graph, given: Set[int], moving: Set[int], logits: Set[int], stored: Set[int]
) -> set[int]:
    """Of the logits those beside as many soft targets: data that weighs them, or what
    is cheaply made of them, or that is added to it, but for differences, which are
    ``stored``. Or all are weighed alike, as smoothed labels do.

    Data is what has no cotangent; made of decisions, as by `jax.nn.one_hot`, it is zero
    or one.
    """
    softmaxes = [op for op in _raising(graph, given) if _is_summed(op, graph)]
    terms = moving.intersection(behind(_reads(softmaxes), graph, _is_sum))
    found: set[int] = set()
    of = {v: {v} for v in logits}
    for op in graph.ops:
        reached = [of[v] for v in op.reads if v in of]
        if not reached or (expensive(op) and not is_of_rows(op)):
            continue
        for value in op.outs:
            of[value] = of.get(value, set()).union(*reached)
        learned = moving.intersection(op.reads)
        data = {*op.reads} - learned
        if len(learned) != 1 or given.isdisjoint(op.outs):
            continue
        (value,) = learned
        size, near = graph.avals[value].size, set()
        if op.kind == "reduce_sum":
            same = terms.intersection(behind([value], graph, _is_sum))
            near.update(behind(same, graph, _is_each))
        elif op.kind in ELEMENTWISE or is_of_rows(op):
            beside = len(data) == 1 and stored.isdisjoint(op.outs)
            if beside and _is_soft(*data, size, graph):
                near = of.get(value, near)
        found.update(v for v in near & logits if graph.avals[v].size == size)
    return found


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


def _raising(graph: Graph, given: Set[int]) -> list[Op]:
    """What takes the exponentials of a loss."""
    losses = find_losses(graph, given)
    return [op for op in graph.ops if _raises(op) and not losses.isdisjoint(op.outs)]


def _raises(op: Op) -> bool:
    call = op.kind == "custom_jvp_call" and is_any(op, EXPONENTIALS)
    return op.kind in EXPONENTIALS or op.kind == "logistic" or call


def _reads(ops: Iterable[Op]) -> set[int]:
    return {v for op in ops for v in op.reads}


def _is_summed(op: Op, graph: Graph) -> bool:
    readers = (reader for v in op.outs for reader in graph.readers[v])
    return any(reader.kind == "reduce_sum" for reader in readers)


def _is_each(op: Op) -> bool:
    """Whether it is made entry by entry, or the entries in another order."""
    sizes = (v.aval.size for v in (*op.eqn.invars[:1], *op.eqn.outvars))
    return op.kind in ELEMENTWISE or (op.kind in LAYOUT and len({*sizes}) == 1)


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
