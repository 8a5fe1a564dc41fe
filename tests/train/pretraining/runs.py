"""Runs of a model so small that they take a second, and what they leave."""

import json
import random
from functools import partial
from pathlib import Path

import configs
import pretrain
from configs import ModelConfig
from tests.train.refusals import refused_by

SMALL = ["--batch-size", "4", "--seq-len", "16", "--eval-batches", "2"]
TINY = configs.MODELS["tiny"]
MICRO = ModelConfig(width=32, ff=48, layers=2, heads=4, max_seq=64)


def text(lines: int = 400) -> str:
    """Lines of ten words, in an order that no two lines share."""
    words = "the a of to and cat dog tree house river sees makes finds".split()
    order = random.Random(0)
    return "\n".join(" ".join(order.choices(words, k=10)) for _ in range(lines))


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows_of(folder) if "loss" in row}


refused = partial(refused_by, pretrain)
