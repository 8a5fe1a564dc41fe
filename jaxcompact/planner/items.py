"""The tensors of a block that have a choice, and what each choice costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jaxcompact.actions import Action, Derivative, Recompute, Save, of_value
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.codecs import Codec, Offload
from jaxcompact.compress import alike
from jaxcompact.kernels.explicit import part
from jaxcompact.memory.cards import Device
from jaxcompact.planner.effects import Sensitivity, noise_of
from jaxcompact.planner.measured import codec_seconds
from jaxcompact.policy import ChoosesActions
from jaxcompact.reals import reals_of
from jaxcompact.transform.replay import Replay
from jaxcompact.transform.sources import Residual, Source


@dataclass(frozen=True)
class Option:
    """One way to store a tensor.

    Attributes:
        action: what a policy says for it.
        nbytes: on a device, of one layer.
        seconds: to encode and decode it.
        noise: mean square of what decoding adds to the gradient, relative to its own;
            where that was not measured, as much as it adds to the tensor.
        lossy: whether decoding adds anything to some tensor, if not to this gradient.
        away: whether it lies in the host's memory.
    """

    action: Action
    nbytes: int
    seconds: float
    noise: float
    lossy: bool = False
    away: bool = False

    @property
    def encoded(self) -> bool:
        return of_value(self.action) != Save()


@dataclass(frozen=True)
class Item:
    """A tensor, and how it may be stored.

    Attributes:
        source: what it is of.
        tensor: as policies see it.
        options: one of which is chosen, or none.
        again: whether it may be made again.
        otherwise: what is done with it if none is chosen.
    """

    source: Source
    tensor: Tensor
    options: tuple[Option, ...]
    again: bool
    otherwise: Action = Recompute()  # noqa: RUF009 (frozen)


def item_of(
    source: Source,
    tensor: Tensor,
    action: Action,
    replay: Replay,
    base: ChoosesActions,
    codecs: Sequence[Codec],
    card: Device,
    found: Sensitivity | None,
) -> Item | None:
    """A tensor's choices, under what ``base`` decided; None where it has none."""
    if not isinstance(source, int | Residual) or source in replay.keep:
        return None
    if tensor.frozen or tensor.discrete or tensor.kind in ("mask", "choice"):
        return None
    again = tensor.kind != "input"
    avals = replay.graph.avals if isinstance(source, int) else replay.recording.avals
    aval = avals[source]
    shape, _ = reals_of(jax.ShapeDtypeStruct(part(aval), aval.dtype))
    option = partial(_option, tensor=tensor, shape=shape, card=card, found=found)
    if kept_sum(tensor):
        return Item(source, tensor, (option(Save()),), again)
    special = not tensor.floating or tensor.statistic or tensor.divisor
    if special and isinstance(action, Save | Codec):
        return Item(source, tensor, (option(action),), again)
    if special:
        return None
    asked = action
    if tensor.cheap or tensor.terms is not None:  # what `base` would do if it stored it
        asked, _ = base.decide(replace(tensor, cheap=False, terms=None))
    actions = [Save()]
    if found and tensor.name in found.effects:
        measured = found.effects[tensor.name].errors
        where = shape, tensor.dtype
        actions += (codec for codec in measured if not codec.host_nbytes(*where))
    elif (
        tensor.scores is not None or tensor.exponent or tensor.enlarged or tensor.fused
    ):
        here = isinstance(asked, Codec) and not asked.host_nbytes(shape, tensor.dtype)
        actions += [asked] if here else []
    else:
        offered = (c for c in codecs if _is_offered(c, tensor.dtype, shape, card))
        actions += alike(offered, asked, tensor)
    if card.host_bandwidth and Offload().supports(tensor.dtype):
        actions.append(Offload())
    options = tuple(map(option, dict.fromkeys(actions)))
    if isinstance(action, Derivative):
        options = tuple(
            replace(o, action=replace(action, value=o.action)) for o in options
        )
        return Item(source, tensor, options, again, otherwise=action)
    return Item(source, tensor, options, again)


def _is_offered(codec: Codec, dtype: Any, shape: tuple[int, ...], card: Device) -> bool:
    if not codec.supports(dtype):
        return False
    return bool(card.host_bandwidth) or not codec.host_nbytes(shape, dtype)


def of_several(replay: Replay) -> set[Source]:
    """Functions of what several tensors are added to, as a ResNet's of each block.

    Made again they are made of those of all blocks before. Others are of one tensor,
    which can be stored in their place.
    """
    avals = replay.graph.avals
    below = {
        v: frozenset([v])
        for v in replay.graph.inputs
        if v in replay.chosen and v in replay.moving
    }
    found: set[Source] = set()
    for op in replay.graph.ops:
        made_of = frozenset().union(*(below.get(v, ()) for v in op.reads))
        for value in op.outs:
            tensor, *_ = replay.chosen.get(value, (None,))
            function = tensor and tensor.kind == "function" and not tensor.divisor
            large = [v for v in made_of if avals[v].size >= avals[value].size]
            if function and not tensor.discrete and len(large) > 1:
                found.add(value)
            stored = tensor and tensor.kind == "op" and not tensor.statistic
            own = stored or value in found
            below[value] = frozenset([value]) if own else made_of
    return found


def kept_sum(tensor: Tensor) -> bool:
    """Whether it is what a softmax or a norm was divided by: it is kept whole."""
    return tensor.statistic and tensor.kind == "op"


def _option(
    action: Action,
    tensor: Tensor,
    shape: tuple[int, ...],
    card: Device,
    found: Sensitivity | None,
) -> Option:
    """``shape``: of one device's part."""
    dtype = tensor.dtype
    if not isinstance(action, Codec):
        return Option(action, math.prod(shape) * dtype.itemsize, 0.0, 0.0)
    return Option(
        action,
        action.nbytes(shape, dtype),
        codec_seconds(action, shape, dtype, card),
        _noise(action, tensor, found),
        noise_of(action, tensor) > 0,
        bool(action.host_nbytes(shape, dtype)),
    )


def _noise(action: Action, tensor: Tensor, found: Sensitivity | None) -> float:
    noise = noise_of(action, tensor)
    if noise and found and tensor.name in found.effects:
        effect = found.effects[tensor.name]
        return effect.error(action) / effect.count
    return noise
