"""Group quantization of the last axis in one pass, for NVIDIA's Hopper and newer.

A block is 64 rows by some groups, read and written by the copy engine, which fills
what lies outside the array with zeros and writes nothing there. A group's row is held
by four threads, so that its scale takes two shuffles, and the codes that share a byte
lie in one thread. Arithmetic is that of `levels` and `noise`, so the bits are the
reference's.

The copy engine wants whatever it reads or writes to start at a multiple of 16 bytes.
Codes do. For `quantize` x's rows must; `dequantize` writes longer ones if they don't.

Scales and lows are written as ``[groups, rows]``, whole cache lines.
"""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxcompact.kernels.quantize import levels, noise, scales
from jaxcompact.kernels.quantize.reference import Encoded, level_dtypes

ROWS = 64  # of a block: those of a warpgroup's layouts
SHARED = 225 * 1024  # bytes that a block may have, but for 2 KiB: barriers, gaps


def quantize(
    x_rn: jax.Array,
    seed: jax.Array | None,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_bits: int,
    bound: levels.Bound | None,
    groups: int,
) -> Encoded:
    """Codes ``uint8[rows, g * group * bits / 8]``, scales and lows ``[rows, g]``.

    ``seed``: `noise.mixed_seed`; None rounds to nearest. ``groups`` of a block. Rows of
    x are multiples of 16 bytes.
    """
    rows, size = x_rn.shape
    count = pl.cdiv(size, group)
    width = group * bits // 8  # bytes of a group's codes
    groups = min(count, _held(groups, group, width, x_rn.dtype))
    blocks = pl.cdiv(rows, ROWS), pl.cdiv(count, groups)
    kinds = level_dtypes(symmetric, scale_bits)
    least = width if seed is None else min(width, noise.pairs(group))
    spread = layout(least, x_rn.dtype)
    inputs = [x_rn]
    inputs += [] if seed is None else [seed.reshape(1)]

    def quantize_block(*refs):
        (x_hbm, *seeds), refs = refs[: len(inputs)], refs[len(inputs) :]
        codes_hbm, *levels_hbm = refs[: 1 + len(kinds)]
        x_smem, codes_smem, *levels_smem, arrived = refs[1 + len(kinds) :]
        i, j = place_of_block(blocks)
        row, first = pl.ds(i * ROWS, ROWS), j * groups
        for source, smem in in_strips(x_hbm.at[row], first * group, x_smem):
            plgpu.copy_gmem_to_smem(source, smem, arrived)
        plgpu.barrier_wait(arrived)
        for g in range(groups):
            x = load(x_smem, g * group, group, spread).astype(jnp.float32)
            x = levels.squeezed(x, bound)
            if size % group and g == (count - 1) % groups:  # the last, in some block
                entries = size - (first + g) * group
                x = filled(x, entries, spread, edge=not symmetric)
            u = None
            if seeds:
                u = _noise(x, seeds[0][0], i * ROWS, first + g, count, spread)
            codes, of = encoded(x, u, bits, symmetric, scale_bits)
            store(codes_smem, g * width, codes)
            for smem, stored in zip(levels_smem, of, strict=True):
                smem[g] = stored
        plgpu.commit_smem()
        for target, smem in in_strips(codes_hbm.at[row], first * width, codes_smem):
            plgpu.copy_smem_to_gmem(smem, target)
        for smem, hbm in zip(levels_smem, levels_hbm, strict=True):
            plgpu.copy_smem_to_gmem(smem, hbm.at[pl.ds(first, groups), row])
        plgpu.wait_smem_to_gmem(0)

    # Scales in whole blocks: copies that are contiguous are not cut at an axis' end.
    whole = blocks[1] * groups, blocks[0] * ROWS
    out = [jax.ShapeDtypeStruct((rows, count * width), jnp.uint8)]
    out += [jax.ShapeDtypeStruct(whole, kind) for kind in kinds]
    codes, *found = plgpu.kernel(
        quantize_block,
        out_type=out,
        grid=(math.prod(blocks),),
        grid_names=("block",),
        scratch_types=[
            x_smem := shared_strips(groups, group, x_rn.dtype),
            shared_strips(groups, width, jnp.uint8),
            *(plgpu.SMEM((groups, ROWS), kind) for kind in kinds),
            plgpu.Barrier(num_arrivals=x_smem.shape[0]),
        ],
    )(*inputs)
    found = [a[:count, :rows].T for a in found]
    return codes, *found, *([None] if symmetric else [])


