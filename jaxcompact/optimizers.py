"""Optax transforms that live in a subspace."""

import zlib
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcompact.kernels.explicit import laid_as, placed_as
from jaxcompact.paths import map_named, named_leaves, path_name
from jaxcompact.subspace import Slot, Subspace, require_subspace

Moment = Literal["keep", "reset", "transfer"]

_MOST = 3.4e38  # of float32
# Fields of optax states that are linear in the gradient: Adam, Lion and others (mu),
# momentum (trace), Adafactor's momentum (ema), Momo's (exp_avg), what MultiSteps
# accumulates, and the gradient before of optimistic descent and of Rprop.
_FIRST_MOMENTS = (
    *("mu", "trace", "ema", "exp_avg", "acc_grads"),
    *("previous_gradient", "prev_updates"),
)


class SubspaceState(NamedTuple):
    """State of `in_subspace`: all that a resumed run needs beside the parameters."""

    count: jax.Array  # shape=(), int32: updates made
    generation: jax.Array  # shape=(), int32: which P the moments are in
    key: jax.Array  # uint32: of the subspace's key, and of what P is made of else
    inner: Any


def in_subspace(
    subspace: Subspace,
    inner: optax.GradientTransformation,
    *,
    moment: Moment = "reset",
) -> optax.GradientTransformationExtraArgs:
    """Runs any optax transform on sketched gradients, and lifts what it returns.

    ``N = inner(P^T G)``, update ``= alpha P N``, with P made anew from the key. Takes
    the gradients of `value_and_grad`; the state of ``inner`` is shaped like them, in
    float32 or wider (also where the parameters are bfloat16: a bfloat16 second moment
    with ``b2 = 0.999`` never decays). The updates have the parameters' shapes and
    dtypes. An ``inner`` that reads parameters gets ``P^T W`` for the kernels in the
    subspace, whose entries are ``sqrt(n/r)`` times those of W: what scales by the size
    of the parameters (Adafactor unless ``multiply_by_parameter_scale=False``, LAMB,
    LARS) takes steps so much larger, which ``alpha = (r/n) ** 0.5`` takes back.

    To accumulate gradients, add up those of the microbatches, as they are, and call
    update once. Or put `optax.MultiSteps` inside: its accumulator is r x m and float32,
    and P stays for all of its mini-steps; but what is chained after `in_subspace` (a
    weight decay, a schedule) then runs at every mini-step. `optax.apply_if_finite`,
    `optax.conditionally_transform` and `optax.adaptive_grad_clip` go inside too: around
    it, they meet updates that have other shapes than gradients.

    Args:
        subspace: the one given to `value_and_grad`. A state that was made under another
            key, or other kinds of projections, gives NaN updates, rather than updates
            through the wrong P.
        inner: the transform.
        moment: what becomes of the first moment at a new P, in whose coordinates the
            old one means nothing: ``"keep"`` it all the same (the paper), ``"reset"``
            it to zero, or ``"transfer"`` it, ``M <- (r/n) P_new^T P_old M``, the least
            squares estimate. After a reset, as Adam's count goes on, updates are ``1 -
            b1``, ``1 - b1^2``, ... of their size at first. Second moments are kept:
            they hardly depend on P. First moments are the state's fields ``mu``,
            ``trace``, ``ema``, ``exp_avg``, ``acc_grads``, ``previous_gradient`` and
            ``prev_updates``; one that a variance is taken around
            (``rmsprop(centered=True)``), or of another shape than a sketch, is reset
            where others are transferred. All else is kept as well: first moments of
            other names (Adan's, AdEMAMix', SM3's) and of `optax.flatten`, and past
            positions, distances from them and sums of updates or gradients, as
            ``schedule_free``, ``prodigy``, ``dadapt_adamw``, ``cocob``, ``mechanize``,
            ``apply_every`` or ``lbfgs`` have, which mean nothing under a
            new P. For those take a period that is longer than the run; for
            `optax.contrib.sam`, which goes inside, a multiple of its ``sync_period``.
            What gives gradients, or zeros like them, in the place of updates goes
            inside too: ``apply_if_finite``, ``conditionally_mask``. To freeze a kernel
            of the subspace chain ``optax.masked(optax.set_to_zero(), ...)`` after it.

    Raises ValueError for an unknown ``moment``, for a ``subspace`` or an ``inner`` that
    is none, for an ``inner`` with several `optax.MultiSteps`, for parameters that do
    not fit the subspace, for an update without ``params``, for a state of other shapes,
    as of another rank, and for a gradient leaf that is not the sketch that the subspace
    makes, or of another shape than a parameter that is not in it: several subspaces, of
    one key and period, go into an `optax.partition`, each in its own. That rules match
    a kernel which goes to another transform is seen where its label is a leaf's, not
    where it is a whole module's.

    Source: CompAct (arXiv 2410.15352), algorithm 3; Flora (arXiv 2402.03293) and LDAdam
    (arXiv 2410.16103) for the transfer.

    >>> import jax, jax.numpy as jnp, optax, jaxcompact as jc
    >>> params = {"kernel": jnp.ones((16, 3))}
    >>> subspace = jc.Subspace({"kernel": jc.Projection(rank=4)}, key=jax.random.key(0))
    >>> tx = jc.in_subspace(subspace, optax.adam(0.1))
    >>> state = tx.init(params)
    >>> state.inner[0].mu["kernel"].shape
    (4, 3)
    >>> updates, state = tx.update({"kernel": jnp.ones((4, 3))}, state, params)
    >>> updates["kernel"].shape, int(jc.update_count(state))
    ((16, 3), 1)
    """
    require_subspace(subspace)
    parts = (getattr(inner, name, None) for name in ("init", "update"))
    if isinstance(inner, type) or not all(map(callable, parts)):
        raise ValueError(f"inner must be an optax transform, got {inner!r}")
    if not isinstance(moment, str) or moment not in get_args(Moment):
        raise ValueError(
            f"moment must be one of {', '.join(get_args(Moment))}, got {moment!r}"
        )
    inner = optax.with_extra_args_support(inner)

    def init(params):
        # What `optax.tree_map_params` gives in their place: a node without leaves.
        known = isinstance(params, dict | list | tuple | None)
        stands_in = not known and not jax.tree.leaves(params)
        slots = {} if stands_in else subspace.slots(params)
        generation, key = jnp.zeros((), jnp.int32), subspace.key_here()
        inner_state = inner.init(_sketched(slots, key, generation, params))
        if (many := len(_all(inner_state, optax.MultiStepsState))) > 1:
            raise ValueError(
                f"inner must hold one optax.MultiSteps at most, since P stays for all "
                f"of its mini-steps, got {many}: put one around all that accumulates"
            )
        return SubspaceState(
            count=jnp.zeros((), jnp.int32),
            generation=generation,
            key=_fingerprint(key, slots),
            inner=inner_state,
        )

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "params must be given to update: lifting needs their shapes"
            )
        if not isinstance(state, SubspaceState):
            got = type(state).__name__
            raise ValueError(f"state must be what init returned, got a {got}")
        slots = subspace.slots(params)
        _check_sketches(slots, updates, params)
        key = subspace.key_here()
        _check_state(inner, state, partial(_sketched, slots, key), params)
        generation = subspace.generation(state.count)
        inner_state = state.inner
        if moment != "keep":
            inner_state = jax.lax.cond(
                generation != state.generation,
                lambda s: _renewed(s, slots, key, state.generation, generation, moment),
                lambda s: s,
                inner_state,
            )
        updates = jax.tree.map(_wide, updates)
        updates, inner_state = inner.update(
            updates,
            inner_state,
            _sketched(slots, key, generation, params),
            **extra_args,
        )
        # P depends on the updates, so that no P outlives the forward pass to meet it.
        generation, updates = jax.lax.optimization_barrier((generation, updates))
        right_key = jnp.all(state.key == _fingerprint(key, slots))

        def lifted(name, update, param):
            slot = slots.get(name)
            if slot is None:
                return update.astype(jnp.result_type(param))
            scale = jnp.where(right_key, float(slot.projection.alpha), jnp.nan)

            def lift(key, n_rm):
                w_nm = slot.projection.lift(key, n_rm, slot.width)
                return laid_as((scale * w_nm).astype(param.dtype), param)

            return slot.map_layers(lift, key, generation, update)

        updates = map_named(lifted, updates, params)
        accumulator = _find(inner_state, optax.MultiStepsState)
        count = (
            optax.safe_increment(state.count)
            if accumulator is None
            else jnp.asarray(accumulator.gradient_step, jnp.int32)
        )
        return updates, SubspaceState(count, generation, state.key, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_subspace_adam(
    subspace: Subspace,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    moment: Moment = "reset",
) -> optax.GradientTransformationExtraArgs:
    """Adam whose moments are r x m: `in_subspace` around `optax.scale_by_adam`.

    >>> import jax, jax.numpy as jnp, jaxcompact as jc
    >>> subspace = jc.Subspace({"kernel": jc.Projection(rank=4)}, key=jax.random.key(0))
    >>> state = jc.scale_by_subspace_adam(subspace).init({"kernel": jnp.ones((16, 3))})
    >>> state.inner.nu["kernel"].shape
    (4, 3)
    """
    for name, value, most in (("b1", b1, 1.0), ("b2", b2, 1.0), ("eps", eps, _MOST)):
        if not _is_scalar(value, 0.0, most):
            raise ValueError(f"{name} must be 0 or more, below {most}, got {value!r}")
    return in_subspace(subspace, optax.scale_by_adam(b1, b2, eps), moment=moment)


def subspace_adamw(
    learning_rate: optax.ScalarOrSchedule,
    subspace: Subspace,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any | Callable | None = None,
    *,
    moment: Moment = "reset",
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` with Adam in a subspace; the weight decay acts on the weights.

    >>> import jax, jax.numpy as jnp, jaxcompact as jc
    >>> subspace = jc.Subspace({"kernel": jc.Projection(rank=4)}, key=jax.random.key(0))
    >>> tx = jc.subspace_adamw(1e-3, subspace)
    >>> int(jc.update_count(tx.init({"kernel": jnp.ones((16, 3))})))
    0
    """
    given = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    for name, value in given.items():
        if not callable(value) and not _is_scalar(value, -_MOST, _MOST):
            raise ValueError(f"{name} must be a number or a schedule, got {value!r}")
    return optax.chain(
        scale_by_subspace_adam(subspace, b1, b2, eps, moment=moment),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def update_count(opt_state: Any) -> jax.Array:
    """Updates made so far, from the state of any chain that holds an `in_subspace`.

    It is the ``step`` that `value_and_grad` wants. With `optax.MultiSteps` inside, it
    counts whole accumulations. Raises ValueError if there is no subspace in the state.
    """
    state = _find(opt_state, SubspaceState)
    if state is None:
        raise ValueError("opt_state must hold the state of an in_subspace, found none")
    return state.count


def _fingerprint(key: jax.Array, slots: dict[str, Slot]) -> jax.Array:
    """Of all that P's are made of, but for the generation."""
    drawn = ";".join(sorted(f"{slot.path}={slot.drawn}" for slot in slots.values()))
    number = np.uint32(zlib.crc32(drawn.encode()))
    return jax.random.key_data(jax.random.fold_in(key, number))


def _is_scalar(value: Any, least: float, most: float) -> bool:
    """A number in this range, or an array, as `optax.inject_hyperparams` gives it."""
    if isinstance(value, jax.Array | np.ndarray):
        return value.shape == () and jnp.issubdtype(value.dtype, jnp.number)
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and least <= value < most


def _find(tree: Any, kind: type) -> Any:
    return next(iter(_all(tree, kind)), None)


def _all(tree: Any, kind: type) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _check_sketches(slots: dict[str, Slot], updates: Any, params: Any) -> None:
    named = named_leaves(updates)
    shapes = {name: jnp.shape(leaf) for name, leaf in named_leaves(params)}
    if missing := slots.keys() - dict(named).keys():
        raise ValueError(f"updates: there is no gradient of {min(missing)!r}")
    for name, leaf in named:
        slot = slots.get(name)
        shape = getattr(leaf, "shape", None)
        if not isinstance(shape, tuple):
            raise ValueError(f"updates: {name!r} must be an array: {leaf!r}")
        if slot is not None and shape != slot.sketch_shape:
            whole = (*slot.stack, slot.width, slot.outputs)
            around = " (optax.MultiSteps goes inside)" if shape == whole else ""
            raise ValueError(
                f"updates: the gradient of {slot.path!r} must be its sketch of shape "
                f"{slot.sketch_shape}, as jaxcompact.value_and_grad returns it, got "
                f"{shape}{around}"
            )
        if slot is None and shape != shapes.get(name, shape):
            raise ValueError(
                f"updates: the gradient of {name!r} must have the parameter's shape "
                f"{shapes[name]}, got {shape}: is it in another subspace? Each of "
                f"several goes into an optax.partition"
            )


def _check_state(inner: Any, state: SubspaceState, sketched: Any, params: Any) -> None:
    """One of another rank would broadcast."""

    def fresh(generation, params):
        return inner.init(sketched(generation, params))

    wanted = jax.eval_shape(fresh, state.generation, params)
    wanted = dict(jax.tree.leaves_with_path(wanted))
    for path, leaf in jax.tree.leaves_with_path(state.inner):
        shape = getattr(wanted.get(path), "shape", None)
        if shape is not None and jnp.shape(leaf) != shape:
            raise ValueError(
                f"state: {path_name(path)!r} must have the shape {shape} of this "
                f"subspace and inner, got {jnp.shape(leaf)}"
            )


def _sketched(slots: dict[str, Slot], key, generation, params: Any) -> Any:
    """``params`` as ``inner`` sees them: float32, ``P^T W`` in the subspace."""

    def sketched(name, param):
        param = _wide(param)
        slot = slots.get(name)
        if slot is None:
            return param

        def project(key, w_nm):
            return laid_as(slot.projection.project(key, w_nm.T).T, w_nm)

        return placed_as(slot.map_layers(project, key, generation, param), param)

    return map_named(sketched, params)


def _wide(x: jax.Array) -> jax.Array:
    """In float32, or wider where x is."""
    x = jnp.asarray(x)
    with jax.numpy_dtype_promotion("standard"):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _renewed(state, slots: dict[str, Slot], key, old, new, moment: Moment):
    """The inner state with its first moments taken into the new P's coordinates."""

    def zero(name, m):
        return m if slots.get(name) is None else jnp.zeros_like(m)

    def transferred(name, m):
        slot = slots.get(name)
        if slot is None or m.shape != slot.sketch_shape:
            return zero(name, m)

        def transfer(old_key, new_key, m_rm):
            w_nm = slot.projection.lift(old_key, m_rm, slot.width)
            new_rm = slot.projection.project(new_key, w_nm.T).T
            return laid_as(new_rm * (slot.rank / slot.width), m_rm)

        new_keys = slot.keys(key, new)
        return slot.map_layers(transfer, key, old, new_keys, m)

    def walk(node, name=None, moment=moment):
        if name in _FIRST_MOMENTS:
            return map_named(zero if moment == "reset" else transferred, node)
        if hasattr(node, "_fields"):
            # Its mean squares, which are kept, must not be below the mean's square.
            centered = type(node).__name__.startswith("ScaleByRStdDev")
            inside = partial(walk, moment="reset" if centered else moment)
            return type(node)(*map(inside, node, node._fields))
        parts, tree = jax.tree.flatten(node, is_leaf=lambda part: part is not node)
        return node if parts and parts[0] is node else tree.unflatten(map(walk, parts))

    return walk(state)
