"""Weights in others' formats: Hugging Face LLaMA folders, and llama2.c files to read.

model = load_llama("some/folder", dtype=jnp.float32)
save_llama(model, "another/folder")
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from configs import ModelConfig
from huggingface import (
    filled,
    kinds_of,
    open_tensors,
    read_config,
    read_parameter,
    require_tensors,
    require_tied,
    some,
    transposed,
    write_tensors,
)
from jaxcompact.paths import named_leaves
from llama import Llama

# Parameter -> Hugging Face's tensor, one for each layer. In llama2.c's order.
_TENSORS = {
    "embed/embedding": "model.embed_tokens.weight",
    "layers/attn_norm/scale": "model.layers.{}.input_layernorm.weight",
    "layers/attn/q/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "layers/attn/k/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "layers/attn/v/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers/attn/o/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "layers/mlp_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/mlp/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "layers/mlp/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "layers/mlp/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}
_FIELDS = {  # of ModelConfig -> of config.json
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "ff": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "max_seq": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
_OPTIONAL = {
    "num_key_value_heads": int | None,
    "tie_word_embeddings": bool,
    "rope_theta": float,
    "rope_parameters": dict | None,
    "head_dim": int | None,
}
_FIXED = {  # fields of config.json that Llama does not vary
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "rope_scaling": None,
    "quantization_config": None,
}


def load_llama(directory: str | Path, **model_kwargs: Any) -> Llama:
    """The model of a folder with ``config.json`` and ``model.safetensors``.

    Shards, as ``model.safetensors.index.json`` lists them, are read too. All arguments
    but the folder are `Llama`'s; weights are cast to its ``param_dtype``.

    Raises ValueError for a config field that is missing or asks for what `Llama` does
    not do, for a tensor that is missing, unknown or of another shape than the config
    says, and for a damaged file.
    """
    directory = Path(directory)
    cfg = _read_config(directory / "config.json")
    tensors = open_tensors(directory)
    expected = {name for path in _shapes(cfg) for name in _names(path, cfg)}
    require_tensors(directory, tensors, expected)
    if cfg.tied:
        require_tied(directory, tensors, _TENSORS["embed/embedding"])
    if unknown := sorted(tensors.keys() - expected):
        raise ValueError(f"{directory} has tensors of no LLaMA: {some(unknown)}")

    def value(path: str, shape: tuple[int, ...]) -> np.ndarray:
        return read_parameter(directory, tensors, path, _names(path, cfg), shape)

    return filled(partial(_make, cfg, **model_kwargs), value)


def save_llama(
    model: Llama,
    directory: str | Path,
    *,
    begin: int | None = None,
    end: int | None = None,
) -> None:
    """Writes ``config.json`` and ``model.safetensors``, in the parameters' dtype.

    ``begin``, ``end``: the tokens' ids that begin and end documents, if any do.
    """
    directory, cfg = Path(directory), model.cfg
    params = nnx.state(model, nnx.Param)
    tensors = write_tensors(params, lambda path: _names(path, cfg), directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **{theirs: getattr(cfg, ours) for ours, theirs in _FIELDS.items()},
        "num_key_value_heads": cfg.num_kv_heads,
        "rope_theta": cfg.rope_theta,
        "bos_token_id": begin,  # if nothing is said, transformers takes 1 and 2
        "eos_token_id": end,
        "torch_dtype": tensors["model.norm.weight"].dtype.name,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_llama2c(path: str | Path, **model_kwargs: Any) -> Llama:
    """The model of a llama2.c checkpoint (version 0: seven int32, then float32).

    Raises ValueError if the file's size is not what its header asks for.
    """
    content = Path(path).read_bytes()
    try:
        header = np.frombuffer(content, "<i4", 7).tolist()
        width, ff, layers, heads, kv_heads, vocab, max_seq = header
        cfg = ModelConfig(
            vocab_size=abs(vocab),
            width=width,
            ff=ff,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            max_seq=max_seq,
            norm_eps=1e-5,
            tied=vocab > 0,
        )
    except ValueError as error:
        raise ValueError(f"{path} is no llama2.c checkpoint: {error}") from error

    shapes = _shapes(cfg)
    sizes = {name: math.prod(shapes[name]) for name in _TENSORS if name in shapes}
    sizes["rope tables"] = max_seq * cfg.head_dim
    if not cfg.tied:  # it comes last, after the tables
        sizes["head/kernel"] = sizes.pop("head/kernel")
    floats = np.frombuffer(content, "<f4", offset=28)
    if floats.size != sum(sizes.values()):
        raise ValueError(
            f"{path} must hold {sum(sizes.values())} floats by its header, "
            f"got {floats.size}"
        )
    ends = np.cumsum(list(sizes.values()))
    flat = dict(zip(sizes, np.split(floats, ends[:-1]), strict=True))

    def value(path: str, shape: tuple[int, ...]) -> np.ndarray:
        if not path.endswith("kernel"):
            return flat[path].reshape(shape)
        *stack, inputs, outputs = shape
        kernel = flat[path].reshape(*stack, outputs, inputs)
        if path in ("layers/attn/q/kernel", "layers/attn/k/kernel"):
            # RoPE turns neighbours there, and the halves of a head here.
            pairs = kernel.reshape(layers, -1, cfg.head_dim // 2, 2, inputs)
            kernel = pairs.swapaxes(2, 3).reshape(kernel.shape)
        return transposed(path, kernel)

    return filled(partial(_make, cfg, **model_kwargs), value)


def _make(cfg: ModelConfig, **model_kwargs: Any) -> Llama:
    return Llama(cfg, rngs=nnx.Rngs(0), **model_kwargs)


def _shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    model = nnx.eval_shape(lambda: _make(cfg))
    return {path: param.shape for path, param in named_leaves(nnx.state(model))}


def _names(path: str, cfg: ModelConfig) -> list[str]:
    """The tensors that make up a parameter."""
    if not path.startswith("layers/"):
        return [_TENSORS[path]]
    return [_TENSORS[path].format(layer) for layer in range(cfg.layers)]


def _read_config(path: Path) -> ModelConfig:
    kinds = kinds_of(ModelConfig, _FIELDS) | _OPTIONAL
    config = read_config(path, _FIXED, kinds, _OPTIONAL)
    # transformers 5 writes rope_parameters, earlier ones rope_theta.
    rope = {"rope_theta": config.get("rope_theta", 1e4)}
    rope |= config.get("rope_parameters") or {}
    theta = rope.pop("rope_theta")
    if rope.pop("rope_type", "default") != "default" or rope:
        raise ValueError(
            f"rope_parameters in {path} must be of rope_type 'default' and have no "
            f"more than rope_theta, got {config['rope_parameters']!r}"
        )
    fields = {o: config[theirs] for o, theirs in _FIELDS.items() if theirs in config}
    try:
        cfg = ModelConfig(rope_theta=theta, **fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if config.get("head_dim") not in (None, cfg.head_dim):
        raise ValueError(
            f"head_dim in {path} must be hidden_size / num_attention_heads = "
            f"{cfg.head_dim}, got {config['head_dim']!r}"
        )
    return cfg
