"""The block that a function checkpoints, found by tracing it."""

from collections.abc import Callable

import jax

from jaxcompact.policy import ChoosesActions
from jaxcompact.traced import Plan as Traces


class _Noting:
    """A policy that notes which blocks are traced under it."""

    statistics = True

    def __init__(self, policy: ChoosesActions):
        self.decide, self.found = policy.decide, []

    def note(self, traces: Traces) -> None:
        self.found.append(traces)


def block_of(
    make: Callable[[ChoosesActions], tuple[Callable, tuple]],
    policy: ChoosesActions,
    name: str,
) -> Traces:
    """The one block that a function checkpoints; ``make(policy)`` is it, with its args.

    Raises ValueError, with the ``name`` of ``make``, if there is none or several.
    """
    noting = _Noting(policy)
    function, args = make(noting)
    jax.eval_shape(function, *args)
    blocks = {id(traces.traced): traces for traces in noting.found}
    if len(blocks) != 1:
        names = ", ".join(repr(t.traced.label) for t in blocks.values()) or "none"
        raise ValueError(
            f"{name} must return a function that checkpoints one block with the policy "
            f"it is given, got {names}"
        )
    (traces,) = blocks.values()
    return traces
