"""`jax.checkpoint` whose saved tensors may be encoded."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import get_opaque_trace_state

from jaxcompact.analysis.spans import spans_of
from jaxcompact.graph import Graph, graph_of, joined
from jaxcompact.kinds import is_entered
from jaxcompact.paths import leaves_with_path, path_name
from jaxcompact.policy import ChoosesActions, Policy, require_policy
from jaxcompact.sketched import SketchedKernel
from jaxcompact.transform.outputs import Outputs
from jaxcompact.transform.traced import Traced, run

_OF_THE_WORLD = {"IOEffect", "OrderedIOEffect"}  # classes that jax does not export

RECOMPUTE = Policy()
Params = int | type | Sequence[int | type] | None

# What traces a checkpointed function: (args, kwargs) -> the function for such
# arguments, and what it is to be called with.
TRACERS: WeakKeyDictionary[Callable, Callable] = WeakKeyDictionary()


def checkpoint(
    fun: Callable,
    *,
    policy: ChoosesActions = RECOMPUTE,
    params: Params = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
) -> Callable:
    """`jax.checkpoint`, which can also encode what it saves.

    The outputs are those of ``fun``, exactly (but for last digits of exp and tanh where
    a kernel evaluates an activation, docs/kernels.md): only what the backward pass
    finds is other. It replays ``fun`` from what was stored. Under the policies of
    `jaxcompact.policies` matrix products, convolutions, attention and what else is
    expensive are not run again; without a policy all is, as by `jax.checkpoint`.

    Works under jit, grad, vmap, scan, nested and inside or around `jax.checkpoint`;
    goes into jitted functions, scans and branches, with other inputs differentiated at
    each use. ``fun`` may read the axis name of a vmap or a `jax.shard_map` around it,
    as for a mean over examples. Arrays that it closes over may be others at the next
    trace, not within one (`jax.jit` keeps the first); numbers, and NumPy's arrays of no
    axes, stay what they were. Outputs that nothing reads which is differentiated, as
    metrics or a module's state, cost no backward pass and, under jit, no memory; but
    for what a loop in ``fun`` carries from step to step. Under jit, products and
    convolutions sum up the gradients of what a vmap's examples share; those that loops
    or tables make are made for each first: there ``checkpoint(jax.vmap(fun))``.
    Modules: `jaxcompact.nnx.checkpoint`, `jaxcompact.linen.checkpoint`.

    Memory between the passes: what `explain` lists, and references to those inputs that
    are kept as they are. In a scan, masks and constants that are broadcast are made in
    each step, where of `jax.checkpoint`'s functions JAX holds them in full size.

    Args:
        fun: any differentiable function of pytrees.
        policy: what is done with each tensor: a `Policy`, or one of
            `jaxcompact.policies`.
        params: which arguments are parameters: argument numbers, or types of pytree
            nodes (``nnx.Param``). They are kept by reference, never copied, never
            encoded; nor is what follows from them alone, and from arrays that ``fun``
            closes over: a batch is to be an argument. All other floating point inputs
            may be encoded if they are differentiated. If None, no input is.
        static_argnums: arguments that are no arrays, hashable.
        static_argnames: the same by keyword.
        prevent_cse: as in `jax.checkpoint`: False is enough inside a scan.

    Raises ValueError for arguments that are none of these, and, when it is
    differentiated, for a rule that matches no tensor and an action that does not fit a
    tensor.
    NotImplementedError for second derivatives through what is encoded, for calls of the
    host (``io_callback``), and for gradients of symbolic shapes (`jax.export`).
    TypeError for forward mode (jvp).

    Source: GACT (arXiv 2206.11357), Adacc (arXiv 2508.00806); the replay is ours.

    >>> import jax, jaxcompact as jc
    >>> import jax.numpy as jnp
    >>> def block(params, x):
    ...     return x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    >>> params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
    >>> small = jc.checkpoint(block, policy=jc.policies.int4(), params=0)
    >>> grads = jax.grad(lambda p, x: small(p, x).sum())(params, jnp.ones((8, 64)))
    >>> grads["up"].shape
    (64, 256)
    """
    if not callable(fun):
        raise ValueError(f"fun must be a function, got {fun!r}")
    require_policy(policy)
    for p in as_tuple(params):
        if isinstance(p, bool) or not isinstance(p, int | type):
            raise ValueError(
                f"params must be argument numbers or types of pytree nodes, got {p!r}"
            )
    numbers, statics = static_numbers(static_argnums), as_tuple(static_argnames)
    for name in statics:
        if not isinstance(name, str):
            raise ValueError(f"static_argnames must be names, got {name!r}")
    known: dict[Any, tuple[Any, Traced, list[Any]]] = {}

    def trace(args: tuple, kwargs: dict) -> tuple[Traced, list[Any]]:
        call = _Call.of(fun, args, kwargs, numbers, statics)
        leaves, tree = jax.tree.flatten(call.dynamic)
        # Equal values of other types, as 1 and True, are other arguments.
        types = tuple(type(value) for _, value in call.static)
        key = call.static, types, tree, call.types(leaves), _settings()
        state, traced, consts = known.get(key, (None, None, None))
        # What a function closes over may belong to the trace around it, or change, but
        # not within one.
        fresh = traced is not None and (
            not consts
            or (
                state == get_opaque_trace_state()
                and any(map(_is_tracer, [*consts, *leaves]))
            )
        )
        if not fresh:
            traced, consts = _trace(call, leaves, tree, params, policy, prevent_cse)
            known[key] = get_opaque_trace_state(), traced, consts
        return traced, [*consts, *leaves, *getattr(policy, "probes", ())]

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        traced, inputs = trace(args, kwargs)
        outs = run(traced, inputs)
        return traced.outputs.whole(outs, traced.split(inputs)[0])

    TRACERS[wrapped] = trace
    return wrapped


@jax.tree_util.register_static
class _Settings:
    """Of JAX that a trace depends on: the precision of products, the width of dtypes.

    They differ where jit would trace anew.
    """


_new_settings = jax.jit(lambda: _Settings())


def _settings() -> _Settings:
    return jax.eval_shape(_new_settings)


@dataclass(frozen=True)
class _Call:
    """A call's arguments, static ones apart."""

    fun: Callable
    static: tuple[tuple[int | str, Any], ...]
    dynamic: tuple[dict[int, Any], dict[str, Any]]
    count: int

    @classmethod
    def of(cls, fun, args, kwargs, static_argnums, static_argnames) -> "_Call":
        count = len(args)
        numbers = places(static_argnums, count)
        static = (
            *((n, args[n]) for n in sorted(numbers)),
            *((k, kwargs[k]) for k in static_argnames if k in kwargs),
        )
        for argument, value in static:
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"static arguments must be hashable, got {value!r} for "
                    f"{_name(fun, argument)}"
                ) from None
        positional = {n: a for n, a in enumerate(args) if n not in numbers}
        named = {k: v for k, v in kwargs.items() if k not in static_argnames}
        return cls(fun, static, (positional, named), count)

    def __call__(self, dynamic) -> Any:
        positional, named = dynamic
        args = {**positional, **named, **dict(self.static)}
        positional = [args.pop(n) for n in range(self.count)]
        return self.fun(*positional, **args)

    def types(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Raises TypeError for a leaf that is no array, with its argument's name."""
        found = []
        for i, x in enumerate(leaves):
            try:
                found.append(jax.typeof(x))
            except TypeError:
                raise TypeError(
                    f"{self.input_names()[i]} must be an array, or an argument of "
                    f"static_argnums or static_argnames (if it is given by its name), "
                    f"or what fun closes over, got {x!r}"
                ) from None
        return tuple(found)

    def input_names(self) -> list[str]:
        """``"params/w1"``: the argument's name and the leaf's path."""
        paths = (path for path, _ in leaves_with_path(self.dynamic))
        return [_name(self.fun, of.key, *inside) for _, of, *inside in paths]

    def _arguments(self) -> Iterator[tuple[int | str, Any]]:
        """As they are flattened."""
        for given in self.dynamic:
            for argument in sorted(given):
                yield argument, given[argument]

    def parameters(self, params: tuple[int | type, ...]) -> list[bool]:
        """Which leaves belong to parameters."""
        types = (SketchedKernel, *(p for p in params if isinstance(p, type)))
        numbers: set[int | str] = set()
        for p in params:
            if isinstance(p, int):
                named = positional(self.fun)[p:] if p >= self.count else []
                if named and named[0] in self.dynamic[1]:  # given by its name
                    numbers.add(named[0])
                    continue
                if not -self.count <= p < self.count:
                    raise ValueError(
                        f"params must be below the number of arguments {self.count}, "
                        f"got {p}"
                    )
                numbers.add(p % self.count)
        for n, _ in self.static:
            if n in numbers:
                raise ValueError(f"argument {n} is in params and static_argnums")

        def is_type(node):
            return isinstance(node, types)

        mask, found = [], set()
        for argument, value in self._arguments():
            for node in jax.tree.leaves(value, is_leaf=is_type):
                found.update(kind for kind in types if isinstance(node, kind))
                said = is_type(node) or argument in numbers
                mask += [said] * len(jax.tree.leaves(node))
        for kind in types[1:]:
            if kind not in found and not numbers:
                raise ValueError(
                    f"params must be in the arguments, got {kind.__name__}, which no "
                    f"node of theirs is: () says that none is a parameter"
                )
        return mask


def _name(fun: Callable, argument: int | str, *inside: Any) -> str:
    """That of an argument, which is given by its place or name, or of what is in it."""
    place_of = getattr(fun, "place_of", lambda *place: None)
    argument, inside = place_of(argument, *inside) or (argument, inside)
    if isinstance(argument, int):
        plain = positional(fun)
        known = argument < len(plain)
        argument = plain[argument] if known else f"argument.{argument}"
    path = path_name(tuple(inside))
    return f"{argument}/{path}" if path else argument


def positional(fun: Callable) -> list[str]:
    """The names of the arguments that may be given by their place, if it tells them."""
    try:
        given = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in given if p.kind < inspect.Parameter.VAR_POSITIONAL]


