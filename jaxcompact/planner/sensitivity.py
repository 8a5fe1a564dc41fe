"""What rounding each tensor does to the gradient, measured in one pass for all."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcompact import policies
from jaxcompact.codecs import Codec, Quantized
from jaxcompact.planner.block import block_of
from jaxcompact.planner.integer import IntegerProgram
from jaxcompact.policy import (
    Action,
    ChoosesActions,
    Derivative,
    Policy,
    Recompute,
    Save,
    written,
)
from jaxcompact.replay import Residual
from jaxcompact.tensors import Tensor

BASE = policies.int4()
CODECS = Quantized(8), Quantized(4), Quantized(3, group_size=32), Quantized(2, 32)


@dataclass(frozen=True)
class Effect:
    """What a tensor's codecs do to the gradient.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        errors: codec -> mean square that it adds to the gradient, relative to the
            gradient's own, all layers together.
        count: of tensors that have this name in a block.
    """

    shape: tuple[int, ...]
    dtype: Any
    errors: Mapping[Codec, float]
    count: int = 1

    @property
    def entries(self) -> int:
        return self.count * math.prod(self.shape)

    def nbytes(self, codec: Codec) -> int:
        return self.count * codec.nbytes(self.shape, self.dtype)

    def error(self, codec: Codec) -> float:
        """As measured, or in proportion to what the codec does to normal numbers."""
        if codec in self.errors:
            return self.errors[codec]
        worst = max(self.errors, key=self.errors.__getitem__)
        scale = noise(worst)  # 0 if all of them are exact
        return self.errors[worst] * noise(codec) / scale if scale else 0.0


@functools.lru_cache(256)
def noise(codec: Codec) -> float:
    """Mean square error of normal numbers, relative to theirs.

    >>> import jaxcompact as jc
    >>> 0.004 < noise(jc.Quantized(4)) < 0.01
    True
    """
    if isinstance(codec, Quantized):
        codec = replace(codec, axis=-1)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        x = _normal()
        decoded = jax.jit(lambda x: codec.decode(codec.encode(x)))(x)
        return float(jnp.mean((decoded - x) ** 2) / jnp.mean(x**2))


@functools.cache
def _normal() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (256, 256), jnp.float32)


@dataclass(frozen=True)
class Sensitivity:
    """The effect of each tensor of a block, by name: what `sensitivity` found.

    Attributes:
        block: the block's name.
        base: the policy that says what is stored.
        effects: name -> its effect, of what is encoded.
        measure: actions -> their own sensitivity, of the same gradient; None if that
            is not known.
    """

    block: str
    base: ChoosesActions
    effects: Mapping[str, Effect] = field(hash=False)
    measure: Callable[[Mapping[str, Action]], "Sensitivity"] | None = field(
        default=None, compare=False, repr=False
    )

    def error(self, actions: Mapping[str, Action]) -> float:
        """Of the gradient, relative, under actions by name: the root of their sum.

        Raises ValueError for what are none.
        """
        named = isinstance(actions, Mapping)
        if not named or not all(isinstance(a, Action) for a in actions.values()):
            raise ValueError(f"actions must map names to actions, got {actions!r}")
        found = (
            self.effects[name].error(action)
            for name, action in actions.items()
            if name in self.effects and isinstance(action, Codec)
        )
        return sum(found) ** 0.5

    def under(self, actions: Mapping[str, Action]) -> "Sensitivity":
        """Measured again under actions by name, such as a plan's.

        What a policy encodes is measured with everything beside it stored. What a plan
        makes again is made of what it encodes: that moves the gradient further.
        """
        return self.measure(actions) if self.measure else self

    def no_less_than(
        self, other: "Sensitivity", codecs: Sequence[Codec]
    ) -> "Sensitivity":
        """With the effects of another of one codec each, and others in proportion."""
        effects = dict(self.effects)
        for name, effect in other.effects.items():
            [(codec, error)] = effect.errors.items()
            known = effects.get(name)
            if known and known.error(codec) >= error:
                continue
            if known and known.error(codec) > 0:
                ratio = error / known.error(codec)
                errors = {c: e * ratio for c, e in known.errors.items()}
            else:
                each = known.errors if known else codecs
                errors = {
                    c: error * noise(c) / noise(codec)
                    for c in (codec, *each)
                    if c.supports(effect.dtype)
                }
            effects[name] = replace(effect, errors=errors)
        return replace(self, effects=effects)

    def bits(self, actions: Mapping[str, Codec]) -> float:
        """An entry takes with these codecs, scales included, on average.

        Raises ValueError if not each tensor has one.
        """
        codecs = actions if isinstance(actions, Mapping) else {}
        if not all(isinstance(codecs.get(name), Codec) for name in self.effects):
            names = ", ".join(self.effects)
            raise ValueError(
                f"actions must map each of {names} to a codec, got {actions!r}"
            )
        nbytes = entries = 0
        for name, effect in self.effects.items():
            nbytes += effect.nbytes(actions[name])
            entries += effect.entries
        return 8 * nbytes / entries

    def policy(self, bits: float) -> Policy:
        """Automatic precision: the least error at an average of ``bits`` an entry.

        Scales are counted: `Quantized(4)` takes 4.25. Exact, as a small integer
        program: GACT's (arXiv 2206.11357) greedy one leaves bits unused.

        Raises ValueError if ``bits`` are no number, or less than the smallest codecs
        take.
        """
        if not is_real(bits):
            raise ValueError(f"bits must be a number, got {bits!r}")
        program, chosen, size = IntegerProgram(), {}, {}
        errors = [e for effect in self.effects.values() for e in effect.errors.values()]
        scale, cost = 1e6 / (max(errors, default=0.0) or 1.0), {}
        entries, smallest = 0, 0
        for name, effect in self.effects.items():
            one = {}
            for codec, error in effect.errors.items():
                x = program.variable(binary=True)
                one[x], chosen[x] = 1.0, (name, codec)
                size[x] = effect.nbytes(codec)
                cost[x] = error * scale
            program.row(one, 1, 1)
            entries += effect.entries
            smallest += min(size[x] for x in one)
        program.row(size, 0, bits / 8 * entries)
        found = program.minimize(cost)
        if found is None:
            raise ValueError(
                f"bits must be {8 * smallest / entries:.2f} or more, which the "
                f"smallest codecs take; got {bits!r}"
            )
        rules = dict(chosen[x] for x in chosen if found[x])
        return Policy(rules, default=self.base)

    def __str__(self) -> str:
        lines = [self.block]
        for name, effect in self.effects.items():
            each = (f"{written(c)} {e**0.5:.2%}" for c, e in effect.errors.items())
            lines.append(f"  {name:24}{', '.join(each)}")
        return "\n".join(lines)


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
    encodes nothing.

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
        probing = _Probing(policy, asked, starts, (probe,))
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
        return _prepared(make_gradient, _Under(dict(actions), policy), (), probes)[0]

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


def is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def require_codecs(codecs: Any) -> None:
    several = isinstance(codecs, tuple | list)
    if not several or not all(isinstance(codec, Codec) for codec in codecs):
        raise ValueError(f"codecs must be codecs, in a tuple or list, got {codecs!r}")


def _codecs(tensor: Tensor, own: Codec, codecs: Sequence[Codec]) -> tuple[Codec, ...]:
    """The policy's own for this tensor, that with other bits, and the others."""
    found = [own]
    if tensor.scores is not None and isinstance(own, Quantized):
        bits = (c.bits for c in codecs if isinstance(c, Quantized))
        found += (replace(own, bits=b) for b in bits)
    found += (c for c in codecs if c.supports(tensor.dtype))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, eq=False)
