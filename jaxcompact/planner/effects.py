"""What rounding each tensor does to the gradient, and what follows: errors, bits."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.actions import Action, of_value, written
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.codecs import Codec, Quantized
from jaxcompact.planner.integer import IntegerProgram
from jaxcompact.policy import ChoosesActions, Policy

_LOST = 1e6  # a thousand times the gradient


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


def noise_of(action: Action, tensor: Tensor) -> float:
    """The same of what is done with a tensor; 0 if that is exact."""
    value = of_value(action)
    return noise(value) if tensor.floating and isinstance(value, Codec) else 0.0


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
            is not known, as of one that was pickled.
        inside: what is encoded in the bodies of loops and branches adds, as errors of
            effects; of a sensitivity `under` actions, else 0.
    """

    block: str
    base: ChoosesActions
    effects: Mapping[str, Effect] = field(hash=False)
    measure: Callable[[Mapping[str, Action]], "Sensitivity"] | None = field(
        default=None, compare=False, repr=False
    )
    inside: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Without the gradient, a function that is compiled here."""
        return self.__dict__ | {"measure": None}

    def error(self, actions: Mapping[str, Action]) -> float:
        """Of the gradient, relative, under actions by name: the root of their sum.

        Raises ValueError for what are none.
        """
        _require_actions(actions)
        found = (
            self.effects[name].error(of_value(action))
            for name, action in actions.items()
            if name in self.effects and isinstance(of_value(action), Codec)
        )
        return (self.inside + sum(found)) ** 0.5

    def under(self, actions: Mapping[str, Action]) -> "Sensitivity":
        """Measured again under actions by name, such as a plan's.

        What a policy encodes is measured with everything beside it stored. What a plan
        makes again is made of what it encodes: that moves the gradient further. The sum
        is no less than what all of it does together, which is found by a gradient. So
        is what is encoded in the bodies of loops and branches, by a gradient of that
        alone.

        Raises ValueError for what are none.
        """
        _require_actions(actions)
        return self.measure(actions) if self.measure else self

    def in_all(self, moved: float, inside: float) -> "Sensitivity":
        """Effects of one codec each that are at least that, with what loops add.

        What is not finite is more than any plan may have.
        """
        moved, inside = (x if math.isfinite(x) else _LOST for x in (moved, inside))
        total = sum(
            e for effect in self.effects.values() for e in effect.errors.values()
        )
        if not total:
            return replace(self, inside=max(moved, inside))
        ratio = max(1.0, (moved - inside) / total)
        effects = {
            name: replace(
                effect, errors={c: e * ratio for c, e in effect.errors.items()}
            )
            for name, effect in self.effects.items()
        }
        return replace(self, effects=effects, inside=inside)

    def no_less_than(
        self, other: "Sensitivity", codecs: Sequence[Codec]
    ) -> "Sensitivity":
        """With the effects of another of one codec each, and others in proportion."""
        effects = dict(self.effects)
        for name, effect in other.effects.items():
            [(codec, error)] = effect.errors.items()
            known = effects.get(name)
            if not error or (known and known.error(codec) >= error):
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

    def _counted(self) -> dict[str, Effect]:
        """Those that move the gradient; others are of outputs that nothing reads."""
        moving = {n: e for n, e in self.effects.items() if any(e.errors.values())}
        return moving or dict(self.effects)

    def bits(self, actions: Mapping[str, Codec]) -> float:
        """An entry takes with these codecs, scales included, on average.

        What moves the gradient by none of its codecs is not counted: compiled, it is
        not stored, as an output's that nothing reads.

        Raises ValueError if not each tensor has one.
        """
        codecs = actions if isinstance(actions, Mapping) else {}
        if not all(isinstance(codecs.get(name), Codec) for name in self.effects):
            names = ", ".join(self.effects)
            raise ValueError(
                f"actions must map each of {names} to a codec, got {actions!r}"
            )
        nbytes = entries = 0
        for name, effect in self._counted().items():
            nbytes += effect.nbytes(actions[name])
            entries += effect.entries
        return 8 * nbytes / entries if entries else 0.0

    def policy(self, bits: float) -> Policy:
        """Automatic precision: the least error at an average of ``bits`` an entry.

        Of what `bits` counts; all else gets its smallest codec. Scales are counted:
        `Quantized(4)` takes 4.25. Exact, as a small integer program: GACT's (arXiv
        2206.11357) greedy one leaves bits unused.

        Raises ValueError if ``bits`` are no number, or less than the smallest codecs
        take, and where there are no effects, as of a block that is a loop.
        """
        if not is_real(bits):
            raise ValueError(f"bits must be a number, got {bits!r}")
        if not self.effects:
            raise ValueError(
                f"bits must be of what {self.block!r} encodes outside of its loops and "
                f"branches, which is nothing; got {bits!r}"
            )
        program, chosen, size = IntegerProgram(), {}, {}
        errors = [e for effect in self.effects.values() for e in effect.errors.values()]
        scale, cost = 1e6 / (max(errors, default=0.0) or 1.0), {}
        entries, smallest = 0, 0
        for name, effect in self._counted().items():
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
        rules = {n: min(e.errors, key=e.nbytes) for n, e in self.effects.items()}
        rules |= dict(chosen[x] for x in chosen if found[x])
        return Policy(rules, default=self.base)

    def __str__(self) -> str:
        lines = [self.block]
        for name, effect in self.effects.items():
            each = (f"{written(c)} {e**0.5:.2%}" for c, e in effect.errors.items())
            lines.append(f"  {name:24}{', '.join(each)}")
        return "\n".join(lines)


def is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _require_actions(actions: Any) -> None:
    named = isinstance(actions, Mapping)
    if not named or not all(isinstance(a, Action) for a in actions.values()):
        raise ValueError(f"actions must map names to actions, got {actions!r}")


def require_codecs(codecs: Any) -> None:
    several = isinstance(codecs, tuple | list)
    if not several or not all(isinstance(codec, Codec) for codec in codecs):
        raise ValueError(f"codecs must be codecs, in a tuple or list, got {codecs!r}")
