"""The compressed linear op: exact output and dx, a sketch in place of dW."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxcompact.codecs import Encoded, Quantized
from jaxcompact.kernels.explicit import beside, like
from jaxcompact.kernels.varying import varying_as
from jaxcompact.sketched import SketchedKernel, sketched_input


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
        x, z, sketch = sketched_input(x, kernel, dtype)
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
        bias = beside(bias.astype(dtype), y)
        y += jnp.expand_dims(bias, range(y.ndim - 1))
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
