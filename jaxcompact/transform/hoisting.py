"""What a loop over layers would make ahead of itself, in full size.

Where `jax.grad` differentiates a scan, JAX makes whatever depends on nothing that
changes from step to step once, ahead of the loop: a mask that is broadcast to the
scores' shape, and the constant that it writes there, are then arrays of that size, kept
and read in each step. Here such a broadcast is tied to the inputs, by what XLA drops
again, and so is made where it is read: by XLA within what reads it.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxcompact.arrays import is_key, tie
from jaxcompact.graph import Graph, Op, Value, read
from jaxcompact.kinds import ELEMENTWISE, renames


class Broadcasts:
    """The values of a graph that are smaller ones, broadcast.

    Those of inputs as they are, and of what is made of no differentiated input, with
    what is elementwise made of the latter. All else that is made of no differentiated
    input is left to be made once: a table of sines that is broadcast, what is stored.

    Args:
        graph: of a function.
        perturbed: which of its inputs, the last ones, are differentiated.
        wanted: values that are asked for besides what its operations read.

    Attributes:
        makers: what makes each of these values.
        readers: the operations that read them beside what is differentiated.
        left_out: what makes those that nothing else reads.
    """

    def __init__(
        self, graph: Graph, perturbed: Sequence[bool], wanted: Collection[Value]
    ):
        inputs = graph.inputs[len(graph.inputs) - len(perturbed) :]
        free = graph.independent_of(set(compress(inputs, perturbed)))
        self.makers: dict[int, Op] = {}
        self.readers: set[Op] = set()
        plain, found = free.union(graph.inputs), self.makers.keys()
        for op in graph.ops:
            large = not found.isdisjoint(op.reads)
            if large and not free.issuperset(op.outs):
                self.readers.add(op)
            elif large and (op.kind in ELEMENTWISE or renames(op)):
                self.makers.update(dict.fromkeys(op.outs, op))
            elif not plain.issuperset(op.reads):
                continue
            elif _grows(op):
                self.makers[op.outs[0]] = op
            elif renames(op):
                plain.update(op.outs)
        self.left_out: set[Op] = set()
        wanted = {v for v in wanted if not isinstance(v, Literal)}
        for op in reversed(graph.ops if found else ()):
            if op in self.readers:
                wanted |= set(op.reads) - found
                continue
            if not found.isdisjoint(op.outs) and wanted.isdisjoint(op.outs):
                self.left_out.add(op)
            wanted.update(op.reads)

    def reader(self, inputs: Sequence[Any]) -> Callable[[Op, dict[int, Any]], list]:
        """``(op, env) -> values`` that one of ``readers`` reads, in a run."""
        never = cache(lambda: _never(inputs))
        made: dict[int, Any] = {}

        def again(value: Value, env: dict[int, Any]) -> Any:
            if isinstance(value, Literal) or value not in self.makers:
                return read(env, value)
            if value not in made:
                op = self.makers[value]
                if _grows(op):
                    x = read(env, op.ins[0])
                    if isinstance(op.ins[0], Literal):
                        x = np.asarray(x, op.eqn.invars[0].aval.dtype)
                    values = [lax.select_n(never(), x, x)]
                else:
                    values = [again(v, env) for v in op.ins]
                made.update(zip(op.outs, op.bind(*values), strict=True))
            return made[value]

        return lambda op, env: [again(v, env) for v in op.ins]


def _grows(op: Op) -> bool:
    if op.kind != "broadcast_in_dim":
        return False
    before, after = op.eqn.invars[0].aval, op.eqn.outvars[0].aval
    return before.size < after.size and not is_key(after)


def _never(inputs: Sequence[Any]) -> jax.Array:
    """False, which JAX takes for made of the inputs, and nobody for what it is.

    A choice between one array and itself is dropped by XLA, and this then.
    """
    return tie((np.zeros((), bool), *inputs))[0]
