"""Steps whose rule gives them a slope: spikes of spiking networks, binarizations.

A surrogate is steep where the step is: made again of a value that was rounded there, it
is off by as much as it is large. It is a number like others, and stored as one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.analysis.decisions import steps
from jaxcompact.analysis.integers import find_whole
from jaxcompact.arrays import is_inexact, zeros
from jaxcompact.graph import Graph, Op, Value, graph_of, graph_of_rule, number, read
from jaxcompact.kinds import ELEMENTWISE


def is_step(op: Op) -> bool:
    """Whether a function with a rule gives whole numbers, or one of some constants, or
    these times a scale."""

    def gives_steps(body: Graph) -> bool:
        found = steps(body, find_whole(body))
        return any(isinstance(v, int) and v in found for v in body.outputs)

    return any(map(gives_steps, map(graph_of, op.jaxprs)))


def slopes_before(backward: Callable, cts: Sequence[Any]) -> Callable | None:
    """The same function, a pytree as well, whose leaves are what it multiplies its
    cotangents by, entry by entry; None if these are masks and constants alone.

    ``cts`` are the types of its cotangents.
    """
    leaves, tree = jax.tree.flatten(backward)
    graph, stored = graph_of_rule(tree, leaves, cts)
    residuals, given = graph.inputs[: len(stored)], graph.inputs[len(stored) :]
    known = graph.constants | dict(zip(residuals, stored, strict=True))
    slopes = dict(zip(given, (jnp.ones_like(zeros(ct)) for ct in cts), strict=True))
    ct_of, later = {v: v for v in given}, []
    needed = {v for v in graph.outputs if isinstance(v, int)}
    for op in graph.ops:
        if known.keys() >= {*op.reads} and not op.eqn.effects:
            values = [read(known, v) for v in op.ins]
            known.update(zip(op.outs, op.bind(*values), strict=True))
        elif _scales(op, graph, known, ct_of):
            (out,) = op.outs
            (slopes[out],) = op.bind(*(read(known | slopes, v) for v in op.ins))
            (ct_of[out],) = {ct_of[v] for v in op.reads if v in ct_of}
        else:
            later.append(op)
            needed.update(op.reads)
    places = [v for v in slopes if v in needed and v not in given]
    others = [v for v in known if v in needed]
    if _smooth(graph, residuals).isdisjoint({*places, *others}.difference(residuals)):
        return None

    def run(slopes, values, cts):
        env = dict(zip([*given, *others], [*cts, *values], strict=True))
        for v, slope in zip(places, slopes, strict=True):
            env[v] = env[ct_of[v]].astype(slope.dtype) * slope
        for op in later:
            outs = op.bind(*(read(env, v) for v in op.ins))
            env.update(zip(op.outs, outs, strict=True))
        return [read(env, v) for v in graph.outputs]

    kept = [slopes[v] for v in places], [known[v] for v in others]
    return jax.tree_util.Partial(run, *kept)


def _scales(
    op: Op, graph: Graph, known: Collection[int], ct_of: Mapping[int, int]
) -> bool:
    """Whether it makes a cotangent times what is known, of one that is."""
    of = [isinstance(v, int) and v in ct_of for v in op.ins]
    cts = {ct_of[v] for v in op.reads if v in ct_of}
    if len(cts) != 1 or any(v not in known and v not in ct_of for v in op.reads):
        return False
    (ct,), out = cts, graph.avals[op.outs[0]]
    if graph.avals[ct].shape != out.shape:
        return False
    match op.kind:
        case "mul":
            return not all(of)
        case "div":
            return not of[1]
        case "select_n":
            cases = zip(op.ins[1:], of[1:], strict=True)
            return not of[0] and all(x or _is_zero(v, graph) for v, x in cases)
    return op.kind in ("convert_element_type", "copy", "neg") and is_inexact(out)


def _is_zero(value: Value, graph: Graph) -> bool:
    while isinstance(value, int) and value in graph.made_by:
        op = graph.made_by[value]
        if op.kind not in ("broadcast_in_dim", "convert_element_type"):
            break
        value = op.ins[0]
    return isinstance(value, Literal) and number(value) == 0


def _smooth(graph: Graph, residuals: Collection[int]) -> set[int]:
    """What numbers among the residuals reach, entry by entry; not what masks of them do
    alone."""
    found = {v for v in residuals if is_inexact(graph.avals[v])}
    for op in graph.ops:
        if op.kind in ELEMENTWISE and not found.isdisjoint(op.reads):
            found.update(v for v in op.outs if is_inexact(graph.avals[v]))
    return found
