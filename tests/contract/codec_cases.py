"""All codecs, each with a bound of its error that follows from its definition."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.codecs import (
    BitMask,
    Chain,
    Codec,
    Float8,
    Hadamard,
    Narrow,
    Offload,
    OutlierQuantized,
    Quantized,
)

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]
SHAPE = (2, 3, 130)  # six rows: two groups of 64 and a tail of 2, or five of 32
SMALL = (5, 3)  # shorter than a group


def groups_of(x: np.ndarray, size: int, axis: int) -> list[np.ndarray]:
    """Indices of the entries of each group, by the documented rule."""
    if not x.size:
        return []
    shape = x.shape or (1,)
    if axis == -1:
        while len(shape) > 1 and shape[-1] < size:
            shape = (*shape[:-2], shape[-2] * shape[-1])
    index = np.moveaxis(np.arange(x.size).reshape(shape), axis, -1)
    rows = index.reshape(-1, shape[axis])
    return [
        row[start : start + size]
        for row in rows
        for start in range(0, shape[axis], size)
    ]


def quantized_groups(codec: Quantized, x: np.ndarray) -> list[np.ndarray]:
    """Of two sizes those that have fewer bytes."""
    size, axis = codec.group_size, codec.axis
    whole = groups_of(x, size, axis)
    if axis != -1 or size % 64 or max(map(len, whole), default=0) < size:
        return whole
    halves = [h for g in whole for h in (g[: size // 2], g[size // 2 :]) if h.size]
    levels = codec.scale_bits // 8 if codec.symmetric else 4
    nbytes = size * codec.bits // 8
    less = len(halves) * (nbytes // 2 + levels) < len(whole) * (nbytes + levels)
    return halves if less else whole


def quantized_bound(codec: Quantized, x: np.ndarray) -> np.ndarray:
    """Largest error of each entry, in exact arithmetic plus 2^-20 for float32's."""
    bound = np.zeros(x.size)
    for group in quantized_groups(codec, x):
        values = x.reshape(-1)[group]
        top, bits = 2 ** (codec.bits - 1), codec.bits
        # Steps are rounded up by a unit of what they are stored in.
        up = 2**0.25 if codec.scale_bits == 8 else 1 + 2**-7
        if not codec.symmetric:
            low = values.min() - abs(values.min()) * 2**-7
            step = up * (values.max() - low) / (2**bits - 1)
        elif bits == 1:
            bound[group] = abs(values).max() * (1 + up * codec.stochastic)
            continue
        elif codec.stochastic or bits == 8:
            step = up * abs(values).max() / (top - 1)
        else:
            step = up * abs(values).max() / top
        half = 1.0 if codec.stochastic else 0.5
        bound[group] = half * step
        if codec.symmetric and not codec.stochastic and bits < 8:
            # Beyond the last code but one on the side away from the extreme.
            extreme = max(values.max(), -values.min())
            sign = 1 if values.max() == extreme else -1
            beyond = values * sign < -(top - 0.5) * extreme / top
            bound[group[beyond]] = step
    floor = 2.0**-24 if codec.scale_bits == 8 else 2.0**-124  # least steps
    return (bound * (1 + 2**-20) + floor).reshape(x.shape)


def bounded_bound(codec: Quantized, x: np.ndarray) -> np.ndarray:
    """Of what is left beyond the bound, and 16 times that."""
    edge = np.clip(x, *codec.ends)
    beyond = np.minimum(abs(x - edge) / 16, abs(edge) / 3)
    left = edge + np.sign(x) * beyond
    # Where both ends are cut off, either may have the code more.
    error = np.maximum(*(quantized_bound(codec, a) for a in (left, -left)))
    off = np.zeros(x.shape)
    for end in (left - error, left + error):
        decoded = end + 15 * (end - np.clip(end, *codec.ends))
        off = np.maximum(off, abs(decoded - x) * (1 + 2**-20))
    return off


def standardized_bound(codec: Quantized, x: np.ndarray) -> np.ndarray:
    """That of the standardized, times a deviation; and the 2^-8 of bfloat16, which
    moments and what is standardized may have."""
    if not x.size:
        return x
    axes = tuple(range(x.ndim - 1))
    mean, square = (v.mean(axes, keepdims=True) for v in (x, x * x))
    least = np.maximum(mean**2 / 2**20, 1e-30)
    deviation = np.sqrt(np.maximum(square - mean**2, least))
    mean, deviation = (v.astype(jnp.bfloat16).astype(float) for v in (mean, deviation))
    z = (x - mean) / deviation
    # Of two ends that are nearly as far either may have the code more.
    ends = (np.where(side, z * (1 + 2**-7), z) for side in (z > 0, z < 0))
    bound = np.maximum(*(quantized_bound(codec, a) for a in ends)) * deviation
    return bound * (1 + 2**-7) + 2**-8 * (abs(x - mean) + abs(mean))


