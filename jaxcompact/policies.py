"""Ready policies: which codec for which kind of tensor, by measurement.

Figures: docs/results.md. What costs gradients most is q and k, which want 8 bits, in
groups along the tokens of one channel, and with a minimum of their own, since channels
lie far from zero; and what else an exponential is taken of, as logits. Where attention
keeps its normalization, as cuDNN's does, v and the output want 8 bits as well. Nearest
rounding beats stochastic: most tensors are read through something nonlinear, where
variance is bias.
"""

from jaxcompact.actions import Recompute, Save
from jaxcompact.codecs import Codec, Quantized
from jaxcompact.compress import Compress

_SCORES = Quantized(8, symmetric=False)


def int8() -> Compress:
    """8 bits; q and k as they are."""
    return Compress(Quantized(8), scores=Save())


def int4() -> Compress:
    """4 bits; 8 for q and k, v and the output of fused attention, and for logits."""
    return compress(Quantized(4))


def int3() -> Compress:
    """3 bits in smaller groups; 8 for q, k and logits. Fused attention is run again."""
    codec = Quantized(3, group_size=32)
    return Compress(codec, scores=_SCORES, attention=Recompute())


def compress(codec: Codec) -> Compress:
    """One codec for all but what exponentials read, which gets 8 bits as in `int4`.

    >>> import jaxcompact as jc
    >>> jc.policies.compress(jc.Quantized(bits=4)) == jc.policies.int4()
    True
    """
    return Compress(codec, scores=_SCORES, attention=Quantized(8))


def uniform(codec: Codec) -> Compress:
    """One codec for all: `Offload`, or 8 bits. 4 spoil attention's gradients."""
    return Compress(codec)
