"""How a backward pass runs on what was stored: the plan of one traced function.

The forward pass evaluates the graph and keeps the chosen values. The backward pass
replays it with every chosen value *pinned*: its value is the stored one, its tangent
flows to the operation that makes it. What the pins make unnecessary is dead code, the
matrix products among it, and is cut off; what the rest does not read is not stored.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcompact.choices import choices, choose, follow
from jaxcompact.codecs import Codec
from jaxcompact.decisions import decided
from jaxcompact.divisors import find_divisors, steeply_read
from jaxcompact.graph import (
    Graph,
    Op,
    Value,
    graph_of,
    on_host,
    pinned,
    read,
    renewed,
    tie,
)
from jaxcompact.kinds import BLOCKS, LINEAR_ALGEBRA, expensive, is_any
from jaxcompact.loops import infinities
from jaxcompact.norms import Norm, find_norms
from jaxcompact.policy import Action, ChoosesActions, Derivative, Recompute, Save
from jaxcompact.program import Program
from jaxcompact.regions import Region, find_regions
from jaxcompact.tensors import Tensor, Tensors


@dataclass(frozen=True)
class Residual:
    """The k-th array that a block (a `jax.custom_vjp` op, a loop) keeps for itself."""

    op: Op
    k: int


@dataclass(frozen=True)
class Slope:
    """The derivative of an elementwise function, by the value that it makes."""

    value: int


@dataclass(frozen=True)
class Choice:
    """Which of its operands' entries an operation took."""

    op: Op


Source = int | Residual | Slope | Choice  # where something stored comes from


@dataclass(frozen=True)
class Slot:
    """Something that the backward pass reads, and how it is stored."""

    source: Source
    tensor: Tensor
    action: Save | Codec
    reason: str


