"""Classification and rating of texts: GLUE's files, and one's own.

    task = TASKS["rte"]
    splits = read_task(task, "glue/RTE")     # .train, .dev: {"dev": [...]}

tables.py has the files' own forms.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from readers import DataError
from tables import DEV, Columns, Row, find_table, read_splits, read_table

HELD_OUT = 10  # of a file alone one example in this many is held out
_LARGEST = float(np.finfo(np.float32).max)  # of ratings, which train as float32


@dataclass(frozen=True)
class Task:
    """What is to be learned, and where in the files it stands.

    Attributes:
        texts: columns of one text or of two.
        label: column of the class or the rating.
        labels: the classes, in order; none for a rating; None for those of the
            training file, sorted, numbers by their value.
        multi_label: an example has several of the classes, one, or none.
        scores: of `scores.SCORES`; the first is that of the papers' tables.
        dev: the held-out files, without their suffix; none for the first of dev,
            valid, validation, val, eval, test that is there.
        columns: of files without a header.
        broken: the files are known to have lines that lack columns, left out.
        batch_size: the papers'.
    """

    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...] | None
    scores: tuple[str, ...]
    dev: tuple[str, ...] = ("dev",)
    multi_label: bool = False
    columns: Columns = None
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
    target: int | float | tuple[int, ...]  # number of the class; rating; of several


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


OWN: dict[str, dict[str, Any]] = {
    "classify": {"labels": None, "scores": ("accuracy",)},
    "tag": {"labels": None, "scores": ("macro_f1", "micro_f1"), "multi_label": True},
    "rate": {"labels": (), "scores": ("pearson", "spearman")},
}


def own_task(texts: str, label: str, kind: str) -> Task:
    """One's own, of a kind of `OWN`, by names of columns with commas between.

    Numbers, from 1, are columns of files without a header.

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
        columns = range(1, max(map(int, numbers)) + 1)
    return Task(texts=names, label=label, dev=(), columns=columns, **OWN[kind])


def read_task(task: Task, path: str | Path) -> Splits:
    """The splits in a folder or, of one's own, in a file.

    Where a file has nothing but train, one text in ten is held out, or one. Raises
    DataError, with file and line, for what does not have the task's form.
    """
    path, broken, needed = Path(path), [], (*task.texts, task.label)
    if not path.exists():
        raise DataError(f"--task-data must exist, got {path}")
    if path.is_file() and not task.dev:
        tables = read_splits(path, task.columns, needed)
        dev = [name for name in DEV if name in tables][:1]
        tables = {name: tables[name] for name in ("train", *dev)}
    elif path.is_dir():
        files = {"train": find_table(path, ("train",))}
        for names in [(name,) for name in task.dev] or [DEV]:
            file = find_table(path, names)
            files[file.name.partition(".")[0]] = file
        tables = {n: read_table(f, task.columns, needed) for n, f in files.items()}
    else:
        raise DataError(f"--task-data must be a folder of train and dev, got {path}")
    rows = {name: list(_labelled(task, t, broken)) for name, t in tables.items()}
    together = rows["train"]  # all classes: the split here may hold out a rare one
    if len(rows) == 1:
        numbers = [zlib.crc32("\t".join(row[1]).encode()) for row in together]
        held_out = {n for n in numbers if n % HELD_OUT == 0} or {*sorted(numbers)[:1]}
        split = {"train": [], "dev": []}
        for row, number in zip(together, numbers, strict=True):
            split["dev" if number in held_out else "train"].append(row)
        if together and not split["train"]:
            raise DataError(
                f"{path} must have two different texts, one of which is held out, got "
                f"one, {len(together)} times"
            )
        rows = split
    if empty := [name for name in rows if not rows[name]]:
        raise DataError(f"{path}: no example in {', '.join(empty)}")
    if task.labels is None:
        if isinstance(task.columns, range):
            _require_no_header(together)
        names = sorted({name for row in together for name in row[2]}, key=_order)
        if len(names) < 2:
            raise DataError(f"{path}: classes must be two or more, train has {names}")
        task = replace(task, labels=tuple(names))
    made = {name: [_example(task, row) for row in rows[name]] for name in rows}
    return Splits(made.pop("train"), made, task, broken)


