"""A function as a flat list of operations on numbered values."""

import functools
import os
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters import ad

_CALLS = ("jit", "pjit", "closed_call", "core_call")
_LIBRARIES = tuple(  # whose lines are not the user's
    os.path.dirname(os.path.abspath(module.__file__)) + os.sep for module in (jax, flax)
) + (os.path.dirname(os.path.abspath(__file__)) + os.sep,)

_REAL = jnp.bool_, jnp.integer, jnp.floating
Value = int | Literal  # the number of a value, or a constant written in place


@dataclass(frozen=True, eq=False)
class Op:
    """One operation: ``eqn`` with numbers for its variables.

    Attributes:
        eqn: the equation it comes from.
        kind: its primitive's name.
        name: ``"dot_general.3"``, the fourth of its kind in the function.
        scope: name of the innermost jitted function around it, ``"silu"``.
        calls: the equations of the jitted functions around it, outermost first.
        ins: what it reads.
        outs: what it makes.
    """

    eqn: JaxprEqn
    kind: str
    name: str
    scope: str
    calls: tuple[JaxprEqn, ...]
    ins: tuple[Value, ...]
    outs: tuple[int, ...]

    @property
    def where(self) -> str:
        """``"mlp.py:41"``: the user's line that made it; empty if there is none."""
        return next(filter(None, map(_where, (*self.calls, self.eqn))), "")

    @functools.cached_property
    def reads(self) -> list[int]:
        return [value for value in self.ins if not isinstance(value, Literal)]

    @functools.cached_property
    def jaxprs(self) -> tuple[Any, ...]:
        """Of what is inside: a loop's body, a cond's branches."""
        return tuple(jaxprs_in_params(self.eqn.params))

    def bind(self, *values: Any, **params: Any) -> list[Any]:
        """Its outputs, with some parameters replaced."""
        primitive = self.eqn.primitive
        params = primitive.get_bind_params({**self.eqn.params, **params})
        # A pair of sub-functions and parameters before jax 0.12.
        functions, params = params if isinstance(params, tuple) else ((), params)
        with self.eqn.ctx.manager:
            outs = primitive.bind(*functions, *values, **params)
        return list(outs) if primitive.multiple_results else [outs]


@dataclass(eq=False)
class Graph:
    """A traced function. Calls of jitted functions are taken apart.

    Made whole at once: what is derived of its operations is found once.

    Attributes:
        made_by: value -> the operation that makes it.
        readers: value -> the operations that read it, each once.
        spans: of its inputs that are constants, between which values they lie.
        infinite: its inputs that infinities are written into.
    """

    inputs: list[int] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    avals: list[Any] = field(default_factory=list)
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    infinite: Collection[int] = ()

    @functools.cached_property
    def made_by(self) -> dict[int, Op]:
        return {value: op for op in self.ops for value in op.outs}

    @functools.cached_property
    def readers(self) -> Mapping[int, list[Op]]:
        """Of a value that none reads, an empty list."""
        found: dict[int, list[Op]] = defaultdict(list)
        for op in self.ops:
            for value in set(op.reads):
                found[value].append(op)
        return found

    def cut(self, outputs: list[Value], *, effects: bool = False) -> "Graph":
        """The same for these outputs, without what they are not made of.

        Args:
            effects: what has some stays.
        """
        needed, ops = {v for v in outputs if isinstance(v, int)}, []
        for op in reversed(self.ops):
            if (effects and op.eqn.effects) or not needed.isdisjoint(op.outs):
                needed.update(op.reads)
                ops.append(op)
        return replace(self, outputs=outputs, ops=ops[::-1])

    def run(
        self, inputs: Sequence[Any], rule: Callable[[Op, list[Any], dict], list[Any]]
    ) -> dict[int, Any]:
        """All values; ``rule(op, values read, all values so far)`` makes them."""
        env = dict(self.constants) | dict(zip(self.inputs, inputs, strict=True))
        for op in self.ops:
            outs = rule(op, [read(env, value) for value in op.ins], env)
            env.update(zip(op.outs, outs, strict=True))
        return env

    def independent_of(self, inputs: Collection[int]) -> set[int]:
        """Values made of constants and of all other inputs alone."""
        found = {*self.constants, *self.inputs}.difference(inputs)
        for op in self.ops:
            if found.issuperset(op.reads) and not op.eqn.effects:
                found.update(op.outs)
        return found


