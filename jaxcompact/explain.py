"""What a policy does with every tensor of a function, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import jax

from jaxcompact.actions import Action, Recompute, Save, written
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.arrays import is_inexact, nbytes_of, on_host
from jaxcompact.checkpoint import TRACERS, Params, checkpoint, label_of
from jaxcompact.codecs import Codec
from jaxcompact.policy import ChoosesActions
from jaxcompact.transform.traced import Plan, Traced

_OF_BODIES = "cond.", "scan.", "shard_map."


@dataclass(frozen=True)
class Row:
    """What becomes of one tensor.

    Attributes:
        name: as the patterns of a `Policy` see it.
        kind: as of a `Tensor`, or "parameter".
        shape: as of a `Tensor`; of one pass through a loop's body.
        dtype: name of its dtype.
        where: the line that makes it.
        action: what is done with it, as it is written in a policy; "keep" for an input
            that is kept by reference, "drop" for what the backward pass does not read.
        reason: why.
        nbytes: bytes as it is.
        stored: bytes that are stored on the device between the passes.
        host: bytes that are stored on the host.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    where: str
    action: str
    reason: str
    nbytes: int
    stored: int
    host: int = 0


@dataclass(frozen=True)
class Explanation:
    """The rows of `explain`; prints as a table.

    Attributes:
        rows: one for each candidate tensor and each parameter.
        inside: those of the bodies of loops and branches, for one pass. What they store
            is among the residuals of ``rows``.
        loops: bytes of what loops and branches keep, were none of it encoded.
        stored: bytes between the passes, beside inputs that are kept by reference.
        exact: bytes of the same tensors as they are.
    """

    rows: tuple[Row, ...]
    inside: tuple[Row, ...]
    loops: int

    @property
    def stored(self) -> int:
        return sum(row.stored for row in self.rows)

    @property
    def exact(self) -> int:
        others = [r for r in self.rows if not _is_of_loop(r) and not _is_of_relu(r)]
        return self.loops + sum(r.nbytes for r in others if r.stored or r.host)

    def __str__(self) -> str:
        header = ("tensor", "", "bytes", "stored", "action", "reason", "where")
        lines = [header]
        for row in (*self.rows, *self.inside):
            shape = ",".join(map(str, row.shape))
            lines.append(
                (
                    row.name,
                    f"{row.dtype}[{shape}]",
                    f"{row.nbytes:,}",
                    f"{row.stored:,}",
                    row.action,
                    row.reason,
                    row.where,
                )
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.rjust(width) if i in (2, 3) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        text.append(f"stored: {self.stored:,} bytes, of {self.exact:,}")
        return "\n".join(text)


def explain(
    fun: Callable,
    *args: Any,
    policy: ChoosesActions | None = None,
    params: Params = None,
    **kwargs: Any,
) -> Explanation:
    """What a policy does with every tensor of ``fun(*args, **kwargs)``, and why.

    ``fun`` is what `checkpoint` or `jaxcompact.nnx.checkpoint` returned, or a plain
    function with a policy for it, in which nothing is checkpointed yet.
    Arguments may be `jax.ShapeDtypeStruct`s: nothing is computed. All floating point
    inputs count as differentiated, but data through which JAX can't differentiate.

    Raises ValueError for a plain function without a policy, for a checkpointed one with
    a policy or params, which it has, and what `checkpoint` does.

    >>> import jax, jaxcompact as jc
    >>> import jax.numpy as jnp
    >>> def block(w, x):
    ...     return jax.nn.relu(x @ w)
    >>> said = jc.explain(block, jnp.ones((64, 64)), jnp.ones((8, 64)),
    ...                   policy=jc.policies.compress(jc.Quantized(8)), params=0)
    >>> [(row.name, row.action, row.nbytes, row.stored) for row in said.rows][1:]
    [('x', 'Quantized(bits=8)', 2048, 528), ('dot_general.0', 'drop', 2048, 0),
     ('relu.0', 'BitMask()', 2048, 64)]
    """
    if not callable(fun):
        raise ValueError(f"fun must be a function, got {fun!r}")
    checkpointed = isinstance(fun, FunctionType) and fun in TRACERS
    for name, given in ("policy", policy), ("params", params):
        if checkpointed and given is not None:
            raise ValueError(
                f"{name} must be left out of a function that is checkpointed: {fun!r} "
                f"has its own; an argument of that name goes by its place"
            )
    if not checkpointed and policy is None:
        raise ValueError(
            f"policy must be given for a fun that jc.checkpoint has not returned "
            f"itself (a jitted or partial function is another; of a model whose layers "
            f"are wrapped, explain one of these), got {label_of(fun)!r}"
        )
    if not checkpointed:
        fun = checkpoint(fun, policy=policy, params=params)
    traced, inputs = TRACERS[fun](args, kwargs)
    mask = tuple(
        is_inexact(traced.graph.avals[v]) and not _is_constant(x, traced.labels.get(v))
        for v, x in zip(traced.graph.inputs, inputs, strict=True)
    )
    mask = _differentiable(traced, mask)
    plan, exact = traced.plan(mask), traced.under(_Exactly(traced.policy)).plan(mask)
    rows = [
        Row(
            name,
            "parameter",
            traced.graph.avals[v].shape,
            str(traced.graph.avals[v].dtype),
            "",
            "keep",
            "closed over" if _is_closed_over(name) else "a parameter",
            nbytes_of(traced.graph.avals[v]),
            0,
        )
        for v, name in traced.labels.items()
    ]
    inside = [row for inner in plan.inner() for row in _rows(inner)]
    loops = sum(row.stored for row in _rows(exact) if _is_of_loop(row))
    return Explanation((*rows, *_rows(plan)), tuple(inside), loops)


def _differentiable(traced: Traced, mask: tuple[bool, ...]) -> tuple[bool, ...]:
    """Less the data, as a mask's padding, whose gradient a rule refuses."""
    if not traced.plan(mask).refused:
        return mask
    places = [*map(traced.graph.inputs.index, traced.labels)]

    def refuses(i: int) -> bool:
        return bool(traced.plan(tuple(i == j for j in range(len(mask)))).refused)

    return tuple(
        moves and (i in places or not refuses(i)) for i, moves in enumerate(mask)
    )


def _is_closed_over(name: str | None) -> bool:
    return name is not None and name.startswith("closure.")


def _is_constant(x: Any, name: str | None) -> bool:
    """What is closed over, unless a transformation around the function knows it."""
    return _is_closed_over(name) and not isinstance(x, jax.core.Tracer)


@dataclass(frozen=True)
class _Exactly:
    """A policy that saves what another one encodes."""

    policy: ChoosesActions

    @property
    def statistics(self) -> bool:
        return getattr(self.policy, "statistics", False)

    def decide(self, tensor: Tensor) -> tuple[Action, str]:
        action, reason = self.policy.decide(tensor)
        return (Save() if isinstance(action, Codec) else action), reason


def _is_of_loop(row: Row) -> bool:
    """Its residuals are codes already, where its body encodes."""
    return row.kind == "residual" and row.name.startswith(_OF_BODIES)


def _is_of_relu(row: Row) -> bool:
    """Bits beside its result, which knows its sign as it is."""
    return row.kind == "function" and row.action == "BitMask()"


def _rows(plan: Plan) -> list[Row]:
    replay = plan.replay
    stores: dict[Any, list] = {}
    for slot, store in zip(replay.slots, plan.stores.each, strict=True):
        value = getattr(slot.source, "value", slot.source)
        value = replay.stands_for.get(slot.source, value)
        stores.setdefault(value, []).append((slot, store))
    kept = {replay.graph.inputs[i] for i in replay.kept}
    rows = []
    for value, (tensor, action, reason) in replay.chosen.items():
        text, size, away = written(action), 0, 0
        if value in stores:
            text = ", ".join(written(slot.action) for slot, _ in stores[value])
            leaves = [leaf for _, store in stores[value] for leaf in store.leaves]
            away = sum(nbytes_of(leaf) for leaf in leaves if on_host(leaf))
            size = sum(map(nbytes_of, leaves)) - away
        elif value in kept:
            text = "keep"
            if isinstance(action, Recompute):
                reason = "an input: there is nothing to make it of"
        elif not isinstance(action, Recompute):
            text, reason = "drop", "the backward pass does not read it"
        rows.append(
            Row(
                tensor.name,
                tensor.kind,
                tensor.shape,
                str(tensor.dtype),
                tensor.where,
                text,
                reason,
                tensor.nbytes,
                size,
                away,
            )
        )
    return rows
