"""What a loop over layers would make ahead of itself, in full size.

Where `jax.grad` differentiates a scan, JAX makes whatever depends on nothing that
changes from step to step once, ahead of the loop: a mask that is broadcast to the
scores' shape, and the constant that it writes there, are then arrays of that size, kept
and read in each step. Here such a broadcast is made of the inputs as well, though of
none of their entries, and so where it is read: by XLA within what reads it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

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
    """

    def __init__(self, graph: Graph, perturbed: Sequence[bool]):
        inputs = graph.inputs[len(graph.inputs) - len(perturbed) :]
        self.free = graph.independent_of(set(compress(inputs, perturbed)))
        self.makers: dict[int, Op] = {}
        plain = {*graph.inputs, *self.free}
        for op in graph.ops:
            light = op.kind in ELEMENTWISE or renames(op)
            large = not self.makers.keys().isdisjoint(op.reads)
            if _grows(op) and plain.issuperset(op.reads):
                self.makers[op.outs[0]] = op
            elif light and large and self.free.issuperset(op.outs):
                self.makers.update(dict.fromkeys(op.outs, op))
            elif renames(op) and plain.issuperset(op.reads):
                plain.update(op.outs)

    def reader(self, inputs: Sequence[Any]) -> Callable[[Op, dict[int, Any]], list]:
        """``(op, env) -> values`` that an operation reads, in a run of the graph."""
        never = cache(lambda where: _never(inputs, where))
        made: dict[int, Any] = {}

        def again(value: Value, env: dict[int, Any]) -> Any:
            if isinstance(value, Literal) or value not in self.makers:
                return read(env, value)
            if value not in made:
                op = self.makers[value]
                if _grows(op):
                    x = jnp.asarray(read(env, op.ins[0]), op.eqn.invars[0].aval.dtype)
                    where = jax.typeof(x).manual_axis_type
                    values = [lax.select_n(never(where), x, x)]
                else:
                    values = [again(v, env) for v in op.ins]
                made.update(zip(op.outs, op.bind(*values), strict=True))
            return made[value]

        def values_of(op: Op, env: dict[int, Any]) -> list[Any]:
            if self.free.issuperset(op.outs):
                return [read(env, v) for v in op.ins]
            return [again(v, env) for v in op.ins]

        return values_of


def _grows(op: Op) -> bool:
    if op.kind != "broadcast_in_dim":
        return False
    before, after = op.eqn.invars[0].aval, op.eqn.outvars[0].aval
    is_key = jnp.issubdtype(after.dtype, jax.dtypes.prng_key)
    return before.size < after.size and not is_key


def _never(inputs: Sequence[Any], where: Any) -> jax.Array:
    """False, which JAX takes for made of the inputs, and XLA for what it is.

    ``where``: the axes of a `jax.shard_map` over which those vary.
    """
    found = jnp.array(False)
    for x in inputs:
        if jax.typeof(x).manual_axis_type == where:
            none = lax.slice(x, [0] * x.ndim, [0] * x.ndim)
            found = found | jnp.any(none != none)
    return found
