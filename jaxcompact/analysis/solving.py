"""Loops that solve for their state: optimal transport's, Newton's.

A state fits what the loop is run on. Beside other data, or once it is rounded, it is no
solution, and what the steps do to the error is multiplied.
"""

from collections.abc import Collection

from jaxcompact.graph import Graph, Op, bodies, scanned_inputs, state_of
from jaxcompact.kinds import LAYOUT, renames

# Linear, if one operand is: but for what guards a divisor from zero.
_LINEAR = frozenset(
    """add add_any clamp convert_element_type div dot_general max mul neg
    reduce_sum""".split()
)
# What makes a logarithm of a sum, of exponentials of what data was added to.
_OF_SUMS = (
    {"add", "add_any", "sub"},
    {"exp", "exp2"},
    {"dot_general", "reduce_sum"},
    {"log"},
)


def solves_for_state(op: Op, fixed: Collection[int]) -> bool:
    """Whether a loop's state is made of inverses of its products with data.

    As Sinkhorn's, ``v = b / (K^T u)``, ``u = a / (K v)``: with another K they are no
    scalings of it. Not normalization, where numerator and divisor are products of the
    state. Or in logarithms, with data that all steps share: ``f = -eps logsumexp((g -
    C) / eps)``. Or of matrix products of the state with itself, as Newton's inverse,
    ``Z (2 - C Z)``, and Newton and Schulz's roots, ``Y (3 - Z Y) / 2``; not with
    parameters between, as attention in a loop.
    """
    state, scanned = state_of(op), scanned_inputs(op)
    for body, _ in bodies(op) if state else ():
        moves = {body.inputs[i]: body.outputs[o] for i, o in state.items()}
        begins = [v for v, end in moves.items() if v != end]
        still = body.independent_of(begins)
        outer = enumerate(zip(body.inputs, op.ins, strict=True))
        data = {v: i for i, (v, o) in outer if isinstance(o, int) and o not in fixed}
        shared = [v for v, i in data.items() if i not in scanned]
        exact, sliced = (body.independent_of({*vs, *begins}) for vs in (data, shared))
        made = _of_inverses(body, begins, still, exact)
        made |= _of_sums(body, begins, still - sliced)
        made |= _of_powers(body, begins, still, exact)
        if any(isinstance(v, int) and v in made for v in moves.values()):
            return True
    return False


def _of_inverses(
    body: Graph, begins: Collection[int], still: Collection[int], exact: Collection[int]
) -> set[int]:
    """What is made of inverses of the state's products with what is not exact."""
    # Linear in the state, or in its inverse; whether with a factor of data.
    linear = dict.fromkeys(begins, False)
    made: set[int] = set()
    for op in body.ops:
        reads = [v for v in op.reads if v in linear]
        others = [v for v in op.reads if v not in linear]
        if not made.isdisjoint(op.reads):
            made.update(op.outs)
        if len(reads) != 1 or not still.issuperset(others):
            continue
        (value,) = reads
        if op.kind in _LINEAR or op.kind in LAYOUT or renames(op):
            linear[op.outs[0]] = linear[value] or not exact.issuperset(others)
        if linear[value] and _inverts(op, value):
            linear[op.outs[0]] = True
            made.update(op.outs)
    return made


def _inverts(op: Op, value: int) -> bool:
    power = op.kind == "integer_pow" and op.eqn.params["y"] == -1
    return power or (op.kind == "div" and value == op.ins[1])


def _of_sums(body: Graph, begins: Collection[int], data: Collection[int]) -> set[int]:
    """What is made of logarithms of sums, of exponentials of the state and data."""
    steps = dict.fromkeys(begins, 0)  # how many of `_OF_SUMS` led to it
    for op in body.ops:
        if of := [steps[v] for v in op.reads if v in steps]:
            done = max(of)
            if done < len(_OF_SUMS) and op.kind in _OF_SUMS[done]:
                if done or not data.isdisjoint(op.reads):  # of the first: which it adds
                    done += 1
            steps |= dict.fromkeys(op.outs, done)
    return {value for value, done in steps.items() if done == len(_OF_SUMS)}


def _of_powers(
    body: Graph, begins: Collection[int], still: Collection[int], exact: Collection[int]
) -> set[int]:
    """What is made of matrix products of the state with itself, and linear in them."""
    linear = dict.fromkeys(begins, False)  # in the state; whether in such products
    for op in body.ops:
        reads = [v for v in op.reads if v in linear]
        others = [v for v in op.reads if v not in linear]
        product = _is_matrix_product(op)
        by_parameters = product and others and exact.issuperset(others)
        if not reads or by_parameters or not still.issuperset(others):
            continue
        if op.kind in _LINEAR or op.kind == "sub" or op.kind in LAYOUT or renames(op):
            made = (product and not others) or any(linear[v] for v in reads)
            linear |= dict.fromkeys(op.outs, made)
    return {value for value, made in linear.items() if made}


def _is_matrix_product(op: Op) -> bool:
    if op.kind != "dot_general":
        return False
    contracting, batch = op.eqn.params["dimension_numbers"]
    each = zip(op.eqn.invars, contracting, batch, strict=True)
    return all(len(gone) + len(shared) < v.aval.ndim for v, gone, shared in each)
