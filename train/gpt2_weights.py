"""GPT-2's weights in Hugging Face folders.

model = load_gpt2("some/folder", dtype=jnp.float32)
save_gpt2(model, "another/folder")
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from configs import GPT2Config
from gpt2 import Gpt2
from huggingface import (
    filled,
    kinds_of,
    open_tensors,
    read_config,
    read_parameter,
    require_tensors,
    require_tied,
    some,
    write_tensors,
)
from jaxcompact.paths import named_leaves

_PREFIX = "transformer."  # which the hub's own gpt2 leaves out
_WORDS = "wte.weight"
# Module here -> Hugging Face's, one for each layer. c_attn is q, k and v side by side.
_MODULES = {
    "layers/attn_norm": "h.{}.ln_1",
    "layers/attn/q": "h.{}.attn.c_attn",
    "layers/attn/k": "h.{}.attn.c_attn",
    "layers/attn/v": "h.{}.attn.c_attn",
    "layers/attn/o": "h.{}.attn.c_proj",
    "layers/mlp_norm": "h.{}.ln_2",
    "layers/mlp/up": "h.{}.mlp.c_fc",
    "layers/mlp/down": "h.{}.mlp.c_proj",
    "norm": "ln_f",
}
_TABLES = {"embed/embedding": _WORDS, "embed/position": "wpe.weight"}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
# The causal mask, which older folders hold as if it were learned.
_MASKS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
_FIELDS = {  # of GPT2Config -> of config.json
    "vocab_size": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "max_seq": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_OPTIONAL = {"n_inner": int | None, "resid_pdrop": float}
_FIXED = {  # fields of config.json that Gpt2 does not vary
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "quantization_config": None,
}


def load_gpt2(directory: str | Path, **model_kwargs: Any) -> Gpt2:
    """The model of a folder with ``config.json`` and ``model.safetensors``.

    Shards are read too. All arguments but the folder are `Gpt2`'s; weights are cast to
    its ``param_dtype``. Of the config's dropouts ``resid_pdrop`` is read.

    Raises ValueError for a config field that is missing or asks for what `Gpt2` does
    not do, for a tensor that is missing, unknown or of another shape than the config
    says, and for a damaged file.
    """
    directory = Path(directory)
    cfg = _read_config(directory / "config.json")
    tensors = open_tensors(directory)
    tensors = {n: t for n, t in tensors.items() if not _MASKS.fullmatch(n)}
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in tensors) else ""

    def make() -> Gpt2:
        return Gpt2(cfg, rngs=nnx.Rngs(0), **model_kwargs)

    paths = [path for path, _ in named_leaves(nnx.state(nnx.eval_shape(make)))]
    expected = {name for path in paths for name in _names(path, cfg, prefix)}
    require_tensors(directory, tensors, expected)
    require_tied(directory, tensors, prefix + _WORDS)
    if unknown := sorted(tensors.keys() - expected):
        raise ValueError(f"{directory} has tensors of no GPT-2: {some(unknown)}")

    def value(path: str, shape: tuple[int, ...]) -> np.ndarray:
        names, part = _names(path, cfg, prefix), re.search("attn/([qkv])/", path)
        if part:
            shape = (*shape[:-1], 3 * shape[-1])
        x = read_parameter(directory, tensors, path, names, shape, transpose=False)
        return np.split(x, 3, axis=-1)["qkv".index(part[1])] if part else x

    return filled(make, value)


def save_gpt2(model: Gpt2, directory: str | Path, *, end: int | None = None) -> None:
    """Writes ``config.json`` and ``model.safetensors``, in the parameters' dtype.

    ``end``: the token's id that ends documents, if one does.
    """
    directory, cfg = Path(directory), model.cfg
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    attn = params["layers"]["attn"]
    parts = [attn.pop(name) for name in "qkv"]
    attn["q"] = jax.tree.map(lambda *x: np.concatenate(x, axis=-1), *parts)
    tensors = write_tensors(
        params, lambda path: _names(path, cfg, _PREFIX), directory, transpose=False
    )
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{field: value for field, value in _FIXED.items() if value is not None},
        **{theirs: getattr(cfg, ours) for ours, theirs in _FIELDS.items()},
        "n_inner": cfg.ff,
        "embd_pdrop": cfg.dropout,
        "resid_pdrop": cfg.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": end,  # if nothing is said, transformers takes 50256
        "eos_token_id": end,
        "torch_dtype": tensors[_PREFIX + _WORDS].dtype.name,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def _names(path: str, cfg: GPT2Config, prefix: str) -> list[str]:
    """The tensors that make up a parameter, or that it is a part of."""
    if path in _TABLES:
        return [prefix + _TABLES[path]]
    module, _, leaf = path.rpartition("/")
    name = f"{prefix}{_MODULES[module]}.{_LEAVES[leaf]}"
    if not path.startswith("layers/"):
        return [name]
    return [name.format(layer) for layer in range(cfg.layers)]


def _read_config(path: Path) -> GPT2Config:
    kinds = kinds_of(GPT2Config, _FIELDS) | _OPTIONAL
    config = read_config(path, _FIXED, kinds, _OPTIONAL)
    fields = {ours: config[theirs] for ours, theirs in _FIELDS.items()}
    fields["ff"] = config.get("n_inner") or 4 * config["n_embd"]
    fields["dropout"] = config.get("resid_pdrop", GPT2Config.dropout)
    try:
        return GPT2Config(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
