"""The weight gradient from codes, for NVIDIA's Hopper: x is decoded on its way.

A block makes 2 groups of x's columns by ``columns`` of dy's. One warpgroup copies the
codes, scales and dy of 64 tokens after another; two others decode a group each, through
registers to shared memory, and multiply: while the tensor core works for one, the other
decodes.
The decoded x never reaches the card's memory. Where there are fewer blocks than
multiprocessors the tokens are split among ``splits`` of them, whose float32 sums XLA
adds.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxcompact.kernels.quantize.mosaic_gpu import ROWS, decoded, layout, tiles

_EPILOGUE = 64  # columns of a sum that are written at once
_WORKERS = 2  # warpgroups that multiply


def weight_gradient(
    codes: jax.Array,
    stored: jax.Array,
    dy: jax.Array,
    *,
    bits: int,
    size: int,
    columns: int,
    splits: int,
    steps: int,
) -> jax.Array:
    """Partial sums ``float32[splits, size, m]``.

    Codes are ``[tokens, g * 64 * bits / 8]``, scales ``[g, tokens]``, dy
    ``[tokens, m]``; ``steps`` are under way at once.
    """
    group, (tokens, m) = 64, dy.shape
    width = group * bits // 8
    rounds = pl.cdiv(pl.cdiv(tokens, ROWS), splits)

    def weight_gradient_block(codes_hbm, stored_hbm, dy_hbm, out_hbm, out_smem, x_smem):
        worker = lax.axis_index("worker")
        i, j, s = (lax.axis_index(name) for name in ("rows", "columns", "splits"))

        def step(index, codes_smem, stored_smem, dy_smem, sums):
            codes = codes_smem.at[:, pl.ds(worker * width, width)]
            codes = plgpu.load(codes, layout=layout(width, dy.dtype))
            x_smem[worker] = decoded(codes, [stored_smem.at[worker]], bits, dy.dtype)
            plgpu.commit_smem()
            plgpu.wgmma(sums, x_smem.at[worker].T, dy_smem)
            plgpu.wgmma_wait(0)
            return sums

        def compute(pipeline):
            def summed(sums):
                pipeline(sums)
                total = sums[...]
                row = pl.ds((_WORKERS * i + worker) * group, group)
                for first in range(0, columns, _EPILOGUE):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_smem[worker] = total[:, first : first + _EPILOGUE]
                    plgpu.commit_smem()
                    column = pl.ds(j * columns + first, _EPILOGUE)
                    target = out_hbm.at[s, row, column]
                    plgpu.copy_smem_to_gmem(out_smem.at[worker], target)
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(summed, plgpu.ACC((group, columns), jnp.float32))

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(rounds,),
            in_specs=[
                plgpu.BlockSpec(
                    (ROWS, _WORKERS * width),
                    lambda k: (s * rounds + k, i),
                    transforms=tiles(jnp.uint8, width),
                ),
                plgpu.BlockSpec((_WORKERS, ROWS), lambda k: (i, s * rounds + k)),
                plgpu.BlockSpec(
                    (ROWS, columns),
                    lambda k: (s * rounds + k, j),
                    transforms=tiles(dy.dtype),
                ),
            ],
            memory_registers=40,
            max_concurrent_steps=min(steps, rounds),
            wg_axis="worker",
            num_compute_wgs=_WORKERS,
            compute_context=compute,
        )(codes_hbm, stored_hbm, dy_hbm)

    return plgpu.kernel(
        weight_gradient_block,
        out_type=jax.ShapeDtypeStruct((splits, size, m), jnp.float32),
        grid=(pl.cdiv(size, _WORKERS * group), pl.cdiv(m, columns), splits),
        grid_names=("rows", "columns", "splits"),
        num_threads=_WORKERS + 1,
        thread_name="worker",
        scratch_types=[
            _shared((_WORKERS, group, _EPILOGUE), jnp.float32),
            _shared((_WORKERS, ROWS, group), dy.dtype),
        ],
    )(codes, stored, dy)


def _shared(shape: tuple[int, ...], dtype: jnp.dtype):
    return plgpu.SMEM(shape, dtype, transforms=tiles(dtype))