def equalized_bound(codec: Quantized, x: np.ndarray) -> np.ndarray:
    """That of what is divided, times the powers of two; of float32's ratios either."""
    if x.ndim < 2 or not x.size:
        return quantized_bound(codec, x)
    powers = (channel_powers(x, 2**1.5 * way) for way in (1 - 2**-18, 1 + 2**-18))
    return np.maximum(*(quantized_bound(codec, x / 2**p) * 2**p for p in powers))


def channel_powers(x: np.ndarray, times: float) -> np.ndarray:
    """Those of channels whose size is as large, so many times, as what is usual."""
    rows = abs(x.reshape(-1, x.shape[-1]))
    largest = rows.max(0)
    usual = np.sqrt(largest[largest > 0]).mean() ** 2 if largest.any() else 1.0
    size = times * np.sqrt((rows**2).mean(0))
    power = np.frexp(size / usual)[1] - 1.0
    return np.where(power >= 2, power, 0.0)


def outlier_bound(codec: OutlierQuantized, x: np.ndarray) -> np.ndarray:
    """As quantized with a zero in each group, and the 2^-8 of bfloat16."""
    plain = Quantized(codec.bits, codec.group_size, codec.symmetric)
    one = Quantized(codec.bits, 128, codec.symmetric)
    bound = np.zeros(x.size)
    for group in quantized_groups(plain, x):
        values = np.append(x.reshape(-1)[group], 0)
        bound[group] = quantized_bound(one, values[None]).max()
    return np.maximum(bound.reshape(x.shape), abs(x) * 2**-8)


def float8_bound(codec: Float8, x: np.ndarray) -> np.ndarray:
    bound = np.zeros(x.size)
    for group in groups_of(x, codec.group_size, -1):
        values = abs(x.reshape(-1)[group])
        least = values.max() / 448 * (1 + 2**-7) * 2**-10
        bound[group] = np.maximum(values * 2**-4, least)
    return (bound * (1 + 2**-20) + 2.0**-124).reshape(x.shape)


def norms(x: np.ndarray, block: int) -> np.ndarray:
    """Length of the vector that each entry's block is."""
    out = np.zeros(x.size)
    for group in groups_of(x, block, -1) if x.ndim else []:
        out[group] = np.linalg.norm(x.reshape(-1)[group])
    return out.reshape(x.shape)


@dataclass(frozen=True, eq=False)
class Case:
    """A codec; the bytes of SHAPE and of SMALL by hand; the bound of its error for an
    x of up to the largest size; whether it only combines what other cases have."""

    codec: Codec
    nbytes: tuple[int, int]
    bound: Callable[[Codec, np.ndarray], np.ndarray]
    kind: str = "float"
    largest: float = 3e38
    slow: bool = False

    @property
    def dtypes(self) -> list:
        ints = [jnp.int32, jnp.uint8, jnp.int16]
        return {"float": FLOATS, "mask": [jnp.bool_, *ints], "int": ints}[self.kind]

    def data(self, shape, dtype=None, seed: int = 0) -> jax.Array:
        random = np.random.default_rng(seed)
        if self.kind == "float":
            x = random.standard_t(4, shape)
        else:
            x = random.integers(0, 2 if self.kind == "mask" else 100, shape)
        return jnp.asarray(x, dtype or self.dtypes[0])


def exact(codec: Codec, x: np.ndarray) -> np.ndarray:
    return np.zeros(x.shape)


def rotated_bound(codec: Hadamard, x: np.ndarray) -> np.ndarray:
    """Each of two rotations errs by an ulp of what its blocks hold."""
    return 2**-20 * norms(x, codec.block)


def rotated_quantized_bound(codec: Chain, x: np.ndarray) -> np.ndarray:
    """Rotating back adds up 32 errors of a step of an eighth of the largest."""
    largest = np.array([norms(x, 32).max(initial=0)])
    return np.full(x.shape, 32**0.5 / 8 * (1 + 2**-6) * largest)


def first_bound(codec: Chain, x: np.ndarray) -> np.ndarray:
    return quantized_bound(codec.codecs[0], x)