def behind(
    values: Iterable[int],
    graph: Graph,
    through: Callable[[Op], bool] = lambda op: True,
) -> Iterator[int]:
    """They, and what they are made of ``through`` such operations; each once, the
    nearest first."""
    seen = dict.fromkeys(values)
    todo = list(seen)
    for value in todo:
        yield value
        op = graph.made_by.get(value)
        if op is not None and through(op):
            new = [v for v in dict.fromkeys(op.reads) if v not in seen]
            seen.update(dict.fromkeys(new))
            todo += new


def read(env: dict[int, Any], value: Value) -> Any:
    return value.val if isinstance(value, Literal) else env[value]


def number(constant: Literal) -> float | None:
    """Its value; None if it is complex, or the tangent of an integer."""
    dtype = constant.aval.dtype
    real = any(map(functools.partial(jnp.issubdtype, dtype), _REAL))
    return float(constant.val) if real else None


def graph_of(jaxpr: Any) -> Graph:
    """The graph of a jaxpr; its constants, if it has any, are the first inputs."""
    graph, counts = Graph(), {}

    def new(variable) -> int:
        graph.avals.append(variable.aval)
        return len(graph.avals) - 1

    def enter(jaxpr, env: dict, scope: str, calls: tuple) -> list[Value]:
        def number(v) -> Value:
            return v if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            kind, params = eqn.primitive.name, eqn.params
            ins = tuple(map(number, eqn.invars))
            if kind in _CALLS:
                inner, consts = opened(params.get("jaxpr", params.get("call_jaxpr")))
                inside = dict(zip(inner.invars, ins, strict=True))
                for variable, value in zip(inner.constvars, consts, strict=True):
                    inside[variable] = new(variable)
                    graph.constants[inside[variable]] = value
                outs = enter(inner, inside, params.get("name", scope), (*calls, eqn))
            else:
                if kind == "custom_jvp_call" and params["symbolic_zeros"]:
                    kind = "custom_vjp_call"  # a checkpoint's: see `pullbacks`
                if kind == "vprim":  # a primitive of Equinox's, under vmap
                    kind = params["prim"].name
                if kind == "pow" and isinstance(ins[0], Literal):
                    kind = "exp2"  # of another base
                counts[kind] = counts.get(kind, -1) + 1
                outs = tuple(map(new, eqn.outvars))
                name = f"{kind}.{counts[kind]}"
                graph.ops.append(Op(eqn, kind, name, scope, calls, ins, outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return list(map(number, jaxpr.outvars))

    jaxpr, _ = opened(jaxpr)
    variables = [*jaxpr.constvars, *jaxpr.invars]
    graph.inputs = list(map(new, variables))
    env = dict(zip(variables, graph.inputs, strict=True))
    graph.outputs = enter(jaxpr, env, "", ())
    return graph


def graph_of_rule(
    tree: Any, leaves: Sequence[Any], cts: Sequence[Any]
) -> tuple[Graph, list[Any]]:
    """The graph of a backward function that is a pytree, and what its first inputs are:
    constants and its leaves. The others are its cotangents, but those that are zero."""
    given = {i: ct for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)}

    def rule(leaves, given):
        return jax.tree.unflatten(tree, leaves)(
            [given.get(i, ct) for i, ct in enumerate(cts)]
        )

    closed = jax.make_jaxpr(rule)(list(leaves), given)
    return graph_of(closed), [*closed.consts, *leaves]


def loosened(graph: Graph) -> Graph:
    """The same, with nothing held by a barrier but what is read behind it."""
    read_later = {v for v in graph.outputs if not isinstance(v, Literal)}
    ops = []
    for op in reversed(graph.ops):
        if op.kind == "optimization_barrier":
            pairs = zip(op.ins, op.outs, strict=True)
            pairs = [(value, out) for value, out in pairs if out in read_later]
            ins, outs = zip(*pairs, strict=True) if pairs else ((), ())
            op = replace(op, ins=ins, outs=outs)
        read_later.update(op.reads)
        ops.append(op)
    return replace(graph, ops=ops[::-1])


def joined(graph: Graph) -> Graph:
    """The same, in which what is multiplied by another value equal to it is squared."""
    first: dict[int, int] = {}  # value -> the first that is equal to it
    seen: dict[Any, tuple[int, ...]] = {}
    ops = []
    for op in graph.ops:
        ins = tuple(first.get(v, v) if isinstance(v, int) else v for v in op.ins)
        twice = len(ins) == 2 and ins[0] == ins[1] and op.ins[0] != op.ins[1]
        if twice and op.kind in ("mul", "dot_general"):
            op = replace(op, ins=op.ins[:1] * 2)
        ops.append(op)
        known = seen.setdefault(_key(op, ins), op.outs)
        first |= {v: w for v, w in zip(op.outs, known, strict=True) if v != w}
    if all(new is old for new, old in zip(ops, graph.ops, strict=True)):
        return graph
    return replace(graph, ops=ops).cut(graph.outputs, effects=True)


def _key(op: Op, ins: Sequence[Value]) -> Any:
    """Equal of two operations that make the same."""
    said = [(v.aval, str(v.val)) if isinstance(v, Literal) else v for v in ins]
    key = op.kind, *said, *op.eqn.params.items()
    try:
        hash(key)
    except TypeError:
        return op
    return op if op.eqn.effects else key


def of_no_number(graph: Graph) -> set[int]:
    """Masks of NaN alone, ``x != x``."""
    unequal = (op for op in graph.ops if op.kind == "ne" and op.ins[0] == op.ins[1])
    return {v for op in unequal for v in op.outs}


def _where(eqn: JaxprEqn) -> str:
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        path = os.path.abspath(frame.file_name)
        if not path.startswith(_LIBRARIES) and not frame.file_name.startswith("<"):
            return f"{os.path.basename(path)}:{frame.line_num}"
    return ""


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants, closed or not."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def bodies(op: Op) -> Iterator[tuple[Graph, int]]:
    """With the first of the operation's inputs that they read; none of a while loop."""
    first = 1 if op.kind == "cond" else 0
    for body in map(graph_of, op.jaxprs):
        same = len(body.inputs) == len(op.ins) - first
        if same and len(body.outputs) == len(op.outs):
            yield body, first


def outside(op: Op, inside: Callable[[Graph], Collection[int]]) -> set[int]:
    """What an operation gives its bodies as inputs that are found ``inside`` them."""
    found: set[int] = set()
    for body, first in bodies(op):
        of = inside(body)
        pairs = zip(op.ins[first:], body.inputs, strict=True)
        found.update(v for v, inner in pairs if inner in of and isinstance(v, int))
    return found


def state_of(op: Op) -> dict[int, int]:
    """Which inputs of a loop's body are outputs of the step before."""
    if op.kind != "scan":
        return {}
    first, count, _ = _parts_of_scan(op)
    return {first + i: i for i in range(count)}


def scanned_inputs(op: Op) -> range:
    """Which inputs of a loop's body are given slice by slice."""
    if op.kind != "scan":
        return range(0)
    *before, count = _parts_of_scan(op)
    return range(sum(before), sum(before) + count)


def _parts_of_scan(op: Op) -> list[int]:
    """How many of its inputs are constants, state and slices."""
    return [len(t.vals) for t in op.eqn.params["ft_in"].unpack()]


def union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def made_of(
    graph: Graph, inputs: Mapping[int, int], closed: Collection[str] = ()
) -> dict[int, int]:
    """Which of the inputs, as bits, each value is made of.

    All outputs of ``closed`` kinds of operations are, of all that these read.
    """
    found = dict.fromkeys(graph.constants, 0) | dict.fromkeys(graph.inputs, 0)
    found |= inputs
    for op in graph.ops:
        masks = [0 if isinstance(v, Literal) else found[v] for v in op.ins]
        outs = masks if op.kind == "optimization_barrier" else None
        for body, first in bodies(op) if op.kind not in closed else ():
            given = dict(zip(body.inputs, masks[first:], strict=True))
            state, ends = state_of(op), []
            while True:
                made = made_of(body, given, closed)
                ends = [0 if isinstance(v, Literal) else made[v] for v in body.outputs]
                again = {body.inputs[i]: ends[o] for i, o in state.items()}
                if all(mask | given[v] == given[v] for v, mask in again.items()):
                    break
                given |= {v: mask | given[v] for v, mask in again.items()}
            index = union(masks[:first])
            outs = [a | b | index for a, b in zip(outs or ends, ends, strict=True)]
        found.update(zip(op.outs, outs or [union(masks)] * len(op.outs), strict=True))
    return found
