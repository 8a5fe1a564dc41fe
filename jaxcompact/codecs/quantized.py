"""Group quantization to 8, 4, 3, 2 or 1 bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.codecs.bound import ends_of, is_bound
from jaxcompact.codecs.codec import Codec, in_parts, in_rows, is_float, merged
from jaxcompact.codecs.moments import are_axes, moments_of, restored, standardized
from jaxcompact.codecs.powers import divided, multiplied, powers_of, wide
from jaxcompact.kernels.activate import api as activation
from jaxcompact.kernels.bits.reference import unit
from jaxcompact.kernels.normalize import api as normalization
from jaxcompact.kernels.project.api import project
from jaxcompact.kernels.project.reference import product
from jaxcompact.kernels.quantize import api
from jaxcompact.kernels.quantize.levels import Bound
from jaxcompact.kernels.weight_gradient.api import weight_gradient


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "lows", "moments", "powers"],
    meta_fields=["shape", "dtype", "parts"],
)
@dataclass(frozen=True)
class Encoded:
    """What is stored of ``x``: ``codes`` uint8, one of ``scales`` a group, no more.

    ``lows``, the groups' least values, are None for a symmetric codec. In ``parts``
    above 1 the grouped axis is split in so many, each of which has groups of its own.
    ``moments`` are means and deviations of a standardized codec, bfloat16 ``[2, ...]``,
    of size 1 along the axes that they are over. ``powers``, uint8 ``[channels]``, are
    those of two by which an equalized codec has divided channels.
    """

    codes: jax.Array
    scales: jax.Array
    lows: jax.Array | None
    shape: tuple[int, ...]
    dtype: jnp.dtype
    parts: int = 1
    moments: jax.Array | None = None
    powers: jax.Array | None = None


@dataclass(frozen=True)
class Quantized(Codec):
    """Store a tensor in ``bits`` bits an entry and a scale for each group of entries.

    A group has one ``step``. Rounding is to nearest, or up and down at random so that
    ``E[decode(encode(x))] = x``; the error of an entry is at most

    ==========  ============  ==================================  ==================
    symmetric   stochastic    step                                error
    ==========  ============  ==================================  ==================
    True        False         8 bits: max|x| / 127                step / 2
    True        False         2 to 4 bits: max|x| / 2^(bits-1)    step / 2, or step:
                                                                  see below
    True        False         1 bit: values are +-mean|x|         max|x|
    True        True          max|x| / (2^(bits-1) - 1)           step
    True        True          1 bit: values are +-max|x|          2 max|x|
    False       either        (max - min) / (2^bits - 1)          step / 2 or step
    ==========  ============  ==================================  ==================

    With 2 to 4 bits, nearest, the lowest code goes to the entry furthest from zero, on
    whichever side that is. On the other side there is one code less, and an entry
    within half a step of that extreme errs by up to a step. (Squared error for N(0, 1),
    groups of 64: 0.156, 0.037, 0.0090 of the values' at 2, 3, 4 bits; with the same
    codes on both sides 0.514, 0.063, 0.0116. As ggml's Q4_0.)

    Steps are rounded up, and minima down, to what is stored, before codes are made:
    that costs up to 2^-7 of a step (19 % of it at ``scale_bits=8``), and clips nothing.
    Asymmetric: the minimum is rounded by up to 2^-7 of itself, which widens the range
    of a group far from zero.

    Any shape and any float dtype; arithmetic is in float32, and float64 is no more
    precise. Saturates, never wraps: what is beyond bfloat16's 3.39e38, or in an
    asymmetric group of 1 bit that is wider than that. A group that holds an Inf or a
    NaN decodes to NaN, so that a broken step is seen. A group of zeros decodes to
    zeros, and one of equal values to that value, to half a step. Scalars are arrays of
    one entry.

    Groups run along ``axis``; a row shorter than a group is one smaller group, and the
    last group of a longer row is filled up. If the last axis is grouped, and is shorter
    than a group, trailing axes are merged first; where groups half as long take less,
    they are, but of 32 at least: of 96 entries three of 32, not two of 64. ``axis=-2``
    is channel-wise: groups of consecutive tokens, apart for each channel, as long, in
    eights, as takes the least: of 197 tokens five of 40, not four of 56.

    Under explicit sharding groups begin anew on each device where its part of a row is
    no multiple of a group: codes are then others than on one device, and nothing is
    sent.

    Memory: ``bits + scale_bits / group_size`` bits an entry (asymmetric:
    ``bits + 32 / group_size``); see `nbytes`.

    Args:
        bits: 1, 2, 3, 4 or 8.
        group_size: entries that share a scale; the bytes of a group must be whole.
        symmetric: False stores each group's minimum as well; better for values of one
            sign (see `fitted`).
        stochastic: unbiased rounding, for tensors that are read by linear operations
            alone: through a nonlinear one, noise is bias. The noise comes from the
            tensor's seed, an entry's place and its group's data. Examples of one vmap
            with equal data share it.
        axis: the grouped axis, negative.
        scale_bits: 16 (bfloat16) or 8 (quarter octaves, 2^-24 to 2^7.25, beyond which
            values saturate or lose precision); 8 if symmetric only.
        bound: for what a function reads that is flat beyond it, on both sides or from
            one number to another, of which one may be None. Beyond, steps are 16
            times as large, and what is further beyond than 16/3 of it, an infinity as
            well, saturates there. A group's largest is 4/3 of a bound at most.
        standardized: what is quantized is ``(x - mean) / deviation``, over these axes
            (numbers from 0), of all devices; True for all but the last. For what a norm
            reads that sums over them, where channels differ in size. Both are stored
            besides, in bfloat16. A deviation is 2^-10 of the mean at least; a channel
            that reaches above 1e19 is divided by 2^63 alone.
        equalized: channels, entries of the last axis, that are far larger than all
            others are divided by a power of two, stored besides in a byte a channel, so
            that their root mean square is 0.35 to 0.71 of what a usual one reaches.
            Where there are none, codes are as without. For what is read row by row, of
            which a trained network's few largest channels would hide all others.

    Raises ValueError for arguments outside these, for dtypes that are not floating
    point, and for arrays that lack the axis.

    Source: GACT (arXiv 2206.11357), section 4; Adacc (arXiv 2508.00806).

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> codec = jc.Quantized(bits=4, group_size=2)
    >>> encoded = codec.encode(jnp.array([0.5, -4.0, 8.0, 3.0]))
    >>> encoded.codes.dtype.name, encoded.codes.shape
    ('uint8', (2,))
    >>> codec.decode(encoded).tolist()
    [0.5, -4.0, 8.0, 3.0]
    """

    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    stochastic: bool = False
    axis: int = -1
    scale_bits: int = 16
    bound: float | Bound | None = None
    standardized: bool | tuple[int, ...] = False
    equalized: bool = False

    def __post_init__(self):
        if type(self.bits) is not int or self.bits not in (1, 2, 3, 4, 8):
            raise ValueError(f"bits must be 1, 2, 3, 4 or 8, got {self.bits!r}")
        whole = unit(self.bits)
        size = self.group_size
        if type(size) is not int or size < 1 or size % whole:
            raise ValueError(
                f"group_size must be a positive multiple of {whole} for {self.bits} "
                f"bits, got {size!r}"
            )
        for name in ("symmetric", "stochastic", "equalized"):
            if not isinstance(getattr(self, name), bool):
                value = getattr(self, name)
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if type(self.axis) is not int or self.axis >= 0:
            raise ValueError(f"axis must be negative, got {self.axis!r}")
        if type(self.scale_bits) is not int or self.scale_bits not in (8, 16):
            raise ValueError(f"scale_bits must be 8 or 16, got {self.scale_bits!r}")
        if self.scale_bits == 8 and not self.symmetric:
            raise ValueError("scale_bits must be 16 if symmetric is False, got 8")
        if self.bound is not None and not is_bound(self.bound):
            raise ValueError(
                f"bound must be None, a number from 1e-30 to 1e30, or two of such size "
                f"and the lesser first, or None for one, got {self.bound!r}"
            )
        axes = self.standardized
        if not isinstance(axes, bool) and not are_axes(axes):
            raise ValueError(
                f"standardized must be True, False or a tuple of axes, numbers from 0, "
                f"got {axes!r}"
            )
        if self.bound is not None and self.standardized:
            raise ValueError(
                f"bound must be None if standardized is {axes}, got {self.bound!r}"
            )
        others = {"axis": -1, "bound": None, "standardized": False}
        for name, value in others.items() if self.equalized else ():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} must be {value} if equalized is True, "
                    f"got {getattr(self, name)!r}"
                )

    def supports(self, dtype: Any) -> bool:
        return is_float(dtype)

    def _grouped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that is grouped."""
        if self.axis == -1:
            return merged(shape, self.group_size)
        if len(shape) < -self.axis:
            raise ValueError(
                f"axis {self.axis} needs an array that has it, got {shape}"
            )
        return shape

    @property
    def ends(self) -> Bound | None:
        """Of the bound: from where to where."""
        return ends_of(self.bound)

    def _group(self, size: int) -> int:
        """The length of a group, of so many entries along the axis."""
        whole, longest = unit(self.bits), self.group_size
        if size > longest:  # of those that kernels take
            some = (longest, longest // 2) if longest % 64 == 0 else (longest,)
            if self.axis != -1:
                some = longest, *range(longest // 8 * 8, 0, -8)
            return min(some, key=partial(self._row_bits, size))
        return min(longest, max(1, -(-size // whole)) * whole)

    def _row_bits(self, size: int, group: int) -> int:
        """That a row takes, in such groups."""
        levels = self.scale_bits if self.symmetric else 32
        return -(-size // group) * (group * self.bits + levels)

    def encode(self, x: jax.Array, seed: int = 0) -> Encoded:
        """``x`` in codes and scales."""
        self._require(x, seed)
        shape, dtype, moments, powers = x.shape, x.dtype, None, None
        if self.standardized:
            moments = moments_of(x, self.standardized)
            x = standardized(x, moments)
        if self.equalized and (powers := powers_of(x)) is not None:
            x = divided(x, powers)
        rows = in_rows(x, self._grouped(x.shape))
        group = self._group(rows.shape[self.axis])
        rows, parts = in_parts(rows, self.axis, group)
        codes, scales, lows = api.quantize(
            rows,
            bits=self.bits,
            group=self._group(rows.shape[self.axis]),
            axis=self.axis,
            symmetric=self.symmetric,
            scale_bits=self.scale_bits,
            bound=self.ends,
            seed=seed if self.stochastic else None,
            implementation=_implementation(powers),
        )
        return Encoded(codes, scales, lows, shape, dtype, parts, moments, powers)

    def quantizes(self, x: Any) -> bool:
        """Whether a kernel makes all that `encode` gives of such an array, at once.

        It is not said of noise, which is XLA's under vmap, and of axes that are merged.
        """
        plain = not (self.stochastic or self._changes)
        if not plain or self._grouped(x.shape) != x.shape:
            return False
        group = self._group(x.shape[self.axis])
        return api.in_one_pass(x, bits=self.bits, group=group, axis=self.axis)

    @property
    def _changes(self) -> bool:
        """Whether it is not x itself that is quantized."""
        return bool(self.standardized or self.equalized)

    def decode(self, encoded: Encoded) -> jax.Array:
        """``x`` again, in its shape and dtype."""
        self._require_encoded(encoded, Encoded)
        shape = self._grouped(encoded.shape)
        size = shape[self.axis] // encoded.parts
        dtype, powers = encoded.dtype, encoded.powers
        x = api.dequantize(
            encoded.codes,
            encoded.scales,
            encoded.lows,
            bits=self.bits,
            group=self._group(size),
            size=size,
            axis=self.axis,
            dtype=dtype if powers is None else wide(dtype),
            bound=self.ends,
            implementation=_implementation(powers),
        )
        x = x.reshape(shape).reshape(encoded.shape)
        if powers is not None:
            return multiplied(x, powers, dtype)
        return x if encoded.moments is None else restored(x, encoded.moments)

    def activates(
        self, f: Callable[..., jax.Array], xs: Sequence[Any], parameters: Sequence[Any]
    ) -> bool:
        """Whether a kernel would make what `activate` does, of such arrays."""
        shape = xs[0].shape
        return self._in_rows(shape) and activation.in_one_pass(
            f, xs, parameters, bits=self.bits, group=self._group(shape[-1])
        )

    def _in_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether groups are those of rows, of x itself, rounded to nearest."""
        rows = self.axis == -1 and self._grouped(shape) == shape
        return rows and not (self.stochastic or self._changes)

    def activate(
        self,
        f: Callable[..., jax.Array],
        xs: Sequence[jax.Array],
        parameters: Sequence[jax.Array],
        bounds: Sequence[Bound | None],
    ) -> tuple[jax.Array, list[Encoded]]:
        """``f(*xs, *parameters)``, elementwise, and what `encode` gives of each x, each
        within a bound of its own.

        Where it `activates`.
        """
        y, found = activation.activate(
            f,
            xs,
            parameters,
            bits=self.bits,
            group=self._group(xs[0].shape[-1]),
            symmetric=self.symmetric,
            scale_bits=self.scale_bits,
            bounds=bounds,
        )
        pairs = zip(xs, found, strict=True)
        return y, [Encoded(*of, x.shape, x.dtype) for x, of in pairs]

    def normalizes(
        self, f: Callable[..., Sequence[jax.Array]], x: Any, parameters: Sequence[Any]
    ) -> bool:
        """Whether a kernel would make what `normalize` does, of such arrays."""
        rows = self._in_rows(x.shape) and self.bound is None
        return rows and normalization.in_one_pass(
            f, x, parameters, bits=self.bits, group=self._group(x.shape[-1])
        )

    def normalize(
        self,
        f: Callable[..., Sequence[jax.Array]],
        x: jax.Array,
        parameters: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], Encoded]:
        """``f(x, *parameters)``, of sums of rows, and what `encode` gives of x.

        Where it `normalizes`.
        """
        outs, found = normalization.normalize(
            f,
            x,
            parameters,
            bits=self.bits,
            group=self._group(x.shape[-1]),
            symmetric=self.symmetric,
            scale_bits=self.scale_bits,
        )
        return outs, Encoded(*found, x.shape, x.dtype)

    def project(self, x: jax.Array, p_nr: jax.Array) -> Encoded:
        """`encode` of ``x P``, in one kernel where that is the fastest."""
        self._require(x, 0)
        shape = *x.shape[:-1], p_nr.shape[-1]
        rows = self.axis == -1 and self._grouped(shape) == shape
        if not rows or self.bound is not None or self._changes:
            return self.encode(product(x, p_nr))
        codes, scales, lows = project(
            x,
            p_nr,
            bits=self.bits,
            group=self._group(shape[-1]),
            symmetric=self.symmetric,
            scale_bits=self.scale_bits,
            seed=0 if self.stochastic else None,
        )
        return Encoded(codes, scales, lows, shape, x.dtype)

    def weight_gradient(self, encoded: Encoded, dy: jax.Array, **product) -> jax.Array:
        """``decode(encoded)^T dy``, summed over all axes but the last, in one kernel.

        ``product``: `preferred_element_type` and what else `jax.lax.dot_general` takes.
        Where there is no such kernel, x is decoded first.
        """
        whole = encoded.parts == 1 and self._grouped(encoded.shape) == encoded.shape
        plain = self.bound is None and not self._changes
        if self.axis != -1 or not whole or not plain:
            tokens = tuple(range(dy.ndim - 1))
            numbers = (tokens, tokens), ((), ())
            return jax.lax.dot_general(self.decode(encoded), dy, numbers, **product)
        return weight_gradient(
            encoded.codes,
            encoded.scales,
            encoded.lows,
            dy,
            bits=self.bits,
            group=self._group(encoded.shape[-1]),
            size=encoded.shape[-1],
            dtype=encoded.dtype,
            **product,
        )


def _implementation(powers: jax.Array | None) -> str | None:
    """XLA's, which divides as it reads: a kernel would be given a copy."""
    return None if powers is None else "xla"
