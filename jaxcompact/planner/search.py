"""Plans, as users ask for them: tried on the card, and their error measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxcompact.checkpoint import Params
from jaxcompact.codecs import Codec
from jaxcompact.memory.cards import find_device, here, present
from jaxcompact.memory.peak import gib
from jaxcompact.memory.search import parse_bytes, saying
from jaxcompact.planner.arguments import require_positive
from jaxcompact.planner.effects import Sensitivity
from jaxcompact.planner.layers import layers_of
from jaxcompact.planner.plan import Plan
from jaxcompact.planner.problem import CODECS, problems_of
from jaxcompact.planner.scan import scan_step
from jaxcompact.planner.trials import Trials
from jaxcompact.policy import ChoosesActions

_PLANS = 4  # of which each is measured; the last is exact


def plan(
    block: Callable,
    *args: Any,
    layers: int = 1,
    params: Params = 0,
    **options: Any,
) -> Plan:
    """The fastest policy for a block, ``layers`` of which fit in a budget.

    As `plan_step`, for the gradient of ``layers`` such blocks in a scan. A block maps
    its first argument that is no parameter to one like it.

    Args:
        block: the function that `jaxcompact.checkpoint` is to wrap.
        args: its arguments, arrays all; shapes are enough. What is none, as a flag, is
            the block's own: ``functools.partial(block, train=True)``.
        layers: how many of them follow each other.
        params: as in `jaxcompact.checkpoint`.
        options: ``budget``, ``device``, ``max_error``, ``sensitivity``, ``codecs`` and
            ``progress`` of `plan_step`.

    Raises ValueError for a block of another form, and what `plan_step` does.

    >>> import jax, jax.numpy as jnp, jaxcompact as jc
    >>> def block(params, x):
    ...     return x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    >>> of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    >>> params = {"up": of(512, 2048), "down": of(2048, 512)}
    >>> found = jc.plan(block, params, of(8192, 512), layers=8, budget="300MiB",
    ...                 progress=lambda line: None)
    >>> found.peak_bytes < 300 * 2**20
    True
    """
    require_positive("layers", layers)
    make_step = scan_step(block, args, layers, params)
    return plan_step(make_step, layers=layers, **options)


def plan_step(
    make_step: Callable[[ChoosesActions], tuple[Callable, tuple]],
    *,
    layers: int | None = None,
    budget: int | str | None = None,
    device: str | None = None,
    max_error: float = 0.2,
    sensitivity: Sensitivity | None = None,
    codecs: Sequence[Codec] = CODECS,
    progress: Callable[[str], Any] | None = None,
) -> Plan:
    """The fastest policy with which a training step fits in a budget.

    For every tensor of the block that the step checkpoints: keep it, encode it, move it
    to the host or make it again, such that the modelled time is least (a mixed integer
    linear program over the block's operations) and the step, *compiled for the card*,
    stays within the budget: the program's own peak corrects the model of what is stored
    and of what lives in a backward pass beside it, in at most three compiles (six while
    a tenth of the budget is left, or what fits is far slower than what does not), and
    five of the smallest plans before none is said to fit. Of plans that are as fast,
    within a hundredth of the block's forward pass, it is one of the more exact.

    What the bodies of the block's own loops and branches store is alike for all of
    them: as it is, in 8 or in 4 bits, whichever is fastest by the model within
    ``max_error``, and as it is where that is as fast.

    Args:
        make_step: ``policy -> (step, args)``, for `jaxcompact.memory.peak`; the step
            uses ``jaxcompact.checkpoint(block, policy=policy, ...)`` on one block.
        layers: how often that block runs before its backward passes begin; by default
            what the step's program says.
        budget: bytes or ``"7GiB"``, of the whole step; the card's memory by default.
        device: a key of `jaxcompact.memory.devices`; by default of the card that is
            here, or "h200".
        max_error: of the gradient, relative; 0 is exact.
        sensitivity: what each codec does to the gradient, as `sensitivity` measured it.
            Without it every tensor is taken to add as much to the gradient, relatively,
            as its codec adds to normal numbers: the default of ``max_error`` then lets
            four or five tensors have 4 bits.
        codecs: what tensors may be encoded by where that was not measured. What
            attention is sensitive to is then stored as by `policies.int4`, exactly, or
            made again. What is made again of a rounded input adds more than is counted,
            most of all where a norm follows linear attention: measure it.
        progress: called with a line for each compile; by default it goes to stderr.

    Sizes and times are those of one device's part where types say how arrays lie, in a
    `jax.shard_map` and under explicit sharding. Where XLA splits a program by itself
    (Auto axes) they are taken of whole arrays: within the budget, but slower than need
    be.

    Times are measured, of each operation with the elementwise ones before it and of
    each codec, if such a card is in this machine, and kept on disk; else they are those
    of its roofline.

    Raises ValueError for a budget that is none, above the card, or below what the
    smallest plan that was found takes (which it says), for other arguments that are
    none of these, and for a step that checkpoints no block or several; ImportError
    without ``jaxcompact[memory]``; NotImplementedError for a card that the compiler
    does not take, and for a step that calls the host.

    Source: Adacc (arXiv 2508.00806); Checkmate (arXiv 1910.02653) for the closure.
    """
    if layers is not None:
        require_positive("layers", layers)
    device = here() if device is None else device
    card, limit = find_device(device), budget_bytes(budget, device)
    say = saying(progress)
    if present(card):
        say(f"operations are timed on this machine's {card.name}, if they were not yet")
    found, held, allowed = sensitivity, 0, max_error
    for left in reversed(range(_PLANS)):
        allowed = allowed if left else 0.0
        problems = list(problems_of(make_step, card, allowed, found, codecs))
        held = held or _layers(make_step, layers, say)
        trials = Trials(make_step, held, limit, device, say)
        best = trials.fastest(problems, allowed)
        if found is None or not found.measure:
            return best
        measured = found.under(best.actions)
        error = measured.error(best.actions)
        if error <= max_error or not allowed:  # it is exact but for the compiler's
            return replace(best, error=error, measured=True)
        say(f"its gradient error is {error:.2%}, expected {best.error:.2%}")
        found = found.no_less_than(measured, codecs)
        allowed *= best.error / error
    raise AssertionError("the last plan is exact")


def _layers(
    make_step: Callable[[ChoosesActions], tuple[Callable, tuple]],
    layers: int | None,
    say: Callable[[str], Any],
) -> int:
    """The layers that are given, or how many the step has."""
    found = layers_of(make_step)
    if layers and found not in (0, layers):
        say(f"layers is {layers}, but the step runs the block {found} times at once")
    return layers or max(1, found)


def budget_bytes(budget: int | str | None, device: str) -> int:
    """A budget on a card, in bytes; by default all that the card has.

    Raises ValueError for a budget that is none, or above the card's memory.

    >>> budget_bytes("7GiB", "h200") == 7 * 2**30
    True
    """
    memory = find_device(device).memory
    limit = memory if budget is None else parse_bytes(budget)
    if limit > memory:
        raise ValueError(
            f"budget must be within the {gib(memory)} of {device!r}, got {gib(limit)}"
        )
    return limit
