"""RoBERTa's weights in Hugging Face folders.

model = load_roberta("roberta-base/", labels=2, rngs=nnx.Rngs(0))
save_roberta(model, "another/folder")
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

import huggingface
from configs import RobertaConfig
from huggingface import (
    open_tensors,
    read_json,
    read_parameter,
    require_tensors,
    some,
    write_tensors,
)
from jaxcompact.paths import map_named, named_leaves
from roberta import Roberta

# Module here -> Hugging Face's, one for each layer.
_MODULES = {
    "embed/norm": "roberta.embeddings.LayerNorm",
    "layers/attn/q": "roberta.encoder.layer.{}.attention.self.query",
    "layers/attn/k": "roberta.encoder.layer.{}.attention.self.key",
    "layers/attn/v": "roberta.encoder.layer.{}.attention.self.value",
    "layers/attn/o": "roberta.encoder.layer.{}.attention.output.dense",
    "layers/attn_norm": "roberta.encoder.layer.{}.attention.output.LayerNorm",
    "layers/mlp/up": "roberta.encoder.layer.{}.intermediate.dense",
    "layers/mlp/down": "roberta.encoder.layer.{}.output.dense",
    "layers/mlp_norm": "roberta.encoder.layer.{}.output.LayerNorm",
    "head/dense": "classifier.dense",
    "head/out": "classifier.out_proj",
    "words": "lm_head",
    "words/dense": "lm_head.dense",
    "words/norm": "lm_head.layer_norm",
}
_TABLES = {
    "embed/embedding": "roberta.embeddings.word_embeddings.weight",
    "embed/position": "roberta.embeddings.position_embeddings.weight",
    "embed/segment": "roberta.embeddings.token_type_embeddings.weight",
}
_LAYER = re.compile(r"roberta\.encoder\.layer\.(\d+)\.")
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_HEADS = ("head/", "words/")
_FIELDS = {  # of RobertaConfig -> of config.json
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "ff": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "bos_id": "bos_token_id",
    "pad_id": "pad_token_id",
    "eos_id": "eos_token_id",
}
_FIXED = {  # fields of config.json that Roberta does not vary
    "model_type": "roberta",
    "hidden_act": "gelu",
    "type_vocab_size": 1,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "tie_word_embeddings": True,
}
_MULTI_LABEL = "multi_label_classification"


def read_config(directory: str | Path) -> RobertaConfig:
    """The shape in a folder's ``config.json``, with the head of masked words.

    Raises ValueError for a field that is missing or asks for what `Roberta` does not
    do.
    """
    path = Path(directory) / "config.json"
    kinds = huggingface.kinds_of(RobertaConfig, _FIELDS)
    kinds["max_position_embeddings"] = int
    config = huggingface.read_config(path, _FIXED, kinds)
    fields = {ours: config[theirs] for ours, theirs in _FIELDS.items()}
    fields["max_seq"] = config["max_position_embeddings"] - config["pad_token_id"] - 1
    fields["multi_label"] = config.get("problem_type") == _MULTI_LABEL
    try:
        return RobertaConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_roberta(
    directory: str | Path,
    *,
    labels: int | Sequence[str] | None = None,
    multi_label: bool = False,
    dropout: float | None = None,
    rngs: nnx.Rngs | None = None,
    **model_kwargs: Any,
) -> Roberta:
    """The model of a folder with ``config.json`` and ``model.safetensors``.

    Shards are read too; weights are cast to ``param_dtype``; other arguments are
    `Roberta`'s. ``labels`` asks for a head with as many classes, 1 for a rating, and
    ``multi_label`` for several of them a text: the head of the folder if it has one of
    that size, else a new one made from ``rngs``. Of classes with names the folder's
    head is that of those with the same ones, in whatever order and case, or of
    nameless ones (``LABEL_0``, ...). Without ``labels`` the model has the head of the
    folder, for what that was trained for.

    Raises ValueError for what `read_config` refuses, for a tensor that is missing or
    of another shape than the config says, for layers that it does not know of, and for
    a damaged file.
    """
    directory = Path(directory)
    cfg, tensors = read_config(directory), open_tensors(directory)
    if not any(name.startswith("roberta.") for name in tensors):  # a body alone
        tensors = {f"roberta.{name}": tensor for name, tensor in tensors.items()}
    if dropout is not None:
        cfg = replace(cfg, dropout=dropout)
    there = 0
    if "classifier.out_proj.bias" in tensors:
        shape = tensors["classifier.out_proj.bias"]().shape
        if len(shape) != 1:
            raise ValueError(
                f"classifier.out_proj.bias in {directory} must have a number for each "
                f"class, got shape {shape}"
            )
        there = shape[0]
    if labels is None:
        labels, multi_label = there, cfg.multi_label
    count = labels if isinstance(labels, int) else len(labels)
    cfg = replace(cfg, labels=count, multi_label=multi_label)
    _require_no_more_layers(directory, tensors, cfg.layers)
    order = range(count) if isinstance(labels, int) else _order(directory, labels)
    new_head = count != there or order is None
    model = Roberta(cfg, rngs=rngs or nnx.Rngs(0), **model_kwargs)
    state = nnx.state(model, nnx.Param)

    paths = [path for path, _ in named_leaves(state)]
    read = {p for p in paths if not (new_head and p.startswith(_HEADS))}
    require_tensors(directory, tensors, {n for p in read for n in _names(p, cfg)})

    def filled(path, param):
        if path not in read:
            return param
        names = _names(path, cfg)
        value = read_parameter(directory, tensors, path, names, param.shape)
        if path.startswith("head/out/"):
            value = value[..., list(order)]
        return jnp.asarray(value, param.dtype)

    nnx.update(model, map_named(filled, state))
    return model


def _order(directory: Path, labels: Sequence[str]) -> list[int] | None:
    """Where the folder's head has these classes; None if it has others."""
    named = read_json(directory / "config.json").get("id2label")
    if not isinstance(named, dict):
        return list(range(len(labels)))
    there = [str(named.get(str(i))).lower() for i in range(len(named))]
    if there == [f"label_{i}" for i in range(len(there))]:
        return list(range(len(labels)))
    names = [name.lower() for name in labels]
    if sorted(there) != sorted(names) or len({*names}) < len(names):
        return None
    return [there.index(name) for name in names]


