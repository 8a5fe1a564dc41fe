"""What may be done with a tensor."""

from dataclasses import dataclass, fields
from typing import Any, get_args

from jaxcompact.codecs import BitMask, Chain, Codec, Narrow, Offload


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
        require(self, "codec", Codec)
        require(self, "value", Save | Codec | None)


def require(holder: Any, name: str, kinds: Any) -> None:
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
