"""How much a compiled program sends between devices."""

from collections import Counter
from collections.abc import Mapping

from jaxcompact.memory.hlo import Instruction, Text

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


def collectives(text: str) -> dict[str, int]:
    """Bytes by kind of collective that one device takes part in, in a compiled program.

    Of each the operands or the results, whichever are larger: the whole arrays of a
    gather and of a reduce-scatter. The operations of a loop count as often as it goes
    round; of a conditional's branches the one with most. Raises ValueError for a loop
    with a collective whose number of rounds is unknown.

    >>> import jax, jax.numpy as jnp
    >>> collectives(jax.jit(jnp.sum).lower(jnp.ones(3)).compile().as_text())
    {}
    """
    return dict(Text.read(text).total(_sent))


def _sent(one: Instruction, beside: Mapping[str, Instruction]) -> Counter | None:
    kind = one.op.removesuffix("-start")
    if kind not in KINDS:
        return None
    given, got = sum(beside[name].nbytes for name in one.operands), one.nbytes
    if kind != one.op and got > given:  # what is given stands before what is made
        got -= given
    return Counter({kind: max(given, got)})
