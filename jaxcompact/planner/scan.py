"""The step of a block alone: the gradient of a scan over layers of it."""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.arrays import is_inexact
from jaxcompact.checkpoint import TRACERS, Params, as_tuple, checkpoint
from jaxcompact.memory.functions import require_function


def scan_step(
    block: Callable, args: Sequence[Any], layers: int, params: Params
) -> Callable[[Any], tuple[Callable, tuple]]:
    """The gradient of a scan over ``layers`` blocks, for one policy."""
    require_function("block", block)
    if isinstance(block, FunctionType) and block in TRACERS:
        raise ValueError(
            f"block must be the function itself, got {block.__name__!r}, which "
            f"jc.checkpoint has wrapped already"
        )
    count = len(args)
    numbers = {n % count for n in as_tuple(params) if count and isinstance(n, int)}
    kinds = tuple(kind for kind in as_tuple(params) if isinstance(kind, type))
    numbers |= {n for n, x in enumerate(args) if _holds(x, kinds)}
    rest = [n for n in range(count) if n not in numbers]
    if not rest:
        raise ValueError("args must hold one that is no parameter")
    place = rest[0]
    out = jax.eval_shape(checkpoint(block, params=params), *args)  # which knows params
    if not numbers:
        raise ValueError(f"params must name an argument to train, got {params!r}")
    like = jax.tree.map(_kind, (out, args[place]))
    if like[0] != like[1]:
        raise ValueError(
            f"block must map its argument {place} to one like it, or make_step be "
            f"given; got {like[1]} to {like[0]}"
        )

    def make_step(policy):
        wrapped = checkpoint(block, policy=policy, params=params, prevent_cse=False)

        def loss(trained, others):
            def layer(x, own):
                given = dict(others) | dict(zip(sorted(numbers), own, strict=True))
                given[place] = x
                return wrapped(*(given[n] for n in range(len(args)))), None

            x, _ = jax.lax.scan(layer, others[place], trained, length=layers)
            inexact = filter(is_inexact, jax.tree.leaves(x))
            return sum(jnp.sum(y.real, dtype=jnp.float32) for y in inexact)

        def stacked(x):
            x = _array(x)
            sharding = getattr(x, "sharding", None)
            if isinstance(sharding, jax.NamedSharding):
                spec = jax.P(None, *sharding.spec)
                sharding = jax.NamedSharding(sharding.mesh, spec)
            else:
                sharding = None
            return jax.ShapeDtypeStruct((layers, *x.shape), x.dtype, sharding=sharding)

        trained = [jax.tree.map(stacked, args[n]) for n in sorted(numbers)]
        others = {n: args[n] for n in rest}
        # A module may hold integers beside its parameters.
        return jax.jit(jax.grad(loss, allow_int=True)), (trained, others)

    return make_step


def _kind(x: Any) -> tuple:
    x = _array(x)
    return x.shape, x.dtype


def _array(x: Any) -> Any:
    """With a shape and a dtype, which a number of Python has not."""
    return x if hasattr(x, "shape") else jax.typeof(x)


def _holds(tree: Any, kinds: tuple[type, ...]) -> bool:
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in nodes)
