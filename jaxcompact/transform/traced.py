"""A traced function that is differentiated from what a policy has stored."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxcompact.analysis.loops import inputs_of_body, known_inside
from jaxcompact.arrays import barrier, is_inexact, jitted, renewed, types_made, zeros
from jaxcompact.graph import Graph, Op, graph_of, joined, read
from jaxcompact.kinds import is_entered
from jaxcompact.policy import ChoosesActions
from jaxcompact.transform.outputs import Outputs, even, undifferentiable
from jaxcompact.transform.pullbacks import Mask, differentiable, guarding
from jaxcompact.transform.replay import Replay
from jaxcompact.transform.sources import Source
from jaxcompact.transform.stores import Stores


class Traced:
    """A traced function that is run, and differentiated, under a policy.

    Attributes:
        graph: the function; its first inputs are what it closes over.
        names: name of each input that is no parameter.
        keep: inputs that are not to be encoded, and why.
        known: whether it is known which inputs are parameters.
        policy: chooses the actions.
        label: the function's name.
        once: as of `arrays.jitted`.
        outputs: all of the function that a user gave, whose graph has some of them.
        labels: name of each input that is a parameter.
    """

    def __init__(
        self,
        graph: Graph,
        names: dict[int, str],
        keep: dict[int, str],
        known: bool,
        policy: ChoosesActions,
        *,
        label: str,
        labels: dict[int, str] | None = None,
        outputs: Outputs | None = None,
        prefix: str = "",
        prevent_cse: bool = True,
        once: bool = False,
    ):
        self.graph, self.names, self.keep, self.known = graph, names, keep, known
        self.policy = policy
        self.label, self.outputs, self.prefix = label, outputs, prefix
        self.prevent_cse, self.labels, self.once = prevent_cse, labels or {}, once
        self.plans: dict[tuple[bool, ...], Plan] = {}
        self.bodies: dict[Op, tuple[Traced, ...]] = {}

    @property
    def uneven(self) -> Collection[int]:
        return self.outputs.uneven if self.outputs else ()

    def plan(self, perturbed: tuple[bool, ...]) -> "Plan":
        if perturbed not in self.plans:
            self._require_sizes()
            plan = self._planned(perturbed)
            if not self.prefix:
                self._require_matches(plan, perturbed)
                # A planner's policy asks for the blocks that are traced under it.
                getattr(self.policy, "note", lambda plan: None)(plan)
            self.plans[perturbed] = plan
        return self.plans[perturbed]

    def _planned(self, perturbed: tuple[bool, ...]) -> "Plan":
        try:
            return Plan(self, perturbed)
        except Exception:
            still, refused = undifferentiable(self.graph, perturbed)
            if not still and not refused:
                raise
        return Plan(self, perturbed, still, refused)

    def under(self, policy: ChoosesActions) -> "Traced":
        """The same function under another policy."""
        names, keep, known, label = self.names, self.keep, self.known, self.label
        return Traced(self.graph, names, keep, known, policy, label=label)

    def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The function's own inputs, and those with which its policy probes it."""
        count = len(self.graph.inputs)
        return inputs[:count], inputs[count:]

    def _require_sizes(self) -> None:
        for aval in map(self.graph.avals.__getitem__, self.graph.inputs):
            if not all(isinstance(n, int) for n in aval.shape):
                raise NotImplementedError(
                    f"checkpoint of {self.label!r}: shapes must be numbers where it is "
                    f"differentiated, got {aval}: what is stored is chosen by its size"
                )

    def _require_matches(self, plan: "Plan", perturbed: tuple[bool, ...]) -> None:
        unused = getattr(self.policy, "unused", lambda names: [])(plan.names())
        avals = [self.graph.avals[v] for v in self.graph.inputs]
        widest = tuple(map(is_inexact, avals))
        if unused and perturbed != widest:  # it may be of what is not differentiated
            self.plan(widest)
        elif unused:
            raise ValueError(
                f"policy: {unused[0]!r} matches no tensor of {self.label!r}; the "
                f"names are {', '.join(sorted(plan.names()))}"
            )

    @functools.cached_property
    def primal(self) -> Callable:
        def primal(*inputs):
            env = self.graph.run(inputs, lambda op, values, _: op.bind(*values))
            outs = [read(env, v) for v in self.graph.outputs]
            return even(outs, self.uneven, inputs)

        return jitted(primal, self.once)

    def bind(self, op: Op, values: Sequence[Any]) -> list[Any]:
        """What an operation makes; bodies of loops and branches are checkpointed."""
        if not is_entered(op):
            return op.bind(*values)
        if op not in self.bodies:
            jaxprs = enumerate(op.jaxprs)
            self.bodies[op] = tuple(self._body(op, i, jaxpr) for i, jaxpr in jaxprs)
        bodies = self.bodies[op]
        if op.kind == "cond":
            return _switch(bodies, list(values))
        (body,) = bodies
        if op.kind == "shard_map":
            return _on_each_device(op, body, values)
        if op.kind != "scan":
            return run(body, list(values))
        avals = [body.graph.avals[v] for v in body.graph.inputs]
        jaxpr = jax.make_jaxpr(lambda *inputs: run(body, list(inputs)))(*avals)
        return op.bind(*values, jaxpr=jaxpr)

    def _body(self, op: Op, index: int, jaxpr: Any) -> "Traced":
        graph, label = known_inside(self.graph, op, joined(graph_of(jaxpr))), op.name
        if op.kind == "cond":
            label = f"{label}.{index}"
        names, keep = inputs_of_body(self.graph, self.names, op, graph)
        return Traced(
            graph,
            names,
            keep,
            self.known,
            self.policy,
            label=f"{self.label}/{label}",
            prefix=f"{self.prefix}{label}/",
            prevent_cse=self.prevent_cse,
        )