class _Under:
    """A plan's actions; what it does not know, as the fused attention of a card that
    is not here, is stored as by the policy ``base``."""

    actions: Mapping[str, Action]
    base: ChoosesActions
    statistics = True

    def decide(self, tensor: Tensor) -> tuple[Action, str]:
        if tensor.name in self.actions:
            return self.actions[tensor.name], "planned"
        return self.base.decide(tensor)


@dataclass(frozen=True, eq=False)
class _Probing:
    """The policy ``base``, but what it encodes is stored as it is, and probed."""

    base: ChoosesActions
    asked: Mapping[str, tuple[Tensor, tuple[Codec, ...]]]
    starts: Mapping[str, int]
    probes: tuple[jax.Array]

    @property
    def statistics(self) -> bool:
        return getattr(self.base, "statistics", False)

    def decide(self, tensor: Tensor) -> tuple[Action, str]:
        action, reason = self.base.decide(tensor)
        if isinstance(action, Derivative):
            return Recompute(), reason
        return (Save() if isinstance(action, Codec) else action), reason

    def probe(self, tensor: Tensor, x: jax.Array, probe: jax.Array) -> jax.Array:
        if tensor.name not in self.asked:
            return x
        _, codecs = self.asked[tensor.name]
        start = self.starts[tensor.name]
        return _probed(codecs, x, probe[start : start + len(codecs)])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _probed(codecs: tuple[Codec, ...], x: jax.Array, probe: jax.Array) -> jax.Array:
    """x; the probe's cotangent is what each codec does to what x's cotangent is of."""
    return x


def _probed_backward(codecs, x, ct):
    def moved(codec):
        decoded = codec.decode(codec.encode(x)).astype(jnp.float32)
        noise = decoded - x.astype(jnp.float32)
        return jnp.sum(jnp.square(noise * ct.astype(jnp.float32)))

    return None, jnp.stack(list(map(moved, codecs)))


_probed.defvjp(lambda codecs, x, probe: (x, x), _probed_backward)
