"""Which tensor gets which action."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, get_args

from jaxcompact.codecs import BitMask, Chain, Codec, Narrow, Offload, Quantized
from jaxcompact.kernels.bits.reference import unit
from jaxcompact.tensor import Tensor

# Of the shortest groups of q and k: a scale and an offset take half as much as codes.
_TOKENS = 8


@dataclass(frozen=True)
class Save:
    """Keep the tensor as it is.

    >>> import jaxcompact as jc
    >>> jc.Policy({"attn_out": jc.Save()})
    Policy({'attn_out': Save()}, default=Recompute())
    """


@dataclass(frozen=True)
class Recompute:
    """Make the tensor again in the backward pass. Inputs are kept as they are."""


@dataclass(frozen=True)
class Derivative:
    """For an elementwise function ``y = f(x)``: store ``f'(x)`` instead of ``x``.

    The gradient ``f'(x) dy`` is then linear in what was rounded, so an unbiased codec
    gives an unbiased gradient, which storing x does not (noise through a nonlinear
    function is bias). It costs a tensor more where ``y`` is read as well.

    Args:
        codec: how ``f'(x)`` is stored. `BitMask` where it is 0 or 1 (relu): 1 bit,
            exact.
        value: how ``y`` is stored where the backward pass reads it, `Save` as it is;
            None makes it again from the stored x.

    Source: notes on GACT (arXiv 2206.11357), whose variance analysis needs it; Mesa
    (arXiv 2111.11124) and ActNN (arXiv 2104.14129) store relu's bits.

    >>> import jaxcompact as jc
    >>> policy = jc.Policy({"tanh.*": jc.Derivative(jc.Quantized(4, stochastic=True))})
    """

    codec: Codec
    value: Save | Codec | None = None

    def __post_init__(self):
        _require(self, "codec", Codec)
        _require(self, "value", Save | Codec | None)


def _require(holder: Any, name: str, kinds: Any) -> None:
    value = getattr(holder, name)
    if not isinstance(value, kinds):
        words = " or ".join(
            "None" if kind is type(None) else kind.__name__
            for kind in get_args(kinds) or (kinds,)
        )
        raise ValueError(
            f"{name} of {type(holder).__name__} must be {words}, got {value!r}"
        )


Action = Save | Recompute | Derivative | Codec


def is_exact(action: Action) -> bool:
    """Whether what it stores is as it was: numbers, or a step's slope.

    >>> is_exact(Derivative(BitMask())), is_exact(Derivative(Narrow(4)))
    (True, False)
    """
    if isinstance(action, Derivative):
        return type(action.codec) is BitMask and is_exact(of_value(action))
    if isinstance(action, Chain):
        return all(map(is_exact, action.codecs))
    return isinstance(action, Save | Recompute | BitMask | Narrow | Offload)


def of_value(action: Action) -> Save | Recompute | Codec:
    """What is done with a tensor's own numbers, not with its derivative.

    >>> of_value(Derivative(BitMask()))
    Recompute()
    """
    return action.value or Recompute() if isinstance(action, Derivative) else action


def written(action: Any) -> str:
    """An action as it would be written: arguments at their defaults left out."""
    if isinstance(action, Chain):
        return f"Chain({', '.join(map(written, action.codecs))})"
    given = [
        f"{field.name}={getattr(action, field.name)!r}"
        for i, field in enumerate(fields(action))
        if i == 0 or getattr(action, field.name) != field.default
    ]
    return f"{type(action).__name__}({', '.join(given)})"


class ChoosesActions(Protocol):
    """What `jaxcompact.checkpoint` asks of a policy: hashable, and this method.

    It may have more: ``unused(names)``, which of its rules match none; ``statistics``,
    whether it decides on sums and maxima too; ``note(plan)``, told of each block that
    is traced; ``probes`` and ``probe(tensor, x, *probes)``, arrays that go into every
    block, and what is stored there in the place of x.
    """

    def decide(self, tensor: Tensor) -> tuple[Action, str]:
        """What is done with a tensor, and why, in a few words."""


def is_policy(value: Any) -> bool:
    return hasattr(value, "decide") and not isinstance(value, type)


def require_policy(value: Any) -> None:
    if not is_policy(value):
        raise ValueError(
            f"policy must be a jaxcompact policy, as jaxcompact.policies.int4(), "
            f"got {value!r}"
        )


@dataclass(frozen=True, init=False, repr=False)
class Policy:
    """Actions by name.

    Args:
        rules: pattern -> action. A pattern is a glob over tensors' names (``"mlp_*"``,
            ``"dot_general.[0-2]"``); the first that matches decides. `explain` lists
            the names. Of what a loop carries, what can't be rounded (logarithms, what
            holds infinities) stays exact whatever the rules: `explain` says why.
        default: for all other tensors: an action, or another policy. A codec as default
            is used as by `policies.uniform`. Decisions (masks, what a max chose) are
            stored as they were made, whatever the default, if a rule rounds.

    Raises ValueError if a value is no action; and, when it meets a function, if a
    pattern matches none of its tensors or a codec can't store the dtype.

    >>> import jaxcompact as jc
    >>> policy = jc.Policy({"attn_out": jc.Quantized(8)}, default=jc.policies.int4())
    >>> policy == jc.Policy({"attn_out": jc.Quantized(8)}, default=jc.policies.int4())
    True
    """

    rules: tuple[tuple[str, Action], ...]
    default: "Action | ChoosesActions"

    def __init__(
        self,
        rules: Mapping[str, Action] = {},  # noqa: B006 (never written to)
        default: "Action | ChoosesActions" = Recompute(),  # noqa: B008 (frozen)
    ):
        if not isinstance(rules, Mapping):
            raise ValueError(f"rules must map names to actions, got {rules!r}")
        for pattern, action in rules.items():
            if not isinstance(pattern, str) or not isinstance(action, Action):
                raise ValueError(
                    f"rules must map names to Save, Recompute, Derivative or a codec, "
                    f"got {pattern!r}: {action!r}"
                )
        if not isinstance(default, Action) and not is_policy(default):
            raise ValueError(f"default must be an action or a policy, got {default!r}")
        object.__setattr__(self, "rules", tuple(rules.items()))
        object.__setattr__(self, "default", default)

    def __repr__(self) -> str:
        return f"Policy({dict(self.rules)!r}, default={self.default!r})"

    def decide(self, tensor: Tensor) -> tuple[Action, str]:
        for pattern, action in self.rules:
            if fnmatchcase(tensor.name, pattern):
                return action, f"rule {pattern!r}"
        if isinstance(self.default, Codec):
            return Compress(self.default).decide(tensor)
        found: tuple[Action, str] = self.default, "default"
        if not isinstance(self.default, Action):
            found = self.default.decide(tensor)
            if found[0] != Recompute():
                return found
        if self._rounds and _decides(tensor):
            return Compress(Save()).decide(tensor)
        return found

    @property
    def _rounds(self) -> bool:
        """Whether one of its rules does."""
        return not all(is_exact(of_value(action)) for _, action in self.rules)

    def unused(self, names: set[str]) -> list[str]:
        """Patterns that match none of these names."""
        unused = [p for p, _ in self.rules if not any(fnmatchcase(n, p) for n in names)]
        return unused + getattr(self.default, "unused", lambda names: [])(names)

    @property
    def statistics(self) -> bool:
        return getattr(self.default, "statistics", False)


def action_of(policy: ChoosesActions, tensor: Tensor) -> tuple[Action, str]:
    """What a policy does to a tensor, and why.

    Raises ValueError for an action that can't be done to it.
    """
    action, reason = policy.decide(tensor)
    action = bounded(action, tensor)
    if isinstance(action, Derivative):
        if tensor.kind != "function":
            raise ValueError(
                f"policy: Derivative is for elementwise functions of one tensor, "
                f"but {tensor} is none"
            )
        if not tensor.step:
            _require_stores(action.codec, tensor)
    if isinstance(codec := of_value(action), Codec):
        _require_stores(codec, tensor)
    return action, reason


def _require_stores(codec: Codec, tensor: Tensor) -> None:
    if not codec.supports(tensor.dtype):
        raise ValueError(f"policy: {codec} can't store {tensor} of {tensor.dtype}")
    try:
        codec.nbytes(tensor.shape, tensor.dtype)
    except ValueError as error:
        raise ValueError(f"policy: {codec} can't store {tensor}: {error}") from None


def bounded(action: Action, tensor: Tensor) -> Action:
    """Within the tensor's bound, if the action has none; channels are alike then."""
    bound = tensor.bound
    if type(action) is Quantized and action.bound is None and bound is not None:
        return replace(action, bound=bound, standardized=False)
    return action