def dequantize(
    codes: jax.Array,
    stored: jax.Array,
    lows: jax.Array | None,
    *,
    bits: int,
    group: int,
    size: int,
    dtype: jnp.dtype,
    bound: levels.Bound | None,
    groups: int,
) -> jax.Array:
    """The inverse, ``dtype[rows, size]``.

    Memory: rows of x are written as multiples of 16 bytes. XLA cuts them as it reads
    them, or copies x where a product reads it.
    """
    (rows, count), width = stored.shape, group * bits // 8
    groups = min(count, _held(groups, group, width, dtype))
    blocks = pl.cdiv(rows, ROWS), pl.cdiv(count, groups)
    aligned = 16 // jnp.dtype(dtype).itemsize
    numbers = [stored] if lows is None else [stored, lows]
    numbers = [longer(a.T, 1, 16) for a in numbers]

    def dequantize_block(*refs):
        codes_hbm, *levels_hbm, x_hbm, codes_smem = refs[: len(numbers) + 3]
        *levels_smem, x_smem, arrived = refs[len(numbers) + 3 :]
        i, j = place_of_block(blocks)
        row, first = pl.ds(i * ROWS, ROWS), j * groups
        for source, smem in in_strips(codes_hbm.at[row], first * width, codes_smem):
            plgpu.copy_gmem_to_smem(source, smem, arrived)
        for hbm, smem in zip(levels_hbm, levels_smem, strict=True):
            source = hbm.at[pl.ds(first, groups), row]
            plgpu.copy_gmem_to_smem(source, smem, arrived)
        plgpu.barrier_wait(arrived)
        for g in range(groups):
            packed = load(codes_smem, g * width, width, layout(width, dtype))
            x = decoded(packed, [a.at[g] for a in levels_smem], bits, dtype, bound)
            store(x_smem, g * group, x)
        plgpu.commit_smem()
        for target, smem in in_strips(x_hbm.at[row], first * group, x_smem):
            plgpu.copy_smem_to_gmem(smem, target)
        plgpu.wait_smem_to_gmem(0)

    x = plgpu.kernel(
        dequantize_block,
        out_type=jax.ShapeDtypeStruct((rows, pl.cdiv(size, aligned) * aligned), dtype),
        grid=(math.prod(blocks),),
        grid_names=("block",),
        scratch_types=[
            codes_smem := shared_strips(groups, width, jnp.uint8),
            *(plgpu.SMEM((groups, ROWS), a.dtype) for a in numbers),
            shared_strips(groups, group, dtype),
            plgpu.Barrier(num_arrivals=codes_smem.shape[0] + len(numbers)),
        ],
    )(codes, *numbers)
    return x[:, :size]


