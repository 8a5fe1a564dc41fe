"""Flax NNX: a drop-in `Linear`; `value_and_grad` and `checkpoint` for modules."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from jaxcompact import subspace as functional
from jaxcompact.checkpoint import (
    RECOMPUTE,
    TRACERS,
    places,
    positional,
    static_numbers,
)
from jaxcompact.checkpoint import checkpoint as functional_checkpoint
from jaxcompact.kernels.explicit import typed
from jaxcompact.linear import linear
from jaxcompact.policy import ChoosesActions
from jaxcompact.sketched import SketchedKernel
from jaxcompact.subspace import Subspace


class Linear(nnx.Linear):
    """`flax.nnx.Linear` that can train in a subspace.

    The same arguments, parameters and outputs. Inside `value_and_grad` a kernel in the
    subspace is read through `jaxcompact.linear`, and so is one whose type says how
    devices share it; everywhere else this is Flax's layer.

    Raises ValueError if a kernel in the subspace meets ``dot_general``,
    ``preferred_element_type`` or ``promote_dtype``: the sketch does not know them.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> from jaxcompact import nnx as cnnx
    >>> layer = cnnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        kernel = self.kernel.get_value()
        special = (
            self.dot_general is not lax.dot_general
            or self.preferred_element_type is not None
            or self.promote_dtype is not promote_dtype
        )
        if not isinstance(kernel, SketchedKernel) and (special or not typed(kernel)):
            return super().__call__(inputs, out_sharding)
        if special:
            raise ValueError(
                f"dot_general, preferred_element_type and promote_dtype must be left "
                f"at their defaults for {kernel.path!r}, which is in the subspace"
            )
        return linear(
            inputs,
            kernel,
            None if self.bias is None else self.bias.get_value(),
            dtype=self.dtype,
            precision=self.precision,
            out_sharding=out_sharding,
        )


def value_and_grad(
    fun: Callable, subspace: Subspace, *, has_aux: bool = False
) -> Callable:
    """`flax.nnx.value_and_grad`, with sketched gradients for kernels in ``subspace``.

    Returns ``wrapped(model, *args, step, **kwargs) -> (value, grads)``; ``grads`` is a
    `flax.nnx.State` for `flax.nnx.Optimizer.update`. All other state, of the model
    (batch statistics, RNG counts) and of modules and `Rngs` among the other arguments,
    is updated in place as Flax does. See `jaxcompact.value_and_grad`.

    Raises ValueError if ``fun`` writes kernels in the subspace, adds parameters, or
    changes attributes of a model that are no variables.

    >>> import jax, optax, jaxcompact as jc
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxcompact import nnx as cnnx
    >>> model = cnnx.Linear(16, 3, rngs=nnx.Rngs(0))
    >>> subspace = jc.Subspace({"kernel": jc.Projection(rank=4)}, key=jax.random.key(0))
    >>> tx = jc.subspace_adamw(1e-3, subspace)
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> grad = cnnx.value_and_grad(lambda model, x: model(x).sum(), subspace)
    >>> value, grads = grad(model, jnp.ones((5, 16)), step=0)
    >>> grads["kernel"].get_value().shape
    (4, 3)
    >>> _ = optimizer.update(model, grads)
    """

    functional.require_subspace(subspace)
    if not callable(fun):
        raise ValueError(f"fun must be a function, got {fun!r}")

    def of_model(path, value):
        return path[0] == 0 and isinstance(value, nnx.Param)

    def sketched(path, value):
        variable = isinstance(value, nnx.Variable)
        return variable and isinstance(value.get_raw_value(), SketchedKernel)

    others = nnx.All(nnx.Variable, nnx.Not(sketched))

    def wrapped(model: nnx.Module, *args, step: jax.typing.ArrayLike, **kwargs):
        node = model, args, kwargs
        graphdef, params, rest = nnx.split(node, of_model, ...)

        def loss(params):
            params = nnx.State({0: params})
            node = nnx.merge(graphdef, params, rest, copy=True)
            model, args, kwargs = node
            before = _parts(node, of_model)
            value = fun(model, *args, **kwargs)
            _require_kept(before, _parts(node, of_model))
            value, aux = value if has_aux else (value, None)
            return value, (aux, nnx.state(node, others))

        (value, (aux, changed)), grads = functional.value_and_grad(
            loss, subspace, has_aux=True
        )(params.get(0, nnx.State({})), step=step)
        nnx.update(node, changed)
        return ((value, aux) if has_aux else value), grads

    return wrapped


