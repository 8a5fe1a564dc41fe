"""Memory against time: the plans of a block, beside every `jax.checkpoint` policy."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import checkpoint_policies as saves

from jaxcompact.arrays import on_host
from jaxcompact.codecs import Codec
from jaxcompact.graph import graph_of
from jaxcompact.memory.cards import Device, find_device, here
from jaxcompact.planner.arguments import require_positive
from jaxcompact.planner.effects import Sensitivity
from jaxcompact.planner.layers import layers_of
from jaxcompact.planner.measured import operation_seconds
from jaxcompact.planner.milp import frontier
from jaxcompact.planner.problem import CODECS, problem_of, without_host
from jaxcompact.planner.roofline import nbytes_of
from jaxcompact.policy import ChoosesActions
from jaxcompact.transform.program import Program
from jaxcompact.transform.traced import Plan as Traces

JAX_POLICIES = {
    "everything_saveable": saves.everything_saveable,
    "dots_saveable": saves.dots_saveable,
    "dots_with_no_batch_dims_saveable": saves.dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims": saves.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
    "nothing_saveable": saves.nothing_saveable,
}


@dataclass(frozen=True)
class Point:
    """What one layer takes.

    Attributes:
        name: of the policy.
        nbytes: stored on the device between the passes.
        seconds: of both passes, as modelled.
        error: of the gradient, relative, as modelled.
    """

    name: str
    nbytes: int
    seconds: float
    error: float = 0.0


@dataclass(frozen=True)
class Front:
    """The fastest plans at each size, and what there is beside them.

    Attributes:
        block: the block's name.
        device: the card.
        layers: how many blocks.
        plans: from the smallest to the fastest.
        exact: those that encode nothing and use no host.
        others: `jax.checkpoint`'s policies.
    """

    block: str
    device: str
    layers: int
    plans: tuple[Point, ...]
    exact: tuple[Point, ...]
    others: tuple[Point, ...]

    def __str__(self) -> str:
        title = f"{self.block}, {self.layers} layers on {find_device(self.device).name}"
        lines = [title, f"{'':36}{'GiB':>8}{'ms':>9}{'error':>8}"]
        for point in (*self.others, *self.plans):
            size = point.nbytes * self.layers / 2**30
            time = point.seconds * self.layers * 1e3
            lines.append(f"{point.name:36}{size:8.2f}{time:9.2f}{point.error:8.1%}")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """As a picture. Raises ImportError without matplotlib."""
        try:
            figures = importlib.import_module("matplotlib.figure")
        except ImportError:
            raise ImportError("a plot needs matplotlib, of jaxcompact[bench]") from None
        figure = figures.Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()

        def shown(points):
            each = [(p.nbytes / 2**30, p.seconds * 1e3) for p in points]
            return np.transpose(each) * self.layers

        worst = max((p.error for p in self.plans), default=0.0)
        lines = (
            (self.plans, f"jc.plan, gradient error up to {worst:.0%}"),
            (self.exact, "jc.plan, exact, without the host"),
        )
        for points, label in lines:
            if points:
                # Up to the next size there is none that is faster.
                axes.plot(*shown(points), ".-", drawstyle="steps-post", label=label)
        others = zip(self.others, *shown(self.others), strict=True)
        mark(axes, {point.name: (x, y) for point, x, y in others})
        axes.set_xlabel(f"stored between the passes, {self.layers} layers, GiB")
        axes.set_ylabel("modelled time of both passes, ms")
        axes.set_title(f"{self.block} on {find_device(self.device).name}", size=10)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=120)


def mark(axes: Any, policies: Mapping[str, tuple[float, float]]) -> None:
    """`jax.checkpoint`'s policies at their memory and time; slow ones at the edge."""
    fastest = min(y for _, y in policies.values())
    top = 1.5 * fastest
    names: dict[tuple[float, float], list[str]] = {}
    for name, (x, y) in policies.items():
        beyond = f", {y:.0f} ms" if y > top else ""
        names.setdefault((x, min(y, 0.97 * top)), []).append(name + beyond)
    axes.plot(*np.transpose([*names]), "ks", label="jax.checkpoint")
    middle = (min(x for x, _ in names) + max(x for x, _ in names)) / 2
    for place, each in names.items():
        right = place[0] > middle
        axes.annotate(
            "\n".join(each),
            place,
            (-6 if right else 6, 4),
            textcoords="offset points",
            ha="right" if right else "left",
            size=7,
        )
    axes.set_ylim(0.97 * fastest, top)
    axes.spines[["top", "right"]].set_visible(False)


