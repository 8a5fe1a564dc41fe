"""Group quantization of an axis before the last, for NVIDIA's Hopper and newer.

x is taken as ``[before, tokens, channels]``. A block is a group of tokens by some
channels. Each thread has one or two of the channels, and reads their tokens twice from
shared memory: for the levels, and for the codes. No two threads exchange anything.
Eight tokens are taken at a time, an eighth of the group apart: their codes fill whole
bytes. Arithmetic is that of `levels` and `noise`, so the bits are the reference's.

The copy engine fills what lies outside the array with zeros.
"""

import math
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxcompact.kernels.quantize import levels, noise, scales
from jaxcompact.kernels.quantize.mosaic_gpu import (
    group_levels,
    longer,
    place_of_block,
)
from jaxcompact.kernels.quantize.reference import Encoded, level_dtypes

_THREADS = 128
_EIGHT = range(8)


def quantize(
    x_btc: jax.Array,
    seed: jax.Array | None,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_bits: int,
    bound: levels.Bound | None,
    columns: int,
) -> Encoded:
    """Codes ``uint8[b, g * group * bits / 8, c]``, scales and lows ``[b, g, c]``.

    ``seed``: `noise.mixed_seed`; None rounds to nearest. ``columns``: channels of a
    block, 128 or 256.
    """
    before, tokens, channels = x_btc.shape
    count, eighth = pl.cdiv(tokens, group), group // 8
    columns, spread = _spread(channels, columns)
    blocks = before, count, pl.cdiv(channels, columns)
    kinds = level_dtypes(symmetric, scale_bits)
    inputs = [x_btc] + ([] if seed is None else [seed.reshape(1)])

    def quantize_channels_block(*refs):
        (x_hbm, *seeds), refs = refs[: len(inputs)], refs[len(inputs) :]
        codes_hbm, *levels_hbm = refs[: 1 + len(kinds)]
        x_smem, codes_smem, *levels_smem, arrived = refs[1 + len(kinds) :]
        b, g, j = place_of_block(blocks)
        column = pl.ds(j * columns, columns)
        source = x_hbm.at[b, pl.ds(g * group, group), column]
        plgpu.copy_gmem_to_smem(source, x_smem, arrived)
        plgpu.barrier_wait(arrived)

        def entries(token):
            if tokens % group and not symmetric:  # the last token again and again
                token = jnp.minimum(token, tokens - 1 - g * group)
            x = plgpu.load(x_smem.at[token], layout=spread).astype(jnp.float32)
            return levels.squeezed(x, bound)

        def all_of(value, dtype):
            return plgpu.layout_cast(jnp.full(columns, value, dtype), spread)

        def extremes(i, found):
            largest, digest, low, high = found
            for token in (i + lane * eighth for lane in _EIGHT):
                x = entries(token)
                largest = jnp.maximum(largest, levels.ranked(x))
                if seeds:
                    digest += noise.digested(x, token.astype(jnp.uint32))
                if not symmetric:
                    low, high = jnp.minimum(low, x), jnp.maximum(high, x)
            return largest, digest, low, high

        found = all_of(0, jnp.uint32), None, None, None
        if seeds:
            found = found[0], all_of(0, jnp.uint32), None, None
        if not symmetric:
            found = *found[:2], *(all_of(a, jnp.float32) for a in (jnp.inf, -jnp.inf))
        largest, digest, *ends = lax.fori_loop(0, eighth, extremes, found)
        of = group_levels(
            largest, *ends, bits=bits, scale_bits=scale_bits, stochastic=bool(seeds)
        )
        if seeds:
            key = noise.group_key(digest, seeds[0][0])
            channel = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=spread)
            channel = (channel + j * columns).astype(jnp.uint32)
            first = ((b * count + g) * group).astype(jnp.uint32)

        @pl.loop(0, eighth)
        def _(i):
            at, noises = [i + lane * eighth for lane in _EIGHT], [None] * 8
            if seeds:
                rows = (first + t.astype(jnp.uint32) for t in at[:4])
                numbers = (r * jnp.uint32(channels % 2**32) + channel for r in rows)
                halves = zip(*(noise.pair_noise(n, key) for n in numbers), strict=True)
                noises = [u for half in halves for u in half]
            codes = [
                levels.code(entries(token), of, u, bits=bits)
                for token, u in zip(at, noises, strict=True)
            ]
            for lane, byte in enumerate(_packed(codes, bits)):
                codes_smem[i + lane * eighth] = byte.astype(jnp.uint8)

        stored = [of.scales] if symmetric else [of.scales, of.lows]
        for smem, a in zip(levels_smem, stored, strict=True):
            smem[...] = a
        plgpu.commit_smem()
        row = pl.ds(g * eighth * bits, eighth * bits)
        plgpu.copy_smem_to_gmem(codes_smem, codes_hbm.at[b, row, column])
        for smem, hbm in zip(levels_smem, levels_hbm, strict=True):
            plgpu.copy_smem_to_gmem(smem, hbm.at[b, g, column])
        plgpu.wait_smem_to_gmem(0)

    # Scales in whole blocks: copies that are contiguous are not cut at an axis' end.
    whole = before, count, blocks[2] * columns
    out = [jax.ShapeDtypeStruct((before, count * eighth * bits, channels), jnp.uint8)]
    out += [jax.ShapeDtypeStruct(whole, kind) for kind in kinds]
    codes, *found = plgpu.kernel(
        quantize_channels_block,
        out_type=out,
        grid=(math.prod(blocks),),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((group, columns), x_btc.dtype),
            plgpu.SMEM((eighth * bits, columns), jnp.uint8),
            *(plgpu.SMEM((columns,), kind) for kind in kinds),
            plgpu.Barrier(),
        ],
    )(*inputs)
    found = (a[..., :channels] for a in found)
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
    columns: int,
) -> jax.Array:
    """The inverse, ``dtype[b, size, c]``."""
    (before, count, channels), eighth = stored.shape, group // 8
    columns, spread = _spread(channels, columns)
    blocks = before, count, pl.cdiv(channels, columns)
    numbers = [stored] if lows is None else [stored, lows]
    numbers = [longer(a, 2, columns) for a in numbers]

    def dequantize_channels_block(*refs):
        codes_hbm, *levels_hbm, x_hbm, codes_smem = refs[: len(numbers) + 3]
        *levels_smem, x_smem, arrived = refs[len(numbers) + 3 :]
        b, g, j = place_of_block(blocks)
        column = pl.ds(j * columns, columns)
        row = pl.ds(g * eighth * bits, eighth * bits)
        plgpu.copy_gmem_to_smem(codes_hbm.at[b, row, column], codes_smem, arrived)
        for hbm, smem in zip(levels_hbm, levels_smem, strict=True):
            plgpu.copy_gmem_to_smem(hbm.at[b, g, column], smem, arrived)
        plgpu.barrier_wait(arrived)
        of = [plgpu.load(a, layout=spread) for a in levels_smem]
        scale, low = [
            scales.load(of[0]),
            *(a.astype(jnp.float32) for a in of[1:]),
            None,
        ][:2]

        @pl.loop(0, eighth)
        def _(i):
            rows = (codes_smem.at[i + lane * eighth] for lane in range(bits))
            packed = [plgpu.load(a, layout=spread).astype(jnp.int32) for a in rows]
            for lane, code in enumerate(_unpacked(packed, bits)):
                kind = {"bits": bits, "dtype": dtype, "bound": bound}
                x_smem[i + lane * eighth] = levels.value(code, scale, low, **kind)

        plgpu.commit_smem()
        token = pl.ds(g * group, group)
        plgpu.copy_smem_to_gmem(x_smem, x_hbm.at[b, token, column])
        plgpu.wait_smem_to_gmem(0)

    # In whole groups where a copy is contiguous, as above.
    tokens = count * group if channels == columns else size
    x = plgpu.kernel(
        dequantize_channels_block,
        out_type=jax.ShapeDtypeStruct((before, tokens, channels), dtype),
        grid=(math.prod(blocks),),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((eighth * bits, columns), jnp.uint8),
            *(plgpu.SMEM((columns,), a.dtype) for a in numbers),
            plgpu.SMEM((group, columns), dtype),
            plgpu.Barrier(num_arrivals=1 + len(numbers)),
        ],
    )(codes, *numbers)
    return x[:, :size]


def _spread(channels: int, columns: int) -> tuple[int, plgpu.Layout]:
    """Channels of a block, no more than there are, and how threads share them."""
    columns = min(columns, pl.cdiv(channels, _THREADS) * _THREADS)
    return columns, plgpu.Layout.WG_STRIDED((columns,), columns // _THREADS)


def _packed(codes: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Eight codes in ``bits`` bytes."""
    if bits == 3:
        low, high = [code & 3 for code in codes], [code >> 2 for code in codes]
        return _packed(low, 2) + _packed(high, 1)
    packed = codes[:bits]
    for lane in range(1, 8 // bits):
        part = codes[lane * bits : (lane + 1) * bits]
        packed = [
            a + (code << (bits * lane)) for a, code in zip(packed, part, strict=True)
        ]
    return list(packed)


def _unpacked(packed: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    if bits == 3:
        low, high = _unpacked(packed[:2], 2), _unpacked(packed[2:], 1)
        return [a | (b << 2) for a, b in zip(low, high, strict=True)]
    mask = 2**bits - 1
    return [(byte >> (bits * i)) & mask for i in range(8 // bits) for byte in packed]
