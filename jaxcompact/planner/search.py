"""The search for a plan: solve, compile for the card, correct, solve again."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact import policies
from jaxcompact.arrays import is_inexact
from jaxcompact.checkpoint import TRACERS, Params, as_tuple, checkpoint
from jaxcompact.codecs import Codec
from jaxcompact.memory.cards import find_device, here, present
from jaxcompact.memory.functions import require_function
from jaxcompact.memory.peak import gib, peak
from jaxcompact.memory.search import parse_bytes, saying
from jaxcompact.planner.arguments import arrays_of, require_positive
from jaxcompact.planner.candidates import Candidates
from jaxcompact.planner.effects import Sensitivity
from jaxcompact.planner.layers import layers_of
from jaxcompact.planner.milp import Solution
from jaxcompact.planner.plan import Plan
from jaxcompact.planner.problem import CODECS, Problem, named, problems_of
from jaxcompact.policy import Action, ChoosesActions
from jaxcompact.traced import Plan as Traces

_COMPILES = 3
_MORE_COMPILES = 6
_FAR = 0.9  # of the budget: what takes less may not be the fastest
_PLANS = 4  # of which each is measured; the last is exact
_NEAR = 0.98  # of the budget: no other plan is looked for above that
_SAFE = 0.99  # of it, where nothing that fits is known: a corrected model errs by 1 %


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
        args: its arguments; shapes are enough.
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
    a tenth of the budget is left), and three of the smallest plans before none is said
    to fit.

    What the bodies of the block's own loops and branches store is alike for all of
    them: as it is, in 8 or in 4 bits, whichever gives the fastest plan within
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

    Times are measured, of each operation with the elementwise ones before it and of
    each codec, if such a card is in this machine, and kept on disk; else they are those
    of its roofline.

    Raises ValueError for a budget that is none, above the card, or below what the
    smallest plan takes (which it says), for a ``max_error`` that no plan keeps, for
    other arguments that are none of these, and for a step that checkpoints no block or
    several; ImportError without ``jaxcompact[memory]``; NotImplementedError for a card
    that the compiler does not take, and for a step that calls the host.

    Source: Adacc (arXiv 2508.00806); Checkmate (arXiv 1910.02653) for the closure.
    """
    if layers is not None:
        require_positive("layers", layers)
    device = here() if device is None else device
    card, limit = find_device(device), budget_bytes(budget, device)
    say = saying(progress)
    if present(card):
        say(f"operations are timed on this machine's {card.name}, if they were not yet")
    found, held = sensitivity, 0
    for left in reversed(range(_PLANS)):
        allowed = max_error if left else 0.0
        problems = problems_of(make_step, card, allowed, found, codecs)
        held = held or _layers(make_step, layers, say)
        best = _of_any(make_step, held, limit, device, allowed, problems, say)
        if found is None or not found.measure:
            return best
        measured = found.under(best.actions)
        error = measured.error(best.actions)
        if error <= max_error:
            return replace(best, error=error)
        say(f"its gradient error is {error:.2%}, expected {best.error:.2%}")
        found = found.no_less_than(measured, codecs)
    raise AssertionError("an exact plan has no error")


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


class _TooSmall(ValueError):
    """A budget; ``least`` is a plan that takes more."""

    def __init__(self, message: str, least: Plan):
        super().__init__(message)
        self.least = least


def _of_any(
    make_step: Callable[[ChoosesActions], tuple[Callable, tuple]],
    layers: int,
    limit: int,
    device: str,
    max_error: float,
    problems: Sequence[tuple[Traces, Problem]],
    say: Callable[[str], Any],
) -> Plan:
    """Of the first problem that has a plan; those that are fast by the model first.

    Raises ValueError if none is within the limit and the error.
    """
    # The least that a step can take beside what its blocks store.
    rest = _nbytes(make_step(policies.int4())[1])
    noise = max_error * max_error
    each = [(traces, Candidates(asked, layers, noise)) for traces, asked in problems]

    def place(k: int) -> tuple[float, int]:
        fastest = each[k][1].fastest(limit - rest) if len(each) > 1 else None
        # The first is the most exact; where none fits by the model, the last may.
        return (fastest.seconds, k) if fastest else (math.inf, -k)

    failed = []
    for k in sorted(range(len(each)), key=place):
        try:
            return _fastest(make_step, limit, device, max_error, *each[k], rest, say)
        except _TooSmall as error:
            failed.append(error)
    raise min(failed, key=lambda error: error.least.peak_bytes)


