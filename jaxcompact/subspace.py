"""Which kernels train in a random subspace, and their gradients there."""

import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcompact.kernels.explicit import laid_as, without
from jaxcompact.kernels.varying import varying_as
from jaxcompact.paths import map_named, named_leaves, path_name
from jaxcompact.projection import Projection
from jaxcompact.sketched import Numbers, SketchedKernel, shared_sketches

# Of keys. Others give other bits under vmap, and so another P than the update's.
IMPL = "threefry2x32"


@dataclass(frozen=True)
class Slot:
    """One kernel's place in a subspace.

    Attributes:
        path: name of the parameter, ``"layers/attn/q/kernel"``.
        family: kernels of one module with equal width and projection. They share P,
            and so their z where they read the same input (q, k, v; gate, up).
        drawn: what P depends on, beside the key, the layer and the generation: the
            family but for its codec, which may change within a run.
        projection: the rule that matched.
        stack: leading layer axes, ``()`` or for example ``(24,)``.
        width: n, the layer's inputs.
        rank: r.
        outputs: m.
    """

    path: str
    family: str
    drawn: str
    projection: Projection
    stack: tuple[int, ...]
    width: int
    rank: int
    outputs: int

    @property
    def sketch_shape(self) -> tuple[int, ...]:
        return (*self.stack, self.rank, self.outputs)

    def keys(self, key: jax.Array, generation: jax.Array) -> jax.Array:
        """One PRNG key a layer, of shape ``stack``; they depend on nothing else."""
        key = jax.random.fold_in(key, generation)  # of all slots, compiled once
        names = [f"{self.drawn}/{i}" for i in range(math.prod(self.stack))]
        numbers = np.array([zlib.crc32(n.encode()) for n in names], np.uint32)
        keys = jax.vmap(partial(jax.random.fold_in, key))(numbers)
        return keys.reshape(self.stack)

    def map_layers(self, fun: Callable, key: jax.Array, generation, *arrays):
        """``fun(key, *arrays)`` layer by layer, so that one P is alive at a time.

        "countsketch" makes no P: all layers at once, without a buffer of a loop's own,
        unless an array is to be gathered for it.
        """
        gathers = any(a.ndim > 1 and without(a, -2) for a in arrays)
        at_once = self.projection.kind == "countsketch" and not gathers
        for _ in self.stack:
            fun = jax.vmap(fun) if at_once else _loop(fun)
        return fun(self.keys(key, generation), *arrays)


