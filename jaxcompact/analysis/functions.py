"""Elementwise functions of one tensor, whose derivative could be stored instead."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax

from jaxcompact.arrays import is_float
from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import ELEMENTWISE, expensive

_JAX = os.path.dirname(jax.__file__) + os.sep


@dataclass(frozen=True)
class Function:
    """How a candidate of kind "function" follows from one tensor, entry by entry."""

    root: int
    ops: tuple[Op, ...]


def find_functions(
    graph: Graph,
    fixed: Collection[int],
    data: Collection[int],
    differentiated: Collection[int],
) -> tuple[dict[int, Function], set[int]]:
    """Each as large as can be, and which of them are steps.

    A step, a relu, is a function by itself: its derivative is 0 or 1. What reads a
    parameter that has a gradient, as a bias, is in front of the function, not in it.
    """
    made: dict[int, Function] = {}
    steps: set[int] = set()

    def root(value: int) -> int:
        return made[value].root if value in made and value not in steps else value

    for op in graph.ops:
        moving = [v for v in op.reads if v not in fixed]
        learned = any(v in fixed and v in differentiated for v in op.reads)
        of_data = _is_elementwise(op, moving, graph) and data >= {*moving}
        if learned or not of_data:
            continue
        if _is_relu(op):
            steps.add(op.outs[0])
            made[op.outs[0]] = Function(moving[0], (op,))
        elif len({root(v) for v in moving}) == 1:
            parts = [
                part
                for v in moving
                if v in made and v not in steps
                for part in made[v].ops
            ]
            ops = tuple(dict.fromkeys([*parts, op]))
            made[op.outs[0]] = Function(root(moving[0]), ops)
    return made, steps


def _is_relu(op: Op) -> bool:
    """Whether it is jax's own; another's of that name may have any derivative."""
    if op.kind != "custom_jvp_call":
        return False
    _, _, source = _debug_info(op).func_src_info.partition(" at ")
    return function_name(op) in ("relu", "relu6") and source.startswith(_JAX)


def _debug_info(op: Op) -> Any:
    (body, *_) = op.jaxprs
    return getattr(body, "jaxpr", body).debug_info


def function_name(op: Op) -> str:
    if op.kind == "custom_jvp_call":
        return _debug_info(op).func_name
    return op.scope if op.scope and not op.scope.startswith("_") else op.kind


def _is_elementwise(op: Op, moving: list[int], graph: Graph) -> bool:
    """Whether it makes one array of numbers, each of the numbers in its place."""
    avals, kind = graph.avals, op.kind
    return (
        bool(moving)
        and len(op.outs) == 1
        and (kind in ELEMENTWISE or kind == "custom_jvp_call")
        and kind not in ("name", "optimization_barrier", "stop_gradient")
        and not expensive(op)
        and all(is_float(avals[v]) for v in [*moving, *op.outs])
        and all(avals[v].shape == avals[op.outs[0]].shape for v in moving)
    )