def _fastest(
    make_step: Callable[[ChoosesActions], tuple[Callable, tuple]],
    limit: int,
    device: str,
    max_error: float,
    traces: Traces,
    candidates: Candidates,
    rest: int,
    say: Callable[[str], Any],
) -> Plan:
    """Raises ValueError if none is within the limit and the error."""
    asked, layers = candidates.asked, candidates.layers
    # What each that was compiled took beside its model.
    rest = [rest]

    def compiled(solution: Solution) -> Plan:
        plan = Plan(
            traces.traced.label,
            _actions(asked, solution),
            device,
            limit,
            solution.seconds,
            solution.nbytes,
            solution.noise**0.5,
            0,
        )
        step, args = make_step(plan)
        nbytes = peak(step, *args, device=device).peak_bytes
        time, size = f"{solution.seconds * 1e6:.0f} us", gib(solution.nbytes)
        line = f"{gib(nbytes)}: {time} and {size} a layer"
        if len(rest) > 1:
            line += f"; {gib(rest[-1] + candidates.nbytes(solution))} expected"
        say(line)
        rest.append(nbytes - candidates.nbytes(solution))
        return replace(plan, peak_bytes=nbytes)

    found: list[Plan] = []
    best = None

    def fastest(room: float) -> Solution | None:
        """That takes no more beside the rest, and was not compiled yet."""
        return candidates.fastest(room, is_new)

    def is_new(solution: Solution) -> bool:
        return _actions(asked, solution) not in [plan.actions for plan in found]

    def compiles() -> int:
        """More, where the model was far from what a plan takes."""
        far = best is not None and best.peak_bytes < _FAR * limit
        return _MORE_COMPILES if far else _COMPILES

    while len(found) < compiles():
        solution = fastest(limit - rest[-1])
        if best and (solution is None or solution.seconds >= best.seconds):
            break
        if found and not best:
            last = len(found) == _COMPILES - 1
            safe = fastest(_SAFE * limit - max(rest[1:]))
            if last or safe and rest[-1] + candidates.nbytes(safe) >= _NEAR * limit:
                solution = safe
        if solution is None:
            break
        found.append(compiled(solution))
        if found[-1].peak_bytes <= limit:
            best = found[-1]
            if best.peak_bytes >= _NEAR * limit:
                break
    if best:
        return best
    smallest = list(candidates.smallest())
    if not smallest:
        raise ValueError(f"max_error must be reachable, got {max_error!r}: no plan is")
    for solution in filter(is_new, smallest):
        last = compiled(solution)
        if last.peak_bytes <= limit:
            return last
        found.append(last)
    # Of these alone: with that budget they are tried again.
    tried = [_actions(asked, solution) for solution in smallest]
    least = min(
        (plan for plan in found if plan.actions in tried), key=lambda p: p.peak_bytes
    )
    beside = gib(least.peak_bytes - layers * least.nbytes)
    raise _TooSmall(
        f"budget must be {gib(_rounded_up(least.peak_bytes))} or more, which the "
        f"smallest plan within max_error={max_error:g} takes: {gib(least.nbytes)} in "
        f"each of {layers} layers, and {beside} beside them; got {gib(limit)}",
        least,
    )


def _rounded_up(nbytes: int) -> int:
    """To what its text says, or a little more."""
    unit = 2**30 if nbytes >= 2**30 else 2**20
    return math.ceil(math.ceil(100 * nbytes / unit) * unit / 100)


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


def _nbytes(args: Any) -> int:
    """Of arrays or their shapes, on one device."""
    total = 0
    for leaf in arrays_of(args):
        aval, sharding = jax.typeof(leaf), getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(aval.shape) if sharding else aval.shape
        total += math.prod(shape) * aval.dtype.itemsize
    return total


def _actions(asked: Problem, solution: Solution) -> dict[str, Action]:
    return asked.actions | named(asked.items, solution.chosen)


def _kind(x: Any) -> tuple:
    aval = x if hasattr(x, "shape") else jax.typeof(x)
    return aval.shape, aval.dtype


def scan_step(
    block: Callable, args: Sequence[Any], layers: int, params: Params
) -> Callable[[Any], tuple[Callable, tuple]]:
    """The gradient of a scan over ``layers`` blocks, for one policy."""
    require_function("block", block)
    if isinstance(block, FunctionType) and block in TRACERS:
        raise ValueError(
            f"block must be the function itself, got {block.__name__!r}, which "
            f"jc.checkpoint has wrapped already"
        )
    count = len(args)
    numbers = {n % count for n in as_tuple(params) if count and isinstance(n, int)}
    kinds = tuple(kind for kind in as_tuple(params) if isinstance(kind, type))
    numbers |= {n for n, x in enumerate(args) if _holds(x, kinds)}
    rest = [n for n in range(count) if n not in numbers]
    if not rest:
        raise ValueError("args must hold one that is no parameter")
    place = rest[0]
    out = jax.eval_shape(checkpoint(block, params=params), *args)  # which knows params
    if not numbers:
        raise ValueError(f"params must name an argument to train, got {params!r}")
    like = jax.tree.map(_kind, (out, args[place]))
    if like[0] != like[1]:
        raise ValueError(
            f"block must map its argument {place} to one like it, or make_step be "
            f"given; got {like[1]} to {like[0]}"
        )

    def make_step(policy):
        wrapped = checkpoint(block, policy=policy, params=params, prevent_cse=False)

        def loss(trained, others):
            def layer(x, own):
                given = dict(others) | dict(zip(sorted(numbers), own, strict=True))
                given[place] = x
                return wrapped(*(given[n] for n in range(len(args)))), None

            x, _ = jax.lax.scan(layer, others[place], trained, length=layers)
            inexact = filter(is_inexact, jax.tree.leaves(x))
            return sum(jnp.sum(y.real, dtype=jnp.float32) for y in inexact)

        def stacked(x):
            sharding = getattr(x, "sharding", None)
            if isinstance(sharding, jax.NamedSharding):
                spec = jax.P(None, *sharding.spec)
                sharding = jax.NamedSharding(sharding.mesh, spec)
            else:
                sharding = None
            return jax.ShapeDtypeStruct((layers, *x.shape), x.dtype, sharding=sharding)

        trained = [jax.tree.map(stacked, args[n]) for n in sorted(numbers)]
        others = {n: args[n] for n in rest}
        # A module may hold integers beside its parameters.
        return jax.jit(jax.grad(loss, allow_int=True)), (trained, others)

    return make_step


def _holds(tree: Any, kinds: tuple[type, ...]) -> bool:
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in nodes)
