"""Sums over the examples of a `jax.vmap`, taken by the products that make their terms.

A backward pass under vmap makes the cotangent of what examples share, as weights, for
each of them, to be summed up: the weights' size times the number of examples. But a sum
of products over tokens is one product, over tokens and examples.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.graph import Graph, Op, Value, graph_of, read

Env = dict[int, Any]  # values of a graph
Find = Callable[[Env], jax.Array]


def summed(fun: Callable, args: Any, shared: Sequence[bool]) -> list[Any]:
    """``fun(*args)``, arrays and None, of which the ``shared`` are summed over axis 0.

    Where nothing is traced they are summed as they are: no program is made of it.
    """
    leaves, tree = jax.tree.flatten(args)
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        pairs = zip(fun(*args), shared, strict=True)
        return [_sum(x) if alike and x is not None else x for x, alike in pairs]

    def of_leaves(*leaves):
        return fun(*jax.tree.unflatten(tree, leaves))

    closed, made = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
    graph, there = graph_of(closed), [x is not None for x in made]
    outputs, sums = iter(graph.outputs), _Sums(graph)
    finds = [
        (sums.of if alike else sums.whole)(next(outputs)) if here else None
        for here, alike in zip(there, shared, strict=True)
    ]

    def _jaxcompact_backward(*inputs):
        env = sums.run(inputs)
        return [find and find(env) for find in finds]

    return jax.jit(_jaxcompact_backward)(*closed.consts, *leaves)


def _sum(x: jax.Array, axis: int = 0) -> jax.Array:
    return x.sum(axis, dtype=x.dtype)


class _Sums:
    """How sums over an axis, of examples, of a graph's values are found.

    Attributes:
        read: the values of which they are.
        held: sums that a barrier holds in place of their terms.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.read: set[int] = set()
        self.held: dict[Op, dict[int, Find]] = {}

    def run(self, inputs: Sequence[Any]) -> Env:
        """All values that are read."""
        graph, needed, ops = self.graph, {*self.read}, []
        for op in reversed(graph.ops):
            if op.eqn.effects or not needed.isdisjoint(op.outs):
                held = self.held.get(op, {})
                taken = (v for i, v in enumerate(op.ins) if i not in held)
                needed.update(v for v in taken if isinstance(v, int))
                ops.append(op)
        env = dict(graph.constants) | dict(zip(graph.inputs, inputs, strict=True))
        for op in reversed(ops):
            held = self.held.get(op, {})
            values = (
                held[i](env) if i in held else read(env, v)
                for i, v in enumerate(op.ins)
            )
            env.update(zip(op.outs, op.bind(*values), strict=True))
        return env

    def whole(self, value: Value) -> Find:
        if isinstance(value, int):
            self.read.add(value)
        return lambda env: read(env, value)

    def of(self, value: Value, axis: int = 0) -> Find:
        op = self.graph.made_by.get(value) if isinstance(value, int) else None
        rule = _RULES.get(op.kind) if op and self._is_read_once(value) else None
        found = rule(self, op, value, axis) if rule else None
        if found is None:
            whole = self.whole(value)
            return lambda env: _sum(whole(env), axis)
        return found

    def _is_read_once(self, value: int) -> bool:
        outputs = sum(v == value for v in self.graph.outputs if isinstance(v, int))
        return len(self.graph.readers[value]) + outputs == 1

    def _of_held(self, op: Op, value: int, axis: int) -> Find:
        """What a barrier holds, so that it is made when the others are."""
        i = op.outs.index(value)
        self.held.setdefault(op, {})[i] = self.of(op.ins[i], axis)
        return self.whole(value)

    def _of_product(self, op: Op, _: int, axis: int) -> Find | None:
        (left, right), (first, second) = op.eqn.params["dimension_numbers"]
        if axis >= len(first):
            return None
        numbers = (
            ((*left, first[axis]), (*right, second[axis])),
            (_without(first, axis), _without(second, axis)),
        )
        a, b = map(self.whole, op.ins)
        fields = {"dimension_numbers": numbers, **_lying(op, axis)}
        return lambda env: op.bind(a(env), b(env), **fields)[0]

    def _of_convolution(self, op: Op, count: int) -> Find | None:
        """Of so many groups, which are the examples: their features are summed up."""
        params = op.eqn.params
        groups = params["feature_group_count"], params["batch_group_count"]
        if groups != (count, 1) or params["out_sharding"] is not None:
            return None
        x, kernel = map(self.whole, op.ins)
        out, into, *_ = params["dimension_numbers"].rhs_spec

        def convolved(env):
            apart = jnp.stack(jnp.split(kernel(env), count, out), into)
            joined = jax.lax.collapse(apart, into, into + 2)
            return op.bind(x(env), joined, feature_group_count=1)[0]

        return convolved

    def _of_sum(self, op: Op, _: int, axis: int) -> Find | None:
        axes = op.eqn.params["axes"]
        kept = [i for i in range(op.eqn.invars[0].aval.ndim) if i not in axes]
        fields = {"axes": tuple(sorted((kept[axis], *axes))), **_lying(op, axis)}
        x = self.whole(op.ins[0])
        return lambda env: op.bind(x(env), **fields)[0]

    def _of_each(self, op: Op, _: int, axis: int) -> Find:
        terms, fields = [self.of(v, axis) for v in op.ins], _lying(op, axis)
        return lambda env: op.bind(*(term(env) for term in terms), **fields)[0]

    def _of_scaled(self, op: Op, _: int, axis: int) -> Find | None:
        """By a number."""
        if all(isinstance(v, int) for v in op.ins):
            return None
        terms = [
            self.of(v, axis) if isinstance(v, int) else self.whole(v) for v in op.ins
        ]
        return lambda env: op.bind(*(term(env) for term in terms))[0]

    def _of_padded(self, op: Op, _: int, axis: int) -> Find | None:
        """A slice's."""
        config = op.eqn.params["padding_config"]
        if config[axis] != (0, 0, 0):
            return None
        x, zero = self.of(op.ins[0], axis), self.whole(op.ins[1])
        fields = {"padding_config": _without(config, axis)}
        return lambda env: op.bind(x(env), zero(env), **fields)[0]

    def _of_transposed(self, op: Op, _: int, axis: int) -> Find:
        order = op.eqn.params["permutation"]
        x = self.of(op.ins[0], order[axis])
        axes = tuple(i - (i > order[axis]) for i in _without(order, axis))
        return lambda env: op.bind(x(env), permutation=axes)[0]

    def _of_reshaped(self, op: Op, _: int, axis: int) -> Find | None:
        shape, sizes = op.eqn.invars[0].aval.shape, op.eqn.params["new_sizes"]
        before, count = prod(sizes[:axis]), sizes[axis]
        starts = [prod(shape[:i]) for i in range(len(shape))]
        if op.eqn.params["dimensions"] is not None or before not in starts:
            return None
        whole = [i for i, n in enumerate(starts) if n == before and shape[i] == count]
        if whole:
            x = self.of(op.ins[0], whole[0])
        else:
            x = self._of_parts(op.ins[0], starts.index(before), count)
        fields = {"new_sizes": _without(sizes, axis), **_lying(op, axis)}
        return x and (lambda env: op.bind(x(env), **fields)[0])

    def _of_parts(self, value: Value, axis: int, count: int) -> Find | None:
        """Of as many parts of an axis, if groups of a convolution's make them."""
        op = self.graph.made_by.get(value) if isinstance(value, int) else None
        if op is None or op.kind != "conv_general_dilated":
            return None
        features = op.eqn.params["dimension_numbers"].out_spec[1] == axis
        once = features and self._is_read_once(value)
        return self._of_convolution(op, count) if once else None


def _without[T](items: Sequence[T], i: int) -> tuple[T, ...]:
    return (*items[:i], *items[i + 1 :])


def _lying(op: Op, axis: int) -> dict[str, Any]:
    """How the sum of its results lies, where that is said of these."""
    params = op.eqn.params
    said = ((k, params[k]) for k in ("sharding", "out_sharding") if params.get(k))
    return {k: lies.update(spec=jax.P(*_without(lies.spec, axis))) for k, lies in said}


_RULES: dict[str, Callable[[_Sums, Op, int, int], Find | None]] = {
    "dot_general": _Sums._of_product,
    "reduce_sum": _Sums._of_sum,
    "optimization_barrier": _Sums._of_held,
    "add_any": _Sums._of_each,
    "convert_element_type": _Sums._of_each,
    "mul": _Sums._of_scaled,
    "neg": _Sums._of_each,
    "pad": _Sums._of_padded,
    "transpose": _Sums._of_transposed,
    "reshape": _Sums._of_reshaped,
}
