"""The compressed linear op: exact output and dx, a sketch in place of dW."""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import get_opaque_trace_state

from jaxcompact.codecs import Encoded, Quantized
from jaxcompact.kernels.explicit import beside, like
from jaxcompact.kernels.varying import varying_as
from jaxcompact.projection import Projection


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "sketch", "key", "layer"],
    meta_fields=["path", "family", "stack", "projection"],
)
@dataclass(frozen=True)
class SketchedKernel:
    """A kernel whose gradient is taken in a subspace; lives for one loss evaluation.

    `jaxcompact.value_and_grad` puts it in the kernel's place in the parameter tree.
    Its arrays may carry leading layer axes, which scan and vmap slice as they slice
    any parameter.

    Attributes:
        weight: the kernel itself, ``(n, m)``; never differentiated.
        sketch: zeros ``(r, m)`` of the kernel's dtype; the derivative is taken with
            respect to it.
        key: the PRNG key that P is made of.
        layer: number of the layer: kernels of equal family, stack and layer have equal
            keys. Not traced before a scan or vmap takes it apart.
        path: name of the parameter.
        family: of the kernels that share z; see `linear`.
        stack: the leading layer axes that the whole parameter has.
        projection: how z is made.
    """

    weight: jax.Array
    sketch: jax.Array
    key: jax.Array
    layer: np.ndarray
    path: str
    family: str
    stack: tuple[int, ...]
    projection: Projection

    def __post_init__(self):
        if _by_hand(self.layer, self.stack):
            _taken_by_hand()

    def __jax_array__(self, *_, **__):
        raise ValueError(self._told())

    __array__ = __getitem__ = __iter__ = __len__ = __jax_array__
    __neg__ = __abs__ = __add__ = __sub__ = __mul__ = __truediv__ = __jax_array__
    __pow__ = __matmul__ = __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __jax_array__
    __rpow__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = __jax_array__

    def __getattr__(self, name: str):  # of an array: T, astype, reshape
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(name)
        raise AttributeError(f"{name}: {self._told()}")

    def _told(self) -> str:
        return (
            f"parameter {self.path!r} is in the subspace, but the layer that reads it "
            f"knows nothing of sketches: use jaxcompact.nnx.Linear, "
            f"jaxcompact.linen.Dense or jaxcompact.linear there, or leave it out of "
            f"the subspace's rules"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype


def linear(
    x: jax.Array,
    kernel: jax.Array | SketchedKernel,
    bias: jax.Array | None = None,
    *,
    dtype: Any = None,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``y = x W + b``, whose backward pass needs ``z = x P`` instead of ``x``.

    With a plain array as ``kernel`` this is the plain product, gradients included.
    With a `SketchedKernel`::

        y  = x W + b       exact
        dx = dy W^T        exact
        db = sum dy        exact
        dW -> z^T dy       r x m, unbiased once lifted: E[P z^T dy] = x^T dy

    Saved for the backward pass: z, encoded by the projection's codec, and W, which is
    a parameter and costs nothing. z is named ``"sketch"`` for the name-based policies
    of `jax.checkpoint`. Kernels of one family that read the same ``x`` share one z. Of
    stacks they must be of one layer where its number is traced: in a scan, a vmap, or
    taken apart within a jit or checkpoint. If stacks are taken apart or reordered by
    hand, the gradient of another layer is NaN there; it is right outside.

    Args:
        x: ``(..., n)``.
        kernel: ``(n, m)``.
        bias: ``(m,)``.
        dtype: of the computation and of y; by default what x, W and b promote to.
        precision: of the products, as in `jax.lax.dot`.
        out_sharding: of ``x W``, as in `jax.lax.dot_general`: under explicit sharding,
            where devices share the axis that is summed over. A kernel that they share
            as they do the tokens (FSDP) is gathered for the products.

    Raises ValueError if the last axis of x is not the kernel's first, or the bias not
    as long as its last.

    Source: CompAct (arXiv 2410.15352), algorithms 1 and 2.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> jc.linear(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    x_shape, shape, bias_shape = map(_shape, (x, kernel, bias))
    if not x_shape:
        raise ValueError(f"x must be an array of one axis or more, got {x!r}")
    if shape is None or len(shape) != 2 or x_shape[-1] != shape[0]:
        raise ValueError(
            f"kernel must have shape (n, m) with n the last axis of x, got kernel "
            f"{shape or kernel!r} and x {x_shape}"
        )
    if bias is not None and bias_shape != shape[1:]:
        raise ValueError(
            f"bias must have shape (m,), as kernel {shape} has outputs, got "
            f"{bias if bias_shape is None else bias_shape!r}"
        )
    if dtype is None:
        operands = (x, kernel) if bias is None else (x, kernel, bias)
        dtype = jnp.result_type(*(a.dtype for a in operands))
    if isinstance(kernel, SketchedKernel):
        x, z, sketch = _sketched_input(x, kernel, dtype)
        spec = _Spec(
            jnp.dtype(dtype),
            precision,
            out_sharding,
            kernel.projection.codec,
            jax.typeof(x),
            jax.typeof(kernel.sketch),
        )
        operands = x, kernel.weight, sketch
        y = _sketched_product(spec, *varying_as(operands, operands), z)
    else:
        y = _product(x.astype(dtype), kernel.astype(dtype), 0, precision, out_sharding)
    if bias is not None:
        y += jnp.expand_dims(bias.astype(dtype), range(y.ndim - 1))
    return y


def _shape(x: Any) -> tuple[int, ...] | None:
    """None for what is no array."""
    shape = getattr(x, "shape", None)
    return shape if isinstance(shape, tuple) else None


def _product(
    x: jax.Array, w_nm: jax.Array, axis: int, precision: Any, out_sharding: Any
) -> jax.Array:
    """The last axis of x against an axis of W, as the plain layer's autodiff does."""
    return jax.lax.dot_general(
        x,
        beside(w_nm, x),
        (((x.ndim - 1,), (axis,)), ((), ())),
        precision=precision,
        out_sharding=out_sharding,
    )


@dataclass(frozen=True)
class _Spec:
    """What the backward pass must know and tracing must not touch."""

    dtype: jnp.dtype
    precision: Any
    out_sharding: Any
    codec: Quantized | None
    x: Any  # its dtype and sharding
    sketch: Any


Residuals = tuple[jax.Array | Encoded, jax.Array]  # z (..., r), W (n, m)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sketched_product(spec: _Spec, x, w_nm, sketch_rm, z) -> jax.Array:
    return _forward(spec, x, w_nm, sketch_rm, z)[0]


def _forward(spec: _Spec, x, w_nm, sketch_rm, z) -> tuple[jax.Array, Residuals]:
    # Not by calling _sketched_product: the policies of jax.checkpoint look for the
    # product in here, and would not see it inside another custom_vjp.
    x, w = x.astype(spec.dtype), w_nm.astype(spec.dtype)
    y = _product(x, w, 0, spec.precision, spec.out_sharding)
    return _once(y, sketch_rm), (z, w_nm)


@jax.custom_jvp
def _once(y: jax.Array, sketch_rm: jax.Array) -> jax.Array:
    """y, of which no derivative by the sketch is taken: the rule is one already."""
    return y


@partial(_once.defjvp, symbolic_zeros=True)
def _once_forward(primals, tangents):
    (y, _), (moved, by_sketch) = primals, tangents
    if not isinstance(by_sketch, SymbolicZero):
        raise NotImplementedError(
            "a kernel in the subspace has no second derivative: within fun it is read "
            "by what is differentiated there (grad, vjp, a gradient penalty, forces). "
            "Leave such kernels out of the subspace's rules"
        )
    return y, moved


def _backward(spec: _Spec, residuals: Residuals, dy):
    z, w_nm = residuals
    # The barrier ties decoding to dy: without it XLA may decode in the forward pass
    # and keep the decoded z.
    z, dy = jax.lax.optimization_barrier((z, dy))
    w = w_nm.astype(spec.dtype)
    dx = _product(dy, w, 1, spec.precision, like(spec.x)).astype(spec.x.dtype)
    tokens = tuple(range(dy.ndim - 1))
    with jax.numpy_dtype_promotion("standard"):
        sum_dtype = jnp.promote_types(dy.dtype, spec.sketch.dtype)
    product = {
        "precision": spec.precision,
        "preferred_element_type": sum_dtype,
        "out_sharding": spec.sketch.sharding,
    }
    if spec.codec is None:
        numbers = (tokens, tokens), ((), ())
        dsketch_rm = jax.lax.dot_general(z, dy, numbers, **product)
    else:
        dsketch_rm = spec.codec.weight_gradient(z, dy, **product)
    if not jnp.issubdtype(spec.sketch.dtype, jnp.complexfloating):
        dsketch_rm = dsketch_rm.real  # of a real kernel that reads a complex x
    return dx, None, dsketch_rm.astype(spec.sketch.dtype), None


_sketched_product.defvjp(_forward, _backward)


# --- sharing ---------------------------------------------------------------------
# q, k and v read one tensor, so one z serves all three. Which kernels read it is known
# only when they are called: the second call with the same x finds the z of the first.


@dataclass
class _Shared:
    x: jax.Array
    reader: tuple  # what must be the same of all that z serves
    result: tuple[jax.Array, jax.Array | Encoded]
    key: jax.Array  # that z was made with
    served: dict[str, jax.Array]  # path -> key
    open: bool = True


@dataclass
class _Sharing:
    trace: Any  # in which it began
    found: list[_Shared]
    by_hand: bool = False  # whether stacks are taken apart, reordered or cut by hand


_sharing: ContextVar[_Sharing | None] = ContextVar("jaxcompact_sharing", default=None)


@contextlib.contextmanager
def shared_sketches() -> Iterator[None]:
    """Within it, kernels of one family that read the same tensor share one z."""
    token = _sharing.set(_Sharing(get_opaque_trace_state(), []))
    try:
        yield
    finally:
        _sharing.reset(token)


def _sketched_input(x: jax.Array, kernel: SketchedKernel, dtype):
    """x and its z, and the sketch to differentiate by.

    x and z are tied together so that z is made when x is, not when it is read.
    """

    def make():
        fixed = jax.lax.stop_gradient(x).astype(dtype)
        z = kernel.projection.stored(kernel.key, fixed)
        z = jax.tree.map(lambda a: checkpoint_name(a, "sketch"), z)
        return jax.lax.optimization_barrier((x, z))

    sharing = _sharing.get()
    # What is shared keeps tracers alive, which is all that a check for leaks sees.
    if sharing is None or jax.config.jax_check_tracer_leaks:
        return *make(), kernel.sketch
    trace = get_opaque_trace_state()
    layer = _layer(kernel, taken_apart=trace == sharing.trace)
    # z must not leave its trace.
    reader = (kernel.family, kernel.stack, layer, jnp.dtype(dtype), trace)
    entries = (e for e in sharing.found if e.x is x and e.reader == reader)
    entry = next(entries, None)
    if entry is None:
        entry = _Shared(x, reader, make(), kernel.key, {})
        sharing.found.append(entry)
    elif layer is None and entry.served.get(kernel.path, kernel.key) is not kernel.key:
        # The same kernel with another key: layers of a stack, taken apart by hand,
        # read one tensor. Which key belongs to which layer can't be seen any more.
        entry.open = False
    if not entry.open:
        return *make(), kernel.sketch
    entry.served[kernel.path] = kernel.key
    sketch = kernel.sketch
    if layer is None and sharing.by_hand and kernel.key is not entry.key:
        sketch = _if_of_one_key(sketch, kernel.key, entry.key)
    return *entry.result, sketch


@jax.custom_vjp
def _if_of_one_key(sketch: jax.Array, key: jax.Array, z_key: jax.Array) -> jax.Array:
    """The sketch, whose gradient is NaN if z is of another layer, and so of another P.

    Only the compiled program knows: keys are its arguments, and nothing else is stored.
    """
    return sketch


def _if_of_one_key_backward(keys, dsketch):
    key, z_key = map(jax.random.key_data, keys)
    same = jnp.all(key == z_key)
    return dsketch * jnp.where(same, 1.0, jnp.nan).astype(dsketch.dtype), None, None


_if_of_one_key.defvjp(lambda sketch, *keys: (sketch, keys), _if_of_one_key_backward)


class Numbers(np.ndarray):
    """Of the layers of a stack: known where their index is, else traced."""

    @classmethod
    def of(cls, stack: tuple[int, ...]) -> "Numbers":
        return np.arange(math.prod(stack), dtype=np.int32).reshape(stack).view(cls)

    def __getitem__(self, index):
        _taken_by_hand()
        if any(isinstance(i, jax.core.Tracer) for i in jax.tree.leaves(index)):
            return jnp.asarray(np.asarray(self))[index]
        return super().__getitem__(index)


def _taken_by_hand() -> None:
    if sharing := _sharing.get():
        sharing.by_hand = True


def _by_hand(layer: Any, stack: tuple[int, ...]) -> bool:
    """Whether it is neither a stack as it was made nor what a scan or vmap is at."""
    if not stack or not hasattr(layer, "shape"):
        return False
    if isinstance(layer, jax.core.Tracer):
        return layer.shape != ()
    return not np.array_equal(layer, np.arange(math.prod(stack)).reshape(stack))


def _layer(kernel: SketchedKernel, taken_apart: bool) -> Any:
    """What is the same of layers with equal keys; None for all that a loop is at.

    A scan or vmap is at one layer of all its stacks. Of what is ``taken_apart`` by an
    index that is traced, or has axes of which only some are known, no other than the
    same array is known to be the same.
    """
    if not isinstance(kernel.layer, jax.core.Tracer):
        return np.asarray(kernel.layer).tobytes()
    return id(kernel.key) if taken_apart or len(kernel.stack) > 1 else None
