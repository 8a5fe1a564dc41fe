"""Backward rules of `jax.custom_vjp` that decide: a window around a threshold, a clip.

A rule whose forward pass is cheap would be run again of decoded values, and decide by
them. What it decides by its residuals alone is decided in the forward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcompact.arrays import is_inexact
from jaxcompact.decisions import decided
from jaxcompact.graph import graph_of, read
from jaxcompact.kinds import ELEMENTWISE, LAYOUT, renames


def decided_before(backward: Callable, cts: Sequence[Any]) -> Callable | None:
    """The same function, a pytree as well, with its masks among its leaves; None if it
    decides nothing. ``cts`` are the types of its cotangents."""
    leaves, tree = jax.tree.flatten(backward)

    def rule(leaves, cts):
        return jax.tree.unflatten(tree, leaves)(cts)

    closed = jax.make_jaxpr(rule)(leaves, list(cts))
    graph, stored = graph_of(closed), [*closed.consts, *leaves]
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
