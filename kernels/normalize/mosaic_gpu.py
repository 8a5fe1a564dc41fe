"""Normalize and quantize in one pass, for NVIDIA's Hopper and newer.

A block is 64 rows. Its warpgroups share their columns, a strip each at a time, which
the copy engine brings to shared memory: once for each sum that waits for another's,
and once more to write y and the codes. A pass begins with the strips that the last one
ended with. So rows that fit in shared memory are read once; of longer ones the blocks
that run at once should fit in the card's cache.

Sums are in float32: of 64 columns at a time, then of a warpgroup's, then of all. y
takes the place of x in shared memory if it has x's dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxcompact.kernels.functions import blocks as evaluation
from jaxcompact.kernels.functions.blocks import COLUMNS
from jaxcompact.kernels.functions.rows import ENTRIES, Function, evaluated
from jaxcompact.kernels.quantize import mosaic_gpu as block
from jaxcompact.kernels.quantize.mosaic_gpu import encoded, in_strips, iota, layout
from jaxcompact.kernels.quantize.reference import Encoded, level_dtypes


def normalize(
    f: Function,
    x: jax.Array,
    parameters: Sequence[jax.Array],
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_bits: int,
    columns: int,
    workers: int,
) -> tuple[list[jax.Array], Encoded]:
    """``y[rows, size]`` and statistics ``[rows]``; codes, scales, lows as `quantize`.

    Parameters are ``[size]``. Rows of x and y are multiples of 16 bytes. ``columns`` of
    one of ``workers`` at once, fewer if shared memory asks for it.
    """
    (rows, size), dtype, of_y = x.shape, x.dtype, f.y.dtype
    count, width = pl.cdiv(size, group), group * bits // 8
    groups, workers = _shared(f, size, bits, group, columns, workers)
    columns, in_place = groups * group, of_y == dtype
    rounds, blocks = pl.cdiv(count, workers * groups), pl.cdiv(rows, block.ROWS)
    whole = rounds * workers * columns
    kinds = level_dtypes(symmetric, scale_bits)
    spread = layout(COLUMNS, max(dtype, of_y, key=lambda kind: kind.itemsize))
    of_rows, over = spread.reduce(1), evaluation.over(spread)

    def normalize_block(x_hbm, *refs):
        refs = iter(refs)
        parameters_hbm = [next(refs) for _ in parameters]
        y_hbm, codes_hbm, *levels_hbm = (next(refs) for _ in range(2 + len(kinds)))
        statistics_hbm = [next(refs) for _ in f.statistics]
        x_smem, codes_smem, *levels_smem = (next(refs) for _ in range(2 + len(kinds)))
        parameters_smem = [next(refs) for _ in parameters]
        statistics_smem = [next(refs) for _ in f.statistics]
        *y_smem, sums_smem, arrived, added = refs
        worker, row = lax.axis_index("worker"), lax.axis_index("block") * block.ROWS
        row = pl.ds(row, block.ROWS)

        def mine(smem):
            strips = smem.shape[0] // workers
            return smem.at[pl.ds(worker * strips, strips)]

        x_smem, codes_smem, *y_smem = map(mine, (x_smem, codes_smem, *y_smem))
        y_smem = (y_smem or [x_smem])[0]
        known: dict[Any, Any] = {}

        def first(j):  # of this worker's columns
            return (j * workers + worker) * columns

        def fetch(j):
            plgpu.commit_smem()  # what was read there is written over
            for source, smem in in_strips(x_hbm.at[row], first(j), x_smem):
                plgpu.copy_gmem_to_smem(source, smem, arrived.at[worker])
            for hbm, smem in zip(parameters_hbm, parameters_smem, strict=True):
                source = hbm.at[pl.ds(first(j), columns)]
                plgpu.copy_gmem_to_smem(source, smem.at[worker], arrived.at[worker])
            plgpu.barrier_wait(arrived.at[worker])

        def through(n: int, run: Callable, carry: Any = ()) -> Any:
            """The n-th pass, there or back."""

            def step(k, carry):
                j = rounds - 1 - k if n % 2 else k
                if n == 0:
                    fetch(j)
                elif rounds > 1:
                    pl.when(k > 0)(lambda: fetch(j))
                return run(j, carry)

            return lax.fori_loop(0, rounds, step, carry)

        def values(column: int) -> dict[Any, Any]:
            found = known | {f.xs[0]: block.load(x_smem, column, COLUMNS, spread)}
            for value, smem in zip(f.parameters, parameters_smem, strict=True):
                found[value] = evaluation.along(smem.at[worker], column, spread)
            return found

        def add(terms, j, sums):
            for column in range(0, columns, COLUMNS):
                found, parts = values(column), []
                for term in terms:
                    part = evaluated(term, found, over)
                    if term.form != ENTRIES:
                        part = over(part, term.form, ENTRIES)
                    if size < whole:
                        place = iota(part.shape, 1, spread)
                        part = jnp.where(place < size - first(j) - column, part, 0)
                    parts.append(jnp.sum(part, 1))
                sums = [a + b for a, b in zip(sums, parts, strict=True)]
            return sums

        place = 0
        for n, sums in enumerate(f.sums):
            terms = [value.ins[0] for value in sums]
            zero = plgpu.layout_cast(jnp.zeros(block.ROWS, jnp.float32), of_rows)
            parts = through(n, lambda j, c, t=terms: add(t, j, c), [zero] * len(sums))
            for i, part in enumerate(parts):
                sums_smem[worker, place + i] = part
            plgpu.barrier_arrive(added)
            plgpu.barrier_wait(added)
            for i, value in enumerate(sums):
                of = [sums_smem.at[w, place + i] for w in range(workers)]
                known[value] = sum(plgpu.load(a, layout=of_rows) for a in of)
            for value in f.of_rows:
                if value.passes <= n + 1:
                    evaluated(value, known, over)
            place += len(sums)

        def write(j, carry):
            for g in range(groups):
                codes_in = layout(width, dtype)
                x = block.load(x_smem, g * group, group, codes_in).astype(jnp.float32)
                if size % group and g == (count - 1) % groups:  # the last, somewhere
                    entries = size - first(j) - g * group
                    x = block.filled(x, entries, codes_in, edge=not symmetric)
                codes, of = encoded(x, None, bits, symmetric, scale_bits)
                block.store(codes_smem, g * width, codes)
                for smem, stored in zip(levels_smem, of, strict=True):
                    smem[worker, g] = stored
            for column in range(0, columns, COLUMNS):
                block.store(y_smem, column, evaluated(f.y, values(column), over))
            plgpu.commit_smem()
            for target, smem in in_strips(y_hbm.at[row], first(j), y_smem):
                plgpu.copy_smem_to_gmem(smem, target)
            place = (j * workers + worker) * groups
            strips = in_strips(codes_hbm.at[row], place * width, codes_smem)
            for target, smem in strips:
                plgpu.copy_smem_to_gmem(smem, target)
            for smem, hbm in zip(levels_smem, levels_hbm, strict=True):
                target = hbm.at[pl.ds(place, groups), row]
                plgpu.copy_smem_to_gmem(smem.at[worker, pl.ds(0, groups)], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return carry

        through(len(f.sums), write)

        @pl.when(worker == 0)
        def _():
            for value, smem in zip(f.statistics, statistics_smem, strict=True):
                smem[...] = known[value]
            plgpu.commit_smem()
            for smem, hbm in zip(statistics_smem, statistics_hbm, strict=True):
                plgpu.copy_smem_to_gmem(smem, hbm.at[row])

        plgpu.wait_smem_to_gmem(0)

    # Levels in whole blocks: copies that are contiguous are not cut at an axis' end.
    kept = rounds * workers * groups, blocks * block.ROWS
    y, codes, *found = plgpu.kernel(
        normalize_block,
        out_type=[
            jax.ShapeDtypeStruct((rows, size), of_y),
            jax.ShapeDtypeStruct((rows, count * width), jnp.uint8),
            *(jax.ShapeDtypeStruct(kept, kind) for kind in kinds),
            *(jax.ShapeDtypeStruct(kept[1:], s.dtype) for s in f.statistics),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=workers,
        thread_name="worker",
        scratch_types=[
            x_smem := block.shared_strips(workers * groups, group, dtype),
            block.shared_strips(workers * groups, width, jnp.uint8),
            *(block.shared_levels(workers, groups, kind) for kind in kinds),
            *(plgpu.SMEM((workers, columns), p.dtype) for p in parameters),
            *(plgpu.SMEM((block.ROWS,), s.dtype) for s in f.statistics),
            *([] if in_place else [block.shared_strips(workers * groups, group, of_y)]),
            plgpu.SMEM((workers, sum(map(len, f.sums)), block.ROWS), jnp.float32),
            plgpu.Barrier(
                num_arrivals=x_smem.shape[0] // workers + len(parameters),
                num_barriers=workers,
            ),
            plgpu.Barrier(num_arrivals=workers),
        ],
    )(x, *(block.longer(p, 0, whole) for p in parameters))
    levels, statistics = found[: len(kinds)], found[len(kinds) :]
    levels = [a[:count, :rows].T for a in levels]
    outs = [y, *(s[:rows] for s in statistics)]
    return outs, (codes, *levels, *([None] if symmetric else []))


def _shared(
    f: Function, size: int, bits: int, group: int, columns: int, workers: int
) -> tuple[int, int]:
    """Groups that a warpgroup has at once, and warpgroups, as shared memory allows."""
    unit, width = max(1, COLUMNS // group), f.xs[0].dtype.itemsize
    width += 0 if f.y.dtype == f.xs[0].dtype else f.y.dtype.itemsize
    one = block.ROWS * (group * width + group * bits // 8 + 4)
    one += group * sum(p.dtype.itemsize for p in f.parameters)
    sums = workers * sum(map(len, f.sums)) + len(f.statistics)
    most = (block.SHARED - 4 * block.ROWS * sums) // (unit * one)
    count = pl.cdiv(size, unit * group)  # of units, that f is evaluated on at once
    workers = min(workers, count, most)
    wanted = columns // (unit * group), pl.cdiv(count, workers), most // workers
    return unit * max(1, min(wanted)), workers
