"""The policy that encodes what is expensive to make again, by kind of tensor."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxcompact.actions import Action, Derivative, Recompute, Save, require
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.codecs import BitMask, Codec, Narrow, Quantized
from jaxcompact.kernels.bits.reference import unit

# Of the shortest groups of q and k: a scale and an offset take half as much as codes.
_TOKENS = 8
_MORE = 17 / 16  # bytes where channels are apart, of those where they are not


@dataclass(frozen=True)
class Compress:
    """Encode what is expensive to make again, and replay the rest.

    Args:
        codec: of floating point tensors.
        scores: of the operands of softmax scores, q and k, whose errors the exponential
            amplifies, and of fast phases of sines; a `Quantized` takes its groups along
            the tokens of one channel, if there are 8, and is also for logits, what else
            an exponential is taken of, and the operands of those that are made again.
            Of what is read in slices, as Mamba's input, for these alone if they are the
            lesser part; else, as of q, k and v in one, for the whole.
        attention: of the other operands and results of an attention that keeps its
            softmax's normalization (cuDNN's): v and the output. `Recompute` runs that
            attention again from decoded q, k and v, which then are no special case.

    The smallest tensors, which together take a hundredth of all, are kept as they are.
    ``scores`` and ``attention`` are None to be as all others. Where ``scores`` is
    `Save`, logits have ``codec`` with a minimum for each group. With ``scores`` a
    `Quantized` codec is standardized, over the axes that are summed up, for what norms
    of channels (batch, instance, group norms) read, unless weights or a mask choose
    among the tokens, which may hold anything where it leaves them out; has groups of a
    head for what norms of heads shorter than a group read; has groups along the tokens
    of one channel for residual streams, where there are enough of them; and is
    equalized for what else norms of rows read, and for inputs and sums that products
    and convolutions do: a few channels of a trained network's are far larger than all
    others. Products of two activations over at most 128 terms are made again: that
    takes fewer operations than encoding takes bytes. Scores, whose codes are larger,
    over twice as many, and those of a table of parameters as well (relative positions,
    learned queries).
    """

    codec: Save | Codec
    scores: Save | Codec | None = None
    attention: Save | Recompute | Codec | None = None

    def __post_init__(self):
        require(self, "codec", Save | Codec)
        require(self, "scores", Save | Codec | None)
        require(self, "attention", Save | Recompute | Codec | None)

    def decide(self, tensor: Tensor) -> tuple[Action, str]:
        if tensor.cheap and tensor.divisor:
            return Recompute(), "it must fit what is made again"
        if not tensor.floating:
            return self._decide_exact(tensor)
        read = tensor.discrete or tensor.divisor  # by a rule of `jax.custom_vjp`
        if tensor.kind == "function" and not read:
            if tensor.step:
                return Derivative(BitMask()), "its derivative is 0 or 1"
            return Recompute(), "elementwise"
        if tensor.frozen:
            return Save(), "it is not differentiated"
        if tensor.discrete:
            return _few_bits(tensor) or (Save(), "decoded values could round otherwise")
        if tensor.cheap:
            return Recompute(), "cheap to make again"
        if tensor.fused == "result" and self.attention == Recompute():
            return Recompute(), "of an attention that is run again"
        if tensor.statistic:
            return Save(), "small beside what it is made of"
        if tensor.divisor and tensor.near:
            return Save(), "a loss's difference or correlations, scaled or small"
        if tensor.divisor:
            return Save(), "a divisor, logarithm or the like: its errors would grow"
        if tensor.few_terms:
            return Recompute(), f"a product over {tensor.terms} terms"
        if tensor.small:
            return Save(), "small beside all that is stored"
        codec = self.scores
        as_others = tensor.table and isinstance(codec, Save)
        if tensor.scores is not None and codec is not None and not as_others:
            if isinstance(codec, Quantized) and tensor.shape[tensor.scores] >= _TOKENS:
                codec = replace(codec, axis=tensor.scores - len(tensor.shape))
            return codec, "operand of scores or phases"
        if tensor.exponent and isinstance(self.scores, Quantized):
            return self.scores, "an exponential or the like is taken of it"
        if (
            tensor.exponent
            and self.scores is not None
            and type(self.codec) is Quantized
        ):
            # A row of logits may lie far from zero, which a softmax does not see.
            codec = replace(self.codec, symmetric=False, scale_bits=16)
            return codec, "an exponential or the like is taken of it"
        if tensor.enlarged and self.scores is not None:
            codecs = (self.scores, self.codec)
            codec = next((c for c in codecs if isinstance(c, Quantized)), None)
            if codec is not None:  # not beside another row's, another head's, entries
                group = max(1, min([codec.group_size, *tensor.shape[-1:]]))
                rows = replace(codec, bits=8, group_size=group)
                return rows, "a norm of its rows is taken"
        if tensor.fused and self.attention not in (None, Recompute()):
            return self.attention, "of an attention that keeps its normalization"
        if isinstance(self.codec, Quantized):
            if 8 * tensor.dtype.itemsize <= self.codec.bits:
                return Save(), "as small as its codes"
            if tensor.near and self.codec.bits < 8:
                # Beside an outlier's, in 4 bits, the small ones of a group are zero.
                larger = replace(self.codec, bits=8)
                return larger, "a loss's difference or correlations"
            rows = of_rows(self.codec, tensor) if self.scores is not None else None
            if rows is not None:
                if rows.axis == -2 or rows.equalized:
                    return rows, "some channels may be far larger than all others"
                each = "channel" if rows.standardized else "head"
                return rows, f"a norm is taken of each {each}"
        return self.codec, "expensive to make again"

    def _decide_exact(self, tensor: Tensor) -> tuple[Action, str]:
        if tensor.kind == "mask":
            if tensor.discrete:
                return BitMask(), "decoded values could decide otherwise"
            return Recompute(), "exact when made again"
        if tensor.kind == "choice":
            return Narrow(tensor.limit), "decoded values could choose others"
        if tensor.dtype == bool:
            return BitMask(), "one bit an entry"
        return _few_bits(tensor) or (Save(), "integers stay exact")


def of_rows(codec: Quantized, tensor: Tensor) -> Quantized | None:
    """Of a stream in groups of a channel's tokens; standardized, where a norm is taken
    of each channel; in groups of a head, where one is taken of each; equalized of what
    else is uneven. Where channels are apart, or equalized, if that takes little more.
    None where none of these is so."""
    row, within = tensor.row, codec.bound is not None or tensor.bound is not None
    if codec.axis != -1 or within:
        return None
    uneven = tensor.uneven and not codec.standardized
    if tensor.stream and uneven:
        channels = replace(codec, axis=-2)
        if _is_little(channels, codec, tensor):
            return channels
    if isinstance(row, tuple):
        every = len(row) == len(tensor.shape) - 1
        return replace(codec, standardized=every or row)
    if row is not None and row < codec.group_size:
        sizes = (n for n in range(row, 7, -1) if row % n == 0)
        size = next((n for n in sizes if n % unit(codec.bits) == 0), None)
        return size and replace(codec, group_size=size)
    if not uneven:
        return None
    equalized = replace(codec, equalized=True)
    return equalized if _is_little(equalized, codec, tensor) else None


def _is_little(codec: Codec, plain: Codec, tensor: Tensor) -> bool:
    where = tensor.shape, tensor.dtype
    return codec.nbytes(*where) <= _MORE * plain.nbytes(*where)


def alike(codecs: Iterable[Codec], action: Action, tensor: Tensor) -> list[Codec]:
    """The codecs, as `of_rows` gives them if what is done is such."""
    if not isinstance(action, Quantized):
        return list(codecs)
    row = tensor.row
    such = action.standardized or action.equalized
    if tensor.stream:
        such |= action.axis == -2
    elif isinstance(row, int):
        such |= row % action.group_size == 0
    if not such:
        return list(codecs)
    return [(isinstance(c, Quantized) and of_rows(c, tensor)) or c for c in codecs]


def _few_bits(tensor: Tensor) -> tuple[Narrow, str] | None:
    """For whole numbers of a known range, unless that takes as much as they do."""
    if tensor.kind not in ("op", "residual") or tensor.limit is None:
        return None
    if tensor.limit <= tensor.least:  # of no entries
        return None
    signed = tensor.floating or tensor.least < 0
    codec = Narrow(tensor.limit, tensor.least if signed else None)
    held = codec.supports(tensor.dtype)
    if not held or codec.nbytes(tensor.shape, tensor.dtype) >= tensor.nbytes:
        return None
    return codec, f"whole numbers from {tensor.least} to {tensor.limit - 1}"
