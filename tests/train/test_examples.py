"""Texts as a RoBERTa reads them, and the order of batches."""

from dataclasses import replace

import numpy as np
import pytest

from examples import Encoded, encode, shares
from readers import DataError
from tasks import Example, Task
from tokenizer import ByteTokenizer, load_tokenizer

BOS, PAD, EOS = 0, 1, 2
CLASSES = Task(("text",), "label", ("a", "b", "c"), ("accuracy",))
RATING = replace(CLASSES, labels=())
TAGS = replace(CLASSES, multi_label=True)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("roberta:300", ["no merges that matter here"])


def ids(tokenizer, text):
    return tokenizer.encode([text])[0].tolist()


def test_one_text_and_two(tokenizer):
    one, two = (
        [Example(("ab",), 1), Example(("abcdefgh",), 0)],
        [Example(("a", "b"), 2)],
    )
    (encoded,) = encode([one], tokenizer, 64, CLASSES)
    ab = ids(tokenizer, "ab")
    assert encoded.tokens_nt[0].tolist()[: len(ab) + 3] == [BOS, *ab, EOS, PAD]
    assert encoded.target_n.tolist() == [1, 0]
    assert encoded.tokens_nt.dtype == encoded.target_n.dtype == np.int32
    (encoded,) = encode([two], tokenizer, 64, CLASSES)
    a, b = (ids(tokenizer, text) for text in "ab")
    assert encoded.tokens_nt[0].tolist()[:6] == [BOS, *a, EOS, EOS, *b, EOS]


def test_splits_are_as_long_as_the_longest_example_of_all(tokenizer):
    short, long = [Example(("x",), 0.5)], [Example(("z" * 20,), 1.0)]
    train, dev = encode([short, long], tokenizer, 64, RATING)
    length = len(ids(tokenizer, "z" * 20)) + 2
    assert train.tokens_nt.shape == dev.tokens_nt.shape
    assert length <= train.tokens_nt.shape[1] < length + 8
    assert train.target_n.dtype == np.float32


def test_targets_of_several_classes_are_yes_or_no_for_each(tokenizer):
    examples = [Example(("x",), (2, 0)), Example(("y",), ()), Example(("z",), (1,))]
    (encoded,) = encode([examples], tokenizer, 64, TAGS)
    assert encoded.target_n.dtype == bool
    assert encoded.target_n.astype(int).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    batch = encoded.batch(0, batch_size=2, accumulate=2, seed=0)
    assert batch.tokens_bt.shape == (2, 1, 8) and batch.target_b.shape == (2, 1, 3)
    rows = encoded.tokens_nt.tolist()
    for tokens_bt, target_bc in zip(batch.tokens_bt, batch.target_b, strict=True):
        number = rows.index(tokens_bt[0].tolist())
        np.testing.assert_array_equal(target_bc[0], encoded.target_n[number])


def test_a_text_like_a_special_token_is_text(tokenizer):
    (encoded,) = encode([[Example(("</s>",), 0)]], tokenizer, 64, CLASSES)
    assert (encoded.tokens_nt[0] == EOS).sum() == 1


def test_what_is_too_long_is_cut_and_stays_closed(tokenizer):
    one, pair = Example(("a" * 90,), 0), Example(("a" * 90, "b" * 3), 0)
    for example, closes in ((one, 1), (pair, 3)):
        (encoded,) = encode([[example]], tokenizer, 16, CLASSES)
        (row,) = encoded.tokens_nt.tolist()
        assert len(row) == 16 and row[0] == BOS and row[-1] == EOS
        assert row.count(EOS) == closes and PAD not in row
    second = ids(tokenizer, "b" * 3)
    assert row[-1 - len(second) : -1] == second  # the shorter text is whole


@pytest.mark.parametrize("a", range(12))
@pytest.mark.parametrize("b", range(12))
def test_shares_are_what_cutting_one_by_one_leaves(a, b):
    left = [a, b]
    while sum(left) > 9:
        left[0 if left[0] > left[1] else 1] -= 1
    assert shares(a, b, 9) == tuple(left)


def test_a_tokenizer_of_another_kind_is_refused():
    with pytest.raises(DataError, match="no <s>, <pad>, </s>, <mask>"):
        encode([[Example(("a",), 0)]], ByteTokenizer(), 64, CLASSES)


# --- batches ---------------------------------------------------------------------


def numbered(count):
    return Encoded(np.arange(count, dtype=np.int32)[:, None], np.zeros(count, np.int32))


def stream(seed, steps, count=10, batch_size=4, accumulate=1):
    batches = [
        numbered(count).batch(
            step, batch_size=batch_size, accumulate=accumulate, seed=seed
        )
        for step in range(steps)
    ]
    return np.concatenate([batch.tokens_bt.ravel() for batch in batches])


def test_an_epoch_has_every_example_once_in_an_order_of_its_own():
    seen = stream(seed=0, steps=5)
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert list(first) != list(second)
    assert list(first) != list(stream(seed=1, steps=5)[:10])
    np.testing.assert_array_equal(seen, stream(seed=0, steps=5))


def test_microbatches_are_cut_from_the_same_batch():
    np.testing.assert_array_equal(stream(0, 5), stream(0, 5, accumulate=2))
    batch = numbered(10).batch(3, batch_size=4, accumulate=2, seed=0)
    assert batch.tokens_bt.shape == (2, 2, 1) and batch.target_b.shape == (2, 2)
    noise = [
        int(n)
        for step in range(4)
        for n in numbered(10).batch(step, batch_size=4, accumulate=2, seed=0).noise
    ]
    assert len(set(noise)) == 8 and batch.noise.dtype == np.int32


def test_held_out_batches_are_in_order_and_full():
    batches = list(numbered(10).in_order(4))
    assert [count for _, count in batches] == [4, 4, 2]
    assert all(tokens_bt.shape == (4, 1) for tokens_bt, _ in batches)
    counted = [tokens_bt[:n, 0].tolist() for tokens_bt, n in batches]
    assert sum(counted, []) == list(range(10))
