"""The metrics of GLUE: of predictions and targets, both (n,).

And of several classes an example, where both are bool (n, c).
"""

import numpy as np


def accuracy(predicted_n: np.ndarray, target_n: np.ndarray) -> float:
    """The share that is right.

    >>> accuracy(np.array([1, 0, 1, 1]), np.array([1, 0, 0, 1]))
    0.75
    """
    return float(np.mean(predicted_n == target_n))


def f1(predicted_n: np.ndarray, target_n: np.ndarray) -> float:
    """Of class 1: the harmonic mean of precision and recall; 0 without a hit.

    >>> round(f1(np.array([1, 0, 1, 1]), np.array([1, 0, 0, 1])), 4)
    0.8
    """
    hits = np.sum((predicted_n == 1) & (target_n == 1))
    both = np.sum(predicted_n == 1) + np.sum(target_n == 1)
    return float(2 * hits / both) if both else 0.0


def macro_f1(predicted_nc: np.ndarray, target_nc: np.ndarray) -> float:
    """The mean of the classes' F1: a rare one counts as much as a frequent one.

    >>> round(macro_f1(np.array([[1, 0], [1, 1]]), np.array([[1, 1], [0, 1]])), 4)
    0.6667
    """
    columns = zip(predicted_nc.T, target_nc.T, strict=True)
    return float(np.mean([f1(*column) for column in columns]))


def micro_f1(predicted_nc: np.ndarray, target_nc: np.ndarray) -> float:
    """F1 of all decisions, of whichever class, together.

    >>> round(micro_f1(np.array([[1, 0], [1, 1]]), np.array([[1, 1], [0, 1]])), 4)
    0.6667
    """
    return f1(predicted_nc.ravel(), target_nc.ravel())


def matthews(predicted_n: np.ndarray, target_n: np.ndarray) -> float:
    """Matthews' correlation of classes 0 and 1; 0 where either has one class alone.

    >>> round(matthews(np.array([1, 0, 1, 1]), np.array([1, 0, 0, 1])), 4)
    0.5774
    """
    return pearson(predicted_n == 1, target_n == 1)


def pearson(predicted_n: np.ndarray, target_n: np.ndarray) -> float:
    """The linear correlation; 0 where either does not vary.

    >>> round(pearson(np.array([1, 2, 4]), np.array([1, 3, 4])), 4)
    0.9286
    """
    x, y = (np.asarray(a, np.float64) for a in (predicted_n, target_n))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def spearman(predicted_n: np.ndarray, target_n: np.ndarray) -> float:
    """Pearson's of the ranks; equal values share their mean rank.

    >>> round(spearman(np.array([1, 2, 9]), np.array([10, 30, 20])), 4)
    0.5
    """
    return pearson(_ranks(predicted_n), _ranks(target_n))


def _ranks(x_n: np.ndarray) -> np.ndarray:
    _, index_n, count = np.unique(x_n, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[index_n]


_ALL = (accuracy, f1, macro_f1, micro_f1, matthews, pearson, spearman)
SCORES = {f.__name__: f for f in _ALL}
