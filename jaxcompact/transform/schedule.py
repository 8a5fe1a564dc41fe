"""In which order a backward pass is made, so that little of it lives at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal

from jaxcompact.arrays import on_host, tie
from jaxcompact.graph import Graph, Op, loosened, read
from jaxcompact.kernels.quantize.devices import mesh_of
from jaxcompact.kinds import ELEMENTWISE, expensive, is_of_expensive, renames

_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
_LARGER = 2  # times what a product makes


@dataclass(frozen=True)
class Later:
    """An array that is made where it is first read.

    Attributes:
        leaves: what it is made of.
        make: makes it of them.
        light: whether it may be made again rather than kept.
    """

    leaves: Sequence[Any]
    make: Callable[[Sequence[Any]], Any]
    light: bool


class Schedule:
    """The order of a backward pass.

    Left to itself XLA decodes early, and makes weight gradients late, as nothing else
    reads them: it keeps what is decoded and what the gradients are made of. So

    - what is not made of cotangents comes where it is first needed, and what of it is
      expensive or gathers waits as a `Later` does: else XLA makes those of several
      layers in one fusion, and keeps them all;
    - a `Later` waits for the expensive operation before its reader, or for what else
      its reader needs where that is in memory in any case; one that lies in the host's
      memory is fetched as early as XLA likes;
    - a light one, and what is elementwise made of it, is not kept while an expensive
      operation runs, but made again for what reads it afterwards, unless that wants it
      in memory as well: to write it again takes longer than to keep it;
    - a matrix product among the outputs is made where its operands are, and shared by
      the devices at once where they are to have a part of it each;
    - one that frees something much larger than it makes, as that of an attention's
      probabilities, comes before what else is made of products as large, or of what it
      reads;
    - where XLA splits the program nothing waits for a product that is added to another:
      of products of parts it then sends the sum alone between the devices.

    Args:
        graph: the backward pass.
        inputs: its inputs, some of them `Later`.
        cts: how many of these, the last ones, are cotangents.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Any], cts: int):
        graph = loosened(graph)
        self.graph, self.inputs = graph, inputs
        cotangents = graph.inputs[len(inputs) - cts :]
        ops, self.chain, self.reader = in_order(graph, cotangents)
        self.readers = graph.readers
        ops, self.source = _shared_at_once(ops, self.readers)
        self.ordered = replace(graph, ops=ops)
        self.number = {op: i for i, op in enumerate(ops)}
        self.maker = self.ordered.made_by
        self.last = {v: i for op, i in self.number.items() for v in op.reads}
        pairs = zip(graph.inputs, inputs, strict=True)
        self.later = {v: x for v, x in pairs if isinstance(x, Later)}
        self.light = {v for v, x in self.later.items() if x.light}
        self.made_of = {v: {v} for v in self.later}  # of light ones: which `Later`
        for op in ops:
            fused = op.kind in ELEMENTWISE or renames(op)
            if fused and self.chain.isdisjoint(op.outs):
                if not self.light.isdisjoint(op.reads):
                    self.light.update(op.outs)
                    of = [self.made_of[v] for v in op.reads if v in self.made_of]
                    self.made_of |= dict.fromkeys(op.outs, set().union(*of))
        self.final = {v for v in graph.outputs if not isinstance(v, Literal)}
        for op in reversed(ops):
            same = renames(op) or op.kind == "convert_element_type"
            if same and not self.final.isdisjoint(op.outs):
                self.final.update(op.reads)
        split = any(map(_is_split, inputs))
        self.summands = _summands(ops, self.readers) if split else set()
        self.now = self.stage = 0  # operations, and expensive ones, so far
        self.stages: dict[int, int] = {}  # in which stage a value was made
        self.waited: dict[int, int] = {}  # the latest stage that its making waits for
        self.before: list[int] = []  # what the last expensive operation made
        self.held: dict[int, list[Any]] = {}  # leaves of a `Later` that waits for it
        self.products: list[int] = []

    def run(self) -> list[Any]:
        env = self.ordered.run(self.inputs, self._rule)
        for value in self.later.keys() & self.final:
            self._prepare(value, env, None)
        return [read(env, v) for v in self.graph.outputs]

    def _rule(self, op: Op, _: list[Any], env: dict[int, Any]) -> list[Any]:
        self.now = self.number[op]
        if not expensive(op) and self._reads_last(op):
            self._hold(env)
        for value in op.reads:
            self._prepare(value, env, op)
        if self.chain.isdisjoint(op.outs):
            return self._again(op, env)
        outs = op.bind(*(read(env, v) for v in op.ins))
        if expensive(op):
            self.held.clear()
            self.stage += 1
            self.before = self._read_later(op.outs) or self.before
        if op not in self.source:
            return outs
        operands = self.source[op].reads
        if final := not self.final.isdisjoint(op.outs):
            # What else is to be made of its operands, or of products, waits for it.
            waiting = {*self.products, *operands}
        else:
            waiting = self._beside_freed(op, operands)
            self.products.extend(op.outs)
        waiting = self._read_later(waiting - self.summands)
        if final or waiting:
            outs, tied = tie((outs, [env[v] for v in waiting]))
            env.update(zip(waiting, tied, strict=True))
        return outs

    def _beside_freed(self, op: Op, operands: Sequence[int]) -> set[int]:
        """Its operands, and products as large as the one of them that it is the last to
        read, if that is much larger than the other and what it makes."""
        avals = self.graph.avals
        least = _LARGER * avals[op.outs[0]].size
        freed = [v for v in operands if avals[v].size >= least]
        if len(freed) != 1 or self.last[freed[0]] > self.now:
            return set()
        if not is_of_expensive(freed[0], self.ordered):
            return set()
        large = [v for v in self.products if avals[v].size >= least]
        for v in large:  # by all names that they have so far
            named = (o for o in self.readers[v] if self.number[o] < self.now)
            large += [u for o in named if renames(o) for u in o.outs]
        return {*large, *operands}

    def _read_later(self, values: Iterable[int]) -> list[int]:
        return [v for v in values if self.last.get(v, -1) > self.now]

    def _prepare(self, value: int, env: dict[int, Any], op: Op | None) -> None:
        stale = value in self.light and self.stages.get(value) != self.stage
        missing = value in self.later and value not in self.stages
        if missing or (stale and op is not None and not self._holds(op)):
            self._make(value, env, self.reader.get(op, op))

    def _holds(self, op: Op) -> bool:
        """Whether it, or all that reads it by another name, reads it in memory."""
        if not (renames(op) or op.kind == "stop_gradient"):
            return _keeps(op)
        behind = [reader for v in op.outs for reader in self.readers[v]]
        return bool(behind) and all(map(self._holds, behind))

    def _make(self, value: int, env: dict[int, Any], reader: Op | None) -> None:
        needed, ops = [value], set()
        while needed:
            v = needed.pop()
            if v in self.later and self.stages.get(v) != self.stage:
                self._decode(v, env, reader)
            elif v not in self.later and self.maker[v] not in ops:
                ops.add(self.maker[v])
                light = [u for u in self.maker[v].reads if u in self.light]
                needed += [u for u in light if self.stages[u] != self.stage]
        for op in sorted(ops, key=self.number.__getitem__):
            env.update(zip(op.outs, self._again(op, env), strict=True))

    def _again(self, op: Op, env: dict[int, Any]) -> list[Any]:
        """What the operation, which reads no cotangents, makes."""
        waited = max([self.waited.get(v, 0) for v in op.reads], default=0)
        if _is_large(op) and op.reads and waited < self.stage:
            first = op.reads[0]
            if after := self._after(self.reader.get(op)):
                env[first] = _tied_to(env[first], after, env)
                waited = self.waited[first] = self.stage
        self.stages.update(dict.fromkeys(op.outs, self.stage))
        self.waited.update(dict.fromkeys(op.outs, waited))
        return op.bind(*(read(env, v) for v in op.ins))

    def _after(self, reader: Op | None) -> list[int]:
        """What has to be there before what ``reader`` needs is made."""
        if reader is not None and _keeps(reader):
            return [v for v in reader.reads if v in self.chain]
        waited = (v for v in self.before if v not in self.summands)
        return [v for v in waited if self.last[v] >= self.now]

    def _decode(self, value: int, env: dict[int, Any], reader: Op | None) -> None:
        leaves = self.held.get(value, self.later[value].leaves)
        if after := self._after(reader):
            leaves = self._waiting(value, after, env)
        env[value] = self.later[value].make(leaves)
        self.stages[value] = self.waited[value] = self.stage

    def _waiting(self, value: int, after: list[int], env: dict[int, Any]) -> list[Any]:
        leaves = list(self.later[value].leaves)
        if here := [i for i, leaf in enumerate(leaves) if not on_host(leaf)]:
            # One leaf is enough; the others stay slices of what a loop has stacked.
            k = min(here, key=lambda i: leaves[i].nbytes)
            leaves[k] = _tied_to(leaves[k], after, env)
        return leaves

    def _reads_last(self, op: Op) -> bool:
        """Whether nothing behind it reads what the last expensive operation made."""
        now = [v for v in self.before if self.last[v] >= self.now]
        return bool(now) and all(self.last[v] == self.now for v in now)

    def _hold(self, env: dict[int, Any]) -> None:
        """What is decoded or made again up to the next expensive operation on
        cotangents waits for the last one."""
        after = self._after(None)
        for op in self.ordered.ops[self.now + 1 :] if after else ():
            again = self.chain.isdisjoint(op.outs)
            if expensive(op) and not again:
                return
            if _keeps(self.reader.get(op, op)):  # for which it waits
                continue
            values = {v for u in op.reads for v in self.made_of.get(u, ())}
            for value in sorted(values - self.held.keys()):
                if self.stages.get(value) != self.stage:
                    self.held[value] = self._waiting(value, after, env)
            if again and _is_large(op):
                self._hold_what_is_here(op, after, env)

    def _hold_what_is_here(self, op: Op, after: list[int], env: dict[int, Any]) -> None:
        """Of what the operation is made of."""
        value = next(iter(op.reads), None)
        while value in self.maker and value not in env:
            value = next(iter(self.maker[value].reads), None)
        here = value in env and value not in self.later
        if here and self.waited.get(value, 0) < self.stage:
            env[value] = _tied_to(env[value], after, env)
            self.waited[value] = self.stage


