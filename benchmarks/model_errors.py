"""How far encoding moves the gradient of a task, beside what its parts predict."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from model_tasks import Task

import jaxcompact as jc
from jaxcompact.checkpoint import TRACERS


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * weights).sum() / weights.sum()


def checkpointed(task: Task, policy: Any) -> Callable:
    if policy is None:
        return task.apply
    return jc.checkpoint(task.apply, policy=policy, params=(0, 1))


@dataclass(frozen=True)
class Exactly:
    """A policy that saves what another one would quantize, all but one tensor."""

    policy: Any
    but: str | None = None

    def decide(self, tensor):
        action, reason = self.policy.decide(tensor)
        exact = isinstance(action, jc.Quantized) and tensor.name != self.but
        return (jc.Save() if exact else action), reason


def gradient(task: Task, policy: Any) -> dict[str, float]:
    """Of the first batch: the relative error of the gradient, and the predicted one.

    Predicted is the root of the sum of the squared errors that each stored tensor's
    own error causes by itself.
    """
    inputs, labels, weights = task.batch(0)
    args = task.params, task.state, inputs, task.key

    def vector(leaves):
        return jnp.concatenate([g.ravel() for g in leaves])

    def of(apply):
        def loss(params, *rest):
            return cross_entropy(apply(params, *rest)[0], labels, weights)

        return vector(jax.tree.leaves(jax.jit(jax.grad(loss))(*args)))

    small = checkpointed(task, policy)
    exact = of(task.apply)
    norm = jnp.linalg.norm(exact)
    measured = jnp.linalg.norm(of(small) - exact) / norm

    def plan_of(fun):
        traced, flat = TRACERS[fun](args, {})
        first = len(flat) - len(jax.tree.leaves(args))
        count = len(jax.tree.leaves(task.params))
        mask = tuple(first <= i < first + count for i in range(len(flat)))
        return traced.plan(mask), flat

    plan, flat = plan_of(checkpointed(task, Exactly(policy)))
    outs, stored = plan.forward(*flat)
    cts = jax.tree.map(jnp.zeros_like, outs)
    cts[0] = jax.grad(cross_entropy)(outs[0], labels, weights)
    kept = [flat[i] for i in plan.replay.kept]

    @jax.jit
    def backward(kept, stored):
        return vector(list(plan.pull(kept, stored, cts).values()))

    start = backward(kept, stored)

    @partial(jax.jit, static_argnums=0)
    def rounded(codec, x):
        return codec.decode(codec.encode(x))

    def alone(name):
        """The square of a tensor's error, by a backward pass of its own."""
        return jnp.sum((of(checkpointed(task, Exactly(policy, name))) - exact) ** 2)

    places = {slot.source: k for k, slot in enumerate(plan.replay.slots)}
    inputs_at = {plan.replay.graph.inputs[i]: k for k, i in enumerate(plan.replay.kept)}
    squares = []
    real = plan_of(small)[0]
    for slot in real.replay.slots:
        if not isinstance(slot.action, jc.Quantized):
            continue
        if slot.source in real.replay.stands_for:  # relu's result, for what that is of
            squares.append(alone(slot.tensor.name))
            continue
        other_kept, other = list(kept), list(stored)
        if slot.source in places:
            k = places[slot.source]
            store = plan.stores.each[k]
            x = store.decode(stored[k])
            other[k] = store.encode(rounded(slot.action, x))
        else:
            k = inputs_at[slot.source]
            other_kept[k] = rounded(slot.action, kept[k])
        squares.append(jnp.sum((backward(other_kept, other) - start) ** 2))
    for body in real.inner():
        for slot in body.replay.slots:
            if isinstance(slot.action, jc.Quantized):
                squares.append(alone(slot.tensor.name))

    def exact_bytes(plan, in_loops: bool) -> int:
        tensors = [slot.tensor for slot in plan.replay.slots]
        chosen = [t for t in tensors if t.name.startswith("scan.") == in_loops]
        return sum(tensor.nbytes for tensor in chosen)

    return {
        "error": float(measured),
        "predicted": float(jnp.sqrt(sum(squares)) / norm),
        "stored": sum(
            leaf.size * leaf.dtype.itemsize
            for store in real.stores.each
            for leaf in store.leaves
        ),
        # A loop's residuals are codes already, where its body encodes.
        "exact": exact_bytes(real, False) + exact_bytes(plan, True),
    }
