"""What rounding each tensor does to the gradient, measured in one pass for all."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxcompact import policies
from jaxcompact.actions import Action
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.codecs import Codec, Quantized
from jaxcompact.compress import alike
from jaxcompact.graph import graph_of, made_of
from jaxcompact.paths import leaves_with_path, path_name
from jaxcompact.planner.arguments import arrays_of, of_arrays, require_positive
from jaxcompact.planner.block import block_of, bodies_of
from jaxcompact.planner.effects import (
    Effect,
    Sensitivity,
    noise_of,
    require_codecs,
)
from jaxcompact.planner.probing import Probing, Under
from jaxcompact.policy import ChoosesActions, Policy, require_policy
from jaxcompact.reals import as_reals
from jaxcompact.transform.sources import Residual

BASE = policies.int4()
_CHANCE = 6  # standard errors, about 4 of them of a mean of squares of normal numbers
CODECS = Quantized(8), Quantized(4), Quantized(3, group_size=32), Quantized(2, 32)


def sensitivity(
    make_gradient: Callable[[ChoosesActions], tuple[Callable, tuple]],
    *,
    policy: ChoosesActions = BASE,
    codecs: Sequence[Codec] = CODECS,
    key: jax.Array | None = None,
    probes: int = 4,
) -> Sensitivity:
    """What each codec, used on each tensor that a policy encodes, does to the gradient.

    To first order the gradient moves by ``J e``, where e is what rounding adds to a
    tensor, and J how the gradient depends on what is stored. If entries err each by
    itself, its mean square is ``sum_k (sum_m J_mk^2) e_k^2``, and ``(J^T v)_k^2`` has
    the inner sum as its mean for random signs v: *one* pass backwards through the
    backward pass gives all tensors, layers and codecs at once. GACT (arXiv 2206.11357)
    takes three gradients for each tensor instead. Rows that are alike, as padding is,
    err alike: then ``(v^T J e)^2``, whose mean is ``|J e|^2``, is far larger, and is
    taken. Of a few v it is known to a third.

    Args:
        make_gradient: ``policy -> (gradient, args)``, with arrays;
            ``gradient(*args)`` is the gradient as a pytree, such as ``jax.grad(loss)``.
            It uses ``jaxcompact.checkpoint(block, policy=policy, ...)`` on one block,
            which must have second derivatives (cuDNN's attention has none). A few
            sequences are enough: of more, gradients suffer less.
        policy: says what is stored at all; its codecs are measured too. What it
            encodes inside a block's own loops and branches has no effects: under a
            plan, all of it is measured together. A block that is a loop has none.
        codecs: how it may be stored.
        key: of the signs.
        probes: how many v; the error of the sum falls with the root of their number.

    Nothing is stored or drawn anywhere else: parameters, statistics and the user's
    random numbers stay as they are. Memory: that of exact training, twice to three
    times.

    Raises ValueError for arguments that are none of these, for a function that returns
    more than the gradient, for a gradient that is not finite or 0, for one that
    checkpoints no block or several, and for a policy that encodes nothing. jax raises
    NotImplementedError for a block in a `jax.shard_map` over Explicit axes, and for
    what it can't differentiate twice.

    >>> import jax, jax.numpy as jnp, jaxcompact as jc
    >>> def block(w, x):
    ...     return x + jnp.tanh(x @ w[0]) @ w[1]
    >>> w = jax.random.normal(jax.random.key(0), (2, 64, 64)) / 8
    >>> x = jax.random.normal(jax.random.key(1), (256, 64))
    >>> def make_gradient(policy):
    ...     wrapped = jc.checkpoint(block, policy=policy, params=0)
    ...     return jax.grad(lambda w, x: jnp.square(wrapped(w, x)).mean()), (w, x)
    >>> found = jc.sensitivity(make_gradient)
    >>> sorted(found.effects)
    ['dot_general.0']
    """
    measure, args = measuring(
        make_gradient, policy=policy, codecs=codecs, probes=probes
    )
    for path, x in leaves_with_path(args):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(
                f"make_gradient must return arrays, not their shapes alone, got {x} "
                f"at args/{path_name(path)}"
            )
    return measure(jax.random.key(0) if key is None else key, *args)


def measuring(
    make_gradient: Callable[[ChoosesActions], tuple[Callable, tuple]],
    *,
    policy: ChoosesActions = BASE,
    codecs: Sequence[Codec] = CODECS,
    probes: int = 4,
) -> tuple[Callable[..., Sensitivity], tuple]:
    """``measure(key, *args)``, compiled once for many, and the first args.

    What is no array among these is meant in all others too.
    """
    require_positive("probes", probes)
    require_policy(policy)
    require_codecs(codecs)
    found = _prepared(make_gradient, policy, codecs, probes)
    if found.encodes_nothing and not found.inside:
        raise ValueError(f"policy must encode something of {found.block!r}")
    return found.measure, found.args


class _Prepared(NamedTuple):
    """As `measuring`; ``inside``: what is done in loops and branches, if that encodes
    anything; ``moved``: by how much all together move the gradient, squared and
    relative to its own square."""

    block: str
    encodes_nothing: bool
    inside: dict[str, Action]
    args: tuple
    measure: Callable[..., Sensitivity]
    moved: Callable[..., jax.Array]


def _prepared(
    make_gradient: Callable[[ChoosesActions], tuple[Callable, tuple]],
    policy: ChoosesActions,
    codecs: Sequence[Codec],
    probes: int,
) -> _Prepared:
    traces = block_of(make_gradient, policy, "make_gradient")
    block = traces.traced.label
    asked: dict[str, tuple[Tensor, tuple[Codec, ...]]] = {}
    counts: Counter[str] = Counter()
    for slot in traces.replay.slots:
        tensor, source = slot.tensor, slot.source
        lossy = isinstance(slot.action, Codec) and tensor.floating
        if not lossy or not isinstance(source, int | Residual):
            continue
        found = asked.setdefault(
            tensor.name, (tensor, _codecs(tensor, slot.action, codecs))
        )
        counts[tensor.name] += 1
        if found[0].shape != tensor.shape:
            raise ValueError(
                f"tensors of one name must have one shape, got {found[0]}, {tensor}"
            )
    bodies = bodies_of(traces)
    lossy = any(noise_of(action, tensor) for tensor, action in bodies.values())
    inside = {n: action for n, (_, action) in bodies.items()} if lossy else {}
    sizes = [len(each) for _, each in asked.values()]
    starts = dict(zip(asked, np.cumsum([0, *sizes]).tolist(), strict=False))
    _, args = make_gradient(policy)

    # Leaves, as an NNX module belongs to the trace that it is made in.
    def gradient(policy, leaves):
        of, _ = make_gradient(policy)
        return of_arrays(of, args)(leaves)

    def probed_gradient(probe, *leaves):
        return gradient(Probing(policy, asked, starts, (probe,)), leaves)

    def score(probe, signs, *leaves):
        trace = jax.make_jaxpr(probed_gradient, return_shape=True)
        jaxpr, found = trace(probe, *leaves)
        if asked:
            _require_gradient(found, args, jaxpr)
        grads = jaxpr_as_fun(jaxpr)(probe, *leaves)
        keys = jax.random.split(signs, len(grads))
        moved = squared = 0.0
        for k, g in zip(keys, grads, strict=True):
            g = as_reals(g).astype(jnp.float32)
            moved += jnp.sum(g * jax.random.rademacher(k, g.shape, jnp.float32))
            squared += jnp.sum(g * g)
        return moved, squared

    probed = jax.jit(jax.grad(score, has_aux=True))

    @jax.jit
    def moved(*leaves):
        exact, found = (
            jax.tree.leaves(gradient(p, leaves)) for p in (Policy(), policy)
        )
        squares = [
            [jnp.sum(jnp.square(as_reals(x).astype(jnp.float32))) for x in (a - b, a)]
            for a, b in zip(exact, found, strict=True)
        ]
        difference, whole = map(sum, zip(*squares, strict=True))
        return difference / whole

    @functools.cache
    def prepared_under(actions: tuple[tuple[str, Action], ...]) -> _Prepared:
        return _prepared(make_gradient, Under(dict(actions), policy), (), probes)

    @functools.cache
    def prepared_inside(actions: tuple[tuple[str, Action], ...]) -> _Prepared:
        return _prepared(make_gradient, Under(dict(actions), Policy()), (), probes)

    def measure(key: jax.Array, *args: Any) -> Sensitivity:
        total, leaves = np.zeros((2, sum(sizes))), arrays_of(args)
        for k in jax.random.split(key, probes) if asked else ():
            zeros = jnp.zeros(total.shape, jnp.float32)
            moved, squared = probed(zeros, k, *leaves)
            total += np.asarray(moved, np.float64) / float(squared) / probes
        alone, together = total
        alike = together > (1 + _CHANCE * probes**-0.5) * alone
        total = np.where(alike, together, alone)
        effects = {}
        for name, (tensor, each) in asked.items():
            found = total[starts[name] :][: len(each)].tolist()
            if not np.isfinite(found).all():
                raise ValueError(
                    f"sensitivity of {name!r} in {block!r} is {found[0]}: the "
                    f"gradient must be finite, and not 0"
                )
            errors = dict(zip(each, found, strict=True))
            effects[name] = Effect(tensor.shape, tensor.dtype, errors, counts[name])

        def under(actions: Mapping[str, Action]) -> Sensitivity:
            plan, inside = prepared_under(tuple(actions.items())), 0.0
            if plan.inside:
                alone = prepared_inside(tuple(plan.inside.items()))
                inside = float(alone.moved(*leaves))
            if plan.encodes_nothing:
                return Sensitivity(block, policy, {}, under).in_all(inside, inside)
            found = plan.measure(key, *args)
            return found.in_all(float(plan.moved(*leaves)), inside)

        return Sensitivity(block, policy, effects, under)

    return _Prepared(block, not asked, inside, args, measure, moved)


def _require_gradient(found: Any, args: tuple, jaxpr: ClosedJaxpr) -> None:
    """Of what else a function returns, the loss or what has_aux adds, nothing moves.

    The square of it would count as the gradient's.
    """
    if not isinstance(found, tuple) or any(map(partial(_alike, found), args)):
        return
    graph = graph_of(jaxpr)
    # Not into a probe: that of what it is of, which it returns, is no derivative.
    moved = made_of(graph, {graph.inputs[0]: 1}, closed=("custom_vjp_call",))
    outputs = iter(graph.outputs)
    for i, part in enumerate(found):
        of_part = [next(outputs) for _ in jax.tree.leaves(part)]
        if of_part and not any(moved.get(v) for v in of_part if isinstance(v, int)):
            shapes = ", ".join(str(leaf) for leaf in jax.tree.leaves(part))
            raise ValueError(
                f"make_gradient must return what gives the gradient alone, as jax.grad "
                f"does, got a tuple whose part {i} nothing that is encoded changes "
                f"({shapes}), as jax.value_and_grad's value or what has_aux adds"
            )


def _alike(a: Any, b: Any) -> bool:
    same = jax.tree.structure(a) == jax.tree.structure(b)
    return same and jax.tree.all(
        jax.tree.map(lambda x, y: x.shape == jnp.shape(y), a, b)
    )


def _codecs(tensor: Tensor, own: Codec, codecs: Sequence[Codec]) -> tuple[Codec, ...]:
    """The policy's own for this tensor, that with other bits, and the others.

    As a policy says them: the tensor's bound is theirs where they are applied.
    """
    if type(own) is Quantized and own.bound == tensor.bound:
        own = replace(own, bound=None)
    found = [own]
    if tensor.scores is not None and isinstance(own, Quantized):
        bits = (c.bits for c in codecs if isinstance(c, Quantized))
        found += (replace(own, bits=b) for b in bits)
    found += alike((c for c in codecs if c.supports(tensor.dtype)), own, tensor)
    return tuple(dict.fromkeys(found))
