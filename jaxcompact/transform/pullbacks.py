"""Functions that are differentiated from what a forward pass of theirs stored.

What is stored may depend on which inputs move. A rule of `jax.custom_vjp` may ask for
that, but jax 0.12 keeps one structure of residuals for all uses of a jitted function, a
branch or a loop's body: it fails, or takes a gradient of other inputs, where one use
differentiates what another does not.
"""

from collections.abc import Callable, Collection, Hashable
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import (
    Primitive,
    set_current_trace,
    take_current_trace,
    unmapped_aval,
)
from jax.interpreters import ad, batching, mlir, partial_eval

from jaxcompact.arrays import is_inexact
from jaxcompact.transform.examples import summed

Mask = tuple[bool, ...]  # of the inputs, which move


def differentiable[S: Hashable](
    primal: Callable[[S, list[Any]], list[Any]],
    forward: Callable[[S, Mask, list[Any]], tuple[list[Any], Any]],
    backward: Callable[[S, Mask, Any, list[Any]], list[Any]],
    moved: Callable[[S, Mask], Collection[int]],
    reached: Callable[[S, Mask, Collection[int]], Collection[int]],
    label: Callable[[S], str],
) -> Callable[[S, list[Any]], list[Any]]:
    """``primal(static, inputs)``, whose derivative is that of the other two.

    Args:
        primal: gives a list of arrays.
        forward: ``(static, mask, inputs) -> (outputs, residuals)``, any tree of arrays.
        backward: ``(static, mask, residuals, cotangents) -> cotangents`` of the inputs,
            None for those that do not move; a cotangent that is given may be a
            `SymbolicZero`.
        moved: ``(static, mask)``: the outputs that have a tangent. Of the others a loop
            may ask what has no derivative, as how often it has run.
        reached: ``(static, mask, outputs)``: the inputs that have a cotangent if these
            outputs alone have one.
        label: the function's name, for errors.

    In forward mode it raises TypeError.
    """

    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def function(static, inputs):
        return primal(static, inputs)

    @partial(function.defjvp, symbolic_zeros=True)
    def rule(static, primals, all_tangents):
        (inputs,), (tangents,) = primals, all_tangents
        mask = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        outs, residuals = _outside(partial(forward, static, mask), inputs)
        stored, tree = jax.tree.flatten(residuals)
        avals = [jax.typeof(out).to_tangent_aval() for out in outs]
        moving = moved(static, mask)
        live = [i for i, aval in enumerate(avals) if is_inexact(aval) and i in moving]

        def pullback(stored, cts):
            every: list[Any] = list(map(SymbolicZero, avals))
            for i, ct in zip(live, cts, strict=True):
                every[i] = ct
            found = backward(static, mask, jax.tree.unflatten(tree, stored), every)
            return [ct for ct, moves in zip(found, mask, strict=True) if moves]

        def reaches(used):
            found = reached(static, mask, set(compress(live, used)))
            return [i in found for i in compress(range(len(mask)), mask)]

        made = _linear.bind(
            *stored,
            *compress(tangents, mask),
            count=len(stored),
            pullback=pullback,
            reaches=reaches,
            avals=tuple(avals[i] for i in live),
            label=label(static),
        )
        found = dict(zip(live, made, strict=True))
        return outs, [found.get(i, SymbolicZero(aval)) for i, aval in enumerate(avals)]

    return function


def _outside[T](fun: Callable[[list[Any]], T], inputs: list[Any]) -> T:
    """``fun(inputs)``, outside of the trace that a rule's tangents are in: of these it
    makes nothing, and there jax would take the jitted functions in it apart for them.
    """
    with take_current_trace() as trace:
        apart = type(trace).__name__ == "JaxprTrace"
        apart = apart and all(getattr(x, "_trace", None) is not trace for x in inputs)
        with set_current_trace(trace.parent_trace if apart else trace):
            return fun(inputs)


# Of what is stored and of tangents, linear in these: known by its transpose alone.
_linear = Primitive("checkpoint_tangents")
_linear.multiple_results = True


