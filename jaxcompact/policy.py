"""Which tensor gets which action."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

from jaxcompact.actions import (
    Action,
    Derivative,
    Recompute,
    Save,
    is_exact,
    of_value,
)
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.codecs import Codec, Quantized
from jaxcompact.compress import Compress


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
        return replace(action, bound=bound, standardized=False, equalized=False)
    return action


def _decides(tensor: Tensor) -> bool:
    """Whether it, made again of rounded values, might be another decision."""
    return tensor.kind in ("mask", "choice") or tensor.discrete or tensor.step
