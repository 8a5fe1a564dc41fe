"""Activate and quantize in one pass, for NVIDIA's Hopper and newer.

A block is 64 rows by some groups of each x, which the copy engine brings to shared
memory once. From there f is evaluated on 64 columns after another, and each x's groups
are encoded one after another, as by `quantize`: few registers are used at once.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxcompact.kernels.functions import blocks as evaluation
from jaxcompact.kernels.functions.blocks import COLUMNS
from jaxcompact.kernels.functions.rows import Function, evaluated
from jaxcompact.kernels.quantize import levels
from jaxcompact.kernels.quantize.mosaic_gpu import (
    ROWS,
    encoded,
    filled,
    in_strips,
    layout,
    load,
    longer,
    place_of_block,
    shared_strips,
    store,
)
from jaxcompact.kernels.quantize.reference import Encoded, level_dtypes


def activate(
    f: Function,
    xs: Sequence[jax.Array],
    parameters: Sequence[jax.Array],
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_bits: int,
    bounds: Sequence[levels.Bound | None],
    columns: int,
) -> tuple[jax.Array, list[Encoded]]:
    """``y[rows, size]``; codes, scales, lows of each x: as `quantize`.

    Parameters are ``[size]``, ``bounds`` each x's. Rows of x and y are multiples of 16
    bytes. ``columns`` of a block.
    """
    (rows, size), dtype, of_y = xs[0].shape, xs[0].dtype, f.y.dtype
    count, width = pl.cdiv(size, group), group * bits // 8
    unit = max(1, COLUMNS // group)  # groups that f is evaluated on at once
    groups = unit * min(max(1, columns // (unit * group)), pl.cdiv(count, unit))
    blocks = pl.cdiv(rows, ROWS), pl.cdiv(count, groups)
    kinds = level_dtypes(symmetric, scale_bits)

    def activate_block(*refs):
        refs = iter(refs)
        parameters_hbm = list(islice(refs, len(parameters)))
        xs_hbm, y_hbm, codes_hbm, levels_hbm = _taken(refs, len(xs), len(kinds))
        xs_smem, y_smem, codes_smem, levels_smem = _taken(refs, len(xs), len(kinds))
        *parameters_smem, arrived = refs
        i, j = place_of_block(blocks)
        row, first = pl.ds(i * ROWS, ROWS), j * groups
        for hbm, x_smem in zip(xs_hbm, xs_smem, strict=True):
            for source, smem in in_strips(hbm.at[row], first * group, x_smem):
                plgpu.copy_gmem_to_smem(source, smem, arrived)
        for hbm, smem in zip(parameters_hbm, parameters_smem, strict=True):
            source = hbm.at[pl.ds(first * group, groups * group)]
            plgpu.copy_gmem_to_smem(source, smem, arrived)
        plgpu.barrier_wait(arrived)
        spread = layout(COLUMNS, dtype)
        for column in range(0, groups * group, COLUMNS):
            known = {
                x: load(smem, column, COLUMNS, spread)
                for x, smem in zip(f.xs, xs_smem, strict=True)
            }
            for value, smem in zip(f.parameters, parameters_smem, strict=True):
                known[value] = evaluation.along(smem, column, spread)
            y = evaluated(f.y, known, evaluation.over(spread))
            store(y_smem, column, y)
        for n, g in itertools.product(range(len(xs)), range(groups)):
            spread = layout(width, dtype)
            x = load(xs_smem[n], g * group, group, spread).astype(jnp.float32)
            x = levels.squeezed(x, bounds[n])
            if size % group and g == (count - 1) % groups:  # the last, in some block
                entries = size - (first + g) * group
                x = filled(x, entries, spread, edge=not symmetric)
            codes, of = encoded(x, None, bits, symmetric, scale_bits)
            store(codes_smem[n], g * width, codes)
            for smem, stored in zip(levels_smem[n], of, strict=True):
                smem[g] = stored
        plgpu.commit_smem()
        for target, smem in in_strips(y_hbm.at[row], first * group, y_smem):
            plgpu.copy_smem_to_gmem(smem, target)
        for n in range(len(xs)):
            strips = in_strips(codes_hbm[n].at[row], first * width, codes_smem[n])
            for target, smem in strips:
                plgpu.copy_smem_to_gmem(smem, target)
            for smem, hbm in zip(levels_smem[n], levels_hbm[n], strict=True):
                plgpu.copy_smem_to_gmem(smem, hbm.at[pl.ds(first, groups), row])
        plgpu.wait_smem_to_gmem(0)

    # Scales in whole blocks: copies that are contiguous are not cut at an axis' end.
    whole = blocks[1] * groups, blocks[0] * ROWS
    codes = jax.ShapeDtypeStruct((rows, count * width), jnp.uint8)
    y, *found = plgpu.kernel(
        activate_block,
        out_type=[
            jax.ShapeDtypeStruct((rows, size), of_y),
            *[codes] * len(xs),
            *[jax.ShapeDtypeStruct(whole, kind) for kind in kinds * len(xs)],
        ],
        grid=(math.prod(blocks),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=f.may_approximate),
        scratch_types=[
            *(xs_smem := [shared_strips(groups, group, dtype)] * len(xs)),
            shared_strips(groups, group, of_y),
            *[shared_strips(groups, width, jnp.uint8)] * len(xs),
            *[plgpu.SMEM((groups, ROWS), kind) for kind in kinds * len(xs)],
            *(plgpu.SMEM((groups * group,), p.dtype) for p in parameters),
            plgpu.Barrier(
                num_arrivals=sum(smem.shape[0] for smem in xs_smem) + len(parameters)
            ),
        ],
    )(*(longer(p, 0, groups * group) for p in parameters), *xs)
    codes, found = found[: len(xs)], [a[:count, :rows].T for a in found[len(xs) :]]
    of = [[*pair, None][:2] for pair in itertools.batched(found, len(kinds))]
    return y, [(code, *levels) for code, levels in zip(codes, of, strict=True)]


def _taken(refs: Iterator[Any], xs: int, kinds: int) -> tuple[list, Any, list, list]:
    """Of each x, of y, of each x's codes, of each x's scales and lows."""
    inputs, y, codes = list(islice(refs, xs)), next(refs), list(islice(refs, xs))
    return inputs, y, codes, [list(islice(refs, kinds)) for _ in range(xs)]
