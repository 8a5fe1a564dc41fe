"""Project and quantize in one pass, for NVIDIA's Hopper.

A block makes 128 rows of z by ``columns`` of them. One warpgroup copies x and P, 64 of
the summed axis after another; two others multiply, 64 rows each, and encode their sums,
group after group, from the registers that hold them. z never reaches the card's memory.

The copy engine fills what lies outside the arrays with zeros, which add nothing, and
writes nothing there.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxcompact.kernels.quantize.mosaic_gpu import (
    ROWS,
    SHARED,
    encoded,
    in_strips,
    shared_levels,
    shared_strips,
    store,
    tiles,
)
from jaxcompact.kernels.quantize.reference import Encoded, level_dtypes

_SUMMED = 64  # entries of x that are under way at once
_WORKERS = 2  # warpgroups that multiply


def project(
    x_tn: jax.Array,
    p_nr: jax.Array,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_bits: int,
    columns: int,
    steps: int,
) -> Encoded:
    """Codes, scales and lows of ``x P``, ``[tokens, r]``: as `quantize`.

    Tokens are a multiple of 8, n of 64, r of ``group``. ``steps`` copies are under way
    at once.
    """
    (tokens, n), r = x_tn.shape, p_nr.shape[1]
    count, width = r // group, group * bits // 8
    groups = min(max(1, columns // group), count)
    columns = groups * group
    rows, dtype = _WORKERS * ROWS, x_tn.dtype
    blocks = pl.cdiv(tokens, rows), pl.cdiv(count, groups)
    rounds, both = n // _SUMMED, tiles(dtype)
    # As many as fit in shared memory with codes and levels.
    left = SHARED - rows * groups * (width + 4)
    steps = min(steps, rounds, left // (2 * _SUMMED * (rows + columns)))
    behind = min(1, rounds - 1)  # products that may be under way as the next begins
    kinds = level_dtypes(symmetric, scale_bits)

    def project_block(x_hbm, p_hbm, codes_hbm, *refs):
        levels_hbm, (codes_smem, *levels_smem) = refs[: len(kinds)], refs[len(kinds) :]
        worker = lax.axis_index("worker")
        i, j = lax.axis_index("rows"), lax.axis_index("columns")
        strips = codes_smem.shape[0] // _WORKERS

        def step(_, x_smem, p_smem, sums):
            mine = x_smem.at[pl.ds(worker * ROWS, ROWS)]
            plgpu.wgmma(sums, mine, p_smem)
            plgpu.wgmma_wait(behind)
            return sums

        def compute(pipeline):
            def of_sums(sums):
                pipeline(sums)
                total, row = sums[...], pl.ds(i * rows + worker * ROWS, ROWS)
                codes_of = codes_smem.at[pl.ds(worker * strips, strips)]
                for g in range(groups):
                    z = total[:, g * group : (g + 1) * group].astype(dtype)
                    codes, of = encoded(
                        z.astype(jnp.float32), None, bits, symmetric, scale_bits
                    )
                    store(codes_of, g * width, codes)
                    for smem, stored in zip(levels_smem, of, strict=True):
                        smem[worker, g] = stored
                plgpu.commit_smem()
                first = j * groups
                for target, smem in in_strips(
                    codes_hbm.at[row], first * width, codes_of
                ):
                    plgpu.copy_smem_to_gmem(smem, target)
                for smem, hbm in zip(levels_smem, levels_hbm, strict=True):
                    target = hbm.at[pl.ds(first, groups), row]
                    plgpu.copy_smem_to_gmem(smem.at[worker, pl.ds(0, groups)], target)
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(of_sums, plgpu.ACC((ROWS, columns), jnp.float32))

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(rounds,),
            in_specs=[
                plgpu.BlockSpec(
                    (rows, _SUMMED),
                    lambda k: (i, k),
                    transforms=both,
                    delay_release=behind,
                ),
                plgpu.BlockSpec(
                    (_SUMMED, columns),
                    lambda k: (k, j),
                    transforms=both,
                    delay_release=behind,
                ),
            ],
            memory_registers=40,
            max_concurrent_steps=steps,
            wg_axis="worker",
            num_compute_wgs=_WORKERS,
            compute_context=compute,
        )(x_hbm, p_hbm)

    # Scales in whole blocks: copies that are contiguous are not cut at an axis' end.
    whole = blocks[1] * groups, blocks[0] * rows
    codes, *found = plgpu.kernel(
        project_block,
        out_type=[
            jax.ShapeDtypeStruct((tokens, count * width), jnp.uint8),
            *(jax.ShapeDtypeStruct(whole, kind) for kind in kinds),
        ],
        grid=blocks,
        grid_names=("rows", "columns"),
        num_threads=_WORKERS + 1,
        thread_name="worker",
        scratch_types=[
            shared_strips(_WORKERS * groups, width, jnp.uint8),
            *(shared_levels(_WORKERS, groups, kind) for kind in kinds),
        ],
    )(x_tn, p_nr)
    found = [a[:count, :tokens].T for a in found]
    return codes, *found, *([None] if symmetric else [])