# "file:line", texts, classes (one, if there are not several) or the rating
Labelled = tuple[str, tuple[str, ...], tuple[str, ...]]


def _labelled(
    task: Task, table: Iterable[Row], broken: list[str]
) -> Iterator[Labelled]:
    wanted = (*task.texts, task.label)
    for place, values in table:
        if missing := [name for name in wanted if values.get(name) is None]:
            if task.broken:
                broken.append(place)
                continue
            raise DataError(f"{place}: the line has no column {missing[0]!r}")
        # A tab within a text, or a row's name, moves what follows.
        if (more := values.get(None)) and not task.dev:
            raise DataError(
                f"{place}: the line has more columns than the header; {more[-1]!r}"
            )
        *texts, label = (values[name] for name in wanted)
        texts = zip(task.texts, texts, strict=True)
        strings = tuple(_string(place, name, text) for name, text in texts)
        yield place, strings, _names(task, place, label)


def _require_no_header(rows: list[Labelled]) -> None:
    """Of numbered columns: a header is a row whose class no other row has.

    Where classes are rare, or rows few, that says nothing.
    """
    place, _, names = rows[0]
    counts = Counter(name for row in rows for name in row[2])
    alone = len(names) == 1 and counts[names[0]] == 1
    if alone and len(rows) >= max(20, 5 * len(counts)):
        raise DataError(
            f"{place}: --text-columns and --label-column must be names where a file "
            f"has a header; the class of the first row, {names[0]!r}, is of no other "
            f"(an example may stand further down)"
        )


def _names(task: Task, place: str, label: Any) -> tuple[str, ...]:
    if task.multi_label:
        if not isinstance(label, list):
            label = _string(place, task.label, label).split(",")
        names = (_string(place, task.label, name).strip() for name in label)
        return tuple(filter(None, names))
    if isinstance(label, list):
        raise DataError(
            f"{place}: {task.label} must not be a list but for --task tag; {label!r}"
        )
    if isinstance(label, float) and task.labels == ():  # a rating, finite or not
        return (str(label),)
    if isinstance(label, float) and label.is_integer():  # a column with gaps, exported
        label = int(label)
    name = _string(place, task.label, label).strip()
    if not name:
        raise DataError(f"{place}: {task.label} must not be empty; {label!r}")
    return (name,)


def _string(place: str, column: str, value: Any) -> str:
    bad = isinstance(value, float) and not math.isfinite(value)
    if bad or value is None or isinstance(value, list | dict):
        raise DataError(f"{place}: {column} must be a text or a number; {value!r}")
    text = str(value)
    if half := re.search("[\ud800-\udfff]", text):
        raise DataError(
            f"{place}: {column} must be Unicode, it has half a surrogate, {half[0]!r}"
        )
    return text


def _order(name: str) -> tuple[float, str]:
    number = name.isdecimal() and len(name) < 100  # int refuses thousands of digits
    return int(name) if number else math.inf, name


def _example(task: Task, row: Labelled) -> Example:
    place, texts, names = row
    if task.labels:
        for name in names:
            if name not in task.labels:
                some = ", ".join(task.labels[:5]) + ", ..." * (len(task.labels) > 5)
                raise DataError(
                    f"{place}: {task.label} must be one of {some}; {name!r}"
                )
        numbers = tuple(task.labels.index(name) for name in names)
        return Example(texts, numbers if task.multi_label else numbers[0])
    (name,) = names
    try:
        rating = float(name) if "_" not in name else math.nan
    except ValueError:
        rating = math.nan
    if not abs(rating) <= _LARGEST:
        raise DataError(
            f"{place}: {task.label} must be a finite number in float32; {name!r}"
        )
    return Example(texts, rating)
