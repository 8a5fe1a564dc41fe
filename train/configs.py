"""Shapes of LLaMA, GPT-2 and RoBERTa: the papers', and a tiny one of each for a CPU."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a LLaMA.

    Attributes:
        vocab_size: V.
        width: D, of the residual stream.
        ff: F, of the gated MLP.
        layers: L.
        heads: of the queries.
        kv_heads: of keys and values, a divisor of heads; None for as many as heads.
        max_seq: the longest sequence that `llama.Llama` takes.
        rope_theta: base of the rotary angles.
        norm_eps: added to the mean square in RMSNorm.
        init_std: of the normal that every matrix is drawn from.
        tied: the output matrix is the embedding.

    Raises ValueError for sizes that are not positive ints or do not fit together.

    >>> ModelConfig(width=512, ff=1376, layers=8, heads=8).head_dim
    64
    """

    vocab_size: int = 32000
    width: int = 512
    ff: int = 1376
    layers: int = 8
    heads: int = 8
    kv_heads: int | None = None
    max_seq: int = 1024
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    init_std: float = 0.02
    tied: bool = False

    def __post_init__(self):
        sizes = ("vocab_size", "width", "ff", "layers", "heads", "max_seq")
        sizes = sizes if self.kv_heads is None else (*sizes, "kv_heads")
        _check(self, sizes, ("rope_theta", "norm_eps", "init_std"))
        if self.head_dim % 2:
            raise ValueError(
                f"width / heads must be even, RoPE turns pairs; got "
                f"{self.width} / {self.heads} = {self.head_dim}"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"kv_heads must divide heads ({self.heads}), got {self.kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads


@dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2; the defaults are those of its smallest.

    Attributes:
        vocab_size, width, ff, layers, heads, max_seq, norm_eps, init_std: as above. The
            matrices that end in the residual stream are drawn narrower by sqrt(2 L).
        dropout: of embeddings and hidden states, in training.

    Raises ValueError for sizes that are not positive ints or do not fit together.

    >>> GPT2Config().head_dim
    64
    """

    vocab_size: int = 50257
    width: int = 768
    ff: int = 3072
    layers: int = 12
    heads: int = 12
    max_seq: int = 1024
    norm_eps: float = 1e-5
    init_std: float = 0.02
    dropout: float = 0.1

    def __post_init__(self):
        sizes = ("vocab_size", "width", "ff", "layers", "heads", "max_seq")
        _check(self, sizes, ("norm_eps", "init_std"))
        _check_dropout(self.dropout)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class RobertaConfig:
    """The shape of a RoBERTa; the defaults are roberta-base's.

    Attributes:
        vocab_size, width, ff, layers, heads, max_seq, norm_eps, init_std: as above.
        labels: outputs of the classification head; 0 for the head of masked words.
        multi_label: each output is of a class that a text has or has not.
        dropout: of hidden states, when a model is fine-tuned.
        bos_id, pad_id, eos_id: of ``<s>``, ``<pad>`` and ``</s>``.
        mask_id: of ``<mask>``; None where no words are masked.

    Raises ValueError for sizes that are not positive ints or do not fit together.

    >>> RobertaConfig().head_dim
    64
    """

    vocab_size: int = 50265
    width: int = 768
    ff: int = 3072
    layers: int = 12
    heads: int = 12
    max_seq: int = 512
    norm_eps: float = 1e-5
    init_std: float = 0.02
    labels: int = 0
    multi_label: bool = False
    dropout: float = 0.1
    bos_id: int = 0
    pad_id: int = 1
    eos_id: int = 2
    mask_id: int | None = None

    def __post_init__(self):
        sizes = ("vocab_size", "width", "ff", "layers", "heads", "max_seq")
        _check(self, sizes, ("norm_eps", "init_std"))
        if type(self.labels) is not int or self.labels < 0:
            raise ValueError(f"labels must be 0 or more, got {self.labels!r}")
        _check_dropout(self.dropout)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def positions(self) -> int:
        """Rows of the table of positions: those up to padding's id are not used."""
        return self.max_seq + self.pad_id + 1


def _check(cfg: Any, sizes: tuple[str, ...], positive: tuple[str, ...]) -> None:
    for name in sizes:
        value = getattr(cfg, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")
    for name in positive:
        value = getattr(cfg, name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if cfg.width % cfg.heads:
        raise ValueError(
            f"width must be divisible by heads ({cfg.heads}), got {cfg.width}"
        )


def _check_dropout(rate: float) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must be in [0, 1), got {rate!r}")


MODELS = {
    # 0.02 would take a narrow model hundreds of steps to grow out of.
    "tiny": ModelConfig(
        width=128, ff=352, layers=4, heads=4, max_seq=512, init_std=0.08
    ),
    "60m": ModelConfig(width=512, ff=1376, layers=8, heads=8),
    "130m": ModelConfig(width=768, ff=2048, layers=12, heads=12),
    "350m": ModelConfig(width=1024, ff=2736, layers=24, heads=16),
    # 5461 wide in the papers: no multiple of 8, at which XLA multiplies half as fast.
    "1b": ModelConfig(width=2048, ff=5464, layers=24, heads=32),
    "7b": ModelConfig(width=4096, ff=11008, layers=32, heads=32),
    "13b": ModelConfig(width=5120, ff=13824, layers=40, heads=40),
    "70b": ModelConfig(width=8192, ff=28672, layers=80, heads=64, kv_heads=8),
    "gpt2-tiny": GPT2Config(
        width=128, ff=512, layers=4, heads=4, max_seq=512, init_std=0.08
    ),
    "gpt2": GPT2Config(),  # 124 M weights, which papers call 117M
    "gpt2-medium": GPT2Config(width=1024, ff=4096, layers=24, heads=16),  # 345M
    "roberta-tiny": RobertaConfig(
        width=128, ff=512, layers=4, heads=4, max_seq=256, init_std=0.05
    ),
    "roberta-base": RobertaConfig(),
    "roberta-large": RobertaConfig(width=1024, ff=4096, layers=24, heads=16),
}
