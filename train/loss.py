"""Next-token cross-entropy whose logits never exist whole."""

from functools import partial

import jax
import jax.numpy as jnp

import sharding
from jaxcompact.kernels.explicit import laid_as, typed

# Of a device's float32 logits, where the caller names no chunk count. Each chunk reads
# and writes the sum of the matrix' gradients, in float32: fewer chunks, fewer bytes.
CHUNK_BYTES = 128 * 2**20


def next_token_loss(
    hidden_btd: jax.Array,
    kernel_dv: jax.Array,
    targets_bt: jax.Array,
    chunks: int | None = None,
) -> jax.Array:
    """Mean over the targets of ``logsumexp(h W) - (h W)[target]``, a float32 scalar.

    The logits are made chunk by chunk along the sequence. Under differentiation each
    chunk's share of the gradients is taken while its logits are there, so nothing is
    computed twice; what lives until the backward pass has the shapes of ``hidden_btd``
    and ``kernel_dv``.

    Args:
        hidden_btd: the model's last hidden states; their dtype is the computation's.
        kernel_dv: the output matrix. Its gradient is summed over chunks in float32.
        targets_bt: ids. A negative one, by custom -1, is left out of the mean; one
            outside the vocabulary makes the loss NaN.
        chunks: how many; by default so many that the logits of one take 128 MiB.

    Raises ValueError for shapes that do not fit and for a chunk count that is not
    between 1 and t.

    >>> import jax.numpy as jnp
    >>> hidden, kernel = jnp.ones((1, 4, 8)), jnp.zeros((8, 10))
    >>> loss = next_token_loss(hidden, kernel, jnp.array([[3, 1, 4, -1]]), chunks=2)
    >>> round(float(jnp.exp(loss)))
    10
    """
    batch, length, width = hidden_btd.shape
    vocab = kernel_dv.shape[-1]
    if kernel_dv.shape != (width, vocab):
        raise ValueError(
            f"kernel_dv must have shape (d, v) with d the last axis of hidden_btd, got "
            f"kernel_dv {kernel_dv.shape} and hidden_btd {hidden_btd.shape}"
        )
    if targets_bt.shape != (batch, length):
        raise ValueError(
            f"targets_bt must have the first two axes of hidden_btd, got "
            f"{targets_bt.shape} and hidden_btd {hidden_btd.shape}"
        )
    if chunks is None:
        mesh = sharding.in_force()
        logits_bytes = 4 * batch * length * vocab // (mesh.size if mesh else 1)
        chunks = _chunks(length, logits_bytes)
    elif not 1 <= chunks <= length:
        raise ValueError(f"chunks must be from 1 to {length} (t), got {chunks}")

    padding = -length % chunks
    hidden_btd = jnp.pad(hidden_btd, ((0, 0), (0, padding), (0, 0)))
    targets_bt = jnp.pad(targets_bt, ((0, 0), (0, padding)), constant_values=-1)
    return _mean_loss(_split(hidden_btd, chunks), kernel_dv, _split(targets_bt, chunks))


