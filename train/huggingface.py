"""Hugging Face folders: tensors in safetensors files, in and out.

Parameters are those of models whose layers are stacked: ``layers/...`` is a tensor for
each layer there, and a kernel (n, m) is (m, n), or of a GPT-2's Conv1D (n, m) too.
"""

import dataclasses
import json
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcompact.paths import map_named, named_leaves
from readers import DataError, require

_KINDS = {
    int: "an int",
    float: "a number",
    bool: "true or false",
    int | None: "an int or null",
    dict | None: "an object or null",
}


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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ValueError, naming the file, if it has none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must be an object of JSON, got {value!r}")
    return value


def kinds_of(shape: type, fields: dict[str, str]) -> dict[str, Any]:
    """config.json's field -> the type of the shape's field that it is."""
    kinds = {field.name: field.type for field in dataclasses.fields(shape)}
    return {theirs: kinds[ours] for ours, theirs in fields.items()}


def read_config(
    path: Path,
    fixed: dict[str, Any],
    kinds: dict[str, Any],
    optional: Container[str] = (),
) -> dict[str, Any]:
    """Raises ValueError for a field of another value or type, or that is missing."""
    config = read_json(path)
    for field, only in fixed.items():
        if config.get(field, only) != only:
            raise ValueError(
                f"{field} in {path} must be {only!r}, got {config[field]!r}"
            )
    for field, kind in kinds.items():
        if field not in config:
            if field in optional:
                continue
            raise ValueError(f"{field} is missing in {path}")
        if not _is_of(config[field], kind):
            raise ValueError(
                f"{field} in {path} must be {_KINDS[kind]}, got {config[field]!r}"
            )
    return config


def _is_of(value: Any, kind: Any) -> bool:
    among = int | float if kind is float else kind
    return isinstance(value, among) and isinstance(value, bool) == (kind is bool)


def open_tensors(directory: Path) -> dict[str, Callable[[], np.ndarray]]:
    """Name -> a function that reads the tensor. Of safetensors alone, never pickle."""
    safetensors = require("safetensors", str(directory))
    index = directory / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    # One file, if it is there, is newer than shards, which nothing here writes.
    if index.exists() and not (directory / shards[0]).exists():
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or {type(f) for f in files.values()} - {str}:
            raise ValueError(
                f"weight_map in {index} must be an object of file names, got {files!r}"
            )
        shards = sorted(set(files.values()))
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
        tensors |= {
            name: partial(_read_tensor, directory, file, name) for name in file.keys()
        }
    # Older folders hold RoPE's frequencies, which the config says anyway.
    return {n: t for n, t in tensors.items() if not n.endswith("rotary_emb.inv_freq")}


def _read_tensor(directory: Path, file: Any, name: str) -> np.ndarray:
    try:
        return file.get_tensor(name)
    except (AttributeError, KeyError, TypeError) as error:  # safetensors' own, none
        dtype = file.get_slice(name).get_dtype()
        raise ValueError(
            f"{name} in {directory} must be of a dtype that numpy has, got {dtype}"
        ) from error


def require_tensors(directory: Path, tensors: dict, names: set[str]) -> None:
    if missing := sorted(names - tensors.keys()):
        raise ValueError(f"{directory} lacks {some(missing)}")


def require_tied(directory: Path, tensors: dict, words: str) -> None:
    """Takes away an output matrix, which must be the embedding, named ``words``."""
    head = tensors.pop("lm_head.weight", None)
    if head and not np.array_equal(head(), tensors[words]()):
        raise ValueError(
            f"lm_head.weight in {directory} must be {words}, with which the model "
            f"shares it; it is another matrix"
        )


def read_parameter(
    directory: Path,
    tensors: dict[str, Callable[[], np.ndarray]],
    path: str,
    names: list[str],
    shape: tuple[int, ...],
    transpose: bool = True,
) -> np.ndarray:
    """A parameter of the tensors that make it up: of each layer, if there are layers.

    ``transpose`` is for kernels. Raises ValueError for a tensor of another shape, or
    of integers.
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
        if not jnp.issubdtype(part.dtype, jnp.floating):
            raise ValueError(
                f"{name} in {directory} must be of floating dtype, got {part.dtype}"
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
        return jnp.asarray(value(path, param.shape), param.dtype)

    return nnx.merge(graphdef, map_named(leaf, params))


def write_tensors(
    params: Any,
    names: Callable[[str], list[str]],
    directory: Path,
    transpose: bool = True,
) -> dict[str, np.ndarray]:
    """Writes parameters to ``model.safetensors``, by ``names(path)`` of theirs.

    Raises OSError, and leaves nothing new, if it cannot be written.
    """
    tensors = {}
    for path, param in named_leaves(params):
        parts = np.asarray(param)
        if not path.startswith("layers/"):
            parts = parts[None]
        for name, part in zip(names(path), parts, strict=True):
            # Contiguous, or safetensors writes the matrix as if not transposed.
            part = transposed(path, part) if transpose else part
            tensors[name] = np.ascontiguousarray(part)
    _save_tensors(tensors, directory)
    return tensors


def _save_tensors(tensors: dict[str, np.ndarray], directory: Path) -> None:
    safetensors = require("safetensors", str(directory))
    numpy = require("safetensors.numpy", str(directory))
    path, part = (directory / f"model.safetensors{end}" for end in ("", ".part"))
    new = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # as umask has it; safetensors makes it 0600
        numpy.save_file(tensors, part, {"format": "pt"})
        part.chmod(mode)
        part.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
            for folder in new:
                folder.rmdir()
        raise OSError(f"{path} cannot be written: {error}") from error


def some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def transposed(path: str, x: np.ndarray) -> np.ndarray:
    """A kernel is (n, m) here and (m, n) there; all else is alike."""
    return x.swapaxes(-1, -2) if path.endswith("kernel") else x
