"""Each metric against values worked out by hand."""

import math

import numpy as np
import pytest

from scores import SCORES, accuracy, f1, matthews, pearson, spearman

# 3 hits, 1 miss, 2 false alarms, 4 rightly left: of ten.
TARGET = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
GUESS = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])


def test_of_classes():
    assert accuracy(GUESS, TARGET) == 0.7
    precision, recall = 3 / 5, 3 / 4
    assert f1(GUESS, TARGET) == pytest.approx(
        2 * precision * recall / (precision + recall)
    )
    by_hand = (3 * 4 - 2 * 1) / math.sqrt((3 + 2) * (3 + 1) * (4 + 2) * (4 + 1))
    assert matthews(GUESS, TARGET) == pytest.approx(by_hand)
    assert matthews(1 - GUESS, TARGET) == pytest.approx(-by_hand)


def test_f1_is_of_class_1():
    assert f1(GUESS, TARGET) != f1(1 - GUESS, 1 - TARGET)


def test_of_classes_where_one_is_never_named():
    none = np.zeros(10, int)
    assert (f1(none, TARGET), f1(none, none)) == (0, 0)
    assert (matthews(none, TARGET), matthews(GUESS, none)) == (0, 0)


# Classes: 2 hits, 1 false alarm; 1 hit, 2 misses; a false alarm; never there or named.
TAGS = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
GUESSED = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]], bool)


def test_of_several_classes():
    """As scikit-learn's f1_score has them, of which 0 / 0 is 0."""
    by_class = [2 * 2 / (2 * 2 + 1), 2 * 1 / (2 * 1 + 2), 0, 0]
    assert SCORES["macro_f1"](GUESSED, TAGS) == pytest.approx(sum(by_class) / 4)
    hits, false_alarms, misses = 2 + 1, 1 + 1, 2
    expected = 2 * hits / (2 * hits + false_alarms + misses)
    assert SCORES["micro_f1"](GUESSED, TAGS) == pytest.approx(expected)
    assert SCORES["macro_f1"](TAGS, TAGS) == 2 / 4  # the others are never there
    assert SCORES["micro_f1"](TAGS, TAGS) == 1
    assert SCORES["macro_f1"](TAGS & False, TAGS) == 0


def test_correlations():
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 9.0, 16.0])
    # Deviations of y from 7.5: sum of products 25, of squares 5 and 129.
    assert pearson(x, y) == pytest.approx(25 / math.sqrt(5 * 129))
    assert spearman(x, y) == pytest.approx(1)
    assert pearson(x, 3 - 2 * x) == pytest.approx(-1)
    assert pearson(x, np.ones(4)) == spearman(np.ones(4), x) == 0


def test_equal_values_share_their_mean_rank():
    # Ranks 1, 2.5, 2.5, 4 beside 4, 2, 1, 3: deviations' products sum to -1.5 - 0.5.
    found = spearman(np.array([0.0, 5.0, 5.0, 9.0]), np.array([8.0, 2.0, 1.0, 3.0]))
    products = (-1.5) * 1.5 + 0 * (-0.5) + 0 * (-1.5) + 1.5 * 0.5
    assert found == pytest.approx(products / math.sqrt(4.5 * 5))


def test_ratings_are_correlated_in_double_precision():
    x = np.arange(5, dtype=np.float32) + np.float32(1e4)
    assert pearson(x, x) == pytest.approx(1, abs=1e-12)
