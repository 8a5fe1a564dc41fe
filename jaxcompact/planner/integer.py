"""Mixed integer linear programs, solved by HiGHS."""

from collections.abc import Mapping

import numpy as np

from jaxcompact.memory.quiet import without

_NOISE = (b"HighsMip",)  # a trace that HiGHS was left with


class IntegerProgram:
    """A program in the making: variables are numbers, rows are sparse."""

    def __init__(self):
        self.least, self.most, self.binary = [], [], []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def variable(self, least: float = 0, most: float = 1, binary: bool = False) -> int:
        self.least.append(float(least))
        self.most.append(float(most))
        self.binary.append(int(binary))
        return len(self.least) - 1

    def row(self, terms: Mapping[int, float], least: float, most: float) -> None:
        if terms := {k: v for k, v in terms.items() if v}:
            self.rows.append((terms, least, most))

    def minimize(
        self, cost: Mapping[int, float], nodes: int | None = None
    ) -> np.ndarray | None:
        """Which variables are 1, of the least cost; None if there is no solution.

        With ``nodes``, the best that is found in so many of the search's tree, or None.
        """
        # Comes with jax, but takes as long to import as jaxcompact does.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        if not self.least:
            return np.zeros(0, bool)
        rows, columns, entries, bounds = [], [], [], []
        for i, (terms, least, most) in enumerate(self.rows):
            scale = max(map(abs, terms.values()))
            rows += [i] * len(terms)
            columns += terms
            entries += [v / scale for v in terms.values()]
            bounds.append((least / scale, most / scale))
        shape = len(self.rows), len(self.least)
        matrix = coo_array((entries, (rows, columns)), shape=shape).tocsr()
        with without(_NOISE, 1):
            found = milp(
                [cost.get(k, 0.0) for k in range(len(self.least))],
                constraints=LinearConstraint(matrix, *np.transpose(bounds)),
                bounds=Bounds(self.least, self.most),
                integrality=self.binary,
                options={} if nodes is None else {"node_limit": nodes},
            )
        return None if found.x is None else found.x > 0.5
