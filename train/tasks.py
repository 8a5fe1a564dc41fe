"""Classification and rating of texts: GLUE's files, and one's own.

    task = TASKS["rte"]
    splits = read_task(task, "glue/RTE")     # {"train": [...], "dev": [...]}

A line of GLUE's is split at every tab: its quotation marks are text.
"""

import csv
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from readers import DataError, open_data

HELD_OUT = 10  # of a file alone one example in this many is held out
_DEV = ("dev", "valid", "validation", "val", "test")  # the first that is there
_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".ndjson")
_COMPRESSED = ("", ".gz", ".xz", ".zst")


@dataclass(frozen=True)
class Task:
    """What is to be learned, and where in the files it stands.

    Attributes:
        texts: columns of one text or of two.
        label: column of the class or the rating.
        labels: the classes, in order; none for a rating; None for those of the
            training split, sorted.
        scores: of `scores.SCORES`; the first is that of the papers' tables.
        dev: the held-out files, without their suffix; none for the first of dev,
            valid, validation, val, test that is there.
        columns: of files without a header.
        broken: the files are known to have lines that lack columns, left out.
        batch_size: the papers'.
    """

    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...] | None
    scores: tuple[str, ...]
    dev: tuple[str, ...] = ("dev",)
    columns: tuple[str, ...] | None = None
    broken: bool = False
    batch_size: int = 16

    @property
    def outputs(self) -> int:
        """Of the model: a rating is one number."""
        return len(self.labels) or 1


_PAIR = ("sentence1", "sentence2")
_ENTAILED = ("entailment", "not_entailment")

TASKS = {
    "cola": Task(
        texts=("sentence",),
        label="label",
        labels=("0", "1"),
        scores=("matthews", "accuracy"),
        columns=("source", "label", "mark", "sentence"),
        batch_size=32,
    ),
    "sst2": Task(("sentence",), "label", ("0", "1"), ("accuracy",)),
    "mrpc": Task(("#1 String", "#2 String"), "Quality", ("0", "1"), ("f1", "accuracy")),
    "stsb": Task(_PAIR, "score", (), ("pearson", "spearman")),
    # A question with a line end in it goes on on the next line.
    "qqp": Task(
        texts=("question1", "question2"),
        label="is_duplicate",
        labels=("0", "1"),
        scores=("accuracy", "f1"),
        broken=True,
    ),
    "mnli": Task(
        texts=_PAIR,
        label="gold_label",
        labels=("contradiction", "entailment", "neutral"),
        scores=("accuracy",),
        dev=("dev_matched", "dev_mismatched"),
    ),
    "qnli": Task(("question", "sentence"), "label", _ENTAILED, ("accuracy",)),
    "rte": Task(_PAIR, "label", _ENTAILED, ("accuracy",)),
}


class Example(NamedTuple):
    texts: tuple[str, ...]
    target: int | float  # the number of the class, or the rating


@dataclass(frozen=True)
class Splits:
    """The examples of a task, and its classes."""

    train: list[Example]
    dev: dict[str, list[Example]]
    task: Task
    broken: list[str]  # "file:line" of the lines that were left out

    def __str__(self) -> str:
        held_out = ", ".join(f"{len(e)} {name}" for name, e in self.dev.items())
        text = f"task: {len(self.train)} examples train, {held_out}"
        if self.broken:
            text += f", {len(self.broken)} lines left out that lack columns"
            text += f" (first: {self.broken[0]})"
        return text


def own_task(texts: str, label: str, kind: str) -> Task:
    """One's own: ``classify`` or ``rate``, by names of columns with commas between.

    Numbers, from 1, are columns of TSV or CSV files without a header.

    >>> own_task("question,sentence", "label", "classify").texts
    ('question', 'sentence')
    """
    names = tuple(texts.split(","))
    if not 1 <= len(names) <= 2 or not all(names):
        raise DataError(f"--text-columns must be one column or two, got {texts!r}")
    numbers = [name for name in (*names, label) if name.isdecimal()]
    if numbers and len(numbers) <= len(names):
        raise DataError(
            f"--text-columns and --label-column must all be names or all be numbers, "
            f"got {texts!r} and {label!r}"
        )
    columns = None
    if numbers:
        columns = tuple(str(i + 1) for i in range(max(map(int, numbers))))
    rate = kind == "rate"
    return Task(
        texts=names,
        label=label,
        labels=() if rate else None,
        scores=("pearson", "spearman") if rate else ("accuracy",),
        dev=(),
        columns=columns,
    )