def _parts(node: Any, of_model: Callable) -> tuple[Any, Any, Any]:
    """A graph, and how its parameters and the rest are called."""
    graphdef, *states = nnx.split(node, of_model, ...)
    return graphdef, *map(jax.tree.structure, states)


def _require_kept(before: tuple, after: tuple) -> None:
    """Raises ValueError where what a function changes would be lost."""
    graphs, names, rests = zip(before, after, strict=True)
    if names[0] != names[1]:
        raise ValueError(
            "fun may change the values of a model's state but of kernels in the "
            "subspace: it has written one of these, or added or removed an nnx.Param"
        )
    if rests[0] == rests[1] and graphs[0] != graphs[1]:
        raise ValueError(
            "fun may change the values of a model's variables, not attributes that are "
            "no variables"
        )


def checkpoint(
    fun: Callable,
    *,
    policy: ChoosesActions = RECOMPUTE,
    static_argnums: int | Sequence[int] = (),
    prevent_cse: bool = True,
) -> Callable:
    """`flax.nnx.remat`, which can also encode what it saves.

    ``fun`` takes modules among its arguments, and may change the values of their state
    (batch statistics, RNG counts) as ever. Arrays among the arguments may be encoded;
    NNX variables, parameters and all other state, never are. See
    `jaxcompact.checkpoint`.

    Raises ValueError for a module or a method of one in the place of ``fun``, and if it
    gives a module another variable or attribute, or returns one that it was given.

    >>> import jax, jaxcompact as jc
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxcompact import nnx as cnnx
    >>> layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> block = cnnx.checkpoint(lambda layer, x: nnx.gelu(layer(x)),
    ...                         policy=jc.policies.int4())
    >>> nnx.grad(lambda layer, x: block(layer, x).sum())(layer, jnp.ones((2, 64))
    ...     )["bias"].shape
    (64,)
    """

    if not callable(fun):
        raise ValueError(f"fun must be a function, got {fun!r}")
    owner = getattr(fun, "__self__", fun)
    kind = owner if isinstance(owner, type) else type(owner)
    if issubclass(kind, nnx.Module):
        raise ValueError(
            f"fun must be a function that takes the module, as checkpoint(lambda m, x: "
            f"m(x))(module, x), got {kind.__name__} itself or a method of it"
        )
    numbers = static_numbers(static_argnums)

    @functools.wraps(fun)
    def pure(static, variables, rest):
        graphdef, constants = static
        node = nnx.merge(graphdef, variables, rest, copy=True)
        args, kwargs = list(node[0]), node[1]
        for place, _, value in constants:
            args[place] = value
        outs = fun(*args, **kwargs)
        if nnx.graphdef(node) != graphdef:
            raise ValueError(
                "fun may change the values of a module's variables, not which "
                "variables and attributes it has, nor attributes that are no "
                "variables: flax.nnx.remat takes such a fun"
            )
        given = {id(part) for _, part in nnx.iter_graph(node)}
        for _, part in nnx.iter_graph(outs):
            if isinstance(part, nnx.Module | nnx.Variable) and id(part) in given:
                raise ValueError(
                    f"fun must return values, got a {type(part).__name__} that it was "
                    f"given: flax.nnx.remat takes such a fun"
                )
        return outs, nnx.state(node, nnx.Variable)

    # A variable's path, or an array's: of (args, kwargs), and of that the argument.
    pure.place_of = lambda _, part, argument, *inside: (argument.key, inside)
    pure.once = True  # as often as not: a module's __call__ may wrap its layers
    inner = functional_checkpoint(
        pure, policy=policy, params=1, static_argnums=0, prevent_cse=prevent_cse
    )

    def split(args, kwargs):
        """The arguments, those that are static without, and ``inner``'s for them."""
        count = max(len(args), len(positional(fun)))  # some may be left at defaults
        static = sorted(n for n in places(numbers, count) if n < len(args))
        # With their types: 1 and True are equal.
        constants = tuple((n, type(args[n]), args[n]) for n in static)
        node = [None if n in static else a for n, a in enumerate(args)], kwargs
        graphdef, variables, rest = nnx.split(node, nnx.Variable, ...)
        return node, ((graphdef, constants), variables, rest)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        node, given = split(args, kwargs)
        outs, state = inner(*given)
        nnx.update(node, state)
        return outs

    TRACERS[wrapped] = lambda args, kwargs: TRACERS[inner](split(args, kwargs)[1], {})
    return wrapped
