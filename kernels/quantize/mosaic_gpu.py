"""Group quantization of the last axis in one pass, for NVIDIA's Hopper and newer.

A block is 64 rows by some groups, read and written by the copy engine, which fills
what lies outside the array with zeros and writes nothing there. A group's row is held
by four threads, so that its scale takes two shuffles, and the codes that share a byte
lie in one thread. Arithmetic is that of `levels` and `noise`, so the bits are the
reference's.

Scales and lows come as ``[groups, rows]``, whole cache lines.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxcompact.kernels.quantize import levels, noise, scales

ROWS = 64  # of a block: those of a warpgroup's layouts


def quantize(
    x_rn: jax.Array,
    seed: jax.Array | None,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_bits: int,
    groups: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Codes ``uint8[rows, g * group * bits / 8]``, scales and lows ``[g, rows]``.

    ``seed``: `noise.mixed_seed`; None rounds to nearest. ``groups`` of a block.
    """
    rows, size = x_rn.shape
    count = size // group
    groups = min(groups, count)
    width = group * bits // 8  # bytes of a group's codes
    kinds = [jnp.uint8 if scale_bits == 8 else jnp.bfloat16]
    kinds += [] if symmetric else [jnp.bfloat16]
    spread = layout(width, x_rn.dtype)
    inputs = [x_rn] if seed is None else [x_rn, seed.reshape(1)]

    def body(*refs):
        (x_hbm, *seeds), refs = refs[: len(inputs)], refs[len(inputs) :]
        codes_hbm, *levels_hbm = refs[: 1 + len(kinds)]
        x_smem, codes_smem, *levels_smem, arrived = refs[1 + len(kinds) :]
        i, j = lax.axis_index("rows"), lax.axis_index("groups")
        row, first = pl.ds(i * ROWS, ROWS), j * groups
        source = x_hbm.at[row, pl.ds(first * group, groups * group)]
        plgpu.copy_gmem_to_smem(source, x_smem, arrived)
        plgpu.barrier_wait(arrived)
        for g in range(groups):
            x = x_smem.at[:, pl.ds(g * group, group)]
            x = plgpu.load(x, layout=spread).astype(jnp.float32)
            of = _levels(x, bits, symmetric, scale_bits, stochastic=bool(seeds))
            u = None
            if seeds:
                u = _noise(x, seeds[0][0], i * ROWS, first + g, count, spread)
            over = levels.Levels(None, None, *(_over(a, group) for a in of[2:]))
            code = levels.code(x, over, u, bits=bits)
            codes_smem[:, pl.ds(g * width, width)] = _packed(code, bits)
            levels_smem[0][g] = of.scales
            if not symmetric:
                levels_smem[1][g] = of.lows
        plgpu.commit_smem()
        target = codes_hbm.at[row, pl.ds(first * width, groups * width)]
        plgpu.copy_smem_to_gmem(codes_smem, target)
        for smem, hbm in zip(levels_smem, levels_hbm, strict=True):
            plgpu.copy_smem_to_gmem(smem, hbm.at[pl.ds(first, groups), row])
        plgpu.wait_smem_to_gmem(0)

    out = [jax.ShapeDtypeStruct((rows, count * width), jnp.uint8)]
    out += [jax.ShapeDtypeStruct((count, rows), kind) for kind in kinds]
    codes, *found = plgpu.kernel(
        body,
        out_type=out,
        grid=(pl.cdiv(rows, ROWS), pl.cdiv(count, groups)),
        grid_names=("rows", "groups"),
        scratch_types=[
            shared((ROWS, groups * group), x_rn.dtype),
            shared((ROWS, groups * width), jnp.uint8, width),
            *(plgpu.SMEM((groups, ROWS), kind) for kind in kinds),
            plgpu.Barrier(),
        ],
    )(*inputs)
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
    groups: int,
) -> jax.Array:
    """The inverse, ``dtype[rows, size]``; scales and lows ``[g, rows]``."""
    rows, count, width = codes.shape[0], stored.shape[0], group * bits // 8
    groups = min(groups, count)
    numbers = [stored] if lows is None else [stored, lows]

    def body(*refs):
        codes_hbm, *levels_hbm, x_hbm, codes_smem = refs[: len(numbers) + 3]
        *levels_smem, x_smem, arrived = refs[len(numbers) + 3 :]
        i, j = lax.axis_index("rows"), lax.axis_index("groups")
        row, first = pl.ds(i * ROWS, ROWS), j * groups
        source = codes_hbm.at[row, pl.ds(first * width, groups * width)]
        plgpu.copy_gmem_to_smem(source, codes_smem, arrived)
        for hbm, smem in zip(levels_hbm, levels_smem, strict=True):
            source = hbm.at[pl.ds(first, groups), row]
            plgpu.copy_gmem_to_smem(source, smem, arrived)
        plgpu.barrier_wait(arrived)
        for g in range(groups):
            packed = codes_smem.at[:, pl.ds(g * width, width)]
            parts = decoded(packed, [a.at[g] for a in levels_smem], bits, dtype)
            for lane, part in enumerate(parts):
                x_smem[:, pl.ds(g * group + lane * width, width)] = part
        plgpu.commit_smem()
        target = x_hbm.at[row, pl.ds(first * group, groups * group)]
        plgpu.copy_smem_to_gmem(x_smem, target)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, size), dtype),
        grid=(pl.cdiv(rows, ROWS), pl.cdiv(count, groups)),
        grid_names=("rows", "groups"),
        scratch_types=[
            shared((ROWS, groups * width), jnp.uint8, width),
            *(plgpu.SMEM((groups, ROWS), a.dtype) for a in numbers),
            shared((ROWS, groups * group), dtype, width * jnp.dtype(dtype).itemsize),
            plgpu.Barrier(num_arrivals=1 + len(numbers)),
        ],
    )(codes, *numbers)


