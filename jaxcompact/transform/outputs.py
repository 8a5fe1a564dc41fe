"""Outputs of a checkpoint that differ in what they are made of.

A rule of differentiation under `jax.vmap` takes the cotangent of an output that is the
same for all examples for that of each: summed up, it counts as often as there are
examples. So what is made of parameters alone is made beside it (and again by
the backward pass), and all other outputs are seen to read what any of them reads.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.arrays import is_inexact, jitted, on_host
from jaxcompact.graph import Graph, Value, graph_of, made_of, read, union


class Outputs:
    """A function's outputs, of which some are inputs or made of parameters alone.

    Args:
        graph: the function.
        fixed: values made of parameters and constants alone.
        tree: structure of its outputs.
        once: as of `arrays.jitted`.

    Attributes:
        inside: the function without these outputs.
        uneven: places, of the outputs inside, of those that do not read all inputs that
            others read.
    """

    def __init__(self, graph: Graph, fixed: set[int], tree: Any, once: bool):
        self.places = {v: i for i, v in enumerate(graph.inputs)}
        self.tree, self.once = tree, once
        known = fixed.union(graph.inputs)
        self.apart = [isinstance(v, Literal) or v in known for v in graph.outputs]
        self.others = [*compress(graph.outputs, self.apart)]
        inside = (not apart for apart in self.apart)
        self.inside = replace(graph, outputs=[*compress(graph.outputs, inside)])
        self.uneven = _uneven(self.inside)
        self.made = graph.cut([v for v in self.others if self._is_made(v)])

    def _is_made(self, value: Value) -> bool:
        return isinstance(value, Literal) or value not in self.places

    def whole(self, inside: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """All outputs, with those of the function ``inside``."""
        made = iter(self._make(*inputs) if self.made.outputs else ())
        others = (
            next(made) if self._is_made(v) else inputs[self.places[v]]
            for v in self.others
        )
        inside = iter(inside)
        leaves = [next(others if apart else inside) for apart in self.apart]
        return jax.tree.unflatten(self.tree, leaves)

    @cached_property
    def _make(self) -> Callable:
        @jax.checkpoint
        def make(*inputs):
            env = self.made.run(inputs, lambda op, values, _: op.bind(*values))
            return [read(env, v) for v in self.made.outputs]

        return jitted(make, self.once)


def _uneven(graph: Graph) -> set[int]:
    floating = [i for i, v in enumerate(graph.outputs) if is_inexact(graph.avals[v])]
    if len(floating) < 2:
        return set()
    inputs = [v for v in graph.inputs if is_inexact(graph.avals[v])]
    sources = made_of(graph, {v: 1 << i for i, v in enumerate(inputs)})
    masks = {i: sources[graph.outputs[i]] for i in floating}
    every = union(masks.values())
    return {i for i, mask in masks.items() if mask != every}


def even(
    outs: Sequence[Any], uneven: Collection[int], inputs: Sequence[Any]
) -> list[Any]:
    """The same; ``uneven`` ones read all inputs, to no effect and, compiled, not."""
    sums: dict[Any, Any] = {}  # by the axes of a `jax.shard_map` over which they vary
    for x in inputs if uneven else ():
        if is_inexact(aval := jax.typeof(x)) and not on_host(x):
            term = jnp.sum(x.real.astype(jnp.float32))
            where = aval.manual_axis_type
            sums[where] = sums.get(where, 0) + term

    def evened(out: jax.Array) -> jax.Array:
        one = sums.get(jax.typeof(out).manual_axis_type, jnp.float32(0))
        other = out + jax.lax.stop_gradient(one).astype(out.dtype)
        return jax.lax.select_n(jnp.zeros((), bool), out, other)

    return [evened(out) if i in uneven else out for i, out in enumerate(outs)]


def undifferentiable(
    graph: Graph, perturbed: Sequence[bool]
) -> tuple[frozenset[int], frozenset[int]]:
    """Outputs that JAX finds to be made of none of these inputs, and those that it
    can't differentiate, as what a `while_loop` sums up."""
    avals = [graph.avals[v] for v in graph.inputs]
    moving = [*compress(avals, perturbed)]

    def output(i, inputs, moving):
        given = iter(moving)
        pairs = zip(inputs, perturbed, strict=True)
        mixed = [next(given) if moves else x for x, moves in pairs]
        env = graph.run(mixed, lambda op, values, _: op.bind(*values))
        return env[graph.outputs[i]]

    def tangent(i, inputs, tangents):
        of = partial(output, i, inputs)
        return jax.jvp(of, ([*compress(inputs, perturbed)],), (tangents,))[1]

    def gradient(i, inputs):
        of = partial(output, i, inputs)
        out, backward = jax.vjp(of, [*compress(inputs, perturbed)])
        return backward(jnp.zeros_like(out))

    still, refused = set(), set()
    for i, v in enumerate(graph.outputs):
        if not isinstance(v, int) or not is_inexact(graph.avals[v]):
            continue
        try:
            found = graph_of(jax.make_jaxpr(partial(tangent, i))(avals, moving))
            tangents = found.inputs[len(found.inputs) - len(moving) :]
            if not union(_read_by(found, dict.fromkeys(tangents, 1))):
                still.add(i)
            else:
                jax.eval_shape(partial(gradient, i), avals)
        except Exception:  # whatever a rule of the user's may raise
            refused.add(i)
    return frozenset(still), frozenset(refused)


def _read_by(graph: Graph, inputs: dict[int, int]) -> list[int]:
    """Which of these inputs each output is made of, as bits."""
    found = made_of(graph, inputs)
    return [found[v] for v in graph.outputs if isinstance(v, int)]
