"""Hugging Face folders: tensors in safetensors files, in and out.

Parameters are those of models whose layers are stacked: ``layers/...`` is a tensor for
each layer there, and a kernel (n, m) is (m, n), or of a GPT-2's Conv1D (n, m) too.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcompact.paths import path_name
from readers import DataError, require


def folder_of(weights: str | Path) -> Path:
    """A path as it is; of ``hf:NAME`` where a copy of the hub's model lies.

    Raises DataError if it cannot be had.
    """
    if not str(weights).startswith("hf:"):
        return Path(weights)
    hub = require("huggingface_hub", str(weights))
    patterns = ["*.json", "*.safetensors"]  # pickled weights are left where they are
    try:
        name = str(weights).removeprefix("hf:")
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's own kinds, httpx's, OSError
        raise DataError(
            f"{weights}: cannot be had from the Hugging Face hub: no network, or no "
            f"such model ({type(error).__name__}: {error})"
        ) from error


def read_config(
    path: Path, fixed: dict[str, Any], needed: Iterable[str]
) -> dict[str, Any]:
    """Raises ValueError for a field that must be another, or that is missing."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for field, only in fixed.items():
        if config.get(field, only) != only:
            raise ValueError(
                f"{field} in {path} must be {only!r}, got {config[field]!r}"
            )
    for field in needed:
        if field not in config:
            raise ValueError(f"{field} is missing in {path}")
    return config


def open_tensors(directory: Path) -> dict[str, Callable[[], np.ndarray]]:
    """Name -> a function that reads the tensor. Of safetensors alone, never pickle."""
    safetensors = require("safetensors", str(directory))
    index = directory / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if index.exists():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors = {}
    for shard in shards:
        if not (directory / shard).is_file():
            raise ValueError(
                f"{directory} has no {shard}; weights in other formats, such as "
                f"pytorch_model.bin, are not read"
            )
        try:
            file = safetensors.safe_open(directory / shard, "np")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{directory / shard} is damaged: {error}") from error
        tensors |= {name: partial(file.get_tensor, name) for name in file.keys()}
    # Older folders hold RoPE's frequencies, which the config says anyway.
    return {n: t for n, t in tensors.items() if not n.endswith("rotary_emb.inv_freq")}


def require_tensors(directory: Path, tensors: dict, names: set[str]) -> None:
    if missing := sorted(names - tensors.keys()):
        raise ValueError(f"{directory} lacks {some(missing)}")


def read_parameter(
    directory: Path,
    tensors: dict[str, Callable[[], np.ndarray]],
    path: str,
    names: list[str],
    shape: tuple[int, ...],
    transpose: bool = True,
) -> np.ndarray:
    """A parameter of the tensors that make it up: of each layer, if there are layers.

    ``transpose`` is for kernels. Raises ValueError for a tensor of another shape.
    """
    stacked = path.startswith("layers/")
    want = shape[1:] if stacked else shape
    transpose = transpose and path.endswith("kernel")
    if transpose:
        want = want[::-1]
    parts = []
    for name in names:
        part = tensors[name]()
        if part.shape != want:
            raise ValueError(
                f"{name} in {directory} must have shape {want} by config.json, "
                f"got {part.shape}"
            )
        parts.append(part.T if transpose else part)
    return np.stack(parts) if stacked else parts[0]


def filled(
    make_model: Callable[[], nnx.Module],
    value: Callable[[str, tuple[int, ...]], np.ndarray],
) -> nnx.Module:
    """A model whose parameters are ``value(path, shape)``."""
    graphdef, params = nnx.split(nnx.eval_shape(make_model))

    def leaf(path, param):
        return jnp.asarray(value(path_name(path), param.shape), param.dtype)

    return nnx.merge(graphdef, jax.tree.map_with_path(leaf, params))


def write_tensors(
    params: Any,
    names: Callable[[str], list[str]],
    directory: Path,
    transpose: bool = True,
) -> dict[str, np.ndarray]:
    """Writes parameters to ``model.safetensors``, by ``names(path)`` of theirs."""
    numpy = require("safetensors.numpy", str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key_path, param in jax.tree.leaves_with_path(params):
        path, parts = path_name(key_path), np.asarray(param)
        if not path.startswith("layers/"):
            parts = parts[None]
        for name, part in zip(names(path), parts, strict=True):
            # Contiguous, or safetensors writes the matrix as if not transposed.
            part = transposed(path, part) if transpose else part
            tensors[name] = np.ascontiguousarray(part)
    numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


def some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def transposed(path: str, x: np.ndarray) -> np.ndarray:
    """A kernel is (n, m) here and (m, n) there; all else is alike."""
    return x.swapaxes(-1, -2) if path.endswith("kernel") else x
