"""Flax Linen: a drop-in `Dense`, and `checkpoint` for modules."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen.dtypes import promote_dtype

from jaxcompact.checkpoint import RECOMPUTE, places, static_numbers
from jaxcompact.checkpoint import checkpoint as functional_checkpoint
from jaxcompact.linear import linear
from jaxcompact.policy import ChoosesActions
from jaxcompact.sketched import SketchedKernel


class Dense(nn.Dense):
    """`flax.linen.Dense` that can train in a subspace.

    The same arguments, parameters and outputs. Inside `jaxcompact.value_and_grad` a
    kernel in the subspace is read through `jaxcompact.linear`; everywhere else this is
    Flax's layer.

    Raises ValueError if a kernel in the subspace meets ``dot_general``,
    ``dot_general_cls`` or ``promote_dtype``: the sketch does not know them.

    >>> import jax, jax.numpy as jnp
    >>> from jaxcompact import linen as clinen
    >>> layer = clinen.Dense(4)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> layer.apply(variables, jnp.ones((2, 3))).shape
    (2, 4)
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        kernel = _unboxed(self.get_variable("params", "kernel"))
        if not isinstance(kernel, SketchedKernel):
            return super().__call__(inputs)
        product = self.dot_general or self.dot_general_cls
        if product is not None or self.promote_dtype is not promote_dtype:
            raise ValueError(
                f"dot_general, dot_general_cls and promote_dtype must be left at their "
                f"defaults for {kernel.path!r}, which is in the subspace"
            )
        bias = _unboxed(self.get_variable("params", "bias"))
        return linear(inputs, kernel, bias, dtype=self.dtype, precision=self.precision)


def _unboxed(param):
    """The value of a parameter that `flax.linen.with_partitioning` put in a box."""
    return param.value if isinstance(param, nn.Partitioned) else param


def checkpoint(
    target: Any,
    *,
    policy: ChoosesActions = RECOMPUTE,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
    methods: Collection[str] | None = None,
) -> Any:
    """`flax.linen.remat`, which can also encode what it saves.

    ``target`` is a module class or a function whose first argument is a module, which
    counts as argument 0 of ``static_argnums``. Arrays among the arguments may be
    encoded; variables never are. `jaxcompact.explain` takes the plain module, as
    ``lambda v, x: Block().apply(v, x)`` with ``params=0``. See `jaxcompact.checkpoint`.

    Modules of such a class that have no name are called ``CheckpointBlock_0``, as with
    `flax.linen.remat`: name them to load parameters that were trained without it.

    Raises ValueError for a target that is neither, and for ``methods`` that the class
    does not have; by default ``__call__`` alone is checkpointed.

    >>> import jax, jaxcompact as jc
    >>> import jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jaxcompact import linen as clinen
    >>> layer = clinen.checkpoint(nn.Dense, policy=jc.policies.int4())(64)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 64)))
    >>> jax.grad(lambda v: layer.apply(v, jnp.ones((2, 64))).sum())(variables)[
    ...     "params"]["bias"].shape
    (64,)
    """
    of = target.func if isinstance(target, functools.partial) else target
    module = isinstance(of, type) and issubclass(of, nn.Module)
    if not module and (not callable(target) or isinstance(target, type | nn.Module)):
        raise ValueError(f"target must be a module class or a function, got {target!r}")
    numbers = static_numbers(static_argnums)

    if module:
        methods = ("__call__",) if methods is None else methods
        if isinstance(methods, str) or not all(hasattr(of, name) for name in methods):
            raise ValueError(
                f"methods must be names of methods of {of.__name__}, got {methods!r}"
            )
        methods = {name: {"called": getattr(of, name)} for name in methods}

    # Its name is part of those of the submodules it makes, as in `nn.remat`.
    def checkpoint(fn: Any, called: Callable = of) -> Any:
        label = getattr(called, "__qualname__", type(called).__name__)
        label = label.split("<locals>.")[-1].removesuffix(".__call__")

        def in_scope(scope, *args, **kwargs):
            initializing = jax.tree.leaves(scope)[0].get_flag("initializing", False)

            def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
                @functools.wraps(called)
                def pure(variables, rngs, *args, **kwargs):
                    inner_scope = scope_fn(variables, rngs)
                    return fn(inner_scope, *args, **kwargs), repack_fn(inner_scope)

                # Nothing is differentiated: the bits of parameters are Flax's.
                if initializing:
                    return pure(variables, rngs, *args, **kwargs)
                pure.__name__ = label
                pure.place_of, pure.once = _place_of, True
                static = [n + 1 for n in places(numbers, 1 + len(args))]
                run = functional_checkpoint(
                    pure,
                    policy=policy,
                    params=(0, 1),
                    static_argnums=static,
                    static_argnames=static_argnames,
                    prevent_cse=prevent_cse,
                )
                return run(variables, rngs, *args, **kwargs)

            every = (True,), (True,), (True,)
            packed = lift.pack(inner, *every, name="checkpoint", enable_kwargs=True)
            return packed(scope, *args, **kwargs)

        return in_scope

    return nn.transforms.lift_transform(checkpoint, target, methods=methods)


def _place_of(argument: int | str, *inside: Any) -> tuple[int | str, tuple]:
    """Whose argument it is: two groups of the scope stand in the module's place."""
    if isinstance(argument, int):
        argument = ("variables", "rngs")[argument] if argument < 2 else argument - 1
    return argument, inside
