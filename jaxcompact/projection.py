"""Random projections that are never stored: P is a function of a key."""

import math
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxcompact.codecs import Encoded, Quantized
from jaxcompact.codecs.codec import Written
from jaxcompact.kernels.explicit import gathered, laid_as
from jaxcompact.kernels.project.reference import product
from jaxcompact.kernels.quantize.reference import join_groups, split_groups

Kind = Literal["gaussian", "rademacher", "sparse", "countsketch", "orthonormal"]

_SPARSITY = 3  # one entry in three is not zero (Achlioptas 2003)
_MOST = 3.4e38  # of float32
_RANK_UNIT = 64  # tensor cores and packed groups want ranks that are multiples


@dataclass(frozen=True, eq=False)
class Projection(Written):
    """How a linear layer's input is sketched: ``z = x P``, ``P`` of shape ``(n, r)``.

    Every kind satisfies ``E[P P^T] = I``, so ``P (z^T dy)`` is an unbiased estimate
    of the weight gradient ``x^T dy``; they differ in the relative variance
    ``E|P P^T G - G|^2 / |G|^2`` and in the cost of making and applying P:

    ============  =======================================  ==================
    kind          entries                                  variance
    ============  =======================================  ==================
    gaussian      N(0, 1/r)                                (n + 1) / r
    rademacher    +-1/sqrt(r)                              (n - 1) / r
    sparse        +-sqrt(3/r), two in three are 0          (n + 1) / r
    countsketch   one +-1 a row, columns equally filled    about n/r - 1
    orthonormal   sqrt(n/r) Q, Q from a QR of n r^2 flop   n/r - 1
    ============  =======================================  ==================

    ``countsketch`` adds inputs j, j + r, j + 2r, ... with random signs: no matrix
    product, nothing but signs to draw, inputs read in their order. Which of them share
    a column is not random: signs alone make it unbiased. Its columns, equally filled,
    are orthogonal, which gives it the variance of ``orthonormal``.

    Args:
        rank: a float is a fraction of the layer's input width (rounded to a multiple
            of 64 where it is at least 64), an int is the rank itself.
        kind: see above.
        alpha: scale of the update, ``W -= lr * alpha * P N``. With any kind an entry
            of ``P N`` has about the size of an entry of ``N``.
        codec: how z is stored; None keeps it in the compute dtype. Of a ``countsketch``
            that adds few inputs, rounding to nearest leaves a bias (5 % of the gradient
            at ``n/r = 2`` in 4 bits), ``stochastic=True`` none.
        blocks: into how many equal parts the width is cut, each with a P and a share of
            r of its own. Parts that tensor parallelism puts on different devices then
            need nothing of each other; the variance is as without.

    Raises ValueError for a rank that is not positive, a fraction above 1, an unknown
    kind, an alpha that is not positive and finite, a codec that is no `Quantized`,
    blocks that are not a positive int.

    Source: CompAct (arXiv 2410.15352), section 3 and Table 6; PRAC (arXiv 2602.23111)
    for the orthonormal kind.

    >>> import jaxcompact as jc
    >>> jc.Projection(rank=0.25).rank_of(1024), jc.Projection(rank=8).rank_of(1024)
    (256, 8)
    >>> jc.Projection(rank=0.5, kind="orthonormal").variance(1024)
    1.0
    """

    rank: int | float
    kind: Kind = "gaussian"
    alpha: float = 1.0
    codec: Quantized | None = None
    blocks: int = 1

    def __post_init__(self):
        number = isinstance(self.rank, int | float) and not isinstance(self.rank, bool)
        if not number or not self.rank > 0:
            raise ValueError(
                f"rank must be a positive int or float of Python, got {self.rank!r}"
            )
        if isinstance(self.rank, float) and self.rank > 1:
            raise ValueError(
                f"rank must be an int, or a fraction of the width of at most 1.0, "
                f"got {self.rank!r}"
            )
        if not isinstance(self.kind, str) or self.kind not in get_args(Kind):
            raise ValueError(
                f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}"
            )
        real = isinstance(self.alpha, Real) and not isinstance(self.alpha, bool)
        if not real or not 0 < self.alpha < _MOST:
            raise ValueError(f"alpha must be positive and finite, got {self.alpha!r}")
        if not isinstance(self.codec, Quantized | None):
            raise ValueError(f"codec must be a Quantized or None, got {self.codec!r}")
        if type(self.blocks) is not int or self.blocks < 1:
            raise ValueError(f"blocks must be a positive int, got {self.blocks!r}")

    def rank_of(self, width: int) -> int:
        """The rank for a layer with ``width`` inputs.

        Raises ValueError if the width is not a positive int, if a rank given as a
        number is above it, and if blocks do not divide width and rank.
        """
        if not isinstance(width, Integral) or isinstance(width, bool) or width < 1:
            raise ValueError(f"width must be a positive int, got {width!r}")
        if isinstance(self.rank, int):
            if self.rank > width:
                raise ValueError(
                    f"rank must not be above the layer's input width {width}, "
                    f"got {self.rank}"
                )
            rank = self.rank
        else:
            rank = self.rank * width
            if rank >= _RANK_UNIT:
                rank = _RANK_UNIT * round(rank / _RANK_UNIT)
            rank = min(width, max(1, round(rank)))
        if width % self.blocks or rank % self.blocks:
            raise ValueError(
                f"blocks must divide the layer's input width {width} and its rank "
                f"{rank}, got {self.blocks}"
            )
        return rank

    def variance(self, width: int) -> float:
        """``E|P P^T G - G|_F^2 / |G|_F^2`` for a layer with ``width`` inputs.

        For any G; but for one of equally large rows with ``countsketch``, if the rank
        does not divide the width.
        """
        n, r = width // self.blocks, self.rank_of(width) // self.blocks
        match self.kind:
            case "gaussian":
                return (n + 1) / r
            case "rademacher":
                return (n - 1) / r
            case "sparse":
                return (n + _SPARSITY - 2) / r
            case "countsketch":  # rows that share a column, of n (n - 1) pairs
                small, larger = divmod(n, r)
                return (
                    larger * (small + 1) * small + (r - larger) * small * (small - 1)
                ) / n
            case "orthonormal":
                return n / r - 1

    def matrix(self, key: jax.Array, width: int) -> jax.Array:
        """P, ``float32[width, rank]``. What `project` and `lift` multiply by."""
        n, r = width, self.rank_of(width)
        if self.blocks > 1:
            part = self._part(width)
            keys = self._keys(key)
            parts = [part.matrix(k, width // self.blocks) for k in keys]
            return jax.scipy.linalg.block_diag(*parts)
        match self.kind:
            case "gaussian":
                return jax.random.normal(key, (n, r), jnp.float32) / math.sqrt(r)
            case "rademacher":
                return _signs(key, (n, r)) / math.sqrt(r)
            case "sparse":
                value = jnp.float32(math.sqrt(_SPARSITY / r))
                u = jax.random.uniform(key, (n, r), jnp.float32) * (2 * _SPARSITY)
                return jnp.where(u < 1, value, jnp.where(u < 2, -value, jnp.float32(0)))
            case "countsketch":
                return self.lift(key, jnp.eye(r, dtype=jnp.float32), n)
            case "orthonormal":
                q, _ = jnp.linalg.qr(jax.random.normal(key, (n, r), jnp.float32))
                return q * math.sqrt(n / r)

    def project(self, key: jax.Array, x: jax.Array) -> jax.Array:
        """``z = x P`` over the last axis of ``x[..., n]``, in x's dtype.

        Integers and bools are read as float32.
        """
        x = _numbers(x)
        return self._projected(self._drawn(key, x.shape[-1], x.dtype), x)

    def stored(self, key: jax.Array, x: jax.Array) -> jax.Array | Encoded:
        """`project`'s z, encoded if there is a codec: by the kernel that makes it.

        `Quantized.project` says which; XLA's code writes z, and reads it to encode it.
        Raises ValueError for complex x if there is a codec.
        """
        if self.codec is None:
            return self.project(key, x)
        if self.kind == "countsketch" or self.blocks > 1:  # not one product
            return self.codec.encode(self.project(key, x))
        x = _numbers(x)
        return self.codec.project(x, self._drawn(key, x.shape[-1], x.dtype))

    def lift(self, key: jax.Array, sketch: jax.Array, width: int) -> jax.Array:
        """``P N``: from ``sketch[r, m]`` back to ``[width, m]``, in its dtype.

        Raises ValueError for a sketch of another rank, and for several.
        """
        if sketch.ndim != 2 or len(sketch) != self.rank_of(width):
            raise ValueError(
                f"sketch must have two axes and {self.rank_of(width)} rows, the rank "
                f"at width {width}, got shape {sketch.shape}"
            )
        return self._lifted(self._drawn(key, width, sketch.dtype), sketch, width)

    def _drawn(self, key: jax.Array, width: int, dtype: jnp.dtype) -> jax.Array:
        """What P is made of: P itself, or signs; of each block."""
        if self.blocks > 1:
            part = self._part(width)
            draw = partial(part._drawn, width=width // self.blocks, dtype=dtype)
            return jax.vmap(draw)(self._keys(key))
        if self.kind == "countsketch":
            return _signs(key, (width,)).astype(dtype)
        return self.matrix(key, width).astype(dtype)

    def _projected(self, drawn: jax.Array, x: jax.Array) -> jax.Array:
        n, r = x.shape[-1], self.rank_of(x.shape[-1])
        if self.blocks > 1:
            x = split_groups(x, group=n // self.blocks, axis=-1)
            drawn = laid_as(drawn, x, (-2, *[None] * (drawn.ndim - 1)))
            project = jax.vmap(self._part(n)._projected, (0, -2), -2)
            return join_groups(project(drawn, x), axis=-1)
        if self.kind == "countsketch":
            x = x * jnp.expand_dims(drawn, range(x.ndim - 1))
            if n % r:
                x = gathered(x, -1)
                x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % r)])
            return split_groups(x, group=r, axis=-1).sum(axis=-2)
        return product(x, drawn)

    def _lifted(self, drawn: jax.Array, sketch: jax.Array, width: int) -> jax.Array:
        if self.blocks > 1:
            part = self._part(width)
            parts = split_groups(sketch, group=part.rank, axis=-2)
            drawn = laid_as(drawn, parts, (-3, *[None] * (drawn.ndim - 1)))
            lift = partial(part._lifted, width=width // self.blocks)
            return join_groups(jax.vmap(lift)(drawn, parts), axis=-2)
        sketch = gathered(sketch, -2)
        if self.kind == "countsketch":
            sketch = jnp.tile(sketch, (-(-width // len(sketch)), 1))[:width]
            return sketch * drawn[:, None]
        return drawn @ sketch

    def _part(self, width: int) -> "Projection":
        return replace(self, rank=self.rank_of(width) // self.blocks, blocks=1)

    def _keys(self, key: jax.Array) -> jax.Array:
        numbers = jnp.arange(self.blocks, dtype=jnp.uint32)
        return jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)


def _numbers(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _signs(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`jax.random.rademacher`, whose bits are others where jax's dtypes are wide."""
    positive = jax.random.bernoulli(key, jnp.float32(0.5), shape)
    return 2 * positive.astype(jnp.float32) - 1