def _held(groups: int, group: int, width: int, dtype: jnp.dtype) -> int:
    """That many groups, or as many as fit in shared memory with codes and levels."""
    one = ROWS * (group * jnp.dtype(dtype).itemsize + width + 4)
    return min(groups, SHARED // one)


def decoded(
    packed: jax.Array,
    of: Sequence,
    bits: int,
    dtype: jnp.dtype,
    bound: levels.Bound | None = None,
) -> jax.Array:
    """One group's 64 rows, from its codes, and its levels in shared memory."""
    width = packed.shape[1]
    spread, packed = layout(width, dtype), packed.astype(jnp.int32)
    of = [plgpu.load(a, layout=spread.reduce(1)) for a in of]
    of = [scales.load(of[0]), *(low.astype(jnp.float32) for low in of[1:]), None]
    scale, low = (_over(a, width) for a in of[:2])
    lanes = ((packed >> (bits * lane)) & (2**bits - 1) for lane in range(8 // bits))
    kind = {"bits": bits, "dtype": dtype, "bound": bound}
    return jnp.concatenate([levels.value(c, scale, low, **kind) for c in lanes], 1)


def encoded(
    x: jax.Array, u: jax.Array | None, bits: int, symmetric: bool, scale_bits: int
) -> tuple[jax.Array, list[jax.Array]]:
    """One group's 64 rows, float32: codes as bytes; scales and, if asymmetric, lows."""
    of = group_levels(
        jnp.max(levels.ranked(x), 1),
        *((None, None) if symmetric else (jnp.min(x, 1), jnp.max(x, 1))),
        bits=bits,
        scale_bits=scale_bits,
        stochastic=u is not None,
    )
    factor, inverse, low = (_over(a, x.shape[1]) for a in of[2:5])
    over = of._replace(factor=factor, inverse=inverse, low=low)
    packed = _packed(levels.code(x, over, u, bits=bits), bits)
    return packed, [of.scales] if symmetric else [of.scales, of.lows]


def layout(width: int, dtype: jnp.dtype) -> plgpu.Layout:
    """Of 64 rows: a thread has 8 or 4 entries of a row side by side, 16 bytes of x."""
    if width % 32 or jnp.dtype(dtype).itemsize == 4:
        return plgpu.Layout.WGMMA_UPCAST_2X
    return plgpu.Layout.WGMMA_UPCAST_4X


def shared_strips(groups: int, group: int, dtype: jnp.dtype):
    """Shared memory for a block, in strips of 128 bytes, in which no banks collide.

    Each is copied by itself. Tiles of one copy would have to divide the array.
    """
    size = jnp.dtype(dtype).itemsize
    width = min(group * size, 128)
    swizzle = [plgpu.SwizzleTransform(width)] if width > 16 else []
    shape = groups * group * size // width, ROWS, width // size
    return plgpu.SMEM(shape, dtype, transforms=swizzle)


def shared_levels(workers: int, groups: int, dtype: jnp.dtype):
    """Shared memory for scales or lows of as many groups for each warpgroup.

    The copy engine wants what it copies to begin at a multiple of 128 bytes: an odd
    number of groups of bytes is followed by one that nobody reads.
    """
    unit = max(1, 128 // (ROWS * jnp.dtype(dtype).itemsize))
    return plgpu.SMEM((workers, groups + -groups % unit, ROWS), dtype)


def in_strips(hbm, column: jax.Array, smem) -> Iterator[tuple]:
    """The strips of shared memory, and where they lie in rows of the card's."""
    strips, _, width = smem.shape
    for strip in range(strips):
        yield hbm.at[:, pl.ds(column + strip * width, width)], smem.at[strip]


def load(smem, column: int, columns: int, spread: plgpu.Layout) -> jax.Array:
    width = smem.shape[2]
    strips = range(column // width, (column + columns) // width)
    return jnp.concatenate([plgpu.load(smem.at[i], layout=spread) for i in strips], 1)


def store(smem, column: int, x: jax.Array) -> None:
    width = smem.shape[2]
    for i in range(0, x.shape[1], width):
        smem[(column + i) // width] = x[:, i : i + width]


def tiles(dtype: jnp.dtype, width: int = 128) -> tuple:
    """Of ``width`` bytes, as products want them, in which no banks collide."""
    width = min(width, 128)
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    return tiling, *([plgpu.SwizzleTransform(width)] if width > 16 else [])


def longer(x: jax.Array, axis: int, unit: int) -> jax.Array:
    """With zeros, so that an axis becomes a multiple of ``unit``."""
    missing = [(0, -n % unit if a == axis else 0, 0) for a, n in enumerate(x.shape)]
    return lax.pad(x, jnp.zeros((), x.dtype), missing)


def place_of_block(blocks: Sequence[int]) -> list[jax.Array]:
    """Of this block along each axis; on a card only a grid's last has no bound."""
    place, left = [], lax.axis_index("block")
    for size in reversed(blocks):
        place.append(lax.rem(left, jnp.int32(size)))
        left = lax.div(left, jnp.int32(size))
    return place[::-1]


def iota(shape: tuple[int, ...], axis: int, spread: plgpu.Layout) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=spread)


def filled(x: jax.Array, entries: jax.Array, spread, *, edge: bool) -> jax.Array:
    """A group of ``entries``, after which come zeros, or the last of them again."""
    place, fill = iota(x.shape, 1, spread), 0.0
    if edge:
        pattern = lax.bitcast_convert_type(x, jnp.uint32)
        pattern = jnp.where(place == entries - 1, pattern, jnp.uint32(0))
        fill = lax.bitcast_convert_type(jnp.max(pattern, 1), jnp.float32)
        fill = _over(fill, x.shape[1])
    return jnp.where(place < entries, x, fill)


def _over(a: jax.Array | None, columns: int) -> jax.Array | None:
    return None if a is None else lax.broadcast_in_dim(a, (ROWS, columns), (0,))


def group_levels(
    largest: jax.Array,
    low: jax.Array | None,
    high: jax.Array | None,
    *,
    bits: int,
    scale_bits: int,
    stochastic: bool,
) -> levels.Levels:
    """From a group's largest `levels.ranked`; if it is asymmetric, its ends as well."""
    extreme, finite = levels.unranked(largest, jnp.float32)
    if low is not None:
        return levels.asymmetric_levels(low, high, finite, bits=bits)
    return levels.symmetric_levels(
        extreme, finite, bits=bits, scale_bits=scale_bits, stochastic=stochastic
    )


def _noise(x: jax.Array, seed, row, g, count: int, spread) -> jax.Array:
    """That of `noise.uniform`, of 64 rows from this one on and this group."""
    group = x.shape[1]
    place = iota(x.shape, 1, spread).astype(jnp.uint32)
    digest = jnp.sum(noise.digested(x, place), 1, dtype=jnp.uint32)
    half = ROWS, noise.pairs(group)
    row = (row + iota(half, 0, spread)).astype(jnp.uint32)
    place = g.astype(jnp.uint32) * group + iota(half, 1, spread).astype(jnp.uint32)
    number = row * jnp.uint32(count * group % 2**32) + place
    key = _over(noise.group_key(digest, seed), half[1])
    return jnp.concatenate(noise.pair_noise(number, key), 1)


def _packed(code: jax.Array, bits: int) -> jax.Array:
    width = code.shape[1] * bits // 8
    packed = code[:, :width]
    for lane in range(1, 8 // bits):
        part = code[:, lane * width : (lane + 1) * width]
        packed += part << (bits * lane)
    return packed.astype(jnp.uint8)
