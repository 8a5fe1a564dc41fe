"""How a backward pass runs on what was stored: the plan of one traced function.

The forward pass evaluates the graph and keeps the chosen values. The backward pass
replays it with these in their places. What they make unnecessary is dead code, the
matrix products among it, and is cut off; what the rest does not read is not stored.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import compress
from typing import Any

from jaxcompact.actions import Action, Derivative, Recompute, Save, is_exact, of_value
from jaxcompact.analysis.moving import moving_values
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.analysis.tensors import Tensors
from jaxcompact.arrays import on_host, renewed
from jaxcompact.codecs import Chain, Codec, Offload, Quantized
from jaxcompact.graph import Graph, Op, behind, graph_of
from jaxcompact.kinds import expensive, is_entered
from jaxcompact.policy import ChoosesActions, action_of
from jaxcompact.transform.backward import Backward, Cut
from jaxcompact.transform.forward import Forward
from jaxcompact.transform.program import Program
from jaxcompact.transform.recording import Recording
from jaxcompact.transform.residuals import find_residuals
from jaxcompact.transform.sources import Choice, Residual, Slope, Source


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
        apart: outputs that are not to be differentiated.

    Attributes:
        tensors: what the policy sees of the graph's values.
        chosen: value or residual -> its tensor, the action, and why.
        stands_for: what is stored -> in which value's place (`find_results`).
        recording: the forward pass with all that may be stored.
        slots: what is stored beside inputs that are kept as they are.
        kept: inputs that are kept as they are.
        forward: the outputs, and what is stored.
        cut: of some outputs, the backward pass: of what is stored, and of their
            cotangents, those of the inputs.
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
        apart: Collection[int] = (),
    ):
        self.graph, self.policy, self.perturbed = graph, policy, perturbed
        self.keep, self.prefix = keep, prefix
        statistics = getattr(policy, "statistics", False)
        outputs = [v for i, v in enumerate(graph.outputs) if i not in apart]
        self.moving = moving_values(replace(graph, outputs=outputs), perturbed)
        self.tensors = Tensors(graph, names, known, self.moving, statistics)
        self.chosen = {v: self._decide(t, v) for v, t in self.tensors.found.items()}
        self._make_exactly()
        self.stands_for = self._results()
        self.slopes = {
            v: action.codec
            for v, (_, action, _) in self.chosen.items()
            if isinstance(action, Derivative) and v in self.moving
        }
        self.recording = Recording(graph, self.tensors, self.moving, self.slopes, bind)
        for source, tensor in find_residuals(self.recording):
            value = source
            if isinstance(source, Residual):
                value = self.recording.links.get(source, source)
            self.chosen[value] = self._decide(tensor, value, source)
            if of_value(self.chosen[value][1]) != Recompute():  # a rule asks for it
                self.stands_for.pop(value, None)
        self._trace_backward()

    def _make_exactly(self) -> None:
        """Again, of what is kept whole, what is to be exact, if that takes no more."""
        for value, (tensor, action, _) in self.chosen.items():
            op = self.graph.made_by.get(value)
            exact = (tensor.discrete or tensor.divisor) and tensor.floating
            if not (exact and tensor.kind == "op" and action == Save() and op):
                continue
            if expensive(op) and not tensor.few_terms:
                continue
            roots = {
                v: self.chosen[v]
                for v in behind(op.reads, self.graph, self._is_made_again)
                if v in self.chosen and of_value(self.chosen[v][1]) != Recompute()
            }
            whole = all(is_exact(action) for _, action, _ in roots.values())
            if whole and sum(t.nbytes for t, *_ in roots.values()) <= tensor.nbytes:
                self.chosen[value] = tensor, Recompute(), "made of what is whole"

    def _is_made_again(self, op: Op) -> bool:
        actions = (self.chosen[v][1] for v in op.outs if v in self.chosen)
        return all(of_value(action) == Recompute() for action in actions)

    def _results(self) -> dict[int, int]:
        """What is stored in the place of what is encoded, or probed, if it is not by
        itself."""
        asked, found = getattr(self.policy, "asked", ()), {}
        for value, result in self.tensors.results.items():
            tensor, action, _ = self.chosen[value]
            _, own, _ = self.chosen[result]
            encoded = type(action) is Quantized and isinstance(own, Derivative)
            if (encoded or tensor.name in asked) and of_value(own) == Recompute():
                found[result] = value
        return found

    def _decide(
        self, tensor: Tensor, value: Source, residual: Source | None = None
    ) -> tuple[Tensor, Action, str]:
        # In a loop's body such an input may be a new array every time.
        frozen = tensor.kind == "input" and value not in self.moving and not self.prefix
        tensor = replace(tensor, name=self.prefix + tensor.name, frozen=frozen)
        if value in self.keep:
            return tensor, Save(), self.keep[value]
        action, reason = action_of(self.policy, tensor)
        if isinstance(residual, Residual) and not isinstance(action, Recompute):
            if is_entered(residual.op):
                return tensor, Save(), "as its body stores it"
            if isinstance(action, Codec) and on_host(self.recording.avals[residual]):
                return tensor, Save(), "already on the host"
        return tensor, action, reason

    @property
    def lossy(self) -> bool:
        """Whether anything is rounded, or moved to the host and back: it has no second
        derivative."""
        return any(
            not is_exact(action) or isinstance(action, Offload | Chain)
            for _, action, _ in self.chosen.values()
        )

    def _trace_backward(self) -> None:
        made_again = {
            s.op
            for s, (_, action, _) in self.chosen.items()
            if isinstance(s, Residual) and isinstance(action, Recompute)
        }
        if not self.lossy:  # what is exact decides as it did
            made_again |= self.recording.cheap
        stored: list[Source] = [
            s
            for s, (_, action, _) in self.chosen.items()
            if not isinstance(action, Recompute)
            and not (isinstance(s, Residual) and s.op in made_again)
            and not (isinstance(action, Derivative) and action.value is None)
            # Where nothing is decoded they are chosen again.
            and not (isinstance(s, Choice) and action == Save() and not self.lossy)
            and s not in self.graph.inputs
        ]
        instead = {v: source for source, v in self.stands_for.items()}
        stored = [instead.get(s, s) for s in stored]
        stored += [Slope(v) for v in self.slopes]
        derived = [
            s
            for s in self.recording.fixed
            if isinstance(s, Residual) and s.op not in made_again
        ]
        backward = Backward(self.recording, self.lossy)

        @cache
        def cut(live: tuple[int, ...]) -> Cut:
            found = backward.cut(stored, derived, made_again, live)
            if hasattr(self.policy, "probe"):
                # Noise in what has no gradient moves those of others.
                program = found.program.without("stop_gradient")
                found = replace(found, program=program)
            return found

        self.cut, self.may_store, self.may_derive = cut, stored, derived
        whole = cut(tuple(self.recording.active))
        self._assign(
            whole.inputs,
            [*compress(stored, whole.stored)],
            [*compress(derived, whole.derived)],
        )

    @cached_property
    def finding_everything(self) -> tuple[Graph, list[Source]]:
        """The backward pass if all values and residuals are stored.

        Its inputs: what it reads, as it is listed, and then cotangents. First asked for
        where the function is traced: in a `jax.shard_map` axes have names there.
        """
        graph, fixed = self.graph, self.tensors.fixed
        recording = self.recording
        values = [v for op in graph.ops for v in op.outs if v not in fixed]
        residuals = [s for s in recording.sources if isinstance(s, Residual)]
        stored = [*values, *(s for s in residuals if s not in recording.fixed)]
        derived: list[Source] = [s for s in residuals if s in recording.fixed]
        derived += [Slope(v) for v in self.slopes]
        backward = Backward(recording, self.lossy)
        cut = backward.cut(stored, derived, set(), recording.active)
        used = cut.inputs, cut.stored, cut.derived
        each = zip((graph.inputs, stored, derived), used, strict=True)
        sources = [s for sources, mask in each for s in compress(sources, mask)]
        whole, count = graph_of(cut.program.jaxpr), len(cut.program.consts)
        return replace(whole, inputs=whole.inputs[count:]), sources

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
            value = self.stands_for.get(source, value)
            tensor, action, reason = self.chosen[value]
            slope = isinstance(source, Slope)
            action = self.slopes[source.value] if slope else of_value(action)
            self.slots.append(Slot(source, tensor, action, reason))

        all_, none = ([x] * len(graph.outputs) for x in (True, False))
        made = [slot.source for slot in self.slots]
        forward, reads, order = self._cut(all_, made)
        self.derive, self.derive_reads, order_derived = self._cut(none, derived)
        self.derived = dict(zip(derived, order_derived, strict=True))
        self.kept = sorted({*kept, *compress(range(len(inputs)), self.derive_reads)})
        actions = [slot.action for slot in self.slots]
        self.forward = Forward(
            forward, reads, len(graph.outputs), order, actions, self.perturbed
        )

    def _cut(
        self, outputs: list[bool], sources: list[Source]
    ) -> tuple[Program, list[bool], list[int]]:
        """The forward pass for some outputs and sources, and where each of these is."""
        asked, recording = set(sources), self.recording
        wanted = outputs + [s in asked for s in recording.sources]
        program, reads = recording.program.cut(wanted, effects=any(outputs))
        made = (s for s in recording.sources if s in asked)
        place = {source: i for i, source in enumerate(made)}
        return program, reads, [place[s] for s in sources]

    def run_backward(
        self,
        live: tuple[int, ...],
        kept: Sequence[Any],
        values: Sequence[Any],
        cts: Sequence[Any],
    ) -> list[Any]:
        """The cotangents of the inputs that these outputs reach, ``cut(live).wrt``."""
        inputs = dict(zip(self.kept, kept, strict=True))
        index = {v: i for i, v in enumerate(self.graph.inputs)}
        stored = {}
        for slot, value in zip(self.slots, values, strict=True):
            if slot.source in index:
                inputs[index[slot.source]] = value
            else:
                stored[slot.source] = value
        count, cut = range(len(self.graph.inputs)), self.cut(live)
        read = (inputs[i] for i in compress(count, self.derive_reads))
        derived = self.derive.call(*map(renewed, read))
        args = [inputs[i] for i in compress(count, cut.inputs)]
        args += [stored[s] for s in compress(self.may_store, cut.stored)]
        names = compress(self.may_derive, cut.derived)
        args += [derived[self.derived[s]] for s in names]
        return cut.program.call_in_order(args, [*compress(cts, cut.cts)])
