"""Cards that programs are compiled for, as data."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_FILE = Path(__file__).with_name("cards.json")
# XLA's GpuTargetConfigProto; what is written out is the same for all cards here.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory_per_block}
  shared_memory_per_core: {shared_memory_per_core}
  threads_per_core_limit: {threads_per_core}
  core_count: {cores} fpus_per_core: {fpus_per_core} clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {memory_bandwidth} l2_cache_size: {l2_cache}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {ext} }}
}}
platform_name: "CUDA" runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


_CHIPS = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}  # of a TPU
_PER_HOST = 8  # GPUs


@dataclass(frozen=True)
class Device:
    """A card, as XLA's compiler sees it.

    Attributes:
        name: as the driver gives it.
        platform: "cuda" or "tpu".
        memory: bytes.
        memory_bandwidth: bytes a second.
        flops: operations a second of products of dense 16-bit matrices, at best.
        host_bandwidth: bytes a second to the host's memory, at best; None if unknown.
        target: what else the compiler asks for. Of a GPU: the compute capability, the
            number of streaming multiprocessors (cores) and what each of them has.
        source: where these figures are from.
    """

    name: str
    platform: str
    memory: int
    memory_bandwidth: int
    flops: int
    host_bandwidth: int | None
    target: Mapping[str, Any]
    source: str

    def topology(self, count: int) -> dict[str, str]:
        """What describes that many of them to `jax.experimental.topologies`.

        Raises ValueError for a number that does not come in whole machines.
        """
        if self.platform == "tpu":
            if count not in _CHIPS:
                numbers = ", ".join(map(str, _CHIPS))
                raise ValueError(f"devices must be one of {numbers}, got {count}")
            return {"topology_name": f"{self.target['generation']}:{_CHIPS[count]}"}
        if count > _PER_HOST and count % _PER_HOST:
            raise ValueError(
                f"more than {_PER_HOST} devices must be a multiple of it, got {count}"
            )
        hosts = -(-count // _PER_HOST)
        capability = self.target["capability"]
        major, minor = capability.rstrip("a").split(".")
        extension = "ACCELERATED_FEATURES" if capability.endswith("a") else "NONE"
        fields = {**vars(self), **self.target, "major": major, "minor": minor}
        return {
            "topology": f"1x{hosts}x{count // hosts}",
            "target_config": _TARGET.format(**fields, ext=extension),
        }


@functools.cache
def devices() -> Mapping[str, Device]:
    """The cards by their short names.

    >>> from jaxcompact import memory
    >>> sorted(memory.devices())
    ['a100', 'b200', 'h100', 'h200', 'l40s', 'rtx4090', 'tpu-v5e', 'v100']
    >>> memory.devices()["a100"].memory / 2**30
    79.3
    """
    cards = json.loads(_FILE.read_text())
    return {name: Device(**fields) for name, fields in cards.items()}


def here() -> str:
    """The key of this machine's card; "h200" where there is none of `devices`.

    >>> from jaxcompact import memory
    >>> memory.devices()[memory.here()].platform
    'cuda'
    """
    return next((key for key, card in devices().items() if present(card)), "h200")


def present(card: Device) -> jax.Device | None:
    """The first device of this machine that is such a card."""
    return next((d for d in jax.local_devices() if d.device_kind == card.name), None)


def find_device(name: str) -> Device:
    if not isinstance(name, str) or name not in devices():
        raise ValueError(f"device must be one of {', '.join(devices())}, got {name!r}")
    return devices()[name]