class Plan:
    """A `Replay` with its codecs: what one pass of differentiation runs.

    Args:
        traced: the function.
        perturbed: which of its inputs are differentiated.
        still: outputs that JAX finds to be made of none of these.
        refused: outputs that JAX can't differentiate: for a cotangent of theirs it
            raises what differentiating all outputs does.
    """

    def __init__(
        self,
        traced: Traced,
        perturbed: tuple[bool, ...],
        still: frozenset[int] = frozenset(),
        refused: frozenset[int] = frozenset(),
    ):
        self.traced, self.refused = traced, refused
        self.replay = Replay(
            traced.graph,
            traced.names,
            traced.keep,
            traced.known,
            perturbed,
            traced.policy,
            traced.bind,
            traced.prefix,
            still | refused,
        )
        self.stores = Stores(self.replay)
        self.guard = guarding(traced.label) if self.replay.lossy else lambda x: x
        self.forward = jitted(self._jaxcompact_forward, traced.once)
        self.backward = functools.cache(self._jitted_backward)

    def names(self) -> set[str]:
        """All candidates' names, those of the bodies of loops included."""
        plans = [self, *self.inner()]
        return {t.name for plan in plans for t, _, _ in plan.replay.chosen.values()}

    def inner(self) -> list["Plan"]:
        """The plans of the bodies of loops and branches, and of those inside them.

        A loop is differentiated until it is known what of its state moves: of the plans
        of its body the one in which most does.
        """
        bodies = [body for group in self.traced.bodies.values() for body in group]
        plans = [b.plans[max(b.plans, key=sum)] for b in bodies if b.plans]
        return [plan for each in plans for plan in (each, *each.inner())]

    def pull(
        self, kept: Sequence[Any], stored: Sequence[Any], cts: Sequence[Any]
    ) -> dict[int, Any]:
        """The cotangents of the inputs that outputs with a cotangent reach."""
        live = self.live(cts)
        moved = self.backward(live)(kept, stored, [cts[i] for i in live])
        return dict(zip(self.replay.cut(live).wrt, moved, strict=True))

    def live(self, cts: Sequence[Any]) -> tuple[int, ...]:
        """The outputs that something reads which is differentiated."""
        live = [i for i, ct in enumerate(cts) if not isinstance(ct, SymbolicZero)]
        if not self.refused.isdisjoint(live):
            # The error is made anew: one that is kept holds the frames of its caller.
            try:
                Plan(self.traced, self.replay.perturbed)
            except Exception as error:
                error.add_note(
                    f"checkpoint of {self.traced.label!r}: something that is "
                    f"differentiated reads an output that can't be; it may read "
                    f"jax.lax.stop_gradient of it"
                )
                raise
            raise AssertionError("what was refused once is refused again")
        return tuple(i for i in live if i in self.replay.recording.active)

    def _jitted_backward(self, live: tuple[int, ...]) -> Callable:
        def _jaxcompact_backward(kept, stored, cts):
            return self._backward(live, kept, stored, cts)

        return jitted(_jaxcompact_backward, self.traced.once)

    def nothing(self, *inputs: Any) -> list[list[jax.Array]]:
        """Zeros in the place of what `forward` stores."""
        (_, stored), _ = types_made(self.forward, *inputs)
        return jax.tree.map(zeros, stored)

    def kept(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs that the backward pass takes as they are."""
        inputs, probes = self.traced.split(inputs)
        places = {i: self.traced.graph.inputs[i] for i in self.replay.kept}
        return [self._probed(probes, v, inputs[i]) for i, v in places.items()]

    def _probed(self, probes: Sequence[Any], source: Source, value: Any) -> Any:
        source = self.replay.stands_for.get(source, source)
        if not probes or source not in self.replay.chosen:
            return value
        tensor, _, _ = self.replay.chosen[source]
        return self.traced.policy.probe(tensor, value, *probes)

    def _jaxcompact_forward(self, *inputs: Any) -> tuple[list[Any], list[list[Any]]]:
        inputs, probes = self.traced.split(inputs)
        # All of them: what is outside may differentiate by others than what is inside.
        inputs = [self.guard(x) if is_inexact(x) else x for x in inputs]
        seen = functools.partial(self._probed, probes) if probes else None
        outs, stored = self.stores.run(inputs, seen, self.traced.prevent_cse)
        return even(outs, self.traced.uneven, inputs), stored

    def _backward(self, live, kept, stored, cts) -> list[Any]:
        kept, stored = renewed((kept, stored))
        if self.traced.prevent_cse:
            # Or XLA decodes early, and drops a copy to the host that is copied back.
            kept, stored, cts = barrier((kept, stored, cts))
        return self.replay.run_backward(live, kept, self.stores.later(stored), cts)


# --- differentiation -------------------------------------------------------------


def _forward(traced: Traced, mask: Mask, inputs: list[Any]) -> tuple[list[Any], Any]:
    plan = traced.plan(traced.split(mask)[0])
    outs, stored = plan.forward(*inputs)
    # As they are: a loop over layers then knows them for slices of the parameters.
    return outs, (plan.kept(inputs), stored)


def _backward(traced: Traced, mask: Mask, residuals: Any, cts: list[Any]) -> list[Any]:
    kept, stored = residuals
    plan = traced.plan(traced.split(mask)[0])
    found = plan.pull(kept, stored, cts)
    return [found.get(i) for i in range(len(mask))]


def _moved(traced: Traced, mask: Mask) -> Collection[int]:
    """Those too that can't be differentiated: it is an error where something is."""
    plan = traced.plan(traced.split(mask)[0])
    return {*plan.replay.recording.active, *plan.refused}


def _reached(traced: Traced, mask: Mask, live: Collection[int]) -> Collection[int]:
    recording = traced.plan(traced.split(mask)[0]).replay.recording
    return recording.reached([i for i in recording.active if i in live])


# The function's outputs; it is differentiated from what its policy stores.
run = differentiable(
    lambda traced, inputs: traced.primal(*traced.split(inputs)[0]),
    _forward,
    _backward,
    _moved,
    _reached,
    lambda traced: traced.label,
)


def _forward_of_one(
    branches: tuple[Traced, ...], mask: Mask, inputs: list[Any]
) -> tuple[list[Any], Any]:
    index, *inputs = inputs
    plans = [branch.plan(mask[1:]) for branch in branches]

    def branch(plan):
        def forward(*inputs):
            outs, stored = plan.forward(*inputs)
            return outs, [stored if p is plan else p.nothing(*inputs) for p in plans]

        return forward

    outs, stored = jax.lax.switch(index, list(map(branch, plans)), *inputs)
    return outs, (index, inputs, stored)


def _backward_of_one(
    branches: tuple[Traced, ...], mask: Mask, residuals: Any, cts: list[Any]
) -> list[Any]:
    index, inputs, stored = residuals
    plans = [branch.plan(mask[1:]) for branch in branches]
    given = {i: ct for i, ct in enumerate(cts) if not isinstance(ct, SymbolicZero)}
    wrt = sorted(i - 1 for i in _reached_by_one(branches, mask, given))

    def branch(i):
        def backward(inputs, stored, given):
            kept = [inputs[k] for k in plans[i].replay.kept]
            every = [given.get(k, ct) for k, ct in enumerate(cts)]
            found = plans[i].pull(kept, stored[i], every)
            return [found[k] if k in found else jnp.zeros_like(inputs[k]) for k in wrt]

        return backward

    functions = list(map(branch, range(len(branches))))
    moved = jax.lax.switch(index, functions, inputs, stored, given)
    found = dict(zip(wrt, moved, strict=True))
    return [None, *(found.get(i) for i in range(len(inputs)))]


def _moved_by_one(branches: tuple[Traced, ...], mask: Mask) -> Collection[int]:
    return {i for branch in branches for i in _moved(branch, mask[1:])}


def _reached_by_one(
    branches: tuple[Traced, ...], mask: Mask, live: Collection[int]
) -> Collection[int]:
    return {1 + i for b in branches for i in _reached(b, mask[1:], live)}


# `jax.lax.switch`, whose own derivative would copy the inputs it keeps.
_switch = differentiable(
    lambda branches, inputs: jax.lax.switch(
        inputs[0], [branch.primal for branch in branches], *inputs[1:]
    ),
    _forward_of_one,
    _backward_of_one,
    _moved_by_one,
    _reached_by_one,
    lambda branches: branches[0].label,
)


def _on_each_device(op: Op, body: Traced, values: Sequence[Any]) -> list[Any]:
    params = op.eqn.params
    mapped = jax.shard_map(
        lambda *inputs: tuple(run(body, list(inputs))),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return list(mapped(*values))