def _split(x_bt: jax.Array, chunks: int) -> jax.Array:
    """(b, t, ...) -> (chunks, b, t / chunks, ...)"""
    batch, length, *rest = x_bt.shape
    return jnp.moveaxis(x_bt.reshape(batch, chunks, length // chunks, *rest), 1, 0)


def _chunks(length: int, logits_bytes: int) -> int:
    """Enough chunks; up to twice as many where these divide the sequence."""
    enough = min(length, -(-logits_bytes // CHUNK_BYTES))
    divisors = (c for c in range(enough, 2 * enough + 1) if length % c == 0)
    return next(divisors, enough)


# In this file's private functions c is the axis of chunks.


@jax.custom_vjp
def _mean_loss(hidden_cbtd, kernel_dv, targets_cbt) -> jax.Array:
    kernel_dv = _gathered(kernel_dv.astype(hidden_cbtd.dtype))

    def chunk(total, inputs):
        hidden_btd, targets_bt = inputs
        _, _, losses_bt = _cross_entropy(hidden_btd, kernel_dv, targets_bt)
        return total + losses_bt.sum(), None

    total, _ = jax.lax.scan(chunk, jnp.float32(0), (hidden_cbtd, targets_cbt))
    return total / _count(targets_cbt)


def _forward(hidden_cbtd, kernel_dv, targets_cbt):
    dtype, vocab = hidden_cbtd.dtype, kernel_dv.shape[-1]
    w_dv = _gathered(kernel_dv.astype(dtype))
    weight = 1 / _count(targets_cbt)

    def chunk(carry, inputs):
        total, dw_dv = carry
        hidden_btd, targets_bt = inputs
        logits_btv, lse_bt, losses_bt = _cross_entropy(hidden_btd, w_dv, targets_bt)
        with jax.named_scope("logits"):
            hit_btv = jax.nn.one_hot(targets_bt, vocab, dtype=jnp.float32)
            dlogits_btv = jnp.exp(logits_btv - lse_bt[..., None]) - hit_btv
            dlogits_btv *= jnp.where(targets_bt >= 0, weight, 0)[..., None]
            # In the computation's dtype: both products below are then fast ones.
            dlogits_btv = dlogits_btv.astype(dtype)
        of_hidden = sharding.type_of(hidden_btd.shape, sharding.BATCH, None, None)
        dhidden_btd = jnp.einsum(
            "btv,dv->btd", dlogits_btv, w_dv, out_sharding=of_hidden
        )
        dw_dv += jnp.einsum(
            "btd,btv->dv",
            hidden_btd,
            dlogits_btv,
            preferred_element_type=jnp.float32,
            out_sharding=sharding.type_of(w_dv.shape, None, "tensor"),
        )
        return (total + losses_bt.sum(), _gathered(dw_dv)), dhidden_btd

    start = jnp.float32(0), _gathered(jnp.zeros(kernel_dv.shape, jnp.float32))
    (total, dw_dv), dhidden_cbtd = jax.lax.scan(
        chunk, start, (hidden_cbtd, targets_cbt)
    )
    # Shared before it is cast: that sums the devices' parts by a reduce-scatter.
    dw_dv = laid_as(dw_dv, kernel_dv).astype(kernel_dv.dtype)
    # The barrier, or XLA keeps the float32 sum, and casts when it is read.
    gradients = dhidden_cbtd, dw_dv
    return total * weight, jax.lax.optimization_barrier(gradients)


def _backward(residuals, dloss):
    dhidden_cbtd, dkernel_dv = residuals
    scaled = lambda g: (g.astype(jnp.float32) * dloss).astype(g.dtype)  # noqa: E731
    return scaled(dhidden_cbtd), scaled(dkernel_dv), None


_mean_loss.defvjp(_forward, _backward)


def _gathered(kernel_dv: jax.Array) -> jax.Array:
    """Once, and not for each chunk; and so the sum of its gradients."""
    return sharding.laid_out(kernel_dv, None, "tensor")


@jax.named_scope("logits")
def _cross_entropy(hidden_btd, kernel_dv, targets_bt):
    """Logits, their log-sum-exp, and the loss of each target, 0 for one left out."""
    logits_btv = jnp.matmul(hidden_btd, kernel_dv, preferred_element_type=jnp.float32)
    lse_bt = jax.nn.logsumexp(logits_btv, axis=-1)
    ids_bt1 = jnp.maximum(targets_bt, 0)[..., None]
    pick = partial(jnp.take_along_axis, axis=-1)
    if typed(ids_bt1):  # no type says how what is picked of shared columns lies
        place = jax.typeof(ids_bt1).sharding
        pick = jax.sharding.auto_axes(pick, out_sharding=place)
    picked_bt = pick(logits_btv, ids_bt1)[..., 0]
    return logits_btv, lse_bt, jnp.where(targets_bt >= 0, lse_bt - picked_bt, 0)


def _count(targets: jax.Array) -> jax.Array:
    return jnp.maximum((targets >= 0).sum(), 1).astype(jnp.float32)
