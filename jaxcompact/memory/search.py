"""The largest batch that fits."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jaxcompact.memory.cards import find_device, here
from jaxcompact.memory.functions import made_by, require_function
from jaxcompact.memory.peak import Peak, gib, peak

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{end}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for end, base in (("B", 1000), ("iB", 1024))
}
_NEAR = 0.01  # of a batch: as near as the answer is searched for
_MOST = 2**24  # batches: who fits those does not depend on them


@dataclass(frozen=True)
class LargestBatch:
    """What `largest_batch` found.

    Attributes:
        batch: the largest that was compiled and fits.
        peak: what it takes.
        budget: bytes that it was to fit in.
        tried: peak bytes of each batch that was compiled.
    """

    batch: int
    peak: Peak
    budget: int
    tried: dict[int, int]

    def __str__(self) -> str:
        return f"{self.batch}: {gib(self.peak.peak_bytes)} of {gib(self.budget)}"


def largest_batch(
    make_step: Callable[[int], tuple[Callable, tuple]],
    *,
    device: str | None = None,
    budget: int | str | None = None,
    multiple: int = 1,
    progress: Callable[[str], Any] | None = None,
) -> LargestBatch:
    """A batch whose step fits, and not with 1 % more, in a few compiles.

    Peaks are nearly straight lines over the batch: each guess is where the line through
    the last two meets the budget, between one that fits and one that does not. They are
    no more than nearly so: XLA may need more for a batch than for a larger one that is
    a multiple of 64, or of 1024. Such alone are looked at with ``multiple=64``.

    Args:
        make_step: ``batch -> (step, args)``, for `peak`. Jit the step to donate.
        device: a key of `devices`; by default of the card that is here, or "h200".
        budget: bytes, or ``"16GiB"``, ``"80GB"``; the card's memory by default.
        multiple: batches are multiples of it.
        progress: called with a line for each compile; by default it goes to stderr.

    Raises ValueError for a budget that is none, or below what the smallest batch takes,
    and for what is no step.

    >>> import jax, jax.numpy as jnp
    >>> from jaxcompact import memory
    >>> def make_step(batch):
    ...     x = jax.ShapeDtypeStruct((batch, 256), jnp.float32)
    ...     return jax.jit(lambda x: 2.0 * x), (x,)
    >>> memory.largest_batch(make_step, budget="1MiB", multiple=8,
    ...                      progress=lambda line: None).batch
    512
    """
    device = here() if device is None else device
    card = find_device(device)
    limit = card.memory if budget is None else parse_bytes(budget)
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise ValueError(f"multiple must be a positive int, got {multiple!r}")
    require_function("make_step", make_step)
    say = saying(progress)
    peaks: dict[int, Peak] = {}

    def compiled(count: int) -> int:
        step, args = made_by(make_step, "make_step", "step", count * multiple)
        found = peaks[count] = peak(step, *args, device=device)
        verdict = "fits" if found.peak_bytes <= limit else "does not fit"
        size = gib(found.peak_bytes)
        say(f"batch {count * multiple}: {size}, {verdict}")
        return found.peak_bytes

    if (one := compiled(1)) > limit:
        raise ValueError(
            f"budget is {gib(limit)}, a batch of {multiple} takes "
            f"{gib(peaks[1].peak_bytes)}"
        )
    # Far beyond the budget XLA tries for minutes to make a program smaller.
    compiled(min(max(2, limit // max(one, 1)), 8))
    width, halve = None, False
    while True:
        fitting = sorted(c for c in peaks if peaks[c].peak_bytes <= limit)
        fits, least = fitting[-1], peaks[fitting[-1]].peak_bytes
        fails = min((c for c in peaks if c > fits), default=None)
        if fails is not None and fails - fits <= max(1, _NEAR * fits):
            break
        if fits > _MOST:
            why = f"a budget of {gib(limit)} is too large to search in"
            if least <= one:
                why = "the peak does not grow with it (does make_step use its batch?)"
            raise ValueError(f"a batch of {fits * multiple} fits: {why}")
        ends = fitting[-2:] if fails is None else (fits, fails)
        guess = _meeting(limit, *((c, peaks[c].peak_bytes) for c in ends))
        if fails is None:
            guess = min(guess, 16 * fits)
        else:
            # One end may be far off the line.
            halve = width is not None and not halve and 2 * (fails - fits) > width
            width = fails - fits
            guess = (fits + fails) // 2 if halve else min(guess, fails - 1)
        compiled(max(guess, fits + 1))
    tried = {c * multiple: found.peak_bytes for c, found in sorted(peaks.items())}
    return LargestBatch(fits * multiple, peaks[fits], limit, tried)


def saying(progress: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """What is called with each line; by default it goes to stderr."""
    if progress is None:
        return lambda line: print(line, file=sys.stderr, flush=True)
    require_function("progress", progress)
    return progress


def _meeting(limit: int, one: tuple[int, int], other: tuple[int, int]) -> int:
    """Where the line through two (batch, bytes) meets the limit."""
    (a, low), (b, high) = one, other
    return a + (limit - low) * (b - a) // (high - low) if high > low else 2 * b


def parse_bytes(text: int | str, name: str = "budget") -> int:
    """A number of bytes, ``"16GiB"`` or ``"80 GB"``; ``name`` is for errors."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not isinstance(text, str) or not match or match[2] not in _UNITS:
        units = ", ".join(filter(None, _UNITS))
        raise ValueError(f"{name} must be bytes, or a number and {units}; got {text!r}")
    nbytes = int(Decimal(match[1]) * _UNITS[match[2]])
    if nbytes < 1:
        raise ValueError(f"{name} must be above 0, got {text!r}")
    return nbytes
