"""One tensor that the backward pass may want to find, as a policy sees it."""

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax.numpy as jnp

from jaxcompact.kernels.quantize.levels import Bound
from jaxcompact.reals import reals_of

GROUP = 64  # entries that are rounded together, by default
TERMS = 128  # a product of two activations over so many at most is made again
Kind = Literal["input", "op", "residual", "mask", "choice", "function"]


@dataclass(frozen=True)
class Tensor:
    """One tensor that the backward pass may want, as a policy sees it.

    Attributes:
        name: ``"dot_general.3"``, or what `checkpoint_name` called it; an input has the
            argument's, a residual is ``"custom_vjp_call.0.residual1"``.
        kind: ``"input"`` of the function; ``"op"``, what an expensive operation made;
            ``"residual"`` that a `jax.custom_vjp` op or a loop keeps; ``"mask"``,
            booleans; ``"choice"``, which entries a max, a sort, a pooling took;
            ``"function"``, an elementwise nonlinear function of one tensor.
        shape: its shape; of complex numbers, which are stored as real ones, after a
            first axis of 2, their parts.
        dtype: its dtype; of complex numbers that of their parts.
        where: the line that made it, ``"mlp.py:41"``.
        frozen: an input that is not differentiated: data, a mask, a table. Kept by
            reference it takes no memory while its owner lives.
        cheap: it is made of other candidates without an expensive operation, or an
            angle, made of few numbers; or, with ``divisor``, it must fit what these
            make when they are rounded: the sums of a softmax over segments, all of a
            loop as Sinkhorn's or Newton's.
        discrete: what it is made of is rounded away: made again from decoded values it
            could come out different.
        limit: for whole numbers known to lie in ``[least, limit)``.
        least: see ``limit``.
        scores: for an operand of a softmax's scores, ``q k^T``, the axis along which
            the tokens lie; else None.
        table: those scores are of a table of parameters: logits, relative positions.
        fused: "operand" or "result" of an attention that keeps its softmax's
            normalization for its backward pass; None for all others.
        divisor: others are divided by it, a logarithm or root is taken of it, it
            belongs to a matrix factorization or solve, or holds infinities or
            logarithms that a loop has added up, or its cosine with another is given,
            or it is a difference that is scaled or small beside other tensors, or
            angles whose sines are taken: small errors of it may be large ones.
        near: a difference of what may be near, as a prediction and its target: rounded
            terms are no substitute. Or correlations whose squares a loss adds up, and
            what they are of.
        exponent: an exponential is taken of it, or of what is cheaply made of it, or a
            sine that may turn fast; or it is rounded in steps that are learned.
        enlarged: a loop of products gives it, and a norm is taken of it: that enlarges
            what is small of it, with its rounding.
        terms: for the product of two activations, or scores of a table of parameters,
            the number of terms summed up.
        normed: a norm or variance of what is made of such products, or by a loop of
            them. It is also made again with that, and stands where no row has shrunk.
        row: how many entries, one after another, share a norm's scale, if not all: a
            head's; of channels, which are apart, the axes that the norm sums over, none
            of which is the last.
        uneven: a norm of rows reads it, or, an input or a sum, a product or a
            convolution. A few channels may be far larger than all others.
        stream: it is uneven, an input or a sum, ``[batch, tokens, channels]``, and read
            by a norm or a product: tokens are alike in size.
        bound: a function that is flat beyond it, or beyond two numbers, alone reads the
            tensor; else None.
        step: for a function, its derivative is 0 or 1 everywhere (relu).
        statistic: a residual much smaller than what the op reads (a log-sum-exp); for
            policies with ``statistics``, sums and maxima too (of norms, of softmax).
        small: one of the smallest, which together take a hundredth of all (gates, what
            a mean has pooled).
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: Any
    where: str = ""
    frozen: bool = False
    cheap: bool = False
    discrete: bool = False
    limit: int | None = None
    least: int = 0
    scores: int | None = None
    table: bool = False
    fused: Literal["operand", "result"] | None = None
    divisor: bool = False
    near: bool = False
    exponent: bool = False
    enlarged: bool = False
    terms: int | None = None
    normed: bool = False
    row: int | tuple[int, ...] | None = None
    uneven: bool = False
    stream: bool = False
    bound: float | Bound | None = None
    step: bool = False
    statistic: bool = False
    small: bool = False

    @classmethod
    def of(cls, aval: Any, **fields: Any) -> Self:
        """With the shape and dtype that an array's description gives."""
        shape, dtype = reals_of(aval)
        return cls(shape=shape, dtype=dtype, **fields)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def few_terms(self) -> bool:
        """Whether a product is made again: that takes less than to encode it."""
        most = 2 * TERMS if self.exponent else TERMS
        return self.terms is not None and self.terms <= most

    @property
    def floating(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"{self.name} [{shape}] {self.where}".rstrip()
