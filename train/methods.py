"""The methods that `pretrain.py` compares: how gradients are taken and applied."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

import jaxcompact as jc
from jaxcompact.kernels.explicit import like
from jaxcompact.optimizers import Moment
from jaxcompact.paths import map_named
from jaxcompact.projection import Kind

Name = Literal["exact", "remat", "compact", "galore"]

# What CompAct and GaLore compress: every matrix of a block but attention's output.
MATRICES = r"layers/(attn/(q|k|v)|mlp/(gate|up|down))/kernel"
DOWN = "layers/mlp/down/kernel"
ATTENTION_OUTPUT = "layers/attn/o/kernel"

# What the backward pass finds of a block.
CHECKPOINT = {
    "none": None,
    "nothing": "nothing",
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
    "everything": jax.checkpoint_policies.everything_saveable,
    "int8": jc.policies.int8(),
    "int4": jc.policies.int4(),
    # Attention is run again, from decoded q, k and v.
    "int4_attention": replace(jc.policies.int4(), attention=jc.Recompute()),
    "int3": jc.policies.int3(),
    "int2": jc.policies.compress(jc.Quantized(bits=2)),
    "offload": jc.policies.uniform(jc.Offload()),
    "uniform8": jc.policies.uniform(jc.Quantized(bits=8)),
    "uniform4": jc.policies.uniform(jc.Quantized(bits=4)),
}


@dataclass(frozen=True)
class Method:
    """One way to train.

    The defaults are CompAct's at n/4, with a kind that takes no product, and trains as
    well as others in docs/results.md; the paper's is gaussian.

    Attributes:
        name: ``exact`` AdamW; ``remat``, the same with recomputation; ``compact``;
            ``galore`` from optax.
        checkpoint: what the backward pass finds of a block; a key of `CHECKPOINT`.
        rank: of the sketch, as `jaxcompact.Projection` takes it; of GaLore's subspace.
        kind: of random projection.
        period: updates between two projections.
        alpha: scale of the update of the compressed kernels.
        output_alpha: scale of the update of attention's output kernel.
        bits: of the saved sketches: 16 for none, 8 or 4.
        moment: what becomes of the first moment at a new projection.
        blocks: parts of the width of the MLP's down that are projected by themselves.
    """

    name: Name = "exact"
    checkpoint: str = "none"
    rank: float | int = 0.25
    kind: Kind = "countsketch"
    period: int = 200
    alpha: float = 1.0
    output_alpha: float = 1.0
    bits: int = 16
    moment: Moment = "reset"
    blocks: int = 1

    def __post_init__(self):
        choices = {
            "name": get_args(Name),
            "checkpoint": tuple(CHECKPOINT),
            "bits": (16, 8, 4),
            "moment": get_args(Moment),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"{field} must be one of {', '.join(map(str, allowed))}, "
                    f"got {getattr(self, field)!r}"
                )
        if not 1 <= self.period < 2**31:  # of int32, as the count of updates
            raise ValueError(f"period must be from 1 to 2^31 - 1, got {self.period}")
        if self.name == "remat" and self.checkpoint == "none":
            object.__setattr__(self, "checkpoint", "nothing")
        _ = self.projection  # says a wrong rank, kind or alpha at once

    @property
    def checkpoint_policy(self) -> Any:
        return CHECKPOINT[self.checkpoint]

    @property
    def projection(self) -> jc.Projection:
        codec = None if self.bits == 16 else jc.Quantized(bits=self.bits)
        return jc.Projection(self.rank, self.kind, self.alpha, codec)

    def subspace(self, seed: int) -> jc.Subspace | None:
        """The compressed kernels; None for the methods that compress none."""
        if self.name != "compact":
            return None
        key = jax.random.fold_in(jax.random.key(seed), 1)
        # Of these alone tensor parallelism shares the input.
        down = replace(self.projection, blocks=self.blocks)
        rules = {DOWN: down, MATRICES: self.projection}
        return jc.Subspace(rules, key, self.period)


def value_and_grad(loss: Callable, subspace: jc.Subspace | None) -> Callable:
    """``(params, *args, step) -> (loss, grads)`` of any method."""
    if subspace is not None:
        return jc.value_and_grad(loss, subspace)
    plain = jax.value_and_grad(loss)
    return lambda params, *args, step: plain(params, *args)


def optimizer(
    method: Method,
    subspace: jc.Subspace | None,
    learning_rate: optax.ScalarOrSchedule,
    *,
    width: int,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    adam: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """AdamW with the method's moments; all methods clip, decay and schedule alike.

    ``width`` is the model's: a fraction as GaLore's rank is one of it. ``adam`` takes
    the place of `optax.scale_by_adam`.
    """
    clipping = optax.clip_by_global_norm(clip)
    adam = optax.scale_by_adam() if adam is None else adam
    match method.name:
        case "compact":  # alpha is the projection's
            scale = jc.in_subspace(
                subspace, optax.chain(clipping, adam), moment=method.moment
            )
        case "galore":
            rank = method.projection.rank_of(width)
            scale = optax.chain(
                in_float32(optax.chain(clipping, _galore(rank, method.period, adam))),
                scaled(MATRICES, method.alpha),
            )
        case _:
            scale = optax.chain(
                in_float32(optax.chain(clipping, adam)), scaled(MATRICES, method.alpha)
            )
    return optax.chain(
        scale,
        scaled(ATTENTION_OUTPUT, method.output_alpha),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keeps the state in float32 for parameters of any float dtype.

    A bfloat16 second moment with ``b2 = 0.999`` never decays.
    """

    def init(params):
        return inner.init(optax.tree.cast(params, jnp.float32))

    def update(updates, state, params=None):
        dtypes = jax.tree.map(lambda u: u.dtype, updates)
        updates, state = inner.update(optax.tree.cast(updates, jnp.float32), state)
        return jax.tree.map(lambda u, d: u.astype(d), updates, dtypes), state

    return optax.GradientTransformation(init, update)


