"""What a run begins with, a shape or trained weights, and the weights it leaves."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from configs import MODELS, GPT2Config, ModelConfig, RobertaConfig
from folders import crc, shape_bytes
from gpt2_weights import load_gpt2, save_gpt2
from huggingface import folder_of, read_json
from pretrain_options import ModelOptions
from readers import DataError
from roberta_weights import save_roberta
from tokenizer import BEGIN_OF_TEXT, ByteTokenizer, Tokenizer, special_ids
from weights import load_llama, save_llama

_LOAD = {"llama": load_llama, "gpt2": load_gpt2}


@dataclass(frozen=True, eq=False)
class Pretrained:
    cfg: ModelConfig | GPT2Config
    params: Any  # on the host: a device has those alone that it trains
    folder: Path

    @property
    def tokenizer(self) -> str:
        """The one that the weights were trained with. Raises DataError without one."""
        path = self.folder / "tokenizer.json"
        if path.is_file():
            return str(path)
        if self.cfg.vocab_size == ByteTokenizer.vocab_size:
            return "bytes"
        raise DataError(
            f"{path}: no such file; --tokenizer names a tokenizer.json, or is bytes"
        )

    @property
    def name(self) -> str:
        """Weights of one name are equal, and read in the same way."""
        return f"{crc([*jax.tree.leaves(self.params), shape_bytes(self.cfg)]):08x}"


def load(weights: str | None, param_dtype: str) -> Pretrained | None:
    """A LLaMA or a GPT-2 of a Hugging Face folder, or of ``hf:NAME``; None of None.

    Raises ValueError for what `load_llama` or `load_gpt2` refuses, and for another
    family; DataError for a name that cannot be had.
    """
    if weights is None:
        return None
    folder = folder_of(weights)
    path = folder / "config.json"
    kind = read_json(path).get("model_type")
    if kind not in tuple(_LOAD):  # it may be a list
        raise ValueError(
            f"model_type in {path} must be one of {', '.join(_LOAD)}, got {kind!r}"
        )
    model = _LOAD[kind](folder, param_dtype=jnp.dtype(param_dtype))
    params = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return Pretrained(model.cfg, params, folder)


def shape_of(
    options: ModelOptions, tokenizer: Tokenizer, begin: Pretrained | None
) -> ModelConfig | GPT2Config | RobertaConfig:
    """Raises ValueError where options, weights and tokenizer do not fit together."""
    size = tokenizer.vocab_size
    cfg = begin.cfg if begin else replace(MODELS[options.name], vocab_size=size)
    if size > cfg.vocab_size:
        raise ValueError(
            f"--tokenizer must be of the weights' vocabulary, {cfg.vocab_size} ids, "
            f"got {size}"
        )
    if isinstance(cfg, RobertaConfig):
        cfg = replace(cfg, **special_ids(tokenizer))
    if options.dropout is not None:
        if not isinstance(cfg, GPT2Config):
            raise ValueError(f"--dropout is an option of a GPT-2, got {options.name}")
        cfg = replace(cfg, dropout=options.dropout)
    return cfg


def save(model: nnx.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """As Hugging Face has them."""
    if isinstance(model.cfg, RobertaConfig):
        save_roberta(model, folder)
    elif isinstance(model.cfg, GPT2Config):
        save_gpt2(model, folder, end=tokenizer.eot)
    else:
        begins = map(tokenizer.token_id, BEGIN_OF_TEXT)
        begin = next((number for number in begins if number is not None), None)
        save_llama(model, folder, begin=begin, end=tokenizer.eot)
    tokenizer.save(folder, model.cfg.max_seq)
