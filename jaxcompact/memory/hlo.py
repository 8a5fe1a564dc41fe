"""A compiled program's text, read: its operations, and how often each is run."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<shape>.*?) (?P<op>[a-z][\w-]*)\((?P<rest>.*)$"
)
_CALLED = re.compile(
    r"(?:calls|to_apply|body|computations?)=\{?(%[^ ,}]+(?:, ?%[^ ,}]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """``%name = shape op(operands), attributes``.

    Attributes:
        rest: what follows the parenthesis that opens the operands.
    """

    name: str
    shape: str
    op: str
    rest: str

    @cached_property
    def operands(self) -> list[str]:
        return re.findall(r"%([^\s,)]+)", self.rest.partition(")")[0])

    @cached_property
    def called(self) -> list[str]:
        """Computations; of a loop its body alone."""
        names = ", ".join(_CALLED.findall(self.rest)).replace("%", "")
        return names.split(", ") if names else []

    @property
    def nbytes(self) -> int:
        return nbytes(self.shape)


@dataclass(frozen=True)
class Text:
    """Computations by name: lists of instructions, of which the last is returned."""

    bodies: Mapping[str, Sequence[Instruction]]
    entry: str

    @classmethod
    def read(cls, text: str) -> "Text":
        bodies: dict[str, list[Instruction]] = {}
        entry = inside = ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                inside = header[2]
                bodies[inside] = []
                entry = inside if header[1] else entry
            elif inside and (found := _INSTRUCTION.match(line)):
                bodies[inside].append(Instruction(*found.groups()))
        return cls(bodies, entry)

    def total(
        self, of: Callable[[Instruction, Mapping[str, Instruction]], Counter | None]
    ) -> Counter:
        """The sum over all that is run of ``of(instruction, all beside it by name)``.

        Where it is None, of what the instruction calls: a loop's body as often as it
        goes round, of a conditional's branches the one with most. Raises ValueError for
        a loop that counts and whose number of rounds is unknown.
        """
        known: dict[str, Counter] = {}

        def total(name: str) -> Counter:
            if name not in known:
                beside = {one.name: one for one in self.bodies[name]}
                known[name] = sum((run(o, beside) for o in beside.values()), Counter())
            return known[name]

        def run(one: Instruction, beside: Mapping[str, Instruction]) -> Counter:
            count = of(one, beside)
            if count is not None:
                return count
            inner = [total(name) for name in one.called if name in self.bodies]
            if one.op == "conditional":
                return max(inner, key=lambda count: count.total(), default=Counter())
            count = sum(inner, Counter())
            if one.op == "while" and count:
                trips = _TRIPS.search(one.rest)
                if trips is None:
                    raise ValueError(
                        f"how often a loop goes round is unknown: %{one.name}"
                    )
                count = Counter({k: n * int(trips[1]) for k, n in count.items()})
            return count

        return total(self.entry)


def nbytes(shape: str) -> int:
    """Of an array or of a tuple of arrays; less than a byte (pred, s4) is one."""
    return sum(
        max(1, int(bits or 8) // 8) * math.prod(int(n) for n in dims.split(",") if n)
        for _, bits, dims in _ARRAY.findall(shape)
    )


def arrays(shape: str) -> list[tuple[int, ...]]:
    """The dimensions of an array, or of the arrays of a tuple."""
    found = (dims for _, _, dims in _ARRAY.findall(shape))
    return [tuple(int(n) for n in dims.split(",") if n) for dims in found]
