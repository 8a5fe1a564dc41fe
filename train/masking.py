"""Words that a RoBERTa is to guess: which, and what it reads in their place."""

import jax
import jax.numpy as jnp

from configs import RobertaConfig
from jaxcompact.kernels.explicit import like

MASKED = 0.15  # of the tokens are predicted
_CLEARED, _REPLACED = 0.8, 0.1  # of these; the rest stay as they are


def mask_words(cfg: RobertaConfig, tokens_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the model reads of a text, and what it is to say (-1 for nothing).

    The draw is a function of the text. A window comes with another offset in each
    epoch, and so with other masks; validation has always the same.
    """
    # Wraps around; the order counts, or two texts of the same words would be alike.
    weight_t = jnp.arange(1, tokens_bt.shape[1] + 1, dtype=jnp.int32)[None]
    seed = jnp.sum(tokens_bt * weight_t)
    chosen, kind, word = jax.random.split(
        jax.random.fold_in(jax.random.key(1), seed), 3
    )
    special_bt = (
        (tokens_bt == cfg.bos_id)
        | (tokens_bt == cfg.eos_id)
        | (tokens_bt == cfg.pad_id)
    )
    lies = {"shape": tokens_bt.shape, "out_sharding": like(tokens_bt)}
    chosen_bt = jax.random.bernoulli(chosen, MASKED, **lies) & ~special_bt
    kind_bt = jax.random.uniform(kind, **lies)
    word_bt = jax.random.randint(word, minval=0, maxval=cfg.vocab_size, **lies)
    word_bt = jnp.where(word_bt == cfg.pad_id, jnp.int32(cfg.mask_id), word_bt)
    changed_bt = jnp.where(
        kind_bt < _CLEARED,
        jnp.int32(cfg.mask_id),
        jnp.where(kind_bt < _CLEARED + _REPLACED, word_bt, tokens_bt),
    )
    return jnp.where(chosen_bt, changed_bt, tokens_bt), jnp.where(
        chosen_bt, tokens_bt, jnp.int32(-1)
    )
