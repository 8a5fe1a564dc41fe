"""How many layers of a block a step holds at once, read off its program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from jaxcompact.memory.functions import made_by
from jaxcompact.planner.arguments import arrays_of, of_arrays
from jaxcompact.policy import ChoosesActions, Policy

# Jitted functions of `traced.Plan`, by names that no one else's have.
_FORWARD, _BACKWARD = "_jaxcompact_forward", "_jaxcompact_backward"


class _Runs(NamedTuple):
    """Of a program: passes whose others are outside of it, and the most held inside."""

    forward: int = 0
    backward: int = 0
    held: int = 0


def layers_of(
    make_step: Callable[[ChoosesActions], tuple[Callable, tuple]],
) -> int:
    """Forward passes of what is checkpointed before their backward passes begin.

    Where both are in one loop, over microbatches, those of one round. 0 if it is not
    differentiated.
    """
    step, args = made_by(make_step, "make_step", "step", Policy())
    return _runs(jax.make_jaxpr(of_arrays(step, args))(arrays_of(args)).jaxpr).held


def _runs(jaxpr: Any) -> _Runs:
    forward = backward = held = 0
    for eqn in jaxpr.eqns:
        name = eqn.params.get("name")
        if name in (_FORWARD, _BACKWARD):
            found = _Runs(forward=name == _FORWARD, backward=name == _BACKWARD)
        else:
            inside = list(map(_runs, jaxprs_in_params(eqn.params)))
            # Of branches one runs.
            found = _Runs(*map(max, zip(*inside, strict=True))) if inside else _Runs()
        rounds = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        forward += rounds * found.forward
        backward += rounds * found.backward
        held = max(held, found.held)
    if forward and backward:
        # A scan's forward pass has a part that it makes once, ahead of the loop.
        return _Runs(held=max(held, min(forward, backward)))
    return _Runs(forward, backward, held)
