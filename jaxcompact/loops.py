"""What the body of a loop or a branch is given: activations, and what stays exact."""

from collections.abc import Collection, Sequence

from jax.extend.core import Literal

from jaxcompact.graph import Graph, Op, Value, is_float
from jaxcompact.kinds import LAYOUT, expensive, is_any

_SMALL = 16  # times smaller: the maxima and sums of an attention, beside its output
_INFINITE = 1e4  # what masks are filled with
_SHIFTS = frozenset("add add_any convert_element_type max select_n sub".split())
_EXPONENTIALS = frozenset("exp exp2".split())


def inputs_of_body(
    graph: Graph, names: Collection[int], op: Op, body: Graph
) -> tuple[dict[int, str], dict[int, str]]:
    """Names of a body's inputs that are activations; which are not encoded, and why.

    ``names``: the graph's inputs that are activations, no parameters.
    """
    first, count, outer = 0, 0, op.ins[1:]
    if op.kind == "scan":
        first, count, _ = (len(t.vals) for t in op.eqn.params["ft_in"].unpack())
        outer = op.ins
    state = range(first, first + count)
    fixed = graph.independent_of(names)
    begins = [isinstance(v, int) and v not in fixed for v in outer]
    found = _new(body, begins, state)
    infinite = _infinite(graph, fixed, outer)
    sizes = {i: body.avals[body.inputs[i]].size for i in found if i in state}
    keep = {}
    for i in found:
        # What runs through a loop is new every time; all else belongs to the arrays
        # outside, and is not stored again.
        if i not in state:
            keep[i] = "belongs to a tensor outside"
        elif infinite[i]:
            keep[i] = "begins as an infinity, or as good as one"
        elif _is_logarithm(body, body.inputs[i]):
            keep[i] = "a logarithm: its exponential is taken"
        elif _SMALL * sizes[i] <= max(sizes.values()):
            keep[i] = "small beside the loop's state"
    return (
        {body.inputs[i]: f"input.{i}" for i in found},
        {body.inputs[i]: reason for i, reason in keep.items()},
    )


def _new(body: Graph, begins: Sequence[bool], state: range) -> list[int]:
    """Which inputs are not made of parameters and constants alone.

    ``begins``: which are not, as it is first run. A loop's state may begin as zeros.
    """
    while True:
        new = [v for v, b in zip(body.inputs, begins, strict=True) if b]
        fixed = body.independent_of(new)
        ends = [isinstance(v, int) and v not in fixed for v in body.outputs]
        found = [
            b or (i in state and ends[i - state.start]) for i, b in enumerate(begins)
        ]
        if found == begins:
            return [i for i, b in enumerate(begins) if b]
        begins = found


def _infinite(
    graph: Graph, fixed: Collection[int], values: Sequence[Value]
) -> list[bool]:
    """Which are constants that an infinity is written into, or what stands for one."""
    found: set[int] = set()

    def is_infinite(value: Value) -> bool:
        if isinstance(value, Literal):
            return is_float(value.aval) and abs(value.val) >= _INFINITE
        return value in found

    for op in graph.ops:
        if any(map(is_infinite, op.ins)) and all(v in fixed for v in op.reads):
            found.update(op.outs)
    return list(map(is_infinite, values))


def _is_logarithm(body: Graph, state: int) -> bool:
    """Whether exp is taken of it, with no more than something added to it.

    As of the log-probabilities of a hidden Markov model, of CTC, of optimal transport:
    an absolute error of one is a relative one of what they stand for. Not of softplus,
    the sum of an exponential and a constant.
    """
    constants, found = body.independent_of(body.inputs), {state}
    for op in body.ops:
        if found.isdisjoint(op.reads):
            continue
        if op.kind in LAYOUT or op.kind in _SHIFTS:
            found.update(op.outs)
        elif is_any(op, _EXPONENTIALS) and not expensive(op):
            if not any(isinstance(v, Literal) or v in constants for v in op.ins):
                return True
    return False