def scaled(pattern: str, scale: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Scales the updates of the parameters whose path matches."""

    def leaf(name, update):
        return update * scale if re.fullmatch(pattern, name) else update

    return optax.stateless(lambda updates, _: map_named(leaf, updates))


def _galore(
    rank: int, period: int, adam: optax.GradientTransformation
) -> optax.GradientTransformation:
    """optax's GaLore on each layer of the stacked matrices, and on nothing else."""

    def unstacked(tree):
        def leaf(name, x):
            return list(x) if re.fullmatch(MATRICES, name) else x

        return map_named(leaf, tree)

    def dimensions(tree):  # of an unstacked tree: its lists are the matrices
        def node(x):
            numbers = optax.contrib.GaLoreDimensionNumbers()
            return [numbers] * len(x) if isinstance(x, list) else None

        return jax.tree.map(node, tree, is_leaf=lambda x: isinstance(x, list))

    inner = optax.contrib.scale_by_galore(
        rank, period, base_optimizer=adam, weight_dimension_numbers=dimensions
    )

    def by_xla(updates, state):
        lists, state = inner.update(unstacked(updates), state)
        is_list = lambda node: isinstance(node, list)  # noqa: E731
        restacked = jax.tree.leaves(lists, is_leaf=is_list)
        restacked = [jnp.stack(x) if is_list(x) else x for x in restacked]
        return jax.tree.unflatten(jax.tree.structure(updates), restacked), state

    def update(updates, state, params=None):
        places = jax.tree.map(like, (updates, state))
        if not jax.tree.leaves(places):
            return by_xla(updates, state)
        # Its svd takes no array that devices share.
        return jax.sharding.auto_axes(by_xla, out_sharding=places)(updates, state)

    return optax.GradientTransformation(lambda p: inner.init(unstacked(p)), update)