def _trace(
    call: _Call,
    leaves: list,
    tree: Any,
    params: Params,
    policy: ChoosesActions,
    prevent_cse: bool,
) -> tuple[Traced, list[Any]]:
    """The traced function, and what it closes over."""
    out_trees = []

    def flat(*leaves):
        outs, out_tree = jax.tree.flatten(call(jax.tree.unflatten(tree, leaves)))
        out_trees.append(out_tree)
        return outs

    label = label_of(call.fun)
    try:
        closed = jax.make_jaxpr(flat)(*leaves)
    except TypeError as error:
        error.add_note(f"checkpoint of {label!r}")
        names = call.input_names()  # of the arguments of `flat`, which it may name
        for i in sorted(set(map(int, re.findall(r"leaves\[(\d+)\]", str(error))))):
            error.add_note(
                f"leaves[{i}] is {names[i]}; what decides what is done goes into "
                f"static_argnums or static_argnames"
            )
        raise
    graph = joined(graph_of(closed))
    if _has_references(graph):
        raise NotImplementedError(
            f"checkpoint of {label!r}: it uses mutable references"
        )
    if {type(effect).__name__ for effect in closed.effects} & _OF_THE_WORLD:
        raise NotImplementedError(
            f"checkpoint of {label!r}: it calls the host (io_callback), which the "
            f"backward pass would do again"
        )
    inputs = graph.inputs[len(closed.consts) :]
    graph.spans = spans_of(dict(zip(graph.inputs, closed.consts, strict=False)))
    said = call.parameters(as_tuple(params))
    all_names = dict(zip(inputs, call.input_names(), strict=True))
    names = {v: all_names[v] for v, s in zip(inputs, said, strict=True) if not s}
    labels = {v: name for v, name in all_names.items() if v not in names}
    for i, v in enumerate(graph.inputs[: len(closed.consts)]):
        labels[v] = f"closure.{i}"
    # A closure lives outside, for as long as the function does.
    keep = {}
    if params is None:
        keep = dict.fromkeys(names, "may be a parameter: `params` was not given")
    once = getattr(call.fun, "once", False)
    outputs = Outputs(graph, graph.independent_of(names), out_trees[-1], once)
    traced = Traced(
        outputs.inside,
        names,
        keep,
        params is not None,
        policy,
        label=label,
        labels=labels,
        outputs=outputs,
        prevent_cse=prevent_cse,
        once=once,
    )
    return traced, list(closed.consts)