def _require_no_more_layers(directory: Path, tensors: dict, layers: int) -> None:
    numbered = ((name, _LAYER.match(name)) for name in tensors)
    more = [name for name, found in numbered if found and int(found[1]) >= layers]
    if more:
        raise ValueError(
            f"num_hidden_layers in {directory}/config.json is {layers}, but the folder "
            f"has {some(sorted(more))}"
        )


def save_roberta(
    model: Roberta, directory: str | Path, labels: Sequence[str] = ()
) -> None:
    """Writes ``config.json`` and ``model.safetensors``, in the parameters' dtype.

    ``labels`` names the classes.
    """
    directory, cfg = Path(directory), model.cfg
    params = nnx.state(model, nnx.Param)
    tensors = write_tensors(params, lambda path: _names(path, cfg), directory)
    kind = "ForSequenceClassification" if cfg.labels else "ForMaskedLM"
    config = {
        "architectures": [f"Roberta{kind}"],
        **_FIXED,
        **{theirs: getattr(cfg, ours) for ours, theirs in _FIELDS.items()},
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": cfg.positions,
        "torch_dtype": tensors[_TABLES["embed/embedding"]].dtype.name,
    }
    if cfg.labels:
        names = labels or [f"LABEL_{i}" for i in range(cfg.labels)]
        config["id2label"] = dict(enumerate(names))
        config["label2id"] = {name: i for i, name in enumerate(names)}
        if cfg.multi_label:
            config["problem_type"] = _MULTI_LABEL
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def _names(path: str, cfg: RobertaConfig) -> list[str]:
    """The tensors that make up a parameter."""
    if path in _TABLES:
        return [_TABLES[path]]
    module, _, leaf = path.rpartition("/")
    name = f"{_MODULES[module]}.{_LEAVES[leaf]}"
    if not path.startswith("layers/"):
        return [name]
    return [name.format(layer) for layer in range(cfg.layers)]