def front(
    make_step: Callable[[ChoosesActions], tuple[Callable, tuple]],
    *,
    layers: int | None = None,
    device: str | None = None,
    max_error: float = 0.2,
    sensitivity: Sensitivity | None = None,
    codecs: Sequence[Codec] = CODECS,
    count: int = 24,
) -> Front:
    """The plans of a step's block, looked for at ``count`` sizes, by the model alone.

    No step is compiled: sizes are what is stored between the passes. Times are those of
    `plan_step`, of the block's forward and backward pass.

    Args: as of `jaxcompact.plan_step`, and ``count``, a positive int.

    Raises ValueError for a step that checkpoints no block or several, and for arguments
    that are none of these.
    """
    require_positive("count", count)
    if layers is not None:
        require_positive("layers", layers)
    device = here() if device is None else device
    card = find_device(device)
    if layers is None:
        layers = max(1, layers_of(make_step))
    traces, lossy = problem_of(make_step, card, max_error, sensitivity, codecs)
    _, exact = problem_of(make_step, card, 0.0, sensitivity, codecs)
    others = [
        _point(name, traces, card, policy)
        for name, policy in JAX_POLICIES.items()
        if card.host_bandwidth or "offload" not in name
    ]
    whole = _point("", traces, card).seconds

    def points(asked, name, noise):
        found: list[Point] = []
        for s in reversed(frontier(asked, noise, count)):
            point = Point(name, s.nbytes, whole + s.seconds, s.noise**0.5)
            if not found or point.seconds < found[-1].seconds:  # others are more exact
                found.append(point)
        return tuple(found)

    return Front(
        traces.traced.label,
        device,
        layers,
        points(lossy, "plan", max_error * max_error),
        points(without_host(exact), "exact plan", 0.0),
        tuple(others),
    )


def _point(
    name: str, traces: Traces, card: Device, policy: Callable | None = None
) -> Point:
    """A block under a policy of `jax.checkpoint`, or under none: from its own trace."""
    graph, replay = traces.traced.graph, traces.replay

    def block(*inputs):
        env = graph.run(inputs, lambda op, values, _: op.bind(*values))
        return [env[v] for v in graph.outputs]

    wrapped = block if policy is None else jax.checkpoint(block, policy=policy)

    def passes(*arguments):
        inputs, cts = arguments[: len(graph.inputs)], arguments[len(graph.inputs) :]

        def moving(*moved):
            filled = list(inputs)
            for i, value in zip(replay.recording.wrt, moved, strict=True):
                filled[i] = value
            outs = wrapped(*filled)
            return [outs[i] for i in replay.recording.active]

        outs, back = jax.vjp(moving, *(inputs[i] for i in replay.recording.wrt))
        return [*outs, *back(list(cts)), *jax.tree.leaves(back)]

    inputs = [graph.avals[v] for v in graph.inputs]
    cts = [graph.avals[graph.outputs[i]].to_ct_aval() for i in replay.recording.active]
    program = Program.trace(passes, *inputs, *cts)
    program, used = program.cut([True] * len(program.jaxpr.outvars))
    traced, count = graph_of(program.jaxpr), len(program.consts)
    fixed = set(traced.inputs[:count])
    own = (v for v, u in zip(graph.inputs, used, strict=False) if u)
    pairs = zip(traced.inputs[count:], own, strict=False)
    fixed |= {v for v, own in pairs if own in replay.tensors.fixed}
    for op in traced.ops:
        if fixed.issuperset(op.reads):
            fixed.update(op.outs)
    first = len(replay.recording.active) + len(replay.recording.wrt)
    stored = {v for v in traced.outputs[first:] if isinstance(v, int)}
    seconds = sum(operation_seconds(op, card, traced.made_by) for op in traced.ops)
    avals = (traced.avals[v] for v in stored - fixed)
    nbytes = sum(nbytes_of(a) for a in avals if not on_host(a))
    return Point(name, nbytes, seconds)
