"""The order of batches in training and in evaluation."""

import tempfile

import numpy as np
import pytest

from data import DataError, Dataset, Report, permute
from tokenizer import load_tokenizer

SEQ = 16


def mapped(tokens: int) -> np.memmap:
    with tempfile.TemporaryFile() as file:
        np.arange(tokens, dtype=np.uint16).tofile(file)
        return np.memmap(file, np.uint16, mode="r")


def dataset(train_tokens: int = 1000, valid_tokens: int = 300) -> Dataset:
    """Tokens that are their own positions."""
    return Dataset(
        train=mapped(train_tokens),
        valid=mapped(valid_tokens),
        tokenizer=load_tokenizer("bytes"),
        report=Report(2, 0, "", train_tokens, valid_tokens),
        checksum="",
    )


def epoch(
    tokens: Dataset, number: int, seed: int = 0, seq_len: int = SEQ
) -> np.ndarray:
    """The first token of every window of an epoch, in order, read one at a time."""
    windows = len(tokens.train) // seq_len
    steps = range(number * windows, (number + 1) * windows)
    options = {"batch_size": 1, "seq_len": seq_len, "seed": seed}
    return np.array([tokens.batch(step, **options)[0, 0] for step in steps])


# The order of training.


@pytest.mark.parametrize("tokens", [1000, 17, 992, 33])
def test_an_epoch_shows_every_window_once(tokens):
    for number in range(3):
        start = np.sort(epoch(dataset(tokens), number))
        assert len(start) == tokens // SEQ
        # A stride of SEQ, around the end: one gap takes what SEQ does not divide.
        gaps = np.diff(np.append(start, start[0] + tokens))
        assert sorted(gaps)[:-1] == [SEQ] * (len(gaps) - 1)
        assert max(gaps) == SEQ + tokens % SEQ


def test_windows_are_consecutive_tokens_around_the_end():
    batch = dataset(992).batch(3, batch_size=62, seq_len=SEQ, seed=1)
    assert batch.shape == (62, SEQ + 1)
    assert batch.dtype == np.int32
    assert type(batch) is np.ndarray
    np.testing.assert_array_equal(np.diff(batch) % 992, 1)
    assert (batch == 991).any() and (batch[:, 1:] == 0).any()


def test_epochs_and_seeds_differ_in_order_and_offset():
    tokens = dataset()
    orders = [epoch(tokens, 0), epoch(tokens, 1), epoch(tokens, 2), epoch(tokens, 0, 1)]
    assert len({tuple(order // SEQ) for order in orders}) == 4
    assert len({min(order) for order in orders}) > 1
    assert not np.array_equal(orders[0], np.sort(orders[0]))


def test_the_batch_is_a_function_of_seed_and_step():
    steps = [0, 7, 8, 100]  # of 62 windows by 8: within the first epochs and across
    options = {"batch_size": 8, "seq_len": SEQ, "seed": 5}
    read = {step: dataset().batch(step, **options) for step in steps}
    tokens = dataset()
    for step in reversed(steps):
        np.testing.assert_array_equal(tokens.batch(step, **options), read[step])
    assert not np.array_equal(read[0], read[8])


def test_the_order_does_not_depend_on_the_batch_size():
    rows = [dataset().batch(s, batch_size=8, seq_len=SEQ, seed=0) for s in range(9)]
    more = [dataset().batch(s, batch_size=24, seq_len=SEQ, seed=0) for s in range(3)]
    np.testing.assert_array_equal(np.concatenate(rows), np.concatenate(more))


def test_the_order_stays_what_it_is():
    """A run of one version resumes in the next: these numbers may not change."""
    assert epoch(dataset(), 0)[:4].tolist() == [558, 142, 62, 590]
    assert epoch(dataset(), 1, seed=3)[:4].tolist() == [616, 520, 968, 120]


@pytest.mark.parametrize("step", [0, 7, 20])
def test_rows_are_a_slice_of_the_batch(step):
    options = {"batch_size": 8, "seq_len": SEQ, "seed": 0}
    whole = dataset().batch(step, **options)
    for rows in (slice(0, 4), slice(4, 8), slice(2, 3), slice(None)):
        part = dataset().batch(step, **options, rows=rows)
        np.testing.assert_array_equal(part, whole[rows])


def test_a_batch_may_hold_several_epochs():
    tokens = dataset(3 * SEQ)
    batch = tokens.batch(0, batch_size=12, seq_len=SEQ, seed=0)
    expected = np.concatenate([epoch(tokens, number) for number in range(4)])
    np.testing.assert_array_equal(batch[:, 0], expected)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1023, 1025, 4097])
def test_permute_is_a_permutation(size):
    keys = [np.uint64(k) for k in (3, 1, 4, 1, 5, 9)]
    image = permute(np.arange(size), size, keys)
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


def test_permute_needs_no_array_of_its_size():
    keys = [np.uint64(k) for k in (3, 1, 4, 1, 5, 9)]
    index = np.arange(10**12, 10**12 + 4096)
    image = permute(index, 10**12 + 4096, keys)
    assert len(np.unique(image)) == 4096
    # Uniform over the range: the mean of 4096 has a deviation of 1/sqrt(12 * 4096).
    assert abs(image.mean() / 10**12 - 0.5) < 4 / np.sqrt(12 * 4096)
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 4 / np.sqrt(4096)


# Evaluation.


def test_eval_batches_are_in_order_and_the_same_at_every_call():
    tokens = dataset(valid_tokens=SEQ * 10 + 1)
    first = list(tokens.eval_batches(4, SEQ))
    assert [batch[:, 0].tolist() for batch in first] == [
        [0, 16, 32, 48],
        [64, 80, 96, 112],
    ]
    assert all(batch.shape == (4, SEQ + 1) for batch in first)
    assert first[0].dtype == np.int32
    np.testing.assert_array_equal(first, list(tokens.eval_batches(4, SEQ)))
    np.testing.assert_array_equal(first[:1], list(tokens.eval_batches(4, SEQ, count=1)))
    np.testing.assert_array_equal(first, list(tokens.eval_batches(4, SEQ, count=99)))
    assert first[1][-1, -1] == 128


def test_few_windows_fill_an_eval_batch_by_turns():
    (batch,) = dataset(valid_tokens=SEQ * 3 + 1).eval_batches(8, SEQ)
    assert batch[:, 0].tolist() == [0, 16, 32, 0, 16, 32, 0, 16]


def test_a_sequence_longer_than_a_split_is_an_error():
    tokens = dataset(train_tokens=64, valid_tokens=32)
    assert tokens.batch(0, batch_size=2, seq_len=63, seed=0).shape == (2, 64)
    with pytest.raises(
        DataError, match="sequence of 64 tokens .* train split holds 64"
    ):
        tokens.batch(0, batch_size=2, seq_len=64, seed=0)
    # Already here, before the first batch is asked for.
    with pytest.raises(
        DataError, match="sequence of 32 tokens .* valid split holds 32"
    ):
        tokens.eval_batches(2, 32)
