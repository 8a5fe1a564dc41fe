"""What JAX's arrays are, and how they are kept from what XLA would do with them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def tie[T](tree: T) -> T:
    """All arrays of a tree, none of which XLA makes or reads apart from the others.

    Arrays in the host's memory are left out: XLA moves them only by themselves.
    """
    leaves, structure = jax.tree.flatten(tree)
    here = [i for i, x in enumerate(leaves) if not on_host(x)]
    tied = barrier([leaves[i] for i in here])
    for i, x in zip(here, tied, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def barrier[T](tree: T) -> T:
    """`jax.lax.optimization_barrier`, which for `jax.debug_key_reuse` uses no key."""
    return renewed(jax.lax.optimization_barrier(renewed(tree)))


def renewed[T](tree: T) -> T:
    """The same, its keys unused: for what is run a second time, or only passed on."""
    return jax.tree.map(lambda x: jax.random.clone(x) if is_key(x) else x, tree)


def is_key(x: Any) -> bool:
    # A bool that a function returns has no dtype.
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def nbytes_of(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def on_host(x: Any) -> bool:
    """Of an array, or of what describes one."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    return aval.memory_space == jax.memory.Space.Host


@jax.custom_jvp
def pinned(given, value):
    """``given``, whose tangent is that of ``value``."""
    return given


pinned.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def jitted(fun: Callable, once: bool) -> Callable:
    """`jax.jit`; if it is called once, it runs op by op where nothing is traced.

    To compile it takes longer.
    """
    compiled = jax.jit(fun)
    if not once:
        return compiled

    def called(*args):
        leaves = jax.tree.leaves(args)
        traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        return (compiled if traced else fun)(*args)

    return called


def is_float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)


def is_inexact(aval: Any) -> bool:
    """Floating point or complex."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def types_made(fun: Callable, *avals: Any) -> tuple[Any, Any]:
    """The types of what a function makes, and its program.

    Not `jax.eval_shape`'s, which jax refuses where a mesh is in part manual.
    """
    program, made = jax.make_jaxpr(fun, return_shape=True)(*avals)
    return jax.tree.unflatten(jax.tree.structure(made), program.out_avals), program


def zeros(aval: Any) -> jax.Array:
    """Of such a shape and dtype, in that memory, laid out so over the devices."""
    x = jnp.zeros_like(
        jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            sharding=aval.sharding,
            manual_axis_type=aval.manual_axis_type,
        )
    )
    return jax.device_put(x, jax.memory.Space.Host) if on_host(aval) else x
