"""What a Mosaic kernel needs to evaluate a `rows.Function` on a block of 64 rows."""

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxcompact.kernels.functions.rows import ENTRIES, ROWS, Form
from jaxcompact.kernels.quantize import mosaic_gpu as block

COLUMNS = 64  # that a function is evaluated on at once


def along(smem, column: int, spread: plgpu.Layout) -> jax.Array:
    """A parameter's part, beside entries that are laid out so."""
    of = smem.at[pl.ds(column, COLUMNS)]
    return plgpu.load(of, layout=spread.reduce(0), optimized=False)


def over(spread: plgpu.Layout) -> Callable[[jax.Array, Form, Form], jax.Array]:
    """Broadcasts what varies over less, for `rows.evaluated`."""

    def run(a: jax.Array, form: Form, wanted: Form) -> jax.Array:
        if wanted == ENTRIES:
            shape, axes = (block.ROWS, COLUMNS), [i for i in (0, 1) if form[i]]
            a = lax.broadcast_in_dim(a, shape, axes)
            return plgpu.layout_cast(a, spread)
        size = block.ROWS if wanted == ROWS else COLUMNS
        a = jnp.full((size,), a)
        return plgpu.layout_cast(a, spread.reduce(1 if wanted == ROWS else 0))

    return run
