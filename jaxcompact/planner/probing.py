"""Policies that measure what rounding does: what is rounded is stored, and probed."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxcompact.actions import Action, Derivative, Recompute, Save
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.codecs import Codec
from jaxcompact.kernels.varying import varying_as
from jaxcompact.policy import ChoosesActions, bounded
from jaxcompact.reals import as_reals


@dataclass(frozen=True, eq=False)
class Under:
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
class Probing:
    """The policy ``base``, but what it encodes is stored as it is, and probed."""

    base: ChoosesActions
    asked: Mapping[str, tuple[Tensor, tuple[Codec, ...]]]
    starts: Mapping[str, int]
    probes: tuple[jax.Array]  # of shape (2, all codecs of all tensors)

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
        own = probe[:, start : start + len(codecs)]
        codecs = tuple(bounded(codec, tensor) for codec in codecs)
        return _probed(codecs, x, varying_as(x, own))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _probed(codecs: tuple[Codec, ...], x: jax.Array, probe: jax.Array) -> jax.Array:
    """x; the probe's cotangent is what each codec does to what x's cotangent is of.

    Twice: with each entry's error by itself, and with all of them together.
    """
    return x


def _probed_backward(codecs, x, ct):
    # Of a complex x the cotangent times a change has the loss's as its real part.
    x, ct = as_reals(x), as_reals(ct.conj())

    def moved(codec):
        decoded = codec.decode(codec.encode(x)).astype(jnp.float32)
        each = (decoded - x.astype(jnp.float32)) * ct.astype(jnp.float32)
        return jnp.stack([jnp.sum(jnp.square(each)), jnp.square(jnp.sum(each))])

    return None, jnp.stack(list(map(moved, codecs)), axis=1)


_probed.defvjp(lambda codecs, x, probe: (x, x), _probed_backward)
