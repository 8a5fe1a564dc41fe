"""How much a compiled program sends between devices."""

import math
import re
from collections import Counter

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<shape>.*?) (?P<op>[a-z][\w-]*)\((?P<rest>.*)$"
)
_CALLED = re.compile(
    r"(?:calls|to_apply|body|computations)=\{?(%[^ ,}]+(?:, ?%[^ ,}]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


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
    bodies: dict[str, list[re.Match]] = {}
    entry = inside = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            inside = header[2]
            bodies[inside] = []
            entry = inside if header[1] else entry
        elif inside and (found := _INSTRUCTION.match(line)):
            bodies[inside].append(found)

    known: dict[str, Counter] = {}

    def total(name: str) -> Counter:
        if name not in known:
            sizes = {found["name"]: _nbytes(found["shape"]) for found in bodies[name]}
            known[name] = sum((of(found, sizes) for found in bodies[name]), Counter())
        return known[name]

    def of(found: re.Match, sizes: dict[str, int]) -> Counter:
        op, rest = found["op"], found["rest"]
        kind = op.removesuffix("-start")
        if kind in KINDS:
            names = re.findall(r"%([^\s,)]+)", rest.partition(")")[0])
            given, got = sum(sizes[name] for name in names), sizes[found["name"]]
            if kind != op and got > given:  # what is given stands before what is made
                got -= given
            return Counter({kind: max(given, got)})
        called = ", ".join(_CALLED.findall(rest)).replace("%", "").split(", ")
        inner = [total(name) for name in called if name in bodies]
        if op == "conditional":
            return max(inner, key=lambda count: count.total(), default=Counter())
        count = sum(inner, Counter())
        if op == "while" and count:
            trips = _TRIPS.search(rest)
            if trips is None:
                raise ValueError(f"how often a loop goes round is unknown: {found[0]}")
            count = Counter({k: n * int(trips[1]) for k, n in count.items()})
        return count

    return dict(total(entry))


def _nbytes(shape: str) -> int:
    """Of an array or of a tuple of arrays; less than a byte (pred, s4) is one."""
    return sum(
        max(1, int(bits or 8) // 8) * math.prod(int(n) for n in dims.split(",") if n)
        for _, bits, dims in _ARRAY.findall(shape)
    )