def _tied_to(x: Any, values: list[int], env: dict[int, Any]) -> Any:
    """The same array, not read before the values are there."""
    x, tied = tie((x, [env[v] for v in values]))
    env.update(zip(values, tied, strict=True))
    return x


def _is_large(op: Op) -> bool:
    """Whether what it makes again is not to be there early."""
    return expensive(op) or op.kind == "gather"


def _keeps(op: Op) -> bool:
    """Whether what it reads has to be in memory."""
    return expensive(op) or op.kind == "optimization_barrier"


def _shared_at_once(
    ops: Sequence[Op], readers: Mapping[int, Sequence[Op]]
) -> tuple[list[Op], dict[Op, Op]]:
    """The operations, what shares a product among devices next to it: XLA sends each
    its part alone only then. And the product of each that ends so, or is one itself."""
    ordered: list[Op] = []
    source: dict[Op, Op] = {}
    moved: set[Op] = set()
    for op in ops:
        if op in moved:
            continue
        ordered.append(op)
        if op.kind not in _PRODUCTS:
            continue
        behind, last = [], op
        while len(readers[last.outs[0]]) == 1:
            (last,) = readers[last.outs[0]]
            if len(last.reads) > 1 or not (renames(last) or last.kind == "reshard"):
                break
            behind.append(last)
        while behind and behind[-1].kind != "reshard":
            behind.pop()
        ordered += behind
        moved.update(behind)
        source[ordered[-1]] = op
    return ordered, source