def _has_references(graph: Graph) -> bool:
    """Also in the bodies of loops and branches, which are checkpointed as it is."""
    bodies = (body for op in graph.ops if is_entered(op) for body in op.jaxprs)
    return any(hasattr(aval, "inner_aval") for aval in graph.avals) or any(
        map(_has_references, map(graph_of, bodies))
    )


def label_of(fun: Callable) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    name = getattr(fun, "__name__", type(fun).__name__)
    code = getattr(inspect.unwrap(fun), "__code__", None)
    if name != "<lambda>" or code is None:
        return name
    return f"lambda at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def as_tuple(x: Any) -> tuple:
    """One or several argument numbers, names or types, or None."""
    if x is None:
        return ()
    one = isinstance(x, str | bytes | type) or not isinstance(x, Iterable)
    return (x,) if one or getattr(x, "shape", None) == () else tuple(x)


def static_numbers(static_argnums: Any) -> tuple[int, ...]:
    for n in as_tuple(static_argnums):
        if type(n) is not int:
            raise ValueError(f"static_argnums must be argument numbers, got {n!r}")
    return as_tuple(static_argnums)


def places(static_argnums: tuple[int, ...], count: int) -> set[int]:
    """Which of so many arguments these numbers are, that may count from the end."""
    for n in static_argnums:
        if not -count <= n < count:
            raise ValueError(
                f"static_argnums must be below the number of arguments {count}, got {n}"
            )
    return {n % count for n in static_argnums}