def read_task(task: Task, path: str | Path) -> Splits:
    """The splits in a folder; of one's own file, nine examples in ten and the others.

    Raises DataError, with file and line, for what does not have the task's form.
    """
    path, broken = Path(path), []
    if path.is_file() and not task.dev:
        files = {"train": path}
    elif path.is_dir():
        files = {"train": _find(path, ("train",))}
        for names in [(name,) for name in task.dev] or [_DEV]:
            file = _find(path, names)
            files[file.name.partition(".")[0]] = file
    else:
        raise DataError(f"--task-data must be a folder of train and dev, got {path}")
    rows = {name: list(_rows(task, file, broken)) for name, file in files.items()}
    if len(rows) == 1:
        together = rows["train"]
        held_out = [zlib.crc32("\t".join(row[1]).encode()) for row in together]
        split = {"train": [], "dev": []}
        for row, number in zip(together, held_out, strict=True):
            split["dev" if number % HELD_OUT == 0 else "train"].append(row)
        rows = split
    if empty := [name for name in rows if not rows[name]]:
        raise DataError(f"{path}: no example in {', '.join(empty)}")
    if task.labels is None:
        task = replace(task, labels=tuple(sorted({row[2] for row in rows["train"]})))
        if len(task.labels) < 2:
            raise DataError(f"{path}: a single class, {task.labels[0]!r}, in train")
    made = {name: [_example(task, row) for row in rows[name]] for name in rows}
    return Splits(made.pop("train"), made, task, broken)


Row = tuple[str, tuple[str, ...], str]  # "file:line", texts, label


def _example(task: Task, row: Row) -> Example:
    place, texts, label = row
    if task.labels:
        if label not in task.labels:
            some = ", ".join(task.labels[:5]) + ", ..." * (len(task.labels) > 5)
            raise DataError(f"{place}: {task.label} must be one of {some}; {label!r}")
        return Example(texts, task.labels.index(label))
    try:
        return Example(texts, float(label))
    except ValueError:
        raise DataError(f"{place}: {task.label} must be a number; {label!r}") from None


def _find(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        for suffix in _SUFFIXES:
            for compressed in _COMPRESSED:
                path = folder / f"{name}{suffix}{compressed}"
                if path.is_file():
                    return path
    wanted = " or ".join(f"{name}.tsv" for name in names)
    raise DataError(
        f"{folder}: no {wanted} ({', '.join(s[1:] for s in _SUFFIXES)}; also .gz, .xz, "
        f".zst)"
    )


def _rows(task: Task, path: Path, broken: list[str]) -> Iterator[Row]:
    wanted = (*task.texts, task.label)
    for number, values in _records(path, task.columns):
        place = f"{path}:{number}"
        if missing := [name for name in wanted if values.get(name) is None]:
            if task.broken:
                broken.append(place)
                continue
            raise DataError(f"{place}: the line has no column {missing[0]!r}")
        *texts, label = (str(values[name]) for name in wanted)
        yield place, tuple(texts), label


def _records(
    path: Path, columns: tuple[str, ...] | None
) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, column -> value); what a line lacks is not in it."""
    suffix = next(s for s in path.suffixes if s in _SUFFIXES or s == path.suffixes[-1])
    try:
        with open_data(path) as file:
            text = file.read().decode("utf-8-sig")
    except DataError:
        raise
    except Exception as error:  # decompressors raise their own kinds
        raise DataError(f"{path}: unreadable ({error})") from error
    # Not splitlines: a text may hold what Python also takes for an end of line.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if suffix in (".jsonl", ".json", ".ndjson"):
        yield from _json(path, lines)
        return
    if suffix == ".csv":
        reader = csv.reader(io.StringIO(text, newline=""))
        table = ((reader.line_num, row) for row in reader)
    else:
        table = enumerate((line.split("\t") for line in lines), start=1)
    for number, row in table:
        if row in ([], [""]):
            continue
        if columns is None:
            columns = tuple(row)
            continue
        yield number, dict(zip(columns, row, strict=False))


def _json(path: Path, lines: list[str]) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: no JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: not an object of JSON")
        yield number, record
