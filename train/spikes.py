"""Losses that jump at a new projection."""

import statistics
from collections import deque

# A spike: a loss so many standard deviations above those of so many steps before a new
# projection, within so many steps from it on. By chance at fewer than 1 of 1000.
_DEVIATIONS, BEFORE, AFTER = 6, 20, 10


class Spikes:
    """Compares the losses after a new projection with those before it."""

    def __init__(self):
        self._losses: deque[float] = deque(maxlen=BEFORE)
        self._before: list[float] = []
        self._projection: float | None = None  # of the last step
        self._first = 0  # step of that projection

    def seen(self, row: dict[str, float]) -> str | None:
        """Takes note of a step, and says so if its loss is a spike: once for each P."""
        projection = row.get("projection")
        if projection != self._projection:
            began = self._projection is not None
            self._before = list(self._losses) if began else []
            self._projection, self._first = projection, row["step"]
        loss = row.get("loss")
        if loss is None:
            return None
        self._losses.append(loss)
        before = self._before
        if len(before) < BEFORE or row["step"] >= self._first + AFTER:
            return None
        mean, deviation = statistics.fmean(before), statistics.stdev(before)
        if loss <= mean + _DEVIATIONS * deviation:
            return None
        self._before = []
        return (
            f"loss {loss:.4f}: a spike, from {mean:.4f} ± {deviation:.4f} before the "
            f"new projection of step {self._first}"
        )
