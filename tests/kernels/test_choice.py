"""Where a kernel is taken, and where XLA's code is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.kernels import choice
from jaxcompact.kernels.quantize import api
from tests.kernels.machine_code import compiled, kernels_in

pytestmark = pytest.mark.usefixtures("optimized")


def encoded_on(cards: int, *, by_hand: bool):
    """4096 rows over some H200s; the number of kernels that encode them."""
    kind = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((cards,), ("data",), axis_types=(kind,))
    rows = jax.P("data")
    sharding = jax.NamedSharding(mesh, rows)
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=sharding)

    def encode(x):
        return jc.Quantized(4).encode(x)

    if by_hand:
        encode = jax.shard_map(encode, in_specs=rows, out_specs=rows, check_vma=False)
    return kernels_in(compiled(encode, x))


def test_where_no_card_was_measured_xla_is_taken(monkeypatch):
    figures = {"default": {"groups": 4}}
    monkeypatch.setattr(choice, "_configs", lambda folder: {"quantize": figures})
    assert encoded_on(1, by_hand=False) == 0


def test_an_h200_takes_what_was_measured_on_one():
    assert encoded_on(1, by_hand=False) == 1


def test_a_card_with_figures_takes_the_kernel_by_itself(monkeypatch):
    """On one, and on each of several: split by XLA (test_devices) or by a shard_map."""
    figures = {"default": {"groups": 4}, "NVIDIA H200": {"groups": 2}}
    monkeypatch.setattr(choice, "_configs", lambda folder: {"quantize": figures})
    assert encoded_on(1, by_hand=False) == 1
    assert encoded_on(2, by_hand=False) == 1
    assert encoded_on(2, by_hand=True) == 1
    with choice.using("xla"):
        assert encoded_on(1, by_hand=False) == 0


def test_unknown_implementation():
    with pytest.raises(
        ValueError, match="one of mosaic_gpu, xla or None, got 'triton'"
    ):
        api.quantize(jnp.ones((8, 64)), bits=4, group=64, implementation="triton")


def test_the_default_device_may_be_a_platform(monkeypatch):
    """As ``jax.default_device("cuda")`` has it."""
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", {"cpu": [card]}.__getitem__)
    with jax.default_device("cpu"):
        assert choice._card() == "NVIDIA H200"