def _decides(tensor: Tensor) -> bool:
    """Whether it, made again of rounded values, might be another decision."""
    return tensor.kind in ("mask", "choice") or tensor.discrete or tensor.step


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
    among the tokens, which may hold anything where it leaves them out; and has groups
    of a head for what norms of heads shorter than a group read. Products of two
    activations over at most 128 terms are made again: that takes fewer operations than
    encoding takes bytes. Scores, whose codes are larger, over twice as many, and those
    of a table of parameters as well (relative positions, learned queries).
    """

    codec: Save | Codec
    scores: Save | Codec | None = None
    attention: Save | Recompute | Codec | None = None

    def __post_init__(self):
        _require(self, "codec", Save | Codec)
        _require(self, "scores", Save | Codec | None)
        _require(self, "attention", Save | Recompute | Codec | None)

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
    """Standardized, where a norm is taken of each channel; of each head, in groups of
    one. None where neither is so."""
    row, within = tensor.row, codec.bound is not None or tensor.bound is not None
    if row is None or codec.axis != -1 or within:
        return None
    if isinstance(row, tuple):
        every = len(row) == len(tensor.shape) - 1
        return replace(codec, standardized=every or row)
    if row >= codec.group_size:
        return None
    sizes = (n for n in range(row, 7, -1) if row % n == 0)
    size = next((n for n in sizes if n % unit(codec.bits) == 0), None)
    return size and replace(codec, group_size=size)


def alike(codecs: Iterable[Codec], action: Action, tensor: Tensor) -> list[Codec]:
    """The codecs, as `of_rows` gives them if what is done is such."""
    row = tensor.row
    if row is None or not isinstance(action, Quantized):
        return list(codecs)
    channels = isinstance(row, tuple)
    if not (action.standardized if channels else row % action.group_size == 0):
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
