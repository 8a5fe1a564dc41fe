"""What exponentials are taken of: an error of it is one of all that they make.

Logits of a softmax or a cross-entropy, what decays are made of. Of sines as well, whose
phase is multiplied: by a number, by what is learned, by another activation. Of sigmoids
that a number makes steep, as a soft threshold's. And of what is rounded in steps that
are learned.
"""

from collections.abc import Collection, Set

from jax.extend.core import Literal

from jaxcompact.analysis.differences import given_inside
from jaxcompact.graph import Graph, Op, behind, number, outside
from jaxcompact.kinds import (
    ADDITIONS,
    EXPONENTIALS,
    REDUCTIONS,
    expensive,
    is_any,
    renames,
)

_ROUNDS = frozenset("ceil floor round".split())
_WITHIN = ADDITIONS | frozenset(
    "broadcast_in_dim clamp convert_element_type div max min mul stop_gradient".split()
)
_SAME = ADDITIONS | {"convert_element_type", "neg"}
_FAST = 2  # radians of a sine for one of what it is made of
# Times a sigmoid's operand is multiplied, above which 4 bits of that are too few. A
# softplus bends there alone.
_STEEP = {"atan": 2.0, "erf": 2.0, "logistic": 4.0, "tanh": 2.0, "softplus": 16.0}


def find_exponents(
    graph: Graph,
    given: Set[int],
    fixed: Collection[int],
    candidates: Collection[int],
    moving: Collection[int] = (),
    steep: bool = True,
) -> set[int]:
    """Those of the ``candidates`` that exponentials are cheaply made of, and ``steep``
    sigmoids.

    Not of softplus and the like, whose derivative is 1 where the exponential is large,
    but where a sum of them is a loss. ``given``: what outputs are made of; ``moving``:
    values with cotangents, as steps that are learned.
    """
    losses = find_losses(graph, given)
    sigmoids = _of_sigmoids(graph, steep) - losses
    ops = [op for op in graph.ops if sigmoids.isdisjoint(op.outs)]
    learned = {v for v in moving if v in fixed}
    todo = [v for op in ops for v in _read_by(op, losses, graph, learned, steep)]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if value in seen or value in fixed:
            continue
        seen.add(value)
        op = graph.made_by.get(value)
        if op is not None and not expensive(op):
            todo += op.reads
    return seen.intersection(candidates)


def find_losses(graph: Graph, given: Set[int]) -> set[int]:
    """What an output is a sum of, or made of such sums, entry by entry."""
    found: set[int] = set()
    for op in reversed(graph.ops):
        sums = op.kind in REDUCTIONS and not given.isdisjoint(op.outs)
        if sums or not found.isdisjoint(op.outs):
            found.update(given.intersection(op.reads))
    return found


def exponents_of(
    op: Op, graph: Graph, learned: Set[int], steep: bool = True
) -> Collection[int]:
    """What an operation takes an exponential of, or a sine that may turn fast, or a
    ``steep`` sigmoid, or rounds in steps that are ``learned``."""
    if op.kind in ("sin", "cos"):
        return [v for v in op.reads if _is_fast(v, graph)]
    if op.kind in _STEEP and steep:
        return [v for v in op.reads if _is_steep(v, op.kind, graph)]
    call = op.kind in ("custom_jvp_call", "custom_vjp_call")
    raised = op.kind in EXPONENTIALS or op.kind == "custom_jvp_call"
    if raised and is_any(op, EXPONENTIALS):
        return op.reads
    rounds = op.kind in _ROUNDS or (call and is_any(op, _ROUNDS))
    return op.reads if rounds and _in_steps(op, learned, graph) else ()


def _read_by(
    op: Op, losses: Set[int], graph: Graph, learned: Set[int], steep: bool
) -> Collection[int]:
    """By it, or by exponentials inside it."""
    if op.kind == "custom_jvp_call" and losses.isdisjoint(op.outs):
        if is_any(op, ("log1p",)):
            sharp = (_is_steep(v, "softplus", graph) for v in op.reads)
            return op.reads if steep and any(sharp) else ()
    if exponents := exponents_of(op, graph, learned, steep):
        return exponents

    def inside(body: Graph) -> set[int]:
        given, fixed = given_inside(body), body.constants.keys()
        return find_exponents(body, given, fixed, body.inputs, steep=steep)

    return outside(op, inside)


def _in_steps(op: Op, learned: Set[int], graph: Graph) -> bool:
    """Whether what it rounds is scaled by what is learned, whose gradient is of what
    rounding leaves over, a part of a step."""
    for value in behind(op.reads, graph, lambda op: op.kind in _WITHIN):
        maker = graph.made_by.get(value)
        if maker is not None and maker.kind in ("mul", "div"):
            by = learned.intersection(maker.reads)
            if by and not by.issuperset(maker.reads):
                return True
    return False


def _of_sigmoids(graph: Graph, steep: bool) -> set[int]:
    """Exponentials that one is added to alone: of a sigmoid, or a softplus.

    But for those that a number makes ``steep``, if these are asked for.
    """
    others: set[int] = {v for v in graph.outputs if isinstance(v, int)}
    for op in graph.ops:
        one = any(isinstance(v, Literal) and v.val == 1 for v in op.ins)
        if op.kind != "log1p" and not (op.kind == "add" and one):
            others.update(op.reads)
    exponentials = (op for op in graph.ops if op.kind in EXPONENTIALS)
    return {
        value
        for op in exponentials
        for value in {*op.outs} - others
        if not (steep and any(_is_steep(v, "logistic", graph) for v in op.reads))
    }


def _is_fast(value: int, graph: Graph) -> bool:
    """Whether a phase may turn faster than what it is made of: that is multiplied, but
    for a small number that is written there."""
    todo, seen = [value], set()
    while todo:
        op = graph.made_by.get(todo.pop())
        if op is None or op in seen:
            continue
        seen.add(op)
        if op.kind in ("mul", "div"):
            by = op.ins[1:] if op.kind == "div" else op.ins
            written = [abs(v.val) for v in by if isinstance(v, Literal)]
            least = 1 / _FAST if op.kind == "div" else 0.0
            if not written or not least < written[0] < _FAST:
                return True
            todo += op.reads
        elif op.kind in ADDITIONS | {"neg", "convert_element_type"} or renames(op):
            todo += op.reads
    return False


def _is_steep(value: int, kind: str, graph: Graph) -> bool:
    return _written(value, graph) > _STEEP[kind]


def _written(value: int, graph: Graph) -> float:
    """By what numbers that are written there it is multiplied, as far as these grow:
    behind them may be one that makes it of size 1."""
    found = largest = 1.0
    while (op := graph.made_by.get(value)) and len(op.reads) == 1:
        factors = op.ins[1:] if op.kind == "div" else op.ins
        by = [number(v) for v in factors if isinstance(v, Literal)]
        if op.kind in ("mul", "div") and by:
            found *= abs(by[0] or 1.0) ** (1 if op.kind == "mul" else -1)
            largest = max(largest, found)
        elif not (op.kind in _SAME or renames(op)):
            break
        (value,) = op.reads
    return largest
