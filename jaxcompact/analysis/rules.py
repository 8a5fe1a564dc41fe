"""Rules of `jax.custom_vjp` and `jax.custom_jvp` that decide: a window, a clip.

A rule whose forward pass is cheap would be run again of decoded values, and decide by
them. What it decides there is kept, and what its backward rule decides by what is kept
is decided in the forward pass.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.analysis.decisions import decided, steps
from jaxcompact.analysis.divisors import find_divisors
from jaxcompact.analysis.integers import find_integers
from jaxcompact.analysis.targets import find_subtracted
from jaxcompact.arrays import is_inexact
from jaxcompact.graph import Graph, Value, graph_of, graph_of_rule, read
from jaxcompact.kinds import ELEMENTWISE, LAYOUT, renames


def made_of(
    kept: Callable[..., Sequence[Any]], values: Sequence[Any], decoded: Sequence[bool]
) -> tuple[Graph, list[int]]:
    """What is kept, as a graph, and those of its inputs that may come back decoded."""
    # Known numbers stay known: a pullback does not keep them.
    every = enumerate(values)
    moved = [i for i, v in every if isinstance(v, jax.core.Tracer) or jnp.ndim(v)]

    def of_moved(*given):
        of = dict(enumerate(values)) | dict(zip(moved, given, strict=True))
        return kept(*of.values())

    closed = jax.make_jaxpr(of_moved)(*(values[i] for i in moved))
    graph = graph_of(closed)
    pairs = zip(graph.inputs[len(closed.consts) :], moved, strict=True)
    return graph, [v for v, i in pairs if decoded[i] and is_inexact(graph.avals[v])]


def keeps_decisions(graph: Graph, moving: Collection[int]) -> bool:
    """Whether a mask, a whole number or a step is kept that is made of what may come
    back decoded (`made_of`).

    What integers alone give, as of labels, is the same when it is made again.
    """
    same = graph.independent_of(moving)
    made = {v for v in graph.outputs if isinstance(v, int)} - same - {*graph.inputs}
    made -= _guards(graph, same)
    if all(is_inexact(graph.avals[v]) for v in made):
        made &= find_integers(graph).keys() | steps(graph)
    return bool(made)


def is_steep(
    graph: Graph, moving: Collection[int], backward: Callable, cts: Sequence[Any]
) -> bool:
    """Whether what is kept divides by what may come back decoded, as zero, or the rule
    by what is kept of that; or whether the rule subtracts, where little may be left."""
    if not find_divisors(graph, ()).isdisjoint(moving):
        return True
    leaves, tree = jax.tree.flatten(backward)
    rule, stored = graph_of_rule(tree, leaves, cts)
    residuals = rule.inputs[len(stored) - len(leaves) : len(stored)]
    steep = find_steep(rule, residuals)
    same, kept = graph.independent_of(moving), graph.outputs
    pairs = zip(residuals, kept, strict=True)
    return any(v in steep for v, made in pairs if _is_new(made, same))


def find_steep(rule: Graph, residuals: Collection[int]) -> set[int]:
    """What a rule divides by, or subtracts of what it keeps."""
    return find_divisors(rule, ()) | find_subtracted(rule, residuals)


def _is_new(value: Value, same: Collection[int]) -> bool:
    return isinstance(value, int) and value not in same


def _guards(graph: Graph, same: Collection[int]) -> set[int]:
    """Whether a number is a known one, as zero: a decoded one may be that as well, and
    what is made again of it then fits."""
    found: set[int] = set()
    for op in graph.ops:
        new = [v for v in op.reads if v not in same]
        if op.kind in ("eq", "is_finite", "ne") and len(new) == 1:
            found.update(op.outs)
        elif new and found.issuperset(new):
            found.update(op.outs)
    return found


def decided_before(backward: Callable, cts: Sequence[Any]) -> Callable | None:
    """The same function, a pytree as well, with its masks among its leaves; None if it
    decides nothing. ``cts`` are the types of its cotangents."""
    leaves, tree = jax.tree.flatten(backward)
    graph, stored = graph_of_rule(tree, leaves, cts)
    residuals = graph.inputs[: len(stored)]
    if not decided(graph, residuals):
        return None
    # What no cotangent is read for: of it the masks that others than masks read.
    known = graph.constants | dict(zip(residuals, stored, strict=True))
    masks: dict[int, Any] = {}
    read_otherwise = {v for v in graph.outputs if isinstance(v, int)}
    for op in graph.ops:
        each = op.kind in ELEMENTWISE or op.kind in LAYOUT or renames(op)
        if each and known.keys() >= {*op.reads}:
            values = [read(known, v) for v in op.ins]
            known.update(zip(op.outs, op.bind(*values), strict=True))
            of = any(is_inexact(graph.avals[v]) or v in masks for v in op.reads)
            out, *others = op.outs
            if of and graph.avals[out].dtype == bool and not others:
                masks[out] = known[out]
                continue
        read_otherwise.update(op.reads)
    places = [v for v in masks if v in read_otherwise]

    def decide(stored, masks, cts):
        given = dict(zip(places, masks, strict=True))
        env = graph.run(
            [*stored, *cts],
            lambda op, values, _: (
                [given[op.outs[0]]] if op.outs[0] in given else op.bind(*values)
            ),
        )
        return [read(env, v) for v in graph.outputs]

    return jax.tree_util.Partial(decide, stored, [masks[v] for v in places])