@_linear.def_abstract_eval
def _(*_, avals, **__):
    return list(avals)


def _refuse(*_, label, **__):
    raise TypeError(
        f"checkpoint of {label!r} can't be differentiated in forward mode (jvp, "
        f"jacfwd): what is stored serves cotangents"
    )


_linear.def_impl(_refuse)
ad.primitive_jvps[_linear] = _refuse
mlir.register_lowering(_linear, _refuse)


def _transpose(cts, *operands, count, pullback, **_):
    stored, tangents = operands[:count], operands[count:]
    cts = [SymbolicZero(ct.aval) if isinstance(ct, ad.Zero) else ct for ct in cts]
    found = pullback(stored, cts)
    moved = [
        ct if ad.is_undefined_primal(t) else None  # a tangent that is known, as zeros
        for ct, t in zip(found, tangents, strict=True)
    ]
    return [None] * count + moved


ad.primitive_transposes[_linear] = _transpose


def _cut(used, *given):
    """Without outputs that nothing reads, as what a loop carries for a log, and the
    tangents that none of the others is made of."""
    eqn = given[-1]
    count, pullback, reaches, avals = (
        eqn.params[name] for name in ("count", "pullback", "reaches", "avals")
    )
    if not any(used):
        return [False] * len(eqn.invars), None
    if all(used):
        return [True] * len(eqn.invars), eqn
    kept = reaches(used)
    if not any(kept):  # what has no tangent is evaluated
        kept = [True] * len(kept)

    def whole(some, rest):
        some = iter(some)
        return [next(some) if u else r for u, r in zip(used, rest, strict=True)]

    def of_used(stored, cts):
        found = pullback(stored, whole(cts, map(SymbolicZero, avals)))
        return list(compress(found, kept))

    params = eqn.params | {
        "pullback": of_used,
        "reaches": lambda some: [
            *compress(reaches(whole(some, [False] * len(used))), kept)
        ],
        "avals": tuple(compress(avals, used)),
    }
    reads = [*([True] * count), *kept]
    return reads, eqn.replace(
        invars=list(compress(eqn.invars, reads)),
        outvars=list(compress(eqn.outvars, used)),
        params=params,
    )


partial_eval.dce_rules[_linear] = _cut


def _batched(axis, operands, dims, *, count, pullback, reaches, avals, label):
    """All outputs are of each example; of an input that examples share the cotangent is
    the sum of theirs."""
    places, shared = dims[:count], [d is None for d in dims[count:]]
    tangents = [
        t if d is None else jnp.moveaxis(t, d, 0)
        for t, d in zip(operands[count:], dims[count:], strict=True)
    ]
    mapped = partial(
        jax.vmap,
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )
    mesh_axis = axis.explicit_mesh_axis
    many = tuple(unmapped_aval(axis.size, 0, aval, mesh_axis) for aval in avals)

    def of_all(stored, cts):
        given = {i: ct for i, ct in enumerate(cts) if not isinstance(ct, SymbolicZero)}

        def of_one(stored, given):
            every = enumerate(map(SymbolicZero, avals))
            return pullback(stored, [given.get(i, zero) for i, zero in every])

        of_each = mapped(of_one, in_axes=(list(places), 0))
        return summed(of_each, (list(stored), given), shared)

    made = _linear.bind(
        *operands[:count],
        *tangents,
        count=count,
        pullback=of_all,
        reaches=reaches,
        avals=many,
        label=label,
    )
    return made, [0] * len(made)


batching.fancy_primitive_batchers[_linear] = _batched


def guarding(label: str) -> Callable:
    """The identity, which can't be differentiated."""

    @jax.custom_jvp
    def guard(x):
        return x

    @guard.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            f"checkpoint of {label!r}: what is encoded has no second derivative; use "
            f"jax.checkpoint, or a policy that saves and recomputes alone; a gradient "
            f"that is a constant, as of an adversarial step, is taken at "
            f"jax.lax.stop_gradient of the parameters"
        )

    return guard
