"""What a run says of itself: log lines, a progress bar, metrics.jsonl, TensorBoard."""

import itertools
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

import events
import spikes
from readers import DataError

_BAR = 30  # characters


class NotFinite(Exception):
    """A loss, a gradient or the state of a run is NaN or infinite."""


class Log:
    """The record of one run, step by step. A context manager.

    A row of metrics.jsonl holds what was measured at its step: of every step the loss,
    the gradient's norm and the learning rate, and with a subspace the number of its
    projection; at each ``every``-th, which also makes a line of text, the speed and the
    memory; after an evaluation the validation loss. Numbers that are not finite are
    left out; the row of a step that was skipped for one says how many in a row were.
    Rows after ``start``, of a run that went on longer than its checkpoint, are dropped.
    A line tells of a loss that jumps at a new projection.

    Args:
        folder: of the run.
        start: updates made before; the next step is ``start + 1``.
        steps: of the whole run.
        every: steps between two lines.
        tokens: that a step reads.
        max_skipped: steps in a row that may be without an update.
        writes: whether there are files; one process of several writes them.
        perplexity: whether the loss is one of words.

    Attributes:
        skipped: steps in a row without an update, up to the last that was waited for.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: int,
        steps: int,
        every: int,
        tokens: int,
        max_skipped: int = 0,
        writes: bool = True,
        perplexity: bool = True,
    ):
        self.perplexity, self._folder = perplexity, folder
        self.steps, self.every, self.tokens = steps, every, tokens
        self.max_skipped = max_skipped
        self.speed: float | None = None  # tokens a second, all lines so far together
        self._done, self._seconds = 0, 0.0  # steps and time behind `speed`
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._losses: list[float] = []  # since the last line
        self._steps = 0  # since the last line
        self._since = time.perf_counter()
        terminal = sys.stdout and sys.stdout.isatty()  # None where it is closed
        self._bar = _Bar(steps) if terminal else None
        path = folder / "metrics.jsonl"
        kept = [row for row in read(path) if row["step"] <= start]
        trained = [row for row in kept if _of_training(row)]
        self.skipped = trained[-1].get("skipped", 0) if trained else 0
        self._spikes = spikes.Spikes()
        for row in trained[-spikes.BEFORE - spikes.AFTER :]:
            if "projection" in row:
                self._spikes.seen(row)
        self._file = self._board = None
        if writes:
            shortened = path.with_suffix(".new")
            lines = "".join(json.dumps(row) + "\n" for row in kept)
            shortened.write_text(lines, encoding="utf-8")
            shortened.replace(path)
            self._file = path.open("a", encoding="utf-8")
            self._board = events.opened(folder, start)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if self._bar:
            self._bar.clear()
        for written in (self._file, self._board):
            try:
                if written:
                    written.close()
            except OSError:  # of a full disk; what ended the run is told already
                if kind is None:
                    raise

    def train(self, step: int, measured: dict[str, jax.Array]) -> None:
        """Takes note of a step that was dispatched; waits for the one before it.

        So the device has its next step while the host fetches numbers and writes.
        Raises NotFinite, after too many skipped steps; one call late, or at `flush`.
        """
        pending, self._pending = self._pending, (step, measured)
        if pending is not None:
            self._record(*pending)

    def flush(self) -> None:
        """Waits for the last step."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._record(*pending)

    def validation(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise NotFinite(f"the validation loss of step {step} is {loss}")
        ppl = perplexity(loss)
        self._write(step, {"valid_loss": loss, "valid_perplexity": ppl})
        self.say(f"step {step:6d}  validation loss {loss:.4f}  ppl {written(ppl)}")

    def scores(self, step: int, scores: dict[str, float]) -> None:
        """Of the held-out examples."""
        self._write(step, _finite(scores))
        text = "  ".join(f"{name} {score:.4f}" for name, score in scores.items())
        self.say(f"step {step:6d}  {text}")

    def say(self, line: str) -> None:
        if self._bar:
            self._bar.clear()
        print(line, flush=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in it (evaluating, saving) does not count as training."""
        self.flush()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - start

    def _record(self, step: int, measured: dict[str, jax.Array]) -> None:
        row = {name: float(x) for name, x in jax.device_get(measured).items()}
        self._steps += 1
        if bad := _not_finite(row):
            self.skipped += 1
            self._require_few(step, bad, row[bad])
            row["skipped"] = self.skipped
        else:
            self.skipped = 0
            self._losses.append(row["loss"])
        if spike := self._spikes.seen({"step": step} | _finite(row)):
            self.say(f"step {step:6d}  {spike}")
        if step % self.every == 0 or step == self.steps:
            row |= self._line(step)
        self._write(step, _finite(row))
        if self._bar:
            self._bar.draw(step, row["loss"])

    def _require_few(self, step: int, name: str, value: float) -> None:
        said = f"the {name.replace('_', ' ')} of step {step} is {value}"
        if self.skipped > self.max_skipped:
            before = self.skipped - 1
            more = f", after {before} skipped in a row" if before else ""
            raise NotFinite(said + more)
        self.say(
            f"step {step:6d}  {said}: no update, {self.skipped} in a row of at most "
            f"{self.max_skipped}"
        )

    def _line(self, step: int) -> dict[str, float]:
        """Prints the line of the steps since the last one, and returns its numbers."""
        now = time.perf_counter()
        count, seconds = self._steps, now - self._since
        loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        self._since, self._losses, self._steps = now, [], 0
        self._done += count
        self._seconds += seconds
        self.speed = self.tokens * self._done / self._seconds
        words = {"perplexity": perplexity(loss)} if self.perplexity else {}
        numbers = words | {
            "tokens_per_second": self.tokens * count / seconds,
            "step_ms": 1000 * seconds / count,
            "memory_bytes": memory_in_use(),
        }
        eta = (self.steps - step) * self._seconds / self._done
        ppl = f"ppl {written(words['perplexity'])}  " if words else ""
        self.say(
            f"step {step:6d}/{self.steps}  loss {loss:.4f}  {ppl}"
            f"{numbers['tokens_per_second']:,.0f} tokens/s  "
            f"{numbers['step_ms']:.1f} ms/step  "
            f"{megabytes(numbers['memory_bytes'])}  eta {duration(eta)}"
        )
        return numbers

    def _write(self, step: int, row: dict[str, float]) -> None:
        if not self._file:
            return
        try:
            self._file.write(json.dumps({"step": step} | row) + "\n")
            self._file.flush()  # a killed run loses no row
            if self._board:
                self._board.add(step, row)
        except OSError as error:
            raise OSError(
                f"the metrics of step {step} could not be written to {self._folder}: "
                f"{error.strerror}"
            ) from error


def read(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl, up to the first line that is none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    return list(itertools.takewhile(bool, map(_row, lines)))


def require_rows(path: Path, start: int) -> None:
    """Raises DataError for a file without a row of each step up to ``start``.

    So it does for a line that is none; the last one of a killed run may be cut short.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read, and has the steps before step {start}: "
            f"{error.strerror}"
        ) from error
    done = 0
    for number, line in enumerate([*lines, last] if _row(last) else lines, 1):
        row = _row(line)
        if row is None:
            raise DataError(f"{path}:{number}: not a row of a run's metrics")
        if not _of_training(row) or row["step"] > start:
            continue
        done += 1
        if row["step"] != done:
            raise DataError(
                f"{path}:{number}: a row of step {row['step']}, and that of step "
                f"{done} is not before it"
            )
    if done < start:
        raise DataError(f"{path} ends at step {done}, before step {start}")


def _row(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return row if {type(x) for x in row.values()} <= {int, float} else None


def _of_training(row: dict[str, float]) -> bool:
    """Not of an evaluation."""
    return "loss" in row or "skipped" in row


def memory_in_use() -> int:
    """Bytes: the peak of the first GPU, without one what this process holds now.

    A peak is that of the whole process, of methods that were trained before as well.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use"]
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no Linux; macOS counts in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident * resource.getpagesize()


def megabytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _finite(row: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in row.items() if math.isfinite(x)}


def _not_finite(row: dict[str, float]) -> str | None:
    names = ("loss", "gradient_norm")
    return next((name for name in names if not math.isfinite(row[name])), None)


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # which exp can still take


def written(perplexity: float) -> str:
    return f"{perplexity:.2f}" if perplexity < 1e6 else f"{perplexity:.2e}"


class _Bar:
    """One line at the foot of a terminal."""

    def __init__(self, steps: int):
        self.steps = steps

    def draw(self, step: int, loss: float) -> None:
        filled = _BAR * step // self.steps
        bar = "#" * filled + "." * (_BAR - filled)
        sys.stdout.write(f"\r\x1b[K[{bar}] {step}/{self.steps}  loss {loss:.4f}")
        sys.stdout.flush()

    def clear(self) -> None:
        sys.stdout.write("\r\x1b[K")
