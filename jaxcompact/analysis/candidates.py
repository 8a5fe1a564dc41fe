"""What of a graph may be stored, and what in place of more: sums, parts, points."""

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from jaxcompact.analysis.bounded import find_bounds
from jaxcompact.analysis.depth import find_deep
from jaxcompact.analysis.divisors import find_divisors, long_sums
from jaxcompact.analysis.parts import find_parts, find_slices
from jaxcompact.analysis.scores import find_attention
from jaxcompact.analysis.sums import find_streams, find_sums
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.graph import Graph, Op, behind
from jaxcompact.kinds import expensive
from jaxcompact.reals import reals_of


class Candidates(dict[int, Tensor]):
    """Value -> `Tensor`.

    Args:
        graph: the function.
        fixed: values made of parameters and constants alone. They are none.
        known: whether it is known which inputs are parameters.
        integers: between which values whole numbers lie (`find_integers`).
        expensive: operations whose results are worth storing.
    """

    def __init__(
        self,
        graph: Graph,
        fixed: Collection[int],
        known: bool,
        integers: Mapping[int, tuple[int, int]],
        expensive: Collection[Op],
    ):
        super().__init__()
        self.graph, self.fixed, self.known = graph, fixed, known
        self.integers, self.expensive = integers, expensive

    def add(self, value: int, **fields: Any) -> None:
        aval = self.graph.avals[value]
        if value not in self.fixed and hasattr(aval, "shape"):
            self[value] = Tensor.of(aval, **fields)

    def add_result(self, value: int) -> None:
        """If it is none already."""
        if value not in self:
            op = self.graph.made_by[value]
            self.add(value, name=op.name, kind="op", where=op.where)

    def change(self, value: int, **fields: Any) -> None:
        self[value] = replace(self[value], **fields)

    def span(self, value: int) -> dict[str, int]:
        """Of whole numbers, which are stored in the fewest bits."""
        if value not in self.integers:
            return {}
        least, most = self.integers[value]
        return {"least": least, "limit": most + 1}

    def move_to_sums(self) -> None:
        """What is only read as a sum, as LoRA's products, is stored as that."""
        for op, terms in self._sums({}).items():
            (value,) = op.outs
            for term in terms:
                del self[term]
            self.add_result(value)
            self.change(value, cheap=False)

    def _sums(self, cut: Mapping[int, Iterable[int]]) -> dict[Op, tuple[int, ...]]:
        """What is only read as a sum, of tensors or of what they are ``cut`` into."""
        whole = {
            value
            for value, tensor in self.items()
            if tensor.floating
            and not (tensor.cheap or tensor.discrete)
            and tensor.terms is None
        }
        # Inputs of which nobody said whether they are parameters are kept as they are.
        stored = {v for v in whole if self.known or self[v].kind != "input"}
        parts = {part for value in whole & cut.keys() for part in cut[value]}
        streams = find_streams(self.graph, stored | parts, self.expensive)
        whole = whole - cut.keys() | parts
        return find_sums(self.graph, self.fixed, whole, streams)

    def move_to_parts(self) -> None:
        """What is only read in part, or as a narrower float, is stored as that."""
        made = {value for value, t in self.items() if t.kind == "op"}
        for value, part in find_parts(self.graph, made).items():
            self._put(self.pop(value), part)

    def move_to_slices(self, exponents: Set[int], tables: Collection[Op]) -> bool:
        """What exponentials read a part of, as q and k beside v, is stored in parts.

        And that of which slices are read that make no more than half of it, as the
        corners of a spectrum; all of which have bounds, as an LSTM's gates; or which
        are sums with others, as a GRU's. Whether any is.
        """
        made = {v for v, t in self.items() if t.kind == "op" and t.floating}
        cut = find_slices(self.graph, made, self.fixed)
        if not cut:
            return False
        stops = made.union(*cut.values())
        of = self.graph, self.fixed, stops, self.known, (), tables
        attention = find_attention(*of)
        read = exponents | attention.scores.keys() | attention.tables.keys()

        def entries(values: Iterable[int]) -> int:
            return sum(self.graph.avals[v].size for v in values)

        parts = set().union(*cut.values())
        bounded = find_bounds(self.graph, self.fixed, parts).keys()
        summed = {v for terms in self._sums(cut).values() for v in parts & {*terms}}
        before = len(self)
        for value, slices in cut.items():
            whole = entries([value])
            lesser = 0 < entries(read.intersection(slices)) < whole
            less = lesser or 2 * entries(slices) <= whole
            if less or bounded >= {*slices} or not summed.isdisjoint(slices):
                tensor = self.pop(value)
                for i, part in enumerate(slices):
                    self._put(replace(tensor, name=f"{tensor.name}.{i}"), part)
        return len(self) > before

    def _put(self, tensor: Tensor, part: int) -> None:
        """In place of a tensor a part of it, which keeps a name of its own."""
        name = self.get(part, tensor).name
        shape, dtype = reals_of(self.graph.avals[part])
        known = {"least": 0, "limit": None, **self.span(part)}
        self[part] = replace(tensor, name=name, shape=shape, dtype=dtype, **known)

    def cut_chains(self) -> None:
        """A residual stream, where what is added to it is read otherwise as well."""
        stored = {
            v for v, t in self.items() if not (t.cheap or t.statistic) and t.floating
        }
        for op in find_deep(self.graph, stored, self.expensive):
            self.add_result(op.outs[0])

    def move_to_divisors(self, steep: Set[int], moving: Set[int]) -> set[int]:
        """What is divided by, or in a logarithm, or the like, and is whole.

        Of a long sum that has no gradient the sum is stored in place of its terms (of
        others the gradient is of terms beside their sum); in place of products of few
        terms, as distances of all pairs, what they are of, if that is less.
        """
        graph, of = self.graph, (self.graph, self.fixed)
        divisors = find_divisors(*of, steep)
        sums = long_sums(graph, divisors - moving)
        less = find_divisors(*of, steep, sums) if sums else divisors
        whole = {v for v in self.keys() & divisors - less if not self[v].cheap}

        def is_of_whole(value: int) -> bool:
            cheaply = behind([value], graph, lambda op: not expensive(op))
            return not whole.isdisjoint(cheaply)

        sums = set(filter(is_of_whole, sums & less))
        for value in sums:
            self.add_result(value)
            self.change(value, cheap=False, statistic=False)
        divisors = find_divisors(*of, steep, sums) if sums else divisors
        products = {v for v in self.keys() & divisors if self._is_of_less(v)}
        for value in products:
            self.change(value, cheap=True)
        points = steep.union(*(graph.made_by[v].reads for v in products))
        return find_divisors(*of, points, sums) if products else divisors

    def _is_of_less(self, value: int) -> bool:
        """Whether it is a product of few terms, of less than itself."""
        if not self[value].few_terms:
            return False
        sizes = [self.graph.avals[v].size for v in {*self.graph.made_by[value].reads}]
        return sum(sizes) <= self.graph.avals[value].size