def decoded(packed, of: Sequence, bits: int, dtype: jnp.dtype) -> list[jax.Array]:
    """The parts of one group's 64 rows, from its codes and levels in shared memory."""
    width = packed.shape[1]
    spread = layout(width, dtype)
    packed = plgpu.load(packed, layout=spread).astype(jnp.int32)
    of = [plgpu.load(a, layout=spread.reduce(1)) for a in of]
    of = [scales.load(of[0]), *(low.astype(jnp.float32) for low in of[1:]), None]
    scale, low = (_over(a, width) for a in of[:2])
    lanes = ((packed >> (bits * lane)) & (2**bits - 1) for lane in range(8 // bits))
    return [levels.value(code, scale, low, bits=bits, dtype=dtype) for code in lanes]


def shared(shape: tuple[int, ...], dtype: jnp.dtype, width: int = 128):
    """Shared memory in tiles of ``width`` bytes, in which no banks collide."""
    return plgpu.SMEM(shape, dtype, transforms=tiles(dtype, width))


def tiles(dtype: jnp.dtype, width: int = 128) -> tuple:
    width = min(width, 128)
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    return tiling, *([plgpu.SwizzleTransform(width)] if width > 16 else [])


def layout(width: int, dtype: jnp.dtype) -> plgpu.Layout:
    """Of 64 rows: a thread has 8 or 4 entries of a row side by side, 16 bytes of x."""
    if width % 32 or jnp.dtype(dtype).itemsize == 4:
        return plgpu.Layout.WGMMA_UPCAST_2X
    return plgpu.Layout.WGMMA_UPCAST_4X


def _over(a: jax.Array | None, columns: int) -> jax.Array | None:
    return None if a is None else lax.broadcast_in_dim(a, (ROWS, columns), (0,))


def _levels(
    x: jax.Array, bits: int, symmetric: bool, scale_bits: int, *, stochastic: bool
) -> levels.Levels:
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    # By magnitude, then sign; whatever is not finite is above what is.
    largest = jnp.max((pattern << 1) | (pattern >> 31), 1)
    finite = largest < jnp.uint32(0xFF000000)
    if symmetric:
        extreme = (largest >> 1) | (largest << 31)
        extreme = lax.bitcast_convert_type(extreme, jnp.float32)
        return levels.symmetric_levels(
            extreme, finite, bits=bits, scale_bits=scale_bits, stochastic=stochastic
        )
    return levels.asymmetric_levels(jnp.min(x, 1), jnp.max(x, 1), finite, bits=bits)


def _noise(x: jax.Array, seed, row, g, count: int, spread) -> jax.Array:
    """That of `noise.uniform`: row and group are the first row's, and this one's."""
    group = x.shape[1]
    iota = partial(plgpu.broadcasted_iota, jnp.uint32, x.shape, layout=spread)
    place = iota(1)
    key = noise.group_key(jnp.sum(noise.digested(x, place), 1), seed)
    row, g = row.astype(jnp.uint32), g.astype(jnp.uint32)
    number = (row + iota(0)) * jnp.uint32(count * group % 2**32)
    number += g * jnp.uint32(group) + place
    return noise.entry_noise(number, _over(key, group))


def _packed(code: jax.Array, bits: int) -> jax.Array:
    width = code.shape[1] * bits // 8
    packed = code[:, :width]
    for lane in range(1, 8 // bits):
        part = code[:, lane * width : (lane + 1) * width]
        packed |= part << (bits * lane)
    return packed.astype(jnp.uint8)
