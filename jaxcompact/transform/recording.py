"""The forward pass of a traced function with all that may be stored of it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.interpreters import ad

from jaxcompact.analysis.moving import moving_values
from jaxcompact.analysis.rules import decided_before, is_steep, keeps_decisions, made_of
from jaxcompact.analysis.surrogates import is_step, slopes_before
from jaxcompact.analysis.tensors import Tensors
from jaxcompact.arrays import renewed
from jaxcompact.graph import Graph, Op, Value, graph_of_rule, read
from jaxcompact.kinds import is_block
from jaxcompact.transform.choices import choices, choose
from jaxcompact.transform.program import Program
from jaxcompact.transform.sources import Choice, Residual, Slope, Source


class Recording:
    """A program that makes a graph's outputs, and then all that may be stored.

    Args:
        graph: the function.
        tensors: what a policy sees of it.
        moving: its values with cotangents (`moving_values`).
        slopes: elementwise functions whose derivative is asked for.
        bind: what an operation makes, if it is to be differentiated as a whole.

    Attributes:
        program: makes the outputs, and then the sources.
        sources: values, residuals of blocks, slopes and choices.
        trees: block -> its backward function as a pytree; its residuals are the leaves.
        cheap: those that are blocks for what their rules decide alone.
        rules: block -> of the rule of a `jax.custom_vjp` or `custom_jvp` the graph, and
            the inputs of it that are its residuals.
        partial: those that can't be run for all cotangents. They are handed those that
            there are.
        links: sources that are values of the graph -> that value.
        fixed: sources made of parameters alone.
        avals: source -> its type.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Tensors,
        moving: set[int],
        slopes: Collection[int],
        bind: Callable[[Op, list[Any]], list[Any]],
    ):
        self.graph, self.tensors, self.moving = graph, tensors, moving
        self.slopes, self.bind = slopes, bind
        self.wrt = [i for i, v in enumerate(graph.inputs) if v in moving]
        self.active = [i for i, v in enumerate(graph.outputs) if self.moves(v)]
        self._trace()
        self._find_links()
        self._find_rules()

    def reached(self, live: Sequence[int]) -> list[int]:
        """Which of the inputs ``wrt`` these outputs are differentiated by."""
        outputs = [self.graph.outputs[i] for i in live]
        perturbed = [v in self.moving for v in self.graph.inputs]
        moving = moving_values(replace(self.graph, outputs=outputs), perturbed)
        return [i for i in self.wrt if self.graph.inputs[i] in moving]

    def moves(self, value: Value) -> bool:
        return isinstance(value, int) and value in self.moving

    def differentiate(self, op: Op, values: list[Any]) -> tuple[list[Any], Any]:
        """A block's outputs, and its backward function, which is a pytree."""
        moves = list(map(self.moves, op.ins))

        def call(*moving):
            rest = iter(moving)
            mixed = [next(rest) if m else v for m, v in zip(moves, values, strict=True)]
            outs = self.bind(op, mixed)
            pairs = zip(outs, op.outs, strict=True)
            return [out for out, v in pairs if self.moves(v)], outs

        moving = [v for v, m in zip(values, moves, strict=True) if m]
        _, backward, outs = jax.vjp(call, *moving, has_aux=True)
        return outs, backward

    def _trace(self) -> None:
        graph, trees = self.graph, {}

        def forward(*inputs):
            residuals, chosen = {}, {}

            def rule(op, values, env):
                if self._chooses(op):
                    outs, chosen[Choice(op)] = choose(op, values)
                    return outs
                backward, moved = None, list(filter(self.moves, op.outs))
                if self._is_block(op):
                    outs, backward = self.differentiate(op, values)
                elif moved and self._has_rule(op):
                    outs, backward = self._decided(op, values, moved)
                if backward is None:
                    return op.bind(*values)
                leaves, trees[op] = jax.tree.flatten(backward)
                residuals.update((Residual(op, k), x) for k, x in enumerate(leaves))
                return outs

            env = graph.run(inputs, rule)
            slopes = {Slope(v): self._slope(v, env) for v in self.slopes}
            made = {**env, **residuals, **slopes, **chosen}
            self.sources = [*made]
            return [read(env, v) for v in graph.outputs], [*made.values()]

        avals = [graph.avals[v] for v in graph.inputs]
        self.program, self.trees = Program.trace(forward, *avals), trees
        self.cheap = {op for op in trees if not self._is_block(op)}

    def _find_links(self) -> None:
        graph, count = self.graph, len(self.graph.outputs)
        variables = self.program.jaxpr.outvars[count:]
        # A residual that is a value of the graph is taken from the replay.
        value_of = {}
        self.links: dict[Source, int] = {}
        for source, variable in zip(self.sources, variables, strict=True):
            if isinstance(variable, Literal):
                continue
            if isinstance(source, int):
                value_of.setdefault(variable, source)
            elif variable in value_of:
                self.links[source] = value_of[variable]
        fixed = {i for i, v in enumerate(graph.inputs) if v in self.tensors.fixed}
        made_of_fixed = self.program.made_of(fixed)[count:]
        self.fixed = {s for s, f in zip(self.sources, made_of_fixed, strict=True) if f}
        self.avals = {s: v.aval for s, v in zip(self.sources, variables, strict=True)}

    def _find_rules(self) -> None:
        self.rules: list[tuple[Op, Graph, list[int]]] = []
        self.partial: set[Op] = set()
        for op, tree in self.trees.items():
            if op.kind not in ("custom_jvp_call", "custom_vjp_call"):
                continue
            avals = [self.avals[Residual(op, k)] for k in range(tree.num_leaves)]
            cts = [self.graph.avals[v].to_ct_aval() for v in op.outs if self.moves(v)]
            try:
                found = [graph_of_rule(tree, avals, cts)]
            except Exception:  # it may refuse what nothing differentiated reads
                found = _of_each(tree, avals, cts)
                if not found:
                    raise
                self.partial.add(op)
            for graph, given in found:
                residuals = graph.inputs[len(given) - len(avals) : len(given)]
                self.rules.append((op, graph, residuals))

    def _chooses(self, op: Op) -> bool:
        """Whether decoded operands could make it choose others."""
        moved = op.kind == "sign" or not self.moving.isdisjoint(op.outs)
        lossy = not self.tensors.data.isdisjoint(op.reads)
        return moved and lossy and bool(choices(op))  # 0 of an empty axis

    def _is_block(self, op: Op) -> bool:
        """Differentiated as a whole, from what it keeps for itself."""
        moved = not self.moving.isdisjoint(op.outs)
        return moved and is_block(op)

    def _has_rule(self, op: Op) -> bool:
        """A cheap function's, whose derivative is not stored as a step's."""
        ruled = op.kind in ("custom_jvp_call", "custom_vjp_call")
        return ruled and op.outs[0] not in self.slopes and not op.eqn.effects

    def _decided(self, op: Op, values: list[Any], moved: list[int]) -> tuple[list, Any]:
        """As `differentiate`; no backward function if its rules decide nothing."""
        values = renewed(values)
        outs, backward = self.differentiate(op, values)
        cts = [self.graph.avals[v].to_ct_aval() for v in moved]
        before = None
        if is_step(op):
            before = slopes_before(backward, cts)
        before = before or decided_before(backward, cts)
        if before is not None:
            return outs, before

        def kept(*values):
            return jax.tree.leaves(self.differentiate(op, [*values])[1])

        decoded = [isinstance(v, int) and self._may_be_rounded(v) for v in op.ins]
        of = made_of(kept, values, decoded)
        needed = keeps_decisions(*of) or is_steep(*of, backward, cts)
        return outs, backward if needed else None

    def _may_be_rounded(self, value: int) -> bool:
        tensor = self.tensors.found.get(value)
        whole = tensor is not None and (tensor.divisor or tensor.discrete)
        return value in self.tensors.data and not whole

    def _slope(self, value: int, env: dict[int, Any]) -> jax.Array:
        function = self.tensors.functions[value]

        def of_root(x):
            inside = {**env, function.root: x}
            for op in function.ops:
                (inside[op.outs[0]],) = op.bind(*(read(inside, v) for v in op.ins))
            return inside[value]

        # A relu's is that of its result: what it is of need not be written.
        x = env[value if self.tensors.found[value].step else function.root]
        return jax.jvp(of_root, (x,), (jnp.ones_like(x),))[1]


def _of_each(
    tree: Any, leaves: Sequence[Any], cts: Sequence[Any]
) -> list[tuple[Graph, list[Any]]]:
    """The graphs of a rule for each of its cotangents alone that it can be run for."""
    found, zeros = [], list(map(ad.Zero, cts))
    for i, ct in enumerate(cts):
        try:
            alone = [*zeros[:i], ct, *zeros[i + 1 :]]
            found.append(graph_of_rule(tree, leaves, alone))
        except Exception:  # whatever a rule of the user's may raise
            continue
    return found
