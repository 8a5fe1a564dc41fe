"""What the models have in common: attention, LayerNorm, the scan over layers.

Shapes in names: b batch, t tokens, d width, h heads, k a head's width, v vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import jaxcompact as jc
from loss import next_token_loss
from sharding import BATCH, gathers_weights, laid_out, of_batch, product, type_of

Checkpoint = jc.Policy | Callable[..., Any] | Literal["nothing"] | None

split = partial(product, last="tensor")  # over the devices of tensor parallelism


class LayerNorm(nnx.Module):
    """Float32 inside, one cast out."""

    def __init__(self, width: int, eps: float, *, param_dtype: Any):
        self.scale = nnx.Param(jnp.ones(width, param_dtype))
        self.bias = nnx.Param(jnp.zeros(width, param_dtype))
        self.eps = eps

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        x = x_btd.astype(jnp.float32)
        x -= jnp.mean(x, axis=-1, keepdims=True)
        x *= jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + self.eps)
        scale, bias = (
            p[...].astype(jnp.float32)[None, None] for p in (self.scale, self.bias)
        )
        return (x * scale + bias).astype(x_btd.dtype)


def default_attention(dtype: Any) -> str:
    """cuDNN's on a GPU with a 16-bit dtype, else XLA's."""
    on_gpu = jax.default_backend() == "gpu"
    return "cudnn" if on_gpu and jnp.dtype(dtype).itemsize == 2 else "xla"


def check_options(checkpoint: Any, attention: Any) -> None:
    """Raises ValueError for what is no `Checkpoint` or no way of attention."""
    if not (checkpoint in (None, "nothing") or callable(checkpoint)) and not hasattr(
        checkpoint, "decide"
    ):
        raise ValueError(
            f'checkpoint must be None, "nothing" or a policy, got {checkpoint!r}'
        )
    if not (attention in (None, "cudnn", "xla") or callable(attention)):
        raise ValueError(
            f'attention must be None, "cudnn", "xla" or a function, got {attention!r}'
        )


def check_length(tokens_bt: jax.Array, max_seq: int) -> int:
    """That of the sequences; raises ValueError for one that is too long."""
    length = tokens_bt.shape[1]
    if length > max_seq:
        raise ValueError(
            f"tokens_bt must be at most max_seq = {max_seq} long, got {length}"
        )
    return length


def heads(linear: nnx.Module, x_btd: jax.Array, head_dim: int) -> jax.Array:
    """``linear(x)`` as (b, t, h, k), of which a device has whole heads."""
    y_btm = split(linear, x_btd, unit=head_dim)
    return y_btm.reshape(*x_btd.shape[:2], -1, head_dim)


def attend(
    implementation: str | Callable,
    q_bthk: jax.Array,
    k_bthk: jax.Array,
    v_bthk: jax.Array,
    length_b: jax.Array | None = None,
) -> jax.Array:
    """`jax.nn.dot_product_attention` in q's dtype, or a function as `attention.flash`.

    Causal, or of each sequence's first ``length_b`` tokens.
    """
    dtype = q_bthk.dtype
    # Devices share the heads if those of keys and values can be divided among them.
    lies = type_of(k_bthk.shape, BATCH, None, "tensor", None)
    if lies is not None:
        q_bthk = jax.sharding.reshard(q_bthk, lies)
    operands = q_bthk, k_bthk, v_bthk
    if implementation == "xla":
        # Its gradient mixes float32 with 16-bit operands, which neither strict
        # promotion nor the speed of a CPU likes.
        operands = (a.astype(jnp.float32) for a in operands)
    if callable(implementation):
        return implementation(*operands, length_b).astype(dtype)

    def call(q_bthk, k_bthk, v_bthk, length_b):
        return jax.nn.dot_product_attention(
            q_bthk,
            k_bthk,
            v_bthk,
            is_causal=length_b is None,
            key_value_seq_lengths=length_b,
            implementation=implementation,
        )

    if implementation == "cudnn" and lies is not None:  # whose types say nothing
        of_length = None if length_b is None else type_of(length_b.shape, BATCH)
        call = jax.shard_map(call, in_specs=(*(lies,) * 3, of_length), out_specs=lies)
    return call(*operands, length_b).astype(dtype)


def stacked_layers(
    make: Callable[[Callable], nnx.Module],
    linear: Callable,
    count: int,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """``count`` layers as one, for `scan_layers`: ``make(linear)``, stacked."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap
    def stacked(rngs: nnx.Rngs) -> nnx.Module:
        return make(partial(linear, rngs=rngs))

    return stacked(rngs)


