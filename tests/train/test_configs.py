"""The shapes of the papers, and what is refused."""

import dataclasses

import pytest

from configs import MODELS, ModelConfig


def test_kv_heads_default_to_heads():
    assert ModelConfig(heads=8).num_kv_heads == 8
    assert ModelConfig(heads=8, kv_heads=2).num_kv_heads == 2


def test_the_vocabulary_is_a_tokenizers_to_say():
    tiny = dataclasses.replace(MODELS["tiny"], vocab_size=256)
    assert (tiny.vocab_size, tiny.width, tiny.head_dim) == (256, 128, 32)


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("vocab_size", 0, "vocab_size must be a positive int, got 0"),
        ("layers", 2.0, "layers must be a positive int, got 2.0"),
        ("heads", True, "heads must be a positive int, got True"),
        ("kv_heads", 0, "kv_heads must be a positive int, got 0"),
        ("heads", 7, r"width must be divisible by heads \(7\), got 512"),
        ("width", 8 * 33, "width / heads must be even.* got 264 / 8 = 33"),
        ("kv_heads", 3, r"kv_heads must divide heads \(8\), got 3"),
        ("rope_theta", 0.0, "rope_theta must be a positive number, got 0.0"),
        ("norm_eps", float("nan"), "norm_eps must be a positive number, got nan"),
        ("norm_eps", float("inf"), "norm_eps must be a positive number, got inf"),
        ("norm_eps", "1e-6", "norm_eps must be a positive number, got '1e-6'"),
    ],
)
def test_impossible_shapes_are_refused(field, value, rule):
    with pytest.raises(ValueError, match=rule):
        ModelConfig(**{field: value})
