"""Hugging Face folders: tensors in safetensors files, in and out.

Parameters are those of models whose layers are stacked: ``layers/...`` is a tensor for
each layer there, and a kernel (n, m) is (m, n).
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
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
) -> np.ndarray:
    """A parameter of the tensors that make it up: of each layer, if there are layers.

    Raises ValueError for a tensor of another shape.
    """
    stacked = path.startswith("layers/")
    want = shape[1:] if stacked else shape
    if path.endswith("kernel"):
        want = want[::-1]
    parts = []
    for name in names:
        part = tensors[name]()
        if part.shape != want:
            raise ValueError(
                f"{name} in {directory} must have shape {want} by config.json, "
                f"got {part.shape}"
            )
        parts.append(transposed(path, part))
    return np.stack(parts) if stacked else parts[0]


def write_tensors(
    model: nnx.Module, names: Callable[[str], list[str]], directory: Path
) -> dict[str, np.ndarray]:
    """Writes the parameters to ``model.safetensors``, by ``names(path)`` of theirs."""
    numpy = require("safetensors.numpy", str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key_path, param in jax.tree.leaves_with_path(nnx.state(model, nnx.Param)):
        path, parts = path_name(key_path), np.asarray(param)
        if not path.startswith("layers/"):
            parts = parts[None]
        for name, part in zip(names(path), parts, strict=True):
            # Contiguous, or safetensors writes the matrix as if not transposed.
            tensors[name] = np.ascontiguousarray(transposed(path, part))
    numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


def some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def transposed(path: str, x: np.ndarray) -> np.ndarray:
    """A kernel is (n, m) here and (m, n) there; all else is alike."""
    return x.swapaxes(-1, -2) if path.endswith("kernel") else x
