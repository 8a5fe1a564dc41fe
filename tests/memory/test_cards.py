"""Cards: their figures, their machines, and a TPU."""

import pytest

import jaxcompact as jc
from jaxcompact.memory import compiler
from tests.memory.steps import F32, S, double, sgd


def test_every_card_says_where_its_figures_are_from():
    for name, card in jc.memory.devices().items():
        assert card.source and card.memory > 2**30, name
        assert card.platform in ("cuda", "tpu")


@pytest.mark.parametrize(
    ("count", "topology"), [(1, "1x1x1"), (8, "1x1x8"), (64, "1x8x8")]
)
def test_machines_have_eight_gpus(count, topology):
    assert jc.memory.devices()["h100"].topology(count)["topology"] == topology


def test_a_tpu_needs_libtpu(monkeypatch):
    card = jc.memory.devices()["tpu-v5e"]
    assert card.topology(8) == {"topology_name": "v5e:2x4"}
    with pytest.raises(ValueError, match="devices must be one of 1, 4, .* got 3"):
        card.topology(3)
    monkeypatch.setattr(compiler, "_found", lambda module: False)
    with pytest.raises(ImportError, match="libtpu is not installed: pip"):
        jc.memory.peak(double, S((8,), F32), device="tpu-v5e")


def test_on_a_tpu():
    pytest.importorskip("libtpu", reason="484 MB that no other test needs")
    found = jc.memory.peak(sgd, S((1024, 1024), F32), S((8192, 1024), F32), donate=0,
                           device="tpu-v5e")  # fmt: skip
    assert found.breakdown["parameters"] == 2**22
    assert sum(found.breakdown.values()) == found.peak_bytes
