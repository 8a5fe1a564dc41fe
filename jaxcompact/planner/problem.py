"""A block, as a planner sees it: what it chooses among."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxcompact import policies
from jaxcompact.actions import Action, Save
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.codecs import Codec, Quantized
from jaxcompact.compress import Compress
from jaxcompact.graph import Op
from jaxcompact.memory.cards import Device
from jaxcompact.planner.block import block_of, bodies_of
from jaxcompact.planner.effects import Sensitivity, is_real, noise_of, require_codecs
from jaxcompact.planner.items import Item, item_of, kept_sum, of_several
from jaxcompact.planner.measured import operation_seconds
from jaxcompact.planner.stages import Stages, stages_of
from jaxcompact.policy import ChoosesActions
from jaxcompact.transform.replay import Replay
from jaxcompact.transform.sources import Residual, Source
from jaxcompact.transform.traced import Plan as Traces

CODECS = Quantized(8), Quantized(4), Quantized(3, group_size=32)


@dataclass(frozen=True)
class Problem:
    """A block, as the planner sees it.

    Attributes:
        items: the tensors with a choice, and those without that take space.
        needed: what the backward pass reads: values and residuals.
        runs: operation -> seconds to run it again.
        makers: value -> the operation that makes it; inputs have none.
        free: values that are there in any case: parameters and what is made of them.
        exact: statistic -> items that are not to be rounded where it is stored: what it
            is made of. A softmax of other scores than it was normalized for is none.
        parents: item -> the items that it is made of, without others between.
        own: items that are not to be made again of anything rounded: divisors, which
            could become zero, differences of what is near, slopes of steps, and what
            exponentials are taken of, if what rounding does to them was not measured.
        actions: what is done with all other tensors, by name.
        stages: of the backward pass.
        noise: of those of these that are encoded, in the bodies of loops.
    """

    items: tuple[Item, ...]
    needed: frozenset[Source]
    runs: dict[Op, float]
    makers: dict[int, Op]
    free: frozenset[int]
    exact: dict[Source, frozenset[Source]]
    parents: dict[Source, frozenset[Source]]
    own: frozenset[Source]
    actions: dict[str, Action]
    stages: Stages
    noise: float = 0.0


def problem_of(
    make_step: Callable[[ChoosesActions], tuple[Callable, tuple]],
    card: Device,
    max_error: float,
    found: Sensitivity | None,
    codecs: Sequence[Codec],
) -> tuple[Traces, Problem]:
    """The block that a step checkpoints, and its choices.

    Of `problems_of` the first, whose loops take the least.
    """
    return next(problems_of(make_step, card, max_error, found, codecs))


def problems_of(
    make_step: Callable[[ChoosesActions], tuple[Callable, tuple]],
    card: Device,
    max_error: float,
    found: Sensitivity | None,
    codecs: Sequence[Codec],
) -> Iterator[tuple[Traces, Problem]]:
    """The same block with the bodies of its loops stored in 4 bits, in 8 and exactly.

    Those within ``max_error``, as far as loops go; one, if there are none. What is not
    chosen besides (masks, integers) is stored as by `policies.int4`.

    Raises ValueError for arguments that are none, named as those of `plan_step`.
    """
    if not is_real(max_error) or not max_error >= 0:
        raise ValueError(f"max_error must be 0 or more, got {max_error!r}")
    if found is not None and not isinstance(found, Sensitivity):
        raise ValueError(f"sensitivity must be a Sensitivity or None, got {found!r}")
    require_codecs(codecs)

    def under(base: ChoosesActions) -> tuple[Traces, Problem]:
        traces = block_of(make_step, base, "make_step", statistics=True)
        return traces, problem(traces, base, tuple(codecs), card, found)

    exact = Compress(Save())
    if not max_error:
        yield under(exact)
        return
    traces, asked = under(policies.int4())
    in_loops = asked.noise > 0
    if asked.noise <= max_error * max_error:
        yield traces, asked
    if in_loops:
        outside = frozenset(t.name for t, _, _ in traces.replay.chosen.values())
        eight = under(_Outside(outside, policies.int8()))
        if eight[1].noise <= max_error * max_error:
            yield eight
        yield under(_Outside(outside, exact))


@dataclass(frozen=True)
class _Outside:
    """`policies.int4` for the tensors of these names, another policy for all others."""

    names: frozenset[str]
    others: ChoosesActions

    def decide(self, tensor: Tensor) -> tuple[Action, str]:
        policy = policies.int4() if tensor.name in self.names else self.others
        return policy.decide(tensor)


def problem(
    traces: Traces,
    base: ChoosesActions,
    codecs: Sequence[Codec],
    card: Device,
    found: Sensitivity | None = None,
) -> Problem:
    """The choices for a block that is traced under the policy ``base``.

    What ``base`` encodes or saves because of what it is (masks, integers, divisors,
    statistics) stays so; so do its codecs for what attention is sensitive to, unless
    what others do was ``found``.
    """
    replay = traces.replay
    stages, needed = stages_of(replay)
    items, inside = [], 0.0
    bodies = bodies_of(traces)
    for tensor, action in bodies.values():
        inside += noise_of(action, tensor)
    actions = {name: action for name, (_, action) in bodies.items()}
    if inside and found is not None and found.measure:
        outside = (tensor.name for tensor, _, _ in replay.chosen.values())
        inside = found.under(dict.fromkeys(outside, Save()) | actions).inside
    several = of_several(replay)
    for source, (tensor, action, _) in replay.chosen.items():
        item = None
        if tensor.kind != "function" or source in several:
            item = item_of(source, tensor, action, replay, base, codecs, card, found)
        if item is None:
            actions[tensor.name] = action
        else:
            items.append(item)
    graph = replay.graph
    sources = {item.source for item in items}
    # The items that a value is made of: all, and those with no others between.
    above: dict[Source, frozenset[Source]] = {}
    parents: dict[Source, frozenset[Source]] = {}
    for op in graph.ops:
        made_of = (above.get(v, frozenset()) | ({v} & sources) for v in op.reads)
        above.update(dict.fromkeys(op.outs, frozenset().union(*made_of)))
        direct = ({v} if v in sources else parents.get(v, ()) for v in op.reads)
        parents.update(dict.fromkeys(op.outs, frozenset().union(*direct)))
    for source in sources:
        if isinstance(source, Residual):
            parents[source] = parents[source.op.outs[0]]
    if found is None:
        whole = _normed(replay, items, above)
        for n, item in enumerate(items):
            if item.source in whole:
                exact = tuple(o for o in item.options if not o.lossy)
                items[n] = replace(item, options=exact)
    return Problem(
        tuple(items),
        needed,
        {op: operation_seconds(op, card, graph.made_by) for op in graph.ops},
        graph.made_by,
        frozenset(replay.tensors.fixed),
        {i.source: above[i.source] for i in items if kept_sum(i.tensor)},
        {source: parents.get(source, frozenset()) for source in sources},
        frozenset(
            i.source
            for i in items
            if i.tensor.divisor
            or i.tensor.near
            or ((i.tensor.exponent or i.tensor.enlarged) and found is None)
            or _of_rule(i.source, replay)
        ),
        actions,
        stages,
        inside,
    )


def _of_rule(source: Source, replay: Replay) -> bool:
    """Whether a rule that decides keeps it, as the slope of a step."""
    return isinstance(source, Residual) and source.op in replay.recording.cheap


def _normed(
    replay: Replay, items: Sequence[Item], above: dict[Source, frozenset[Source]]
) -> frozenset[Source]:
    """The products that norms are of: a row that is enlarged brings its rounding."""
    products = {i.source for i in items if i.tensor.terms is not None}
    norms = (v for v, (tensor, *_) in replay.chosen.items() if tensor.normed)
    found = frozenset().union(*(above.get(v, frozenset()) & products for v in norms))
    return found - frozenset().union(*(above[v] for v in found))


def named(items: Sequence[Item], chosen: Sequence[Any]) -> dict[str, Action]:
    """The action of each item, by name."""
    pairs = zip(items, chosen, strict=True)
    return {i.tensor.name: o.action if o else i.otherwise for i, o in pairs}


def without_host(asked: Problem) -> Problem:
    """The same, with nothing moved to the host."""
    return replace(
        asked,
        items=tuple(
            replace(
                item,
                options=tuple(o for o in item.options if not o.away),
            )
            for item in asked.items
        ),
    )