def scan_layers(
    layers: nnx.Module,
    call: Callable[..., jax.Array],
    x_btd: jax.Array,
    checkpoint: Checkpoint,
    *each: jax.Array,
) -> jax.Array:
    """x through stacked layers: ``call(layer, x_btd, *of_each)`` for one after another.

    The first axis of ``each`` is that of the layers too.
    """
    graphdef, stack = nnx.split(layers)

    # jax.lax.scan and not nnx.scan: that one also returns the layers' weights,
    # stacked anew, because they might have changed.
    def layer(x_btd, of_layer):
        state, *of_each = of_layer
        return call(nnx.merge(graphdef, state), x_btd, *of_each), None

    if hasattr(checkpoint, "decide"):
        layer = jc.checkpoint(layer, policy=checkpoint, params=1, prevent_cse=False)
    elif checkpoint is not None or gathers_weights():
        policy = None if checkpoint == "nothing" else checkpoint or _but_gathered
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x_btd, _ = jax.lax.scan(layer, x_btd, (stack, *each))
    return x_btd


def _but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Of `jax.checkpoint`: all is kept but weights that were gathered."""
    return primitive.name != "reshard"


class Attention(nnx.Module):
    """Of heads as many as of keys and values; ``output`` makes the last linear."""

    def __init__(
        self, cfg: Any, linear: Callable, implementation: str | Callable, output=None
    ):
        self.q, self.k, self.v = (linear(cfg.width, cfg.width) for _ in range(3))
        self.o = (output or linear)(cfg.width, cfg.width)
        self.head_dim, self.implementation = cfg.head_dim, implementation

    def __call__(
        self, x_btd: jax.Array, length_b: jax.Array | None = None
    ) -> jax.Array:
        projections = self.q, self.k, self.v
        operands = (heads(f, x_btd, self.head_dim) for f in projections)
        mixed_bthk = attend(self.implementation, *operands, length_b)
        return product(self.o, of_batch(mixed_bthk.reshape(x_btd.shape), "tensor"))


class MLP(nnx.Module):
    """GELU, exact or by tanh; ``output`` as of `Attention`."""

    def __init__(self, cfg: Any, linear: Callable, *, tanh: bool, output=None):
        self.up = linear(cfg.width, cfg.ff)
        self.down = (output or linear)(cfg.ff, cfg.width)
        self.tanh = tanh

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        x_btf = jax.nn.gelu(split(self.up, x_btd), approximate=self.tanh)
        return product(self.down, x_btf)


class Decoder(nnx.Module):
    """Says the next token. A model has ``hidden`` and ``output_kernel``, (d, v)."""

    def __call__(self, tokens_bt: jax.Array) -> jax.Array:
        """Logits, float32 (b, t, v)."""
        return self.logits(self.hidden(tokens_bt))

    def loss(self, tokens_bt: jax.Array, *rest: Any) -> jax.Array:
        """Mean loss of every token but the first, given those before it.

        ``rest`` is of ``hidden``.
        """
        hidden_btd = self.hidden(tokens_bt[:, :-1], *rest)
        return next_token_loss(hidden_btd, self.output_kernel(), tokens_bt[:, 1:])

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Float32 (b, t, v), of what `hidden` returns."""
        kernel_dv = laid_out(self.output_kernel().astype(x_btd.dtype), None, "tensor")
        return jnp.matmul(x_btd, kernel_dv, preferred_element_type=jnp.float32)
