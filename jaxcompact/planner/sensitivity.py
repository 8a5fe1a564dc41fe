"""What rounding each tensor does to the gradient, measured in one pass for all."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcompact import policies
from jaxcompact.codecs import Codec, Quantized
from jaxcompact.planner.block import block_of
from jaxcompact.planner.effects import Effect, Sensitivity, require_codecs
from jaxcompact.planner.probing import Probing, Under
from jaxcompact.policy import Action, ChoosesActions
from jaxcompact.sources import Residual
from jaxcompact.tensors import Tensor

BASE = policies.int4()
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
    tensor, each entry by itself, and J how the gradient depends on what is stored. Its
    mean square is ``sum_k (sum_m J_mk^2) e_k^2``, and ``(J^T v)_k^2`` has the inner
    sum as its mean for random signs v: *one* pass backwards through the backward pass
    gives all tensors, layers and codecs at once. GACT (arXiv 2206.11357) takes three
    gradients for each tensor instead.

    Args:
        make_gradient: ``policy -> (gradient, args)``, with arrays;
            ``gradient(*args)`` is the gradient as a pytree, such as ``jax.grad(loss)``.
            It uses ``jaxcompact.checkpoint(block, policy=policy, ...)`` on one block,
            which must have second derivatives (cuDNN's attention has none). A few
            sequences are enough: of more, gradients suffer less.
        policy: says what is stored at all; its codecs are measured too. What it
            encodes inside a block's own loops and branches is not measured.
        codecs: how it may be stored.
        key: of the signs.
        probes: how many v; the error of the sum falls with the root of their number.

    Nothing is stored or drawn anywhere else: parameters, statistics and the user's
    random numbers stay as they are. Memory: that of exact training, twice to three
    times.

    Raises ValueError for arguments that are none of these, for a gradient that is not
    finite or 0, for one that checkpoints no block or several, and for a policy that
    encodes nothing. jax raises NotImplementedError for a block in a `jax.shard_map`
    over Explicit axes, and for what it can't differentiate twice.

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
    return measure(jax.random.key(0) if key is None else key, *args)


def measuring(
    make_gradient: Callable[[ChoosesActions], tuple[Callable, tuple]],
    *,
    policy: ChoosesActions = BASE,
    codecs: Sequence[Codec] = CODECS,
    probes: int = 4,
) -> tuple[Callable[..., Sensitivity], tuple]:
    """``measure(key, *args)``, compiled once for many, and the first args."""
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise ValueError(f"probes must be a positive int, got {probes!r}")
    if isinstance(policy, type) or not hasattr(policy, "decide"):
        raise ValueError(f"policy must be a jaxcompact policy, got {policy!r}")
    require_codecs(codecs)
    measure, args, name = _prepared(make_gradient, policy, codecs, probes)
    if name:
        raise ValueError(
            f"policy must encode something of {name!r}, outside of its loops"
        )
    return measure, args


def _prepared(
    make_gradient: Callable[[ChoosesActions], tuple[Callable, tuple]],
    policy: ChoosesActions,
    codecs: Sequence[Codec],
    probes: int,
) -> tuple[Callable[..., Sensitivity], tuple, str | None]:
    """As `measuring`; and the block's name if nothing of it is encoded."""
    traces = block_of(make_gradient, policy, "make_gradient")
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
    sizes = [len(each) for _, each in asked.values()]
    starts = dict(zip(asked, np.cumsum([0, *sizes]).tolist(), strict=False))
    _, args = make_gradient(policy)
    tree = jax.tree.structure(tuple(args))

    # Leaves, as an NNX module belongs to the trace that it is made in.
    def score(probe, signs, *leaves):
        probing = Probing(policy, asked, starts, (probe,))
        gradient, _ = make_gradient(probing)
        grads = jax.tree.leaves(gradient(*jax.tree.unflatten(tree, leaves)))
        keys = jax.random.split(signs, len(grads))
        moved = squared = 0.0
        for k, g in zip(keys, grads, strict=True):
            g = g.astype(jnp.float32)
            moved += jnp.sum(g * jax.random.rademacher(k, g.shape, jnp.float32))
            squared += jnp.sum(g * g)
        return moved, squared

    probed = jax.jit(jax.grad(score, has_aux=True))

    @functools.cache
    def measure_under(actions: tuple[tuple[str, Action], ...]):
        return _prepared(make_gradient, Under(dict(actions), policy), (), probes)[0]

    def measure(key: jax.Array, *args: Any) -> Sensitivity:
        total = np.zeros(sum(sizes))
        for k in jax.random.split(key, probes):
            zeros, leaves = jnp.zeros(sum(sizes), jnp.float32), jax.tree.leaves(args)
            moved, squared = probed(zeros, k, *leaves)
            total += np.asarray(moved, np.float64) / float(squared) / probes
        effects = {}
        for name, (tensor, each) in asked.items():
            found = total[starts[name] :][: len(each)].tolist()
            if not np.isfinite(found).all():
                raise ValueError(
                    f"sensitivity of {name!r} in {traces.traced.label!r} is "
                    f"{found[0]}: the gradient must be finite, and not 0"
                )
            errors = dict(zip(each, found, strict=True))
            effects[name] = Effect(tensor.shape, tensor.dtype, errors, counts[name])

        def under(actions: Mapping[str, Action]) -> Sensitivity:
            return measure_under(tuple(actions.items()))(key, *args)

        return Sensitivity(traces.traced.label, policy, effects, under)

    return measure, args, None if asked else traces.traced.label


def _codecs(tensor: Tensor, own: Codec, codecs: Sequence[Codec]) -> tuple[Codec, ...]:
    """The policy's own for this tensor, that with other bits, and the others."""
    found = [own]
    if tensor.scores is not None and isinstance(own, Quantized):
        bits = (c.bits for c in codecs if isinstance(c, Quantized))
        found += (replace(own, bits=b) for b in bits)
    found += (c for c in codecs if c.supports(tensor.dtype))
    return tuple(dict.fromkeys(found))