def _summands(ops: Iterable[Op], readers: Mapping[int, Sequence[Op]]) -> set[int]:
    return {
        v
        for op in ops
        if op.kind in _PRODUCTS
        for v in op.outs
        if [reader.kind for reader in readers[v]] == ["add_any"]
    }


def _is_split(x: Any) -> bool:
    """Whether XLA may split it over devices."""
    if isinstance(x, Later):
        return any(map(_is_split, x.leaves))
    mesh = mesh_of(x)
    return mesh.size > 1 and not mesh.are_all_axes_manual


def in_order(
    graph: Graph, cts: Iterable[int]
) -> tuple[list[Op], set[int], dict[Op, Op]]:
    """The operations, what is made of ``cts``, and which operation on that chain each
    operation is first needed by."""
    chain = set(cts)
    for op in graph.ops:
        if not chain.isdisjoint(op.reads):
            chain.update(op.outs)
    number = {op: i for i, op in enumerate(graph.ops)}
    maker = graph.made_by
    reader: dict[Op, Op] = {}
    for op in graph.ops:
        if chain.isdisjoint(op.outs):
            continue
        needed, found = [op], {op}
        while needed:
            makers = {maker[v] for v in needed.pop().reads if v in maker}
            new = {op for op in makers - found if op not in reader}
            found |= new
            needed.extend(new)
        reader.update(dict.fromkeys(sorted(found, key=number.__getitem__), op))
    rest = (op for op in graph.ops if op not in reader)
    return [*reader, *rest], chain, reader
