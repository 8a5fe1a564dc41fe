"""What a compiled program moves through a card's memory, and in what least time."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxcompact.memory.cards import Device
from jaxcompact.memory.hlo import Instruction, Text, arrays, nbytes

KINDS = ("products", "attention", "encoding", "kernels", "elementwise", "zeros", "host")
_NOTHING = frozenset(  # that are not run, or count where they are begun
    """parameter constant tuple get-tuple-element bitcast opt-barrier after-all
    fusion-done copy-done async-done partition-id replica-id""".split()
)
_CONTAINERS = frozenset("while conditional call async-start".split())
_RENAMES = frozenset(("bitcast", "reshape", "get-tuple-element"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]')


class Traffic(NamedTuple):
    """Of the operations of one kind.

    Attributes:
        nbytes: read from the card's memory and written to it.
        flops: of products.
        seconds: at least; the sum over operations of what takes longer, each at the
            card's full rate.
    """

    nbytes: int
    flops: int
    seconds: float


def traffic(text: str, card: Device) -> dict[str, Traffic]:
    """By kind of operation, for one run of a compiled program of one device.

    Each operation reads its operands once and writes its results: nothing stays in a
    cache from one to the next, nothing is read twice, of what is sliced only the slice
    is read, and what is updated in place is written where it changes. Kinds: matrix
    products, cuDNN's attention, what is named ``_encode``, Pallas kernels, buffers that
    are filled with a constant, copies to the host's memory, all else. Products of
    convolutions are not counted, only their bytes.

    Raises ValueError for a loop whose number of rounds is unknown.

    >>> import jax, jax.numpy as jnp
    >>> from jaxcompact.memory import devices
    >>> text = jax.jit(jnp.sin).lower(jnp.ones(256)).compile().as_text()
    >>> traffic(text, devices()["h200"])["elementwise"].nbytes
    2048
    """
    program = Text.read(text)

    def of(one: Instruction, beside: Mapping[str, Instruction]) -> Counter | None:
        if one.op in _NOTHING or "AllocateBuffer" in one.rest:
            return Counter()
        if one.op in _CONTAINERS:
            return None
        found = _Operation(program, one, beside)
        kind, size, flops = found.kind, found.nbytes, found.flops
        rate = card.host_bandwidth if kind == "host" else card.memory_bandwidth
        moving = size / rate if rate else math.inf  # a link that is not known
        seconds = max(moving, flops / card.flops)
        fields = {"nbytes": size, "flops": flops, "seconds": seconds}
        return Counter({(kind, name): n for name, n in fields.items()})

    counts = program.total(of)
    kinds = [kind for kind in KINDS if counts[kind, "nbytes"]]
    return {k: Traffic(*(counts[k, name] for name in Traffic._fields)) for k in kinds}


class _Operation:
    def __init__(
        self, program: Text, one: Instruction, beside: Mapping[str, Instruction]
    ):
        self.program, self.one, self.beside = program, one, beside
        called = [program.bodies[name] for name in one.called if "fusion" in one.op]
        self.inside = called[0] if called else ()
        self.all = list(self._all(self.inside)) or [one]

    def _all(self, body: Iterable[Instruction]) -> Iterable[Instruction]:
        for one in body:
            yield one
            if one.op == "fusion":
                for name in one.called:
                    yield from self._all(self.program.bodies[name])

    @property
    def kind(self) -> str:
        targets = "".join(one.rest for one in self.all if one.op == "custom-call")
        shapes = [self.one.shape, *(self.beside[o].shape for o in self.one.operands)]
        if any("S(5)" in shape for shape in shapes):  # the host's memory
            return "host"
        if "fmha" in targets:
            return "attention"
        if "mosaic_gpu" in targets:
            return "kernels"
        if "cublas" in targets or any(one.op == "dot" for one in self.all):
            return "products"
        if not any(self.beside[name].op != "constant" for name in self.one.operands):
            return "zeros"
        return "encoding" if "_encode" in self.one.rest else "elementwise"

    @property
    def nbytes(self) -> int:
        """Read and written; of what crosses to the host or back, once."""
        return self._moved() // 2 if self.kind == "host" else self._moved()

    def _moved(self) -> int:
        if self.one.op == "copy-start":
            return 2 * self.beside[self.one.operands[0]].nbytes
        if self.inside:
            places = {one.name: one for one in self.inside}
            given = (one for one in self.inside if one.op == "parameter")
            return sum(map(self._read, given)) + self._written(self.inside[-1], places)
        if self.one.op == "dynamic-update-slice":
            return 2 * self.beside[self.one.operands[1]].nbytes
        made = self.one.nbytes
        if self.kind in ("products", "attention") and self.one.shape.startswith("("):
            *_, (last,) = arrays(self.one.shape)  # bytes to work in
            made -= last
        if self.one.op in _SLICES:
            return 2 * made
        return made + sum(self.beside[name].nbytes for name in self.one.operands)

    def _read(self, value: Instruction) -> int:
        """Of a parameter of the fusion, or of another name for it."""
        size, total = value.nbytes, 0
        for one in self.inside:
            if value.name not in one.operands:
                continue
            first = one.operands[0] == value.name
            if one.op in _RENAMES:
                total += self._read(one)
            elif one.op in _SLICES and first:
                total += one.nbytes
            elif one.op not in ("dynamic-update-slice", "scatter") or not first:
                return size
        return min(total, size)

    def _written(self, made: Instruction, places: Mapping[str, Instruction]) -> int:
        if made.op == "tuple":
            return sum(self._written(places[name], places) for name in made.operands)
        if made.op == "get-tuple-element":
            return made.nbytes
        if made.op in _RENAMES:
            return self._written(places[made.operands[0]], places)
        if made.op == "dynamic-update-slice":
            return places[made.operands[1]].nbytes
        if made.op == "scatter":
            return 2 * places[made.operands[-1]].nbytes
        if made.op == "custom-call":
            return nbytes(made.shape[: made.shape.rfind(",")])
        return made.nbytes

    @property
    def flops(self) -> int:
        if self.kind == "attention":
            return self._attention()
        shapes = {one.name: one.shape for one in (*self.beside.values(), *self.all)}
        return sum(
            _product(one, arrays(shapes[one.operands[0]])[0])
            for one in self.all
            if one.op == "dot" or "cublas" in one.rest.partition("metadata=")[0]
        )

    def _attention(self) -> int:
        """Two products of scores' size; five in the backward pass."""
        (call,) = (one for one in self.all if "fmha" in one.rest)
        batch, length, heads, width = arrays(self.beside[call.operands[0]].shape)[0]
        keys = arrays(self.beside[call.operands[1]].shape)[0][1]
        count = 5 if "Backward" in call.rest else 2
        products = 2 * count * batch * heads * length * keys * width
        return products // 2 if '"CAUSAL"' in call.rest else products


def _product(one: Instruction, lhs: tuple[int, ...]) -> int:
    axes = _CONTRACTED.search(one.rest)[1].replace('"', "").split(",")
    summed = math.prod(lhs[int(axis)] for axis in axes if axis)
    return 2 * summed * math.prod(arrays(one.shape)[0])
