"""The block that a function checkpoints, found by tracing it."""

from collections import Counter, defaultdict
from collections.abc import Callable

import jax

from jaxcompact.actions import Action
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.memory.functions import made_by
from jaxcompact.planner.arguments import arrays_of, of_arrays
from jaxcompact.policy import ChoosesActions
from jaxcompact.transform.traced import Plan as Traces
from jaxcompact.transform.traced import Traced


class Noting:
    """A policy that notes which blocks are traced under it."""

    def __init__(self, policy: ChoosesActions, statistics: bool = False):
        self.decide, self.found = policy.decide, []
        self.statistics = statistics or getattr(policy, "statistics", False)

    def note(self, traces: Traces) -> None:
        if jax.sharding.get_abstract_mesh().manual_axes:  # it can't be traced later
            _ = traces.replay.finding_everything
        self.found.append(traces)


def block_of(
    make: Callable[[ChoosesActions], tuple[Callable, tuple]],
    policy: ChoosesActions,
    name: str,
    statistics: bool = False,
) -> Traces:
    """The one block that a function checkpoints; ``make(policy)`` is it, with its args.

    It may be traced several times, for several layers, if it is the same each time.
    ``statistics`` as of `Tensors`.

    Raises ValueError, with the ``name`` of ``make``, if there is none or several, or if
    ``make`` returns anything else.
    """
    noting = Noting(policy, statistics)
    function, args = made_by(make, name, name.removeprefix("make_"), noting)
    jax.eval_shape(of_arrays(function, args), arrays_of(args))
    # The first layer's input, and a loop's at first, are not differentiated: they count
    # as the others' do.
    every = {id(traces.traced): traces.traced for traces in noting.found}.values()
    moving: dict[tuple, list[tuple[bool, ...]]] = defaultdict(list)
    for traced in every:
        moving[_inputs(traced)] += traced.plans
    masks = {of: tuple(map(any, zip(*m, strict=True))) for of, m in moving.items()}
    plans = [traced.plan(masks[_inputs(traced)]) for traced in every]
    blocks = {_form(traces): traces for traces in plans}
    if len(blocks) != 1:
        counts = Counter(traces.traced.label for traces in blocks.values())
        names = ", ".join(
            f"{label!r}" if n == 1 else f"{label!r} in {n} forms"
            for label, n in counts.items()
        )
        raise ValueError(
            f"{name} must return a function that checkpoints one block with the policy "
            f"it is given, got {names or 'none'}"
        )
    (traces,) = blocks.values()
    return traces


def bodies_of(traces: Traces) -> dict[str, tuple[Tensor, Action]]:
    """What its loops and branches may store, and what is done with it, by name."""
    return {
        tensor.name: (tensor, action)
        for inner in traces.inner()
        for tensor, action, _ in inner.replay.chosen.values()
    }


def _inputs(traced: Traced) -> tuple:
    avals = traced.graph.avals
    return traced.label, *(str(avals[value]) for value in traced.graph.inputs)


def _form(traces: Traces) -> tuple:
    """What two layers have in common if one plan serves both."""
    tensors = (tensor for tensor, _, _ in traces.replay.chosen.values())
    return traces.traced.label, *((t.name, t.shape, str(t.dtype)) for t in tensors)
