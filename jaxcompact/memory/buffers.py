"""What takes the space at a program's peak, read off its compiled buffers.

Arguments and outputs keep their place throughout. Temporaries share one block: those
that live at the moment when most of it is in use are listed; what XLA could not fill
between them is "unused".
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxcompact.memory.compiler import LEAST_CONSTANT, Program

KINDS = (
    "parameters",
    "optimizer state",
    "inputs",
    "constants",
    "outputs",
    "gradients",
    "residuals",
    "logits",
    "workspace",
    "unused",
)
_SMALL = 1024  # bytes: loop counters, tables of pointers

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+),(.*)$", re.M)
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>\S+?)(?P<index>\{[\d,]*\})?(?P<phi> \(phi\))? @0> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$"
)
_RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.M)
_STEP = re.compile(r"^    (\d+):(\S+)$", re.M)
_OPERATION = re.compile(r"^\s+(?P<root>ROOT )?%(?P<name>\S+) = ")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(")
_PARAMETER = re.compile(r"^\s+(?:ROOT )?%(\S+) = \S+ parameter\((\d+)\)", re.M)
_CALLED = re.compile(r"calls=%(\S+?)[,\s]")
_PATH = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Buffer:
    """One tensor that lives at the peak.

    Attributes:
        kind: one of `KINDS`.
        shape: on one device, ``"bf16[24,1024,2736]"``.
        nbytes: on one device.
        source: an argument's name, or the path of the operation that made it.
    """

    kind: str
    shape: str
    nbytes: int
    source: str


@dataclass
class _Value:
    """What XLA calls a value: a tensor, from when it is written to its last use."""

    name: str
    phi: bool
    slot: tuple[int, int, int]  # allocation, offset, size
    shape: str
    start: int = 0
    end: int = -1


def buffers(program: Program, arguments: Mapping[str, str]) -> tuple[Buffer, ...]:
    """The buffers at the peak, the largest first; their bytes add up to it.

    ``arguments`` says of what kind each argument is, by its name. One that it does not
    name is a parameter if it is donated.
    """
    paths = _paths(program.text)
    entry = program.text[program.text.index("\nENTRY ") :]
    parameters = {number: name for name, number in _PARAMETER.findall(entry)}
    allocations, values = _read(program)
    held = defaultdict(list)
    for value in values:
        held[value.slot[0]].append(value)
    found, temporaries = [], []
    for number, (size, words) in allocations.items():
        inside = held[number]
        if not size or not inside or "thread-local" in words:
            continue
        largest = max(inside, key=lambda v: v.slot[2])
        if "constant" in words:
            if size >= LEAST_CONSTANT:
                name = largest.name
                found.append(Buffer("constants", _shape(largest.shape), size, name))
            continue
        if number_of := re.search(r" parameter (\d+),", words):
            path = paths.get(parameters.get(number_of[1], ""), "")
            default = "parameters" if "maybe-live-out" in words else "inputs"
            kind = arguments.get(path, default)
            found.append(Buffer(kind, _shape(largest.shape), size, path))
        elif "preallocated-temp" in words:
            temporaries += inside
        elif "maybe-live-out" in words:
            found.append(Buffer("outputs", _shape(largest.shape), size, largest.name))
    trained = [b.shape for b in found if b.kind in ("parameters", "optimizer state")]
    shapes = {dims for shape in trained for dims in _of_gradients(shape)} - {()}
    found += _temporaries(temporaries, program, paths, shapes)
    found = [buffer for buffer in found if buffer.nbytes]
    return tuple(sorted(found, key=lambda buffer: -buffer.nbytes))


def _paths(text: str) -> dict[str, str]:
    """Where in the user's program each operation comes from.

    A fusion without a path has that of what it calls.
    """
    paths: dict[str, str] = {}
    called: dict[str, str] = {}
    last: dict[str, str] = {}  # of a computation
    inside = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            inside = header[1]
        elif operation := _OPERATION.match(line):
            name = operation["name"]
            if path := _PATH.search(line):
                last[inside] = paths[name] = path[1].replace("\\'", "'")
            elif calls := _CALLED.search(line):
                called[name] = calls[1]
                if calls[1] in last:  # computations come before what calls them
                    last.setdefault(inside, last[calls[1]])
    for name, computation in called.items():
        if computation in last:
            paths[name] = last[computation]
    return paths


def _read(program: Program) -> tuple[dict[int, tuple[int, str]], list[_Value]]:
    ranges = {
        (name, index): (int(start), int(end))
        for name, index, start, end in _RANGE.findall(program.live)
    }
    allocations, values, number = {}, [], -1
    for line in program.assignment.splitlines():
        if header := _ALLOCATION.match(line):
            number = int(header[1])
            allocations[number] = int(header[2]), header[3]
        elif line.startswith(" value: ") and (m := _VALUE.match(line)):
            slot = number, int(m["offset"]), int(m["size"])
            value = _Value(m["name"], bool(m["phi"]), slot, m["shape"])
            # Without a range it lives inside a called computation.
            value.start, value.end = ranges.get(
                (m["name"], m["index"] or "{}"), (0, -1)
            )
            values.append(value)
        elif line.startswith("Total bytes") or line.startswith("Used values"):
            break
    return allocations, values


def _temporaries(
    values: list[_Value],
    program: Program,
    paths: Mapping[str, str],
    shapes: Collection[tuple[int, ...]],
) -> list[Buffer]:
    steps = {name: int(at) for at, name in _STEP.findall(program.live)}
    backward = [at for name, at in steps.items() if _is_backward(paths.get(name, ""))]
    first_backward = min(backward, default=None)
    time = _fullest(values)
    slots: dict[tuple[int, int, int], list[_Value]] = defaultdict(list)
    for value in values:
        slots[value.slot].append(value)
    found, small = [], 0
    for slot, sharing in slots.items():
        if not any(v.start <= time <= v.end for v in sharing):
            continue
        if slot[2] < _SMALL:
            small += slot[2]
            continue
        chain = _chain(sharing, time)
        # Who wrote it last, or will next; else the loop that fills it.
        writers = [v for v in chain if v.start <= time][::-1]
        writers += [v for v in chain if v.start > time]
        writers.sort(key=lambda v: v.phi)
        # XLA calls what it adds by its own names, which have no slash.
        sources = [path for v in writers if "/" in (path := paths.get(v.name, ""))]
        path = next((x for x in sources if not x.endswith("/broadcast_in_dim")), "")
        path = path or next(iter(sources), "")
        end = max(v.end for v in chain)
        read_backward = first_backward is not None and end >= first_backward
        kind = _kind(path, _dims(_numbers(chain[0].shape)), shapes, read_backward)
        shape = _shape(writers[0].shape)
        found.append(Buffer(kind, shape, slot[2], path or writers[0].name))
    left = program.stats.temp_size_in_bytes - sum(buffer.nbytes for buffer in found)
    small = min(small, left)  # a TPU does not count its tables of pointers
    found.append(Buffer("workspace", "", small, f"smaller than {_SMALL} bytes"))
    return [*found, Buffer("unused", "", left - small, "between temporaries")]


def _chain(sharing: list[_Value], time: int) -> list[_Value]:
    """Of values in one place, those without a gap up to a time, and after it.

    A loop hands its values on: it reads one, writes one, and returns another.
    """
    ordered = sorted(sharing, key=lambda v: (v.start, v.end))
    before = [v for v in ordered if v.start <= time]
    chain = [before[-1]]
    for value in reversed(before[:-1]):
        if value.end < min(v.start for v in chain) - 1:
            break
        chain.insert(0, value)
    end = max(v.end for v in chain)
    for value in ordered[len(before) :]:
        if value.start > end + 1:
            break
        chain.append(value)
        end = max(end, value.end)
    return chain


def _fullest(values: list[_Value]) -> int:
    """When the most bytes are in use."""
    changes: dict[int, list[tuple[int, tuple[int, int, int]]]] = defaultdict(list)
    for value in values:
        if value.end >= value.start:
            changes[value.start].append((1, value.slot))
            changes[value.end + 1].append((-1, value.slot))
    living, total, best, at = Counter(), 0, -1, 0
    for time in sorted(changes):
        for sign, slot in sorted(changes[time], reverse=True):
            living[slot] += sign
            if sign > 0 and living[slot] == 1:
                total += slot[2]
            elif sign < 0 and living[slot] == 0:
                total -= slot[2]
        if total > best:
            best, at = total, time
    return at


def _kind(
    path: str,
    dims: tuple[int, ...],
    shapes: Collection[tuple[int, ...]],
    read_backward: bool,
) -> str:
    if "logits" in path:
        return "logits"
    if not path:  # what a loop fills, without a word of who does
        filled = "gradients" if dims in shapes else "residuals"
        return filled if read_backward else "workspace"
    copy = path.endswith("convert_element_type")
    if "jvp(" in path and dims in shapes and not copy:  # in the loss, or of a parameter
        return "gradients"
    if _is_backward(path) or "jvp(" not in path or not read_backward:
        return "workspace"
    return "residuals"


def _is_backward(path: str) -> bool:
    return "transpose(" in path


def _of_gradients(shape: str) -> list[tuple[int, ...]]:
    """Of an argument with such a shape, and of one layer of several."""
    numbers = _numbers(shape)
    return [_dims(numbers)] + ([_dims(numbers[1:])] if len(numbers) > 2 else [])


def _dims(numbers: list[int]) -> tuple[int, ...]:
    """Without ones, sorted: a layout may have turned them around."""
    return tuple(sorted(n for n in numbers if n > 1))


def _numbers(shape: str) -> list[int]:
    found = re.match(r"\w+\[([\d,]*)\]", shape)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _shape(text: str) -> str:
    """Without its layout; empty for a tuple, a table of pointers."""
    return "" if text.startswith("(") else re.sub(r"\{[^}]*\}", "", text)


def operations(text: str) -> dict[str, int]:
    """Matrix products and attention calls of a compiled program; a loop's body once."""
    counts = Counter(re.findall(r'custom_call_target="([^"]+)"', text))
    matmuls = sum(n for target, n in counts.items() if "cublas" in target)
    matmuls += len(re.findall(r"__triton_gemm|__triton_nested_gemm", text))
    backwards = sum(
        n for target, n in counts.items() if "fmha" in target and "Backward" in target
    )
    forwards = sum(n for target, n in counts.items() if "fmha" in target) - backwards
    return {
        "matmuls": matmuls,
        "attention_forwards": forwards,
        "attention_backwards": backwards,
    }
