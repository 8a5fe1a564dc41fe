"""Attention with a backward pass of its own, in plain JAX."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def flash(
    q_bthk: jax.Array,
    k_bthk: jax.Array,
    v_bthk: jax.Array,
    length_b: jax.Array | None = None,
) -> jax.Array:
    """Attention that keeps q, k, v, its output and the log-sum-exp.

    As cuDNN's does, which has no second derivative and needs a GPU; this one holds all
    scores at once, in float32. Causal, or of each sequence's first ``length_b`` tokens,
    1 or more. k and v may have fewer heads: a divisor.
    """
    return _forward(q_bthk, k_bthk, v_bthk, length_b)[0]


def _einsum(formula: str, *arrays: jax.Array) -> jax.Array:
    arrays = (x.astype(jnp.float32) for x in arrays)
    return jnp.einsum(formula, *arrays)


def _grouped(q_bthk, k_bthk):
    """Heads in groups g, one for each of k's, of r each."""
    batch, length, _, width = q_bthk.shape
    return q_bthk.reshape(batch, length, k_bthk.shape[2], -1, width)


def _scores(q_bqgrk, k_btgk, length_b):
    length, width = q_bqgrk.shape[1], q_bqgrk.shape[-1]
    s_bgrqt = _einsum("bqgrk,btgk->bgrqt", q_bqgrk, k_btgk) / width**0.5
    if length_b is None:
        read = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
    else:
        read = jnp.arange(length, dtype=jnp.int32)[None] < length_b[:, None]
        read = read[:, None, None, None]
    return jnp.where(read, s_bgrqt, -jnp.inf)


def _forward(q, k, v, length_b):
    s = _scores(_grouped(q, k), k, length_b)
    lse_bgrq = jax.nn.logsumexp(s, axis=-1)
    out = _einsum("bgrqt,btgk->bqgrk", jnp.exp(s - lse_bgrq[..., None]), v)
    out = out.reshape(q.shape).astype(q.dtype)
    return out, (q, k, v, length_b, out, lse_bgrq)


def _backward(residuals, d_out):
    q, k, v, length_b, out, lse_bgrq = residuals
    q_bqgrk, out, d_out = (_grouped(x, k) for x in (q, out, d_out))
    p = jnp.exp(_scores(q_bqgrk, k, length_b) - lse_bgrq[..., None])
    dp = _einsum("bqgrk,btgk->bgrqt", d_out, v)
    row = _einsum("bqgrk,bqgrk->bgrq", d_out, out)
    ds = p * (dp - row[..., None]) / q.shape[-1] ** 0.5
    return (
        _einsum("bgrqt,btgk->bqgrk", ds, k).reshape(q.shape).astype(q.dtype),
        _einsum("bgrqt,bqgrk->btgk", ds, q_bqgrk).astype(k.dtype),
        _einsum("bgrqt,bqgrk->btgk", p, d_out).astype(v.dtype),
        None,
    )


flash.defvjp(_forward, _backward)
