"""The backward pass of a recording: a replay with what is stored in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jaxcompact.arrays import pinned
from jaxcompact.graph import Op
from jaxcompact.kinds import LINEAR_ALGEBRA
from jaxcompact.transform.choices import follow
from jaxcompact.transform.program import Program
from jaxcompact.transform.recording import Recording
from jaxcompact.transform.sources import Choice, Residual, Slope, Source

# A norm that, made again, is so many times smaller is of a row that decoded to zero.
_SHRUNK = 16


@dataclass(frozen=True)
class Cut:
    """A backward pass that is cut to what some outputs take.

    Attributes:
        program: gives the cotangents of the inputs ``wrt``.
        wrt: numbers of inputs.
        inputs: which of the inputs it reads.
        stored: which of what is stored.
        derived: which of what is made of parameters alone.
        cts: which of the cotangents.
    """

    program: Program
    wrt: list[int]
    inputs: list[bool]
    stored: list[bool]
    derived: list[bool]
    cts: list[bool]


class Backward:
    """The backward pass of a recording.

    It replays the graph with every stored value *pinned*: its value is the stored one,
    its tangent flows to the operation that makes it.

    Args:
        recording: the forward pass.
        lossy: whether anything that is stored is encoded.
    """

    def __init__(self, recording: Recording, lossy: bool):
        self.recording, self.lossy = recording, lossy

    def cut(
        self,
        stored: list[Source],
        derived: list[Source],
        made_again: set[Op],
        live: Sequence[int],
    ) -> "Cut":
        """The backward pass of some outputs.

        Args:
            stored: what there is beside the inputs.
            derived: what is made of parameters alone.
            made_again: blocks that run again.
            live: the outputs that have a cotangent, of ``recording.active``. Of the
                others nothing is differentiated: a zero times what is infinite is none.
        """
        recording, graph = self.recording, self.recording.graph
        wrt = recording.reached(live)
        count = len(graph.inputs), len(stored), len(derived)

        def backward(*args):
            inputs, args = args[: count[0]], args[count[0] :]
            pins = dict(zip([*stored, *derived], args, strict=False))
            cts = args[count[1] + count[2] :]

            def replay(*moving):
                filled = list(inputs)
                for i, value in zip(wrt, moving, strict=True):
                    filled[i] = value

                def rule(op, values, env):
                    return self._run(op, values, env, pins, made_again)

                env = graph.run(filled, rule)
                return [env[graph.outputs[i]] for i in live]

            moving = tuple(inputs[i] for i in wrt)
            # As `jax.vjp` would, in half the time.
            transposed = jax.linear_transpose(
                lambda *tangents: jax.jvp(replay, moving, tangents)[1], *moving
            )
            return list(transposed(list(cts)))

        program = Program.trace(
            backward,
            *(graph.avals[v] for v in graph.inputs),
            *(recording.avals[s] for s in [*stored, *derived]),
            *(graph.avals[graph.outputs[i]].to_ct_aval() for i in live),
        )
        program, used = program.cut([True] * len(wrt))
        inputs, used = used[: count[0]], used[count[0] :]
        values, used = used[: count[1]], used[count[1] :]
        return Cut(program, wrt, inputs, values, used[: count[2]], used[count[2] :])

    def _run(
        self, op: Op, values: list[Any], env: dict, pins: dict, made_again: set[Op]
    ) -> list[Any]:
        recording = self.recording
        if op.kind.startswith("debug_"):
            return [None] * len(op.outs)
        if all(v in pins and not recording.moves(v) for v in op.outs):
            return [pins[v] for v in op.outs]
        choice = Choice(op)
        if choice not in pins:  # it may be a value of the graph
            choice = recording.links.get(choice)
        if choice in pins:
            outs = follow(op, pins[choice], values, rounded=self.lossy)
        elif op in recording.trees and op not in made_again:
            outs = self._run_block(op, values, env, pins)
        else:
            outs = recording.bind(op, values)
        return [self._pin(v, o, env, pins) for v, o in zip(op.outs, outs, strict=True)]

    def _run_block(self, op: Op, values: list[Any], env: dict, pins: dict) -> list[Any]:
        recording = self.recording
        tree = recording.trees[op]
        # Second derivatives, which exact policies have, go through what it keeps.
        held = jax.lax.stop_gradient if self.lossy else lambda x: x
        if all(v in pins for v in op.outs):
            outs = [pins[v] for v in op.outs]
        else:
            fixed = list(map(held, values))
            # A factorization's rule may make another output than the primitive, whose
            # other triangle is whatever it is.
            if op.kind in LINEAR_ALGEBRA:
                outs, _ = recording.differentiate(op, fixed)
            else:
                outs = recording.bind(op, fixed)
            outs = [pins.get(v, o) for v, o in zip(op.outs, outs, strict=True)]
        known = {**pins, **env, **dict(zip(op.outs, outs, strict=True))}
        sources = (Residual(op, k) for k in range(tree.num_leaves))
        leaves = [held(known[recording.links.get(s, s)]) for s in sources]

        @jax.custom_vjp
        def block(moving, outs, leaves):
            return outs

        def forward(*args):
            _, outs, leaves = jax.tree.map(lambda primal: primal.value, args)
            return outs, leaves

        def backward(leaves, cts):
            pairs = zip(cts, op.outs, strict=True)
            moved = [_none(ct) for ct, v in pairs if recording.moves(v)]
            cheap = op in recording.cheap  # kept for what its rule reads
            whole = op.kind == "custom_vjp_call" and op not in recording.partial
            if cheap or whole:  # else: of what is not stored
                moved = list(map(ad.instantiate_zeros, moved))
            return list(jax.tree.unflatten(tree, leaves)(moved)), None, None

        block.defvjp(forward, backward, symbolic_zeros=True)
        pairs = zip(values, op.ins, strict=True)
        moving = [value for value, v in pairs if recording.moves(v)]
        return block(moving, outs, leaves)

    def _pin(self, value: int, out: Any, env: dict, pins: dict) -> Any:
        if value in self.recording.slopes:
            root = env[self.recording.tensors.functions[value].root]
            return _follow(pins.get(value, out), pins[Slope(value)], root)
        if value not in pins:
            return out
        stored, tensor = pins[value], self.recording.tensors.found.get(value)
        if self.lossy and tensor is not None and tensor.normed:
            # It fits the rows that were made again, but where nothing is left of them.
            stored = jnp.where(abs(out) >= abs(stored) / _SHRUNK, out, stored)
        return pinned(stored, out) if self.recording.moves(value) else stored


def _none(ct: Any) -> Any:
    """As `jax.vjp` takes no cotangent at all: of an output that nothing reads."""
    return ad.Zero(ct.aval) if isinstance(ct, SymbolicZero) else ct


@jax.custom_jvp
def _follow(y, slope, x):
    """``y = f(x)`` with a given value and derivative."""
    return y


@_follow.defjvp
def _(primals, tangents):
    (y, slope, _), moved = primals, tangents[2]
    return y, (slope.astype(moved.dtype) * moved).astype(y.dtype)
