"""Traced functions: cut down to some of their outputs, run in a chosen order."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from jaxcompact.graph import graph_of, read
from jaxcompact.transform.schedule import Schedule


class Program:
    """A traced function that can be cut down to some of its outputs."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any]):
        self.jaxpr, self.consts = jaxpr, tuple(consts)

    def call(self, *args: Any) -> list[Any]:
        return jax.core.eval_jaxpr(self.jaxpr, (), *self.consts, *args)

    def call_in_order(self, args: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        """The outputs for ``[*args, *cts]``, as `Schedule` orders them."""
        inputs = [*self.consts, *args, *cts]
        return Schedule(graph_of(self.jaxpr), inputs, len(cts)).run()

    @classmethod
    def trace(cls, fun: Callable, *avals: Any) -> "Program":
        closed = jax.make_jaxpr(fun)(*avals)
        jaxpr = partial_eval.convert_constvars_jaxpr(closed.jaxpr)
        return cls(jaxpr, closed.consts)

    def cut(
        self, wanted: Sequence[bool], effects: bool = False
    ) -> tuple["Program", list[bool]]:
        """What makes the wanted outputs, and which inputs it reads.

        With ``effects`` what is printed or checked on the way is, too.
        """
        jaxpr = self.jaxpr
        if jaxpr.effects and not effects:
            jaxpr = _without_effects(jaxpr, wanted)
        jaxpr, used = partial_eval.dce_jaxpr(jaxpr, list(wanted))
        count = len(self.consts)
        kept = [c for c, u in zip(self.consts, used[:count], strict=True) if u]
        return Program(jaxpr, kept), used[count:]

    def without(self, kind: str) -> "Program":
        """The same with no operations of a kind that gives back what it is given."""
        graph = graph_of(self.jaxpr)

        def run(*inputs):
            env = graph.run(
                [*self.consts, *inputs],
                lambda op, values, _: values if op.kind == kind else op.bind(*values),
            )
            return [read(env, v) for v in graph.outputs]

        inputs = graph.inputs[len(self.consts) :]
        return Program.trace(run, *(graph.avals[v] for v in inputs))

    def made_of(self, inputs: set[int]) -> list[bool]:
        """Which outputs depend on no other inputs than these."""
        count = len(self.consts)
        fixed = set(self.jaxpr.invars[:count])
        fixed |= {v for i, v in enumerate(self.jaxpr.invars[count:]) if i in inputs}
        for eqn in self.jaxpr.eqns:
            if all(isinstance(v, Literal) or v in fixed for v in eqn.invars):
                fixed.update(eqn.outvars)
        return [isinstance(v, Literal) or v in fixed for v in self.jaxpr.outvars]


def _without_effects(jaxpr: Any, wanted: Sequence[bool]) -> Any:
    """The same with no operation that the wanted outputs are not made of."""
    pairs = zip(jaxpr.outvars, wanted, strict=True)
    needed = {v for v, w in pairs if w and not isinstance(v, Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
            eqns.append(eqn)
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(eqns=eqns[::-1], effects=effects)
