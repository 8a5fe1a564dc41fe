"""Runs of a model so small that they take seconds, and what they leave."""

import json
import random
from functools import partial
from pathlib import Path

import finetune
import finetune_options
from configs import RobertaConfig
from tests.train.refusals import refused_by

WORDS = "the a of to and cat dog tree house river sees makes".split()
MICRO = RobertaConfig(
    vocab_size=300, width=32, ff=64, layers=1, heads=4, max_seq=32, init_std=0.1
)


def sentences(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 7))) for _ in range(count)]


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in rows_of(folder) if "loss" in row]


def run(arguments, out, *more) -> int:
    return finetune.main([*arguments, "--out", str(out), *more])


def prepared(arguments):
    (config,) = finetune_options.parse(arguments)
    data = finetune.load_data(config)
    return finetune.prepare(config, data, finetune.load_params(config, data))


refused = partial(refused_by, finetune)