class Replay:
    """The forward and the backward program of a graph under a policy.

    Args:
        graph: the function.
        names: name of each input that is no parameter.
        keep: inputs that are not to be encoded, and why.
        known: whether it is known which inputs are parameters.
        perturbed: which inputs are differentiated.
        policy: chooses the actions.
        bind: what an operation makes, if it is to be differentiated as a whole.
        prefix: put before the tensors' names.

    Attributes:
        slots: what is stored beside inputs that are kept as they are.
        kept: inputs that are kept as they are.
        regions: elementwise functions of what is stored encoded, and norms of it.
    """

    def __init__(
        self,
        graph: Graph,
        names: dict[int, str],
        keep: dict[int, str],
        known: bool,
        perturbed: Sequence[bool],
        policy: ChoosesActions,
        bind: Callable[[Op, list[Any]], list[Any]],
        prefix: str = "",
    ):
        self.graph, self.policy, self.bind = graph, policy, bind
        self.keep, self.prefix = keep, prefix
        statistics = getattr(policy, "statistics", False)
        self.tensors = Tensors(graph, names, known, statistics)
        self.moving = _moving(graph, perturbed)
        self.wrt = [i for i, v in enumerate(graph.inputs) if v in self.moving]
        self.active = [i for i, v in enumerate(graph.outputs) if self._moves(v)]
        self.chosen = {v: self._decide(t, v) for v, t in self.tensors.found.items()}
        self.slopes = {
            v
            for v, (_, action, _) in self.chosen.items()
            if isinstance(action, Derivative) and v in self.moving
        }
        self._trace_forward()
        self._trace_backward()

    def _decide(self, tensor: Tensor, source: Source) -> tuple[Tensor, Action, str]:
        # In a loop's body such an input may be a new array every time.
        frozen = (
            tensor.kind == "input" and source not in self.moving and not self.prefix
        )
        tensor = replace(tensor, name=self.prefix + tensor.name, frozen=frozen)
        if source in self.keep:
            return tensor, Save(), self.keep[source]
        action, reason = self.policy.decide(tensor)
        if isinstance(action, Derivative):
            if tensor.kind != "function":
                raise ValueError(
                    f"policy: Derivative is for elementwise functions of one tensor, "
                    f"but {tensor} is none"
                )
            if not (tensor.step or action.codec.supports(tensor.dtype)):
                raise ValueError(
                    f"policy: {action.codec} can't store {tensor} of {tensor.dtype}"
                )
        elif hasattr(action, "supports") and not action.supports(tensor.dtype):
            raise ValueError(f"policy: {action} can't store {tensor} of {tensor.dtype}")
        elif isinstance(action, Codec):
            try:
                action.nbytes(tensor.shape, tensor.dtype)
            except ValueError as error:
                raise ValueError(
                    f"policy: {action} can't store {tensor}: {error}"
                ) from None
        return tensor, action, reason

    def _chooses(self, op: Op) -> bool:
        """Whether decoded operands could make it choose others."""
        moved = op.kind == "sign" or not self.moving.isdisjoint(op.outs)
        lossy = not self.tensors.data.isdisjoint(op.reads)
        return moved and lossy and bool(choices(op))  # 0 of an empty axis

    def _is_block(self, op: Op) -> bool:
        """Differentiated as a whole, from what it keeps for itself."""
        moved = not self.moving.isdisjoint(op.outs)
        return op.kind in BLOCKS and moved and expensive(op)

    @property
    def lossy(self) -> bool:
        """Whether anything is encoded."""
        return any(
            isinstance(a, Codec | Derivative) for _, a, _ in self.chosen.values()
        )

    # --- forward ---

    def _trace_forward(self) -> None:
        graph, trees = self.graph, {}

        def forward(*inputs):
            residuals, chosen = {}, {}

            def rule(op, values, env):
                if self._chooses(op):
                    outs, chosen[Choice(op)] = choose(op, values)
                    return outs
                if not self._is_block(op):
                    return op.bind(*values)
                outs, backward = self._differentiate(op, values)
                leaves, trees[op] = jax.tree.flatten(backward)
                residuals.update((Residual(op, k), x) for k, x in enumerate(leaves))
                return outs

            env = graph.run(inputs, rule)
            slopes = {Slope(v): self._slope(v, env) for v in self.slopes}
            made = {**env, **residuals, **slopes, **chosen}
            self.sources = [*made]
            return [read(env, v) for v in graph.outputs], [*made.values()]

        avals = [graph.avals[v] for v in graph.inputs]
        program = Program.trace(forward, *avals)
        self.forward, self.trees = program, trees
        variables = program.jaxpr.outvars[len(graph.outputs) :]
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
        made_of_fixed = program.made_of(fixed)[len(graph.outputs) :]
        self.fixed = {s for s, f in zip(self.sources, made_of_fixed, strict=True) if f}
        self.avals = {s: v.aval for s, v in zip(self.sources, variables, strict=True)}
        self.infinite = self._find_infinite()
        self.steep, self.decided = self._read_by_rules()
        for source in self.sources:
            value = self.links.get(source, source)
            if source in self.fixed:
                continue
            if isinstance(source, Residual):
                asked = value in self.steep or value in self.decided
                # One that is a value of the graph is decided there.
                if asked or source not in self.links:
                    self.chosen[value] = self._decide_residual(source)
            elif isinstance(source, Choice):
                self.chosen[source] = self._decide(self._choice(source), source)

    def _find_infinite(self) -> set[Source]:
        """Residuals that an infinity is written into by the rule that makes them."""
        if not self.trees:
            return set()
        graph = graph_of(self.forward.jaxpr)
        found = infinities(graph)
        made = graph.outputs[len(self.graph.outputs) :]
        pairs = zip(self.sources, made, strict=True)
        return {s for s, v in pairs if isinstance(v, int) and v in found}

    def _read_by_rules(self) -> tuple[set[Source], set[Source]]:
        """What rules of `jax.custom_vjp` divide by, and what they decide by."""
        steep: set[Source] = set()
        decides: set[Source] = set()
        for op, tree in self.trees.items():
            if op.kind != "custom_vjp_call":
                continue
            sources = [Residual(op, k) for k in range(tree.num_leaves)]
            cts = [self.graph.avals[v].to_ct_aval() for v in op.outs if self._moves(v)]

            def rule(leaves, cts, tree=tree):
                return jax.tree.unflatten(tree, leaves)(cts)

            avals = [self.avals[s] for s in sources]
            graph = graph_of(jax.make_jaxpr(rule)(avals, cts))
            residuals = graph.inputs[-len(sources) - len(cts) :][: len(sources)]
            named = dict(zip(residuals, sources, strict=True))
            for found, inside in (
                (steep, find_divisors(graph, ())),
                (decides, decided(graph, residuals)),
            ):
                read = (s for v, s in named.items() if v in inside)
                found.update(self.links.get(s, s) for s in read if s not in self.fixed)
        return steep, decides

    def _differentiate(self, op: Op, values: list[Any]) -> tuple[list[Any], Any]:
        """A block's outputs, and its backward function, which is a pytree."""
        moves = list(map(self._moves, op.ins))

        def call(*moving):
            rest = iter(moving)
            mixed = [next(rest) if m else v for m, v in zip(moves, values, strict=True)]
            outs = self.bind(op, mixed)
            return [
                o for o, v in zip(outs, op.outs, strict=True) if self._moves(v)
            ], outs

        moving = [v for v, m in zip(values, moves, strict=True) if m]
        _, backward, outs = jax.vjp(call, *moving, has_aux=True)
        return outs, backward

    def _moves(self, value: Value) -> bool:
        return isinstance(value, int) and value in self.moving

    def _slope(self, value: int, env: dict[int, Any]) -> jax.Array:
        function = self.tensors.functions[value]

        def of_root(x):
            inside = {**env, function.root: x}
            for op in function.ops:
                (inside[op.outs[0]],) = op.bind(*(read(inside, v) for v in op.ins))
            return inside[value]

        x = env[function.root]
        return jax.jvp(of_root, (x,), (jnp.ones_like(x),))[1]

    def _residual(self, source: Residual) -> Tensor:
        aval, op = self.avals[source], source.op
        value = self.links.get(source, source)
        steep = value in self.steep or source in self.infinite
        flags = {"discrete": value in self.decided, "divisor": steep}
        special = {name: True for name, holds in flags.items() if holds}
        if value in self.tensors.found:
            return replace(self.tensors.found[value], **special)
        largest = max(self.graph.avals[v].size for v in op.reads)
        out = self.tensors.found.get(op.outs[0])  # of a loop a part may be stored
        tensor = Tensor(
            name=f"{op.name}.residual{source.k}",
            kind="residual",
            shape=aval.shape,
            dtype=aval.dtype,
            where=op.where,
            statistic=16 * aval.size <= largest,
            fused=out and out.fused,
            divisor=is_any(op, LINEAR_ALGEBRA)
            or not self.tensors.fixed.issuperset(steeply_read(op)),
        )
        return replace(tensor, **special)

    def _decide_residual(self, source: Residual) -> tuple[Tensor, Action, str]:
        value = self.links.get(source, source)
        tensor, action, reason = self._decide(self._residual(source), value)
        if isinstance(action, Codec):
            if on_host(self.avals[source]):
                return tensor, Save(), "already on the host"
            if source.op.kind in ("scan", "cond"):
                return tensor, Save(), "encoded inside if its policy says so"
        return tensor, action, reason

    def _choice(self, source: Choice) -> Tensor:
        aval, op = self.avals[source], source.op
        return Tensor(
            name=f"{op.name}.choice",
            kind="choice",
            shape=aval.shape,
            dtype=aval.dtype,
            where=op.where,
            discrete=True,
            limit=choices(op),
        )

    # --- backward ---

    def _trace_backward(self) -> None:
        made_again = {
            s.op
            for s, (_, action, _) in self.chosen.items()
            if isinstance(s, Residual) and isinstance(action, Recompute)
        }
        stored: list[Source] = [
            s
            for s, (_, action, _) in self.chosen.items()
            if not isinstance(action, Recompute)
            and not (isinstance(s, Residual) and s.op in made_again)
            and not (isinstance(action, Derivative) and action.value is None)
            and not (isinstance(s, Choice) and action == Save())  # nothing is decoded
            and s not in self.graph.inputs
        ]
        stored += [Slope(v) for v in self.slopes]
        derived = [
            s for s in self.fixed if isinstance(s, Residual) and s.op not in made_again
        ]
        self.backward, (inputs, values, derived_used, self.cts_used) = (
            self._cut_backward(stored, derived, made_again)
        )
        if hasattr(self.policy, "probe"):
            # Noise in what has no gradient moves those of others.
            self.backward = self.backward.without("stop_gradient")
        self._assign(
            inputs,
            [s for s, u in zip(stored, values, strict=True) if u],
            [s for s, u in zip(derived, derived_used, strict=True) if u],
        )

    def finds_everything(self) -> tuple[Graph, list[Source]]:
        """The backward pass if all values and residuals are stored.

        Its inputs: what it reads, as it is listed, and then cotangents.
        """
        graph, fixed = self.graph, self.tensors.fixed
        values = [v for op in graph.ops for v in op.outs if v not in fixed]
        residuals = [s for s in self.sources if isinstance(s, Residual)]
        stored = [*values, *(s for s in residuals if s not in self.fixed)]
        derived: list[Source] = [s for s in residuals if s in self.fixed]
        derived += [Slope(v) for v in self.slopes]
        program, used = self._cut_backward(stored, derived, set())
        each = zip((graph.inputs, stored, derived), used[:3], strict=True)
        sources = [s for sources, mask in each for s in _where(sources, mask)]
        whole = graph_of(program.jaxpr)
        return replace(whole, inputs=whole.inputs[len(program.consts) :]), sources

    def _cut_backward(
        self, stored: list[Source], derived: list[Source], made_again: set[Op]
    ) -> tuple[Program, tuple[list[bool], ...]]:
        """The backward pass, and what it uses of each kind of argument."""
        graph = self.graph
        count = len(graph.inputs), len(stored), len(derived)

        def backward(*args):
            inputs, args = args[: count[0]], args[count[0] :]
            pins = dict(zip([*stored, *derived], args, strict=False))
            cts = args[count[1] + count[2] :]

            def replay(*moving):
                filled = list(inputs)
                for i, value in zip(self.wrt, moving, strict=True):
                    filled[i] = value

                def rule(op, values, env):
                    if op.kind.startswith("debug_"):
                        return [None] * len(op.outs)
                    if all(v in pins and not self._moves(v) for v in op.outs):
                        return [pins[v] for v in op.outs]
                    choice = Choice(op)
                    if choice in pins or self.links.get(choice) in pins:
                        choice = pins[self.links.get(choice, choice)]
                        outs = follow(op, choice, values)
                    elif op in self.trees and op not in made_again:
                        outs = self._replay_block(op, values, env, pins)
                    else:
                        outs = self.bind(op, values)
                    return [
                        self._pin(v, o, env, pins)
                        for v, o in zip(op.outs, outs, strict=True)
                    ]

                env = graph.run(filled, rule)
                return [env[graph.outputs[i]] for i in self.active]

            moving = tuple(inputs[i] for i in self.wrt)
            # As `jax.vjp` would, in half the time.
            transposed = jax.linear_transpose(
                lambda *tangents: jax.jvp(replay, moving, tangents)[1], *moving
            )
            return list(transposed(list(cts)))

        program = Program.trace(
            backward,
            *(graph.avals[v] for v in graph.inputs),
            *(self.avals[s] for s in [*stored, *derived]),
            *(graph.avals[graph.outputs[i]].to_ct_aval() for i in self.active),
        )
        backward, used = program.cut([True] * len(self.wrt))
        inputs, used = used[: count[0]], used[count[0] :]
        values, used = used[: count[1]], used[count[1] :]
        return backward, (inputs, values, used[: count[2]], used[count[2] :])

    def _replay_block(self, op: Op, values: list[Any], env: dict, pins: dict) -> list:
        tree = self.trees[op]
        # Second derivatives, which exact policies have, go through what it keeps.
        held = jax.lax.stop_gradient if self.lossy else lambda x: x
        if all(v in pins for v in op.outs):
            outs = [pins[v] for v in op.outs]
        else:
            fixed = list(map(held, values))
            # A factorization's rule may make another output than the primitive, whose
            # other triangle is whatever it is.
            special = op.kind in LINEAR_ALGEBRA
            outs = (
                self._differentiate(op, fixed)[0] if special else self.bind(op, fixed)
            )
            outs = [pins.get(v, o) for v, o in zip(op.outs, outs, strict=True)]
        known = {**env, **dict(zip(op.outs, outs, strict=True))}
        leaves = []
        for k in range(tree.num_leaves):
            source = Residual(op, k)
            value = known[self.links[source]] if source in self.links else pins[source]
            leaves.append(held(value))

        @jax.custom_vjp
        def block(moving, outs, leaves):
            return outs

        def backward(leaves, cts):
            moved = [ct for ct, v in zip(cts, op.outs, strict=True) if self._moves(v)]
            return list(jax.tree.unflatten(tree, leaves)(moved)), None, None

        block.defvjp(lambda moving, outs, leaves: (outs, leaves), backward)
        moving = [
            value for value, v in zip(values, op.ins, strict=True) if self._moves(v)
        ]
        return block(moving, outs, leaves)

    def _pin(self, value: int, out: Any, env: dict, pins: dict) -> Any:
        if value in self.slopes:
            root = env[self.tensors.functions[value].root]
            return _follow(pins.get(value, out), pins[Slope(value)], root)
        if value not in pins:
            return out
        return pinned(pins[value], out) if self._moves(value) else pins[value]

    def _assign(
        self, inputs: list[bool], stored: list[Source], derived: list[Source]
    ) -> None:
        """What crosses to the backward pass, of what it reads."""
        graph, kept = self.graph, []
        self.slots: list[Slot] = []
        for i, (value, used) in enumerate(zip(graph.inputs, inputs, strict=True)):
            if used and value in self.chosen:
                tensor, action, reason = self.chosen[value]
                if isinstance(action, Codec):
                    self.slots.append(Slot(value, tensor, action, reason))
                    continue
            if used:
                kept.append(i)
        for source in stored:
            value = source.value if isinstance(source, Slope) else source
            tensor, action, reason = self.chosen[value]
            if isinstance(action, Derivative):
                action = action.codec if isinstance(source, Slope) else action.value
            self.slots.append(Slot(source, tensor, action, reason))

        all_, none = ([x] * len(graph.outputs) for x in (True, False))
        made = [slot.source for slot in self.slots]
        self.forward_cut, self.forward_reads, self.order = self._cut(all_, made)
        self.derive, self.derive_reads, self.derived = self._cut(none, derived)
        self.inputs_read = inputs
        used = (i for i, u in enumerate(self.derive_reads) if u)
        self.kept = sorted({*kept, *used})
        self._find_regions()

    def _find_regions(self) -> None:
        graph = self.forward_graph = graph_of(self.forward_cut.jaxpr)
        count = len(self.graph.outputs)
        outputs, made = graph.outputs[:count], graph.outputs[count:]
        self.places: dict[Any, list[int]] = defaultdict(list)
        for k, i in enumerate(self.order):
            self.places[made[i]].append(k)
        actions = {v: self.slots[ks[0]].action for v, ks in self.places.items()}
        codecs = {
            v: action
            for v, action in actions.items()
            if isinstance(action, Codec) and len(self.places[v]) == 1
        }
        outputs = {v for v in outputs if isinstance(v, int)}
        others = {v for v in self.places if isinstance(v, int) and v not in codecs}
        self.regions: list[Region | Norm]
        self.regions = [*find_regions(graph, codecs, outputs | others)]
        saved = {v for v in others - outputs if actions[v] == Save()}
        self.regions += find_norms(graph, codecs, saved, outputs | others - saved)

    def _cut(
        self, outputs: list[bool], sources: list[Source]
    ) -> tuple[Program, list[bool], list[int]]:
        """The forward pass for some outputs and sources, and where each of these is."""
        asked = set(sources)
        wanted = outputs + [s in asked for s in self.sources]
        program, reads = self.forward.cut(wanted, effects=any(outputs))
        place = {s: i for i, s in enumerate(s for s in self.sources if s in asked)}
        return program, reads, [place[s] for s in sources]

    # --- running ---

    def run_forward(
        self,
        inputs: Sequence[Any],
        encode: Callable[[int, Any], Any],
        regions: Sequence[Region | Norm] = (),
        evaluate: Callable[[Any, list[Any]], tuple[list[Any], list[Any]]] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """The outputs, and ``encode(k, value)`` of each slot, made when its value is.

        Left to itself XLA encodes at the end, and keeps what it encodes until then.
        What one of ``regions`` makes, and its sources' slots, are those of
        ``evaluate``.
        What nothing reads but its encoding (a relu's slope) is not tied to it, and so
        need not be in memory.
        """
        graph, count = self.forward_graph, len(self.graph.outputs)
        read_on = {v for v in graph.outputs[:count] if not isinstance(v, Literal)}
        read_on.update(v for op in graph.ops for v in op.reads)
        stored: dict[int, Any] = {}
        sources = {v for region in regions for v in region.sources}
        ends = {region.ops[-1]: region for region in regions}
        inside = {op for region in regions for op in region.ops[:-1]}

        def keep(value: int, x: Any) -> Any:
            for k in () if value in sources else self.places.get(value, ()):
                stored[k] = encode(k, x)
                if value in read_on:
                    x, stored[k] = tie((x, stored[k]))
            return x

        def rule(op: Op, values: list[Any], env: dict[int, Any]) -> list[Any]:
            if op in inside:
                return [None]
            if op not in ends:
                return list(map(keep, op.outs, op.bind(*values)))
            region = ends[op]
            outs, encoded = evaluate(region, [env[v] for v in region.reads])
            stored.update(zip(self.slots_of(region), encoded, strict=True))
            return list(map(keep, region.makes, outs))[:1]  # others are only stored

        inputs = [*self.forward_cut.consts, *_where(inputs, self.forward_reads)]
        env = graph.run(list(map(keep, graph.inputs, inputs)), rule)
        outs = [read(env, v) for v in graph.outputs[:count]]
        return outs, [stored[k] for k in range(len(self.slots))]

    def slots_of(self, region: Region | Norm) -> list[int]:
        return [self.places[v][0] for v in region.sources]

    def run_backward(
        self, kept: Sequence[Any], values: Sequence[Any], cts: Sequence[Any]
    ) -> list[Any]:
        """The cotangents of the differentiated inputs, `wrt`."""
        inputs = dict(zip(self.kept, kept, strict=True))
        index = {v: i for i, v in enumerate(self.graph.inputs)}
        stored = []
        for slot, value in zip(self.slots, values, strict=True):
            if slot.source in index:
                inputs[index[slot.source]] = value
            else:
                stored.append(value)
        derived = self.derive.call(
            *(renewed(inputs[i]) for i, u in enumerate(self.derive_reads) if u)
        )
        args = [inputs[i] for i, u in enumerate(self.inputs_read) if u]
        args += [*stored, *(derived[i] for i in self.derived)]
        return self.backward.call_in_order(args, _where(cts, self.cts_used))


@jax.custom_jvp
def _follow(y, slope, x):
    """``y = f(x)`` with a given value and derivative."""
    return y


_follow.defjvp(lambda primals, tangents: (primals[0], primals[1] * tangents[2]))


def _moving(graph: Graph, perturbed: Sequence[bool]) -> set[int]:
    """The values on a path from the differentiated inputs to the outputs."""

    def floating(value):
        return jnp.issubdtype(graph.avals[value].dtype, jnp.inexact)

    inputs = zip(graph.inputs, perturbed, strict=True)
    moving = {v for v, p in inputs if p and floating(v)}
    for op in graph.ops:
        if op.kind != "stop_gradient" and not moving.isdisjoint(op.reads):
            moving.update(v for v in op.outs if floating(v))
    reaching = {v for v in graph.outputs if isinstance(v, int)}
    for op in reversed(graph.ops):
        if op.kind != "stop_gradient" and not reaching.isdisjoint(op.outs):
            reaching.update(op.reads)
    return moving & reaching


def _where(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [v for v, m in zip(values, mask, strict=True) if m]