Q = partial(Case, bound=quantized_bound)
SLOW = {"slow": True}
CASES = [
    # SHAPE: 6 rows of 3 groups, or 5 of 32 where that is less. SMALL: one of 15, in
    # whole bytes.
    Q(Quantized(1), (18 * (8 + 2), 2 + 2), **SLOW),
    Q(Quantized(2), (30 * (8 + 2), 4 + 2), **SLOW),
    Q(Quantized(3), (30 * (12 + 2), 6 + 2)),
    Q(Quantized(4), (30 * (16 + 2), 8 + 2)),
    Q(Quantized(8), (30 * (32 + 2), 15 + 2), **SLOW),
    # Here a step is a group's range, and the largest step is 3.39e38.
    Q(Quantized(1, symmetric=False), (18 * (8 + 4), 2 + 4), largest=1.6e38, **SLOW),
    Q(Quantized(4, symmetric=False), (30 * (16 + 4), 8 + 4)),
    # The largest scale in 8 bits is 2^7.25, times 8 codes.
    Q(Quantized(4, 32, scale_bits=8), (30 * (16 + 1), 8 + 1), largest=1000.0),
    # Groups down the columns: 2 x 130 of 3 rows (3 bits: of 8), and 3 of 5.
    Q(Quantized(8, axis=-2), (260 * (3 + 2), 3 * (5 + 2)), **SLOW),
    Q(Quantized(3, axis=-2, symmetric=False), (260 * (3 + 4), 3 * (3 + 4))),
    Q(Quantized(1, stochastic=True), (18 * (8 + 2), 2 + 2)),
    Q(Quantized(2, symmetric=False, stochastic=True), (18 * (16 + 4), 4 + 4), **SLOW),
    Q(Quantized(4, stochastic=True, axis=-2), (260 * (2 + 2), 3 * (3 + 2)), **SLOW),
    Q(
        Quantized(8, stochastic=True, scale_bits=8),
        (30 * (32 + 1), 15 + 1),
        largest=1000.0,
        **SLOW,
    ),
    # Two numbers of each of 130 channels, of 3.
    Case(
        Quantized(4, standardized=True),
        (30 * (16 + 2) + 130 * 4, 8 + 2 + 3 * 4),
        standardized_bound,
        largest=1e18,
    ),
    Case(
        Quantized(4, equalized=True),
        (30 * (16 + 2) + 130, 8 + 2 + 3),
        equalized_bound,
        largest=1e18,
    ),
    Case(Quantized(4, bound=1.5), (30 * (16 + 2), 8 + 2), bounded_bound),
    Case(Quantized(8, bound=(-0.5, None)), (30 * (32 + 2), 15 + 2), bounded_bound),
    # 2 slots and 1: six rows and five, 2 bytes each and for the index.
    Case(OutlierQuantized(4), (30 * 18 + 2 * 14, 10 + 12), outlier_bound),
    Case(
        OutlierQuantized(3, 32, slots=5, symmetric=False),
        (30 * (12 + 4) + 5 * 14, (6 + 4) + 3 * 12),
        outlier_bound,
        **SLOW,
    ),
    Case(Float8(), (18 * (64 + 2), 15 + 2), float8_bound),
    Case(Hadamard(64), (780 * 4, 15 * 4), rotated_bound, **SLOW),
    Case(Offload(), (0, 0), exact),
    # 32 of the largest add up to sqrt(32) times it.
    Case(
        Chain(Hadamard(32), Quantized(4)),
        (30 * 18, 8 + 2),
        rotated_quantized_bound,
        largest=2.5e37,
    ),
    Case(Chain(Quantized(4), Offload()), (0, 0), first_bound, **SLOW),
    Case(BitMask(), (98, 2), exact, "mask"),
    Case(Narrow(100), (780, 15), exact, "int"),
    Case(Narrow(200, -50), (780, 15), exact, "int", **SLOW),
    Case(Chain(Narrow(1000), Offload()), (0, 0), exact, "int", **SLOW),
]


def over(cases):
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(c, id=repr(c.codec), marks=[pytest.mark.slow] * c.slow)
            for c in cases
        ],
    )


every = over(CASES)
floats = over([c for c in CASES if c.kind == "float"])
# Offload and Hadamard alone keep all values; the others have steps.
LOSSY = [
    c for c in CASES if c.kind == "float" and c.bound not in (exact, rotated_bound)
]
lossy = over(LOSSY)
