"""Traced functions: cut down to some of their outputs, run in a chosen order."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from jaxcompact.graph import Op, graph_of, read, tie
from jaxcompact.kinds import renames


class Program:
    """A traced function that can be cut down to some of its outputs."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any]):
        self.jaxpr, self.consts = jaxpr, tuple(consts)
        self.call = jax.jit(
            lambda *args: jax.core.eval_jaxpr(jaxpr, (), *consts, *args)
        )

    def call_in_order(self, *args: Any) -> list[Any]:
        """The outputs; a matrix product among them is made where its operands are.

        Weight gradients are read by nothing else, so XLA likes to make them last, and
        keeps what they are made of until then.
        """
        graph = graph_of(self.jaxpr)
        number = {op: i for i, op in enumerate(graph.ops)}
        last = {v: i for op, i in number.items() for v in op.reads}
        final = {v for v in graph.outputs if not isinstance(v, Literal)}
        for op in reversed(graph.ops):
            if renames(op) and not final.isdisjoint(op.outs):
                final.update(op.reads)
        products: list[int] = []

        def rule(op: Op, values: list[Any], env: dict[int, Any]) -> list[Any]:
            outs = op.bind(*values)
            if op.kind not in ("dot_general", "conv_general_dilated"):
                return outs
            if final.isdisjoint(op.outs):
                products.extend(op.outs)
                return outs
            # What else is to be made of its operands, or of products, waits for it.
            waiting = {*products, *op.reads}
            waiting = [v for v in waiting if last.get(v, 0) > number[op]]
            outs, tied = tie((outs, [env[v] for v in waiting]))
            env.update(zip(waiting, tied, strict=True))
            return outs

        env = graph.run([*self.consts, *args], rule)
        return [read(env, v) for v in graph.outputs]

    @classmethod
    def trace(cls, fun: Callable, *avals: Any) -> "Program":
        closed = jax.make_jaxpr(fun)(*avals)
        jaxpr = partial_eval.convert_constvars_jaxpr(closed.jaxpr)
        return cls(jaxpr, closed.consts)

    def cut(self, wanted: Sequence[bool]) -> tuple["Program", list[bool]]:
        """What makes the wanted outputs, and which inputs it reads."""
        jaxpr, used = partial_eval.dce_jaxpr(self.jaxpr, list(wanted))
        count = len(self.consts)
        kept = [c for c, u in zip(self.consts, used[:count], strict=True) if u]
        return Program(jaxpr, kept), used[count:]

    def made_of(self, inputs: set[int]) -> list[bool]:
        """Which outputs depend on no other inputs than these."""
        count = len(self.consts)
        fixed = set(self.jaxpr.invars[:count])
        fixed |= {v for i, v in enumerate(self.jaxpr.invars[count:]) if i in inputs}
        for eqn in self.jaxpr.eqns:
            if all(isinstance(v, Literal) or v in fixed for v in eqn.invars):
                fixed.update(eqn.outvars)
        return [isinstance(v, Literal) or v in fixed for v in self.jaxpr.outvars]