@dataclass(frozen=True, eq=False)
class Subspace:
    """Kernels whose gradient and optimizer state are r x m instead of n x m.

    Args:
        rules: pattern -> `Projection`. A pattern is a regular expression that must
            match a parameter's whole path (``"layers/attn/q/kernel"``); the first
            pattern that matches a path decides. Leading axes of a kernel of more than
            two are layers, each with its own P.
        key: a typed PRNG key, ``jax.random.key(seed)``, threefry2x32. P is a pure
            function of (key, the kernel's module and sizes, the projection but for its
            codec, layer, step // period) and is never stored.
        period: updates between two projections.

    Raises ValueError for no rules, a pattern that is not a regular expression, a value
    that is not a `Projection`, a key that is not one typed PRNG key, a period that is
    not a positive int. Against parameters (`slots`): a rule that matches no kernel, a
    match that is no kernel, a rank above a kernel's width.

    Source: CompAct (arXiv 2410.15352), section 3.

    >>> import jax, jax.numpy as jnp, jaxcompact as jc
    >>> subspace = jc.Subspace(
    ...     {r".*/kernel": jc.Projection(rank=0.25)}, key=jax.random.key(0), period=200)
    >>> subspace.slots({"up": {"kernel": jnp.zeros((32, 8)), "bias": jnp.zeros(8)}})[
    ...     "up/kernel"].sketch_shape
    (8, 8)
    """

    rules: Mapping[str, Projection]
    key: jax.Array
    period: int = 200

    def __post_init__(self):
        if not isinstance(self.rules, Mapping):
            raise ValueError(f"rules must map patterns to them, got {self.rules!r}")
        if not self.rules:
            raise ValueError("rules must hold at least one pattern, got none")
        for pattern, projection in self.rules.items():
            try:
                re.compile(pattern).fullmatch("")  # bytes match no names
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"rules: {pattern!r} must be a regular expression: {error}"
                ) from error
            if not isinstance(projection, Projection):
                raise ValueError(
                    f"rules[{pattern!r}] must be a Projection, got {projection!r}"
                )
        dtype = getattr(self.key, "dtype", None)
        if not (dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)):
            raise ValueError(
                f"key must be a typed PRNG key, jax.random.key(seed), got {self.key!r}"
            )
        if (impl := str(jax.random.key_impl(self.key))) != IMPL:
            raise ValueError(
                f"key must be of impl {IMPL!r}, whose bits are the same under "
                f"vmap: jax.random.key(seed, impl={IMPL!r}); got {impl!r}"
            )
        if self.key.shape != ():
            raise ValueError(f"key must be one key, got an array of {self.key.shape}")
        if type(self.period) is not int or self.period < 1:
            raise ValueError(f"period must be a positive int, got {self.period!r}")
        if self.period >= 2**31:  # counts are int32
            raise ValueError(f"period must be below 2^31, got {self.period}")
        object.__setattr__(self, "rules", MappingProxyType(dict(self.rules)))
        bits = None
        if not isinstance(self.key, jax.core.Tracer):
            with jax.ensure_compile_time_eval():
                bits = np.asarray(jax.random.key_data(self.key))
        object.__setattr__(self, "_bits", bits)

    def __eq__(self, other: Any) -> bool:  # the order of rules decides
        return isinstance(other, Subspace) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple:
        bits = id(self.key) if self._bits is None else self._bits.tobytes()
        return tuple(self.rules.items()), bits, self.period

    def __reduce__(self):  # to copy and pickle
        return Subspace, (dict(self.rules), self.key, self.period)

    def key_here(self) -> jax.Array:
        """``key``, for any mesh: it may have been made under another `jax.set_mesh`."""
        if self._bits is None:
            return self.key
        return jax.random.wrap_key_data(self._bits, impl=IMPL)

    def slots(self, params: Any) -> dict[str, Slot]:
        """The kernels of ``params`` that are in the subspace, by path."""
        unused = set(self.rules)
        slots: dict[str, Slot] = {}
        named = named_leaves(params)
        for name, leaf in named:
            pattern = next((p for p in self.rules if re.fullmatch(p, name)), None)
            if pattern is not None:
                unused.discard(pattern)
                if name in slots:
                    raise ValueError(f"params: two leaves have the name {name!r}")
                slots[name] = _slot(name, leaf, pattern, self.rules[pattern])
        for name in _masked(params):
            if any(re.fullmatch(p, name) for p in self.rules):
                raise ValueError(
                    f"rules: {name!r} is in the subspace, but optax.partition or "
                    "optax.masked gives its sketch to another transform: leave it out "
                    "of the rules"
                )
        if unused:
            names = [name for name, _ in named]
            raise ValueError(
                f"rules: {min(unused)!r} matches no parameter (or an earlier rule "
                f"takes all that it matches); the parameters are {', '.join(names)}"
            )
        return slots

    def generation(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Which P serves at ``step``: ``step // period``.

        Raises ValueError for a step that is no integer, or negative.
        """
        known = isinstance(step, np.ndarray | np.generic | jax.Array)
        if type(step) is int:
            whole = 0 <= step < 2**31
        else:  # also what stands for an array, as NNX's variables
            scalar = getattr(step, "shape", None) == ()
            whole = scalar and jnp.issubdtype(step.dtype, jnp.integer)
        if whole and known and not isinstance(step, jax.core.Tracer):
            whole = 0 <= int(step) < 2**31
        if not whole:
            raise ValueError(
                f"step must be the number of updates made, an integer, got {step!r}"
            )
        return jnp.asarray(step, jnp.int32) // self.period


def value_and_grad(
    fun: Callable, subspace: Subspace, *, has_aux: bool = False
) -> Callable:
    """`jax.value_and_grad`, with sketched gradients for the kernels in ``subspace``.

    Returns ``wrapped(params, *args, step, **kwargs) -> (value, grads)``, which calls
    ``fun(params, *args, **kwargs)``. ``grads`` has the structure of ``params``; the
    leaf of a kernel in the subspace is ``P^T G``, of shape ``(*stack, r, m)`` and the
    kernel's dtype, and no array of the kernel's own shape is made for it. All other
    leaves, biases among them, are the exact gradient.

    ``step`` is the number of updates made so far, `update_count(opt_state)`. It chooses
    P, so it stays the same for all microbatches of one update, whose gradients may be
    added up as they are.

    Of what ``fun`` casts, as to bfloat16, it must leave keys alone: a kernel in the
    subspace has one among its leaves. `jaxcompact.linear` casts by itself.

    The kernels are constants of ``fun``: what else it does with them has no gradient.
    A penalty on weights belongs into the optimizer (`optax.add_decayed_weights`).
    A ``step`` other than the optimizer's own count, or a subspace other than its own,
    takes the gradient in a P that the update does not lift with, which nothing can
    notice; nor that ``params`` are a part of the tree that the other one has, or hold
    it: names begin at its root (but for Linen's "params"); nor a `jax.vmap` over
    parameters around one of the two alone, or a `jax.shard_map` that cuts a kernel's
    rows or stack: vmap or map the whole step (and `init`), or what ``fun`` does.
    Derivatives of ``grads`` lack what goes through x in ``P^T G``: take curvature of
    ``fun`` and plain kernels.

    ``fun`` must read these kernels through `jaxcompact.linear` or the layers of
    `jaxcompact.nnx` and `jaxcompact.linen`.

    Raises ValueError, before ``fun`` is traced, where ``subspace`` and ``params`` do
    not fit (see `Subspace`), and for a ``step`` that is no count. NotImplementedError
    for a ``fun`` that takes a derivative itself of what reads a kernel in the subspace
    (forces, gradient penalties).

    >>> import jax, jax.numpy as jnp, jaxcompact as jc
    >>> params = {"kernel": jnp.ones((16, 3)), "bias": jnp.zeros(3)}
    >>> loss = lambda p, x: jc.linear(x, p["kernel"], p["bias"]).sum()
    >>> subspace = jc.Subspace({"kernel": jc.Projection(rank=4)}, key=jax.random.key(0))
    >>> grad = jc.value_and_grad(loss, subspace)
    >>> value, grads = grad(params, jnp.ones((5, 16)), step=0)
    >>> float(value), grads["kernel"].shape, grads["bias"].tolist()
    (240.0, (4, 3), [5.0, 5.0, 5.0])
    """

    require_subspace(subspace)
    if not callable(fun):
        raise ValueError(f"fun must be a function, got {fun!r}")

    def wrapped(params, *args, step: jax.typing.ArrayLike, **kwargs):
        loss, tree = with_sketches(fun, subspace, params, step)
        return jax.value_and_grad(loss, has_aux=has_aux)(tree, *args, **kwargs)

    return wrapped


_ERRORS = NotImplementedError, TypeError, ValueError, IndexError, AttributeError
# What jax says of a SketchedKernel that is read as an array, or as a tree of arrays.
_OF_A_KEY = (
    *("abstract method", "key<", "__jax_array__"),
    *("out of bounds for axis", "GetAttrKey"),
)


def require_subspace(subspace: Any) -> None:
    if not isinstance(subspace, Subspace):
        raise ValueError(f"subspace must be a Subspace, got {subspace!r}")


def with_sketches(
    fun: Callable, subspace: Subspace, params: Any, step: jax.typing.ArrayLike
) -> tuple[Callable, Any]:
    """``fun`` as a function of zero sketches, and the tree to differentiate it at.

    The tree is ``params`` with zeros ``(*stack, r, m)`` in the place of each kernel in
    the subspace; the kernels themselves become constants of the function.
    """
    slots = subspace.slots(params)
    generation = subspace.generation(step)
    # One array of keys a family and stack: what reads them whole has the same.
    key = subspace.key_here()
    keys = {
        (slot.family, slot.stack): slot.keys(key, generation) for slot in slots.values()
    }

    def zeros(name, leaf):
        slot = slots.get(name)
        if slot is None:
            return leaf
        return varying_as(leaf, laid_as(jnp.zeros(slot.sketch_shape, leaf.dtype), leaf))

    def kernel(name, leaf, weight):
        slot = slots.get(name)
        if slot is None:
            return leaf
        return SketchedKernel(
            weight,
            leaf,
            keys[slot.family, slot.stack],
            Numbers.of(slot.stack),
            slot.path,
            slot.family,
            slot.stack,
            slot.projection,
        )

    def of_sketches(tree, *args, **kwargs):
        sketched = map_named(kernel, tree, params)
        try:
            with shared_sketches():
                return fun(sketched, *args, **kwargs)
        except _ERRORS as error:
            if any(sign in str(error) for sign in _OF_A_KEY):
                paths = ", ".join(slot.path for slot in slots.values())
                error.add_note(
                    f"In the subspace are {paths}: each is a weight, a sketch and a "
                    "PRNG key here, whose axes before the last two are layers. Cast "
                    "only floating point leaves, scan over the first axis, read "
                    "kernels by jaxcompact.linear, and leave penalties to the "
                    "optimizer."
                )
            raise

    return of_sketches, map_named(zeros, params)


def _slot(name: str, leaf: Any, pattern: str, projection: Projection) -> Slot:
    told = f"rules: {pattern!r} must match kernels only, floating point of two axes "
    told += f"or more, but matches {name!r}"
    if not isinstance(getattr(leaf, "shape", None), tuple):
        raise ValueError(f"{told}, which is {leaf!r}")
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.ndim < 2:
        raise ValueError(f"{told}, {leaf.dtype.name}{list(leaf.shape)}")
    *stack, width, outputs = leaf.shape
    try:
        rank = projection.rank_of(width)
    except ValueError as error:
        raise ValueError(f"rules[{pattern!r}] for {name!r}: {error}") from None
    # Of Linen's variables and of their "params" it is the same.
    module = name.removeprefix("params/").rpartition("/")[0].rpartition("/")[0]
    drawn = f"{module}:{width}:{rank}:{projection.kind}:{projection.blocks}"
    family = f"{drawn}:{projection.codec}"
    return Slot(name, family, drawn, projection, tuple(stack), width, rank, outputs)


def _masked(params: Any) -> list[str]:
    """What optax hides of a tree from one of several transforms."""

    def is_masked(node):
        return isinstance(node, optax.MaskedNode)

    nodes = jax.tree.leaves_with_path(params, is_leaf=is_masked)
    return [path_name(path) for path, node in nodes if is_masked(node)]


def _loop(fun: Callable) -> Callable:
    return lambda *arrays: jax.lax.map(lambda layer: fun(*layer), arrays)
