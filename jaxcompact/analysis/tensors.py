"""The candidate tensors of a function: what its backward pass may want to find.

Worth storing is what is expensive to make again: results of matrix products and
convolutions, of sorts and scatters, of loops, and what a `jax.custom_vjp` op keeps for
itself. Chains of elementwise operations, norms, reshapes are made again from those: it
costs no memory traffic that is not there anyway, and is exact.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from jaxcompact.analysis.bounded import find_bounds, find_results
from jaxcompact.analysis.candidates import Candidates
from jaxcompact.analysis.correlations import find_correlations
from jaxcompact.analysis.decisions import EXACT, decides, find_searched, in_a_cell
from jaxcompact.analysis.differences import (
    find_angles,
    find_differences,
    find_expanded,
    find_scaled,
    given_by,
)
from jaxcompact.analysis.distributions import find_means
from jaxcompact.analysis.divisors import find_norms
from jaxcompact.analysis.exponents import find_exponents
from jaxcompact.analysis.functions import Function, find_functions, function_name
from jaxcompact.analysis.integers import find_integers, within_bounds
from jaxcompact.analysis.loops import exact_outputs
from jaxcompact.analysis.normal import find_features
from jaxcompact.analysis.phases import find_phases
from jaxcompact.analysis.rows import find_rows, find_uneven
from jaxcompact.analysis.scores import (
    find_attention,
    find_tables,
    is_product,
    multiplies,
    terms_of,
)
from jaxcompact.analysis.small import find_small
from jaxcompact.analysis.solving import solves_for_state
from jaxcompact.analysis.spectra import is_spread
from jaxcompact.analysis.still import find_ends
from jaxcompact.analysis.tails import find_tails
from jaxcompact.analysis.targets import find_logits, find_targets
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.arrays import is_inexact
from jaxcompact.graph import Graph, Op
from jaxcompact.kinds import (
    LINEAR_ALGEBRA,
    NONLINEAR,
    ORDERS,
    REDUCTIONS,
    expensive,
    renames,
    rules_algebra,
)

# A loss's difference, and logits, are whole beside a tensor so many times larger.
_SMALL = 12
_ONE_OF = 64  # entries, the largest of which is stored if it is small


class Tensors:
    """The candidates of a graph.

    Args:
        graph: the function.
        inputs: name of each input that is no parameter.
        known: whether it is known which inputs are parameters.
        moving: its values with cotangents (`moving_values`).
        statistics: whether sums and maxima over many entries are candidates.

    Attributes:
        found: value -> `Tensor`.
        functions: value -> `Function`, for the candidates of that kind.
        results: tensor -> what is encoded in its place (`find_results`).
        fixed: values made of parameters and constants alone. They are never encoded.
        data: values that depend on what may be encoded: inputs, and what expensive
            operations make, also of indices, keys and parameters alone.
        expensive: operations whose results are worth storing.
        solving: loops as Sinkhorn's and Newton's (`solves_for_state`).
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[int, str],
        known: bool,
        moving: Set[int],
        statistics: bool = False,
    ):
        self.fixed = graph.independent_of(inputs)
        # What only gives what has no gradient, as a metric, says nothing of the rest.
        graph = replace(graph.cut([*moving]), outputs=graph.outputs)
        self.graph, self.known, self.statistics = graph, known, statistics
        self.functions: dict[int, Function] = {}
        self.cells: set[int] = set()  # rounded numbers, and what is made of these alone
        self.expensive = {op for op in graph.ops if expensive(op)}
        self.data = {v for v in inputs if is_inexact(graph.avals[v])}
        self._find_data()
        of = graph, self.fixed, known, find_integers(graph), self.expensive
        self.found = Candidates(*of)
        given = given_by(graph, moving)
        of = graph, given, self.fixed, self.data, moving
        exponents = find_exponents(*of)
        softmaxes = find_exponents(*of, steep=False) if exponents else set()
        self.tables = find_tables(graph, softmaxes, self.fixed, known)
        self.solving = {op for op in graph.ops if solves_for_state(op, self.fixed)}
        for value, name in inputs.items():
            self.found.add(value, name=name, kind="input")
        for op in graph.ops:
            self._add_outputs(op, moving)
        for value in find_searched(graph, self.data, self.fixed):
            self._add_rounded(value)
        self._add_names()
        self.found.move_to_sums()
        self.found.move_to_parts()
        if self.found.move_to_slices(exponents, self.tables):
            self.found.move_to_sums()
        self.found.cut_chains()
        frozen = inputs.keys() - moving
        for value in find_ends(graph, self.found, moving, frozen):
            self.found.add_result(value)
        norms = find_norms(self.graph, self.fixed)
        enlarged = self._add_norms(norms)
        of = graph, given, self.data, self.fixed
        near, bells = find_differences(*of, moving)
        products, factors = find_correlations(*of, known)
        self._add_differences(near | products, moving)
        self._add_factors(factors)
        self._add_functions(moving)
        steep = bells | find_means(graph, moving, self.fixed)
        of = graph, given, moving
        again = {op for op in graph.ops if self._terms(op) is not None}
        logits, ranks = find_logits(*of, again, self.found)
        steep |= ranks | find_targets(*of, logits, near | products)
        steep |= {v for v in logits if self._is_little(v)}
        steep |= find_angles(graph, given, self.data)
        steep |= find_expanded(graph, given, self.data) | find_features(graph)
        divisors = self.found.move_to_divisors(steep, moving)
        self._describe(moving, exponents, enlarged, divisors)
        sums = {op for ends in norms.values() for op, _ in ends}
        stored = {v for v, t in self.found.items() if t.floating and not t.cheap}
        rows = find_rows(graph, sums, stored)
        for value, row in rows.items():
            self.found.change(value, row=row)
        own = stored & inputs.keys()
        uneven, streams = find_uneven(graph, rows, own, stored)
        for value in uneven:
            self.found.change(value, uneven=True, stream=value in streams)
        made = ((v, graph.made_by.get(v)) for v in self.found)
        extremes = {v for v, op in made if op and self._is_extreme(op, v, moving)}
        for value in find_small(self.found, frozen, extremes):
            self.found.change(value, small=True, cheap=False)

    def _find_data(self) -> None:
        for op in self.graph.ops:
            made = op in self.expensive and not self._counts(op)
            encoded = op.kind == "name" or made
            for value in op.outs if self.fixed.isdisjoint(op.outs) else ():
                inexact = encoded and is_inexact(self.graph.avals[value])
                if inexact or not self.data.isdisjoint(op.reads):
                    self.data.add(value)

    def _describe(
        self,
        moving: Set[int],
        exponents: Set[int],
        enlarged: Set[int],
        divisors: Set[int],
    ) -> None:
        """What is read of those that may be encoded, which says how finely."""
        graph = self.graph
        stored = {
            value
            for value, tensor in self.found.items()
            if tensor.kind != "function" and tensor.floating and not tensor.statistic
        }
        norms = [v for v in stored if self.found[v].normed]
        of = self.fixed, stored, self.known, norms, self.tables, moving
        attention = find_attention(graph, *of)
        divisors = divisors | exact_outputs(graph)
        phases, again = find_phases(graph, self.fixed, moving, stored)
        for value in stored:
            tensor, op = self.found[value], graph.made_by.get(value)
            kind = op.kind if op else None
            table = attention.tables.get(value)
            scores = attention.scores.get(value, table)
            if scores is not None:  # after the axis of a complex number's parts
                scores += len(tensor.shape) - graph.avals[value].ndim
            self.found.change(
                value,
                scores=scores,
                table=table is not None,
                fused=attention.fused.get(value),
                exponent=value in exponents,
                enlarged=value in enlarged,
                divisor=tensor.divisor
                or value in divisors | phases
                or kind in LINEAR_ALGEBRA
                or (op is not None and rules_algebra(op)),
                # A softmax over segments is then normalized as its terms are rounded.
                cheap=tensor.cheap
                or value in again
                or (kind == "fft" and is_spread(op, graph))
                or (value in divisors and kind == "scatter-add"),
            )
        plain = {v for v in stored if self._is_plain(v)}
        named = {v for v, tensor in self.found.items() if tensor.kind != "function"}
        steps = {v for v in self.functions if self.found[v].step}
        self.results = find_results(graph, self.fixed, plain, steps, named)
        bounds = find_bounds(graph, self.fixed, plain)
        bounds |= find_tails(graph, self.fixed, plain - bounds.keys())
        for value, bound in bounds.items():
            self.found.change(value, bound=bound)

    def _is_plain(self, value: int) -> bool:
        """Whether an operation made it, and nothing else is known of it."""
        tensor = replace(self.found[value], name="", where="", exponent=False)
        return tensor == Tensor.of(self.graph.avals[value], name="", kind="op")

    def _add_outputs(self, op: Op, moving: Set[int]) -> None:
        graph, discrete = self.graph, not self.data.isdisjoint(op.reads)
        for i, value in enumerate(op.outs):
            aval = graph.avals[value]
            name = op.name if len(op.outs) == 1 else f"{op.name}.{i}"
            if op in self.expensive:
                # Its choice is stored, by which what it read is gathered.
                ordered = op.kind in ORDERS and discrete
                again = ordered or self._counts(op) or op in self.solving
                fields = {
                    "discrete": discrete and not is_inexact(aval),
                    **self.found.span(value),
                    "terms": self._terms(op),
                    "cheap": is_inexact(aval) and again,
                    "divisor": op in self.solving,
                }
            elif (whole := in_a_cell(op, graph, self.data)) is not None:
                self._add_rounded(whole)
                self.cells.add(value)
                continue
            elif op.kind in EXACT and self._is_of_cells(op):
                self.cells.add(value)  # made again of what is kept whole
                continue
            elif decides(op, value, graph, self.data):
                value = within_bounds(value, graph, self.found.integers)
                aval = graph.avals[value]
                fields = {"discrete": discrete, **self.found.span(value)}
            elif self._is_extreme(op, value, moving) or self._is_statistic(op, value):
                fields = {"cheap": True, "statistic": self._is_statistic(op, value)}
            else:
                continue
            mask = aval.dtype == bool and op not in self.expensive
            kind = "mask" if mask else "op"
            self.found.add(value, name=name, kind=kind, where=op.where, **fields)

    def _is_of_cells(self, op: Op) -> bool:
        of = [v for v in op.reads if v in self.data or v in self.cells]
        return bool(of) and self.cells.issuperset(of)

    def _add_rounded(self, value: int) -> None:
        """A number that is kept as it is: both parts of it are read."""
        self.found.add_result(value)
        self.found.change(value, discrete=True)

    def _is_extreme(self, op: Op, value: int, moving: Set[int]) -> bool:
        """Of many entries one, as of a cloud of points: whole if it is small."""
        of = value in self.data and value in moving
        if not of or op.kind not in ("reduce_max", "reduce_min"):
            return False
        avals = self.graph.avals
        return avals[op.reads[0]].size >= _ONE_OF * avals[value].size

    def _is_statistic(self, op: Op, value: int) -> bool:
        avals = self.graph.avals
        largest = max((avals[v].size for v in op.reads), default=0)
        small = 16 * avals[value].size <= largest
        return (
            self.statistics
            and op.kind in REDUCTIONS
            and small
            and value in self.data
            and is_inexact(avals[value])
        )

    def _counts(self, op: Op) -> bool:
        """Whether it sums constants by indices: exact when made again, as degrees."""
        return op.kind == "scatter-add" and self.data.isdisjoint(op.reads)

    def _terms(self, op: Op) -> int | None:
        again = op in self.tables or is_product(op, self.fixed, self.known)
        return terms_of(op) if again else None

    def _add_names(self) -> None:
        """Names of `checkpoint_name` win, also over a reshaped copy of their tensor."""
        root = {}
        for op in self.graph.ops:
            if renames(op):
                for source, out in zip(op.ins, op.outs, strict=False):
                    if isinstance(source, int):
                        root[out] = root.get(source, source)
            if op.kind == "name":
                value, name = root[op.outs[0]], op.eqn.params["name"]
                if value in self.found:
                    self.found.change(value, name=name)
                else:
                    discrete = value in self.data and not is_inexact(
                        self.graph.avals[value]
                    )
                    self.found.add(
                        value,
                        name=name,
                        kind="op",
                        where=op.where,
                        cheap=True,
                        discrete=discrete,
                    )

    def _add_norms(self, norms: Mapping[int, Sequence[tuple[Op, bool]]]) -> set[int]:
        """What rows or channels are divided by; of which loops of products give those
        is returned."""
        products: dict[int, set[int]] = {}  # and what is cheaply made of them
        enlarged: set[int] = set()
        for op in self.graph.ops:
            if op in self.expensive:
                made = multiplies(op, self.fixed, self.known)
                loop = op.kind == "scan"
                products |= {v: {v} if loop else set() for v in op.outs if made}
            elif of := [products[v] for v in op.reads if v in products]:
                products |= dict.fromkeys(op.outs, set().union(*of))
            of_product = not products.keys().isdisjoint(op.outs)
            for value in self.data.intersection(op.outs) & norms.keys():
                self.found.add_result(value)
                self.found.change(
                    value,
                    cheap=False,
                    statistic=False,
                    normed=of_product and all(squares for _, squares in norms[value]),
                )
                if self.found[value].normed:
                    enlarged |= products[value]
        return enlarged

    def _add_differences(self, near: Set[int], moving: Set[int]) -> None:
        """Of what is near, as a prediction is to its target."""
        if not near:
            return
        scaled = find_scaled(self.graph, near, moving)
        for op in self.graph.ops:
            for value in near.intersection(op.outs):
                self.found.add_result(value)
                self.found.change(
                    value,
                    cheap=False,
                    near=True,
                    divisor=value in scaled or self._is_little(value),
                )

    def _is_little(self, value: int) -> bool:
        floating = (t.size for t in self.found.values() if t.floating)
        return _SMALL * self.found[value].size <= max(floating, default=0)

    def _add_factors(self, factors: Set[int]) -> None:
        """Of correlations: what is stored of them has as many bits."""
        for value in factors & self.found.keys():
            if self.found[value].floating and not self.found[value].cheap:
                self.found.change(value, near=True)

    def _add_functions(self, moving: Set[int]) -> None:
        """Nonlinear ones that others read, and that are no candidates already."""
        made, steps = find_functions(self.graph, self.fixed, self.data, moving)
        for value, function in made.items():
            curved = [op for op in function.ops if op.kind in NONLINEAR]
            inner = self.graph.readers[value] and all(
                o in made and made[o].root == function.root
                for reader in self.graph.readers[value]
                for o in reader.outs
            )
            if value in self.found or not curved or inner:
                continue
            label = function_name(curved[0])
            count = sum(f.name.startswith(f"{label}.") for f in self.found.values())
            self.functions[value] = function
            self.found.add(
                value,
                name=f"{label}.{count}",
                kind="function",
                where=curved[0].where,
                cheap=True,
                step=value in steps,
            )
