"""Tokens of examples, and batches of them in an order that is a function of the step.

Shapes in names: n examples, a microbatches, b examples of one, t tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dropout import noise_of
from roberta import Examples
from tasks import Example, Task
from tokenizer import Tokenizer, special_ids

_UNIT = 8  # tokens: the length of a batch is a multiple


@dataclass(frozen=True, eq=False)
class Encoded:
    """Examples as a RoBERTa reads them: ``<s> a </s>``, ``<s> a </s></s> b </s>``."""

    tokens_nt: np.ndarray  # int32, padded on the right
    target_n: np.ndarray  # int32 classes, float32 ratings; bool (n, c) of several

    def __len__(self) -> int:
        return len(self.tokens_nt)

    def batch(self, step: int, *, batch_size: int, accumulate: int, seed: int):
        """The `Examples` of the step after ``step`` updates, each leaf (a, ...).

        An epoch has every example once, in an order of its own.
        """
        number_b = np.arange(step * batch_size, (step + 1) * batch_size)
        index_b = np.empty_like(number_b)
        for epoch in np.unique(number_b // len(self)):
            here = number_b // len(self) == epoch
            order_n = _order(len(self), seed, int(epoch))
            index_b[here] = order_n[number_b[here] % len(self)]
        index_ab = index_b.reshape(accumulate, -1)
        noise_a = noise_of(seed, step, accumulate)
        return Examples(self.tokens_nt[index_ab], self.target_n[index_ab], noise_a)

    def in_order(self, batch_size: int) -> Iterator[tuple[np.ndarray, int]]:
        """(tokens (b, t), how many of them count): the last batch is filled up."""
        for start in range(0, len(self), batch_size):
            index_b = np.arange(start, start + batch_size)
            count = min(batch_size, len(self) - start)
            yield self.tokens_nt[index_b % len(self)], count


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def encode(
    splits: Sequence[Sequence[Example]],
    tokenizer: Tokenizer,
    max_len: int,
    task: Task,
) -> list[Encoded]:
    """All splits, padded to their longest example; what is longer is cut.

    A pair is cut where it is longest, until ``max_len`` tokens are left. Raises
    DataError for a tokenizer without RoBERTa's special tokens.
    """
    ids = special_ids(tokenizer)
    bos, pad, eos = (ids[name] for name in ("bos_id", "pad_id", "eos_id"))
    rows = [
        [_row(texts, bos, eos, max_len) for texts in _tokens(examples, tokenizer)]
        for examples in splits
    ]
    longest = max(len(row) for split in rows for row in split)
    length = min(max_len, -(-longest // _UNIT) * _UNIT)
    encoded = []
    for split, examples in zip(rows, splits, strict=True):
        tokens_nt = np.full((len(split), length), pad, np.int32)
        for tokens_t, row in zip(tokens_nt, split, strict=True):
            tokens_t[: len(row)] = row
        encoded.append(Encoded(tokens_nt, _targets(examples, task)))
    return encoded


def _targets(examples: Sequence[Example], task: Task) -> np.ndarray:
    if not task.multi_label:
        dtype = np.int32 if task.labels else np.float32
        return np.array([example.target for example in examples], dtype)
    target_nc = np.zeros((len(examples), task.outputs), bool)
    for target_c, example in zip(target_nc, examples, strict=True):
        target_c[list(example.target)] = True
    return target_nc


def _tokens(
    examples: Sequence[Example], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, ...]]:
    """The ids of each example's texts."""
    columns = zip(*(example.texts for example in examples), strict=True)
    return zip(*(tokenizer.encode(list(texts)) for texts in columns), strict=True)


def _row(texts: Sequence[np.ndarray], bos: int, eos: int, max_len: int) -> list[int]:
    first, *second = (text.tolist() for text in texts)
    if not second:
        return [bos, *first[: max_len - 2], eos]
    a, b = shares(len(first), len(second[0]), max_len - 4)
    return [bos, *first[:a], eos, eos, *second[0][:b], eos]


def shares(a: int, b: int, room: int) -> tuple[int, int]:
    """How much of two lengths stays, if the longer one is cut until both fit.

    >>> shares(5, 30, 20), shares(30, 30, 21), shares(3, 4, 20)
    ((5, 15), (11, 10), (3, 4))
    """
    if a + b <= room:
        return a, b
    a_left = max(room - b, min(a, -(-room // 2)))
    return a_left, room - a_left
