"""Rows of tables in files: TSV, CSV, lines of JSON, and splits in one JSON file.

A line of TSV is split at every tab: its quotation marks are text. Rows of CSV are all
as wide as the first, so that a quotation mark left open does not take rows away.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from readers import DataError, open_data

_JSON = (".jsonl", ".json", ".ndjson")
_SUFFIXES = (".tsv", ".csv", *_JSON)
_COMPRESSED = ("", ".gz", ".xz", ".zst")
DEV = ("dev", "valid", "validation", "val", "eval", "test")  # the first that is there

# "file:line", and the columns that the line has; under None what its header lacks
Row = tuple[str, dict[str | None, Any]]
Columns = tuple[str, ...] | range | None  # of files without a header


def find_table(folder: Path, names: Iterable[str]) -> Path:
    """The file of the first of the names that is there, with whichever suffix."""
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


def read_table(
    path: Path, columns: Columns, needed: Iterable[str] = ()
) -> Iterator[Row]:
    """Raises DataError for a file, or a line, that cannot be read.

    So it does for a header without the columns that are ``needed``.
    """
    return _rows(path, _text(path), columns, needed)


def read_splits(
    path: Path, columns: Columns, needed: Iterable[str] = ()
) -> dict[str, Iterator[Row]]:
    """The splits in one file: those of an object of JSON, or train alone.

    The object has lists of rows, ``{"train": [["a text", "its class"], ...], ...}``,
    which are objects where columns have names; what has a split's name among its words,
    as oos_train and validation_matched have, is part of it. Raises DataError where none
    but train is told by its name.
    """
    text = _text(path)
    splits = _object(path, text) if _suffix(path) == ".json" else None
    if splits is None:
        return {"train": _rows(path, text, columns, needed)}
    found: dict[str, list[Row]] = {}
    for name, rows in splits.items():
        words = re.findall("[a-z]+", name.lower())
        known = (word for word in reversed(words) if word in ("train", *DEV))
        split = found.setdefault(next(known, name), [])
        for number, row in enumerate(rows, start=1):
            place = f"{path}:{name}:{number}"
            split.append((place, _named(place, row, columns)))
    if "train" not in found:
        raise DataError(f"{path}: no train among its splits, {', '.join(splits)}")
    if len(found) > 1 and found.keys().isdisjoint(DEV):
        raise DataError(
            f"{path}: no held-out split among {', '.join(splits)}: one must have one "
            f"of {', '.join(DEV)} as a word of its name"
        )
    return {name: iter(rows) for name, rows in found.items()}


def _named(place: str, row: Any, columns: Columns) -> dict[str, Any]:
    kind, rule = dict, "an object where --text-columns are names"
    if columns is not None:
        kind, rule = list, "a list where --text-columns are numbers"
    if not isinstance(row, kind):
        raise DataError(f"{place}: a row must be {rule}, got {row!r}")
    return row if columns is None else _cells(columns, row)


def _cells(columns: tuple[str, ...] | range, row: list) -> dict[str | None, Any]:
    """Cells by column, of those that the row has."""
    cells: dict[str | None, Any] = dict(zip(map(str, columns), row, strict=False))
    # Tabs at the end of a line are a spreadsheet's.
    more = [cell for cell in row[len(columns) :] if cell]
    return cells | {None: more} if more and isinstance(columns, tuple) else cells


def _suffix(path: Path) -> str:
    suffixes = map(str.lower, path.suffixes)
    return next((s for s in suffixes if s in _SUFFIXES), ".tsv")


def _text(path: Path) -> str:
    try:
        with open_data(path) as file:
            return file.read().decode("utf-8-sig")
    except DataError:
        raise
    except Exception as error:  # decompressors raise their own kinds
        raise DataError(f"{path}: unreadable ({error})") from error


def _rows(
    path: Path, text: str, columns: Columns, needed: Iterable[str]
) -> Iterator[Row]:
    # Not splitlines: a text may hold what Python also takes for an end of line.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if _suffix(path) in _JSON:
        yield from _json(path, lines)
        return
    if _suffix(path) == ".csv":
        table = _csv(path, text)
    else:
        table = enumerate((line.split("\t") for line in lines), start=1)
    for number, row in table:
        if row in ([], [""]):
            continue
        if columns is None:
            columns = tuple(row)
            if "\r" in "".join(columns):
                raise DataError(
                    f"{path}:{number}: lines must end with \\n, this has \\r within"
                )
            if missing := [name for name in needed if name not in columns]:
                raise DataError(
                    f"{path}:{number}: no column {missing[0]!r}, the header has "
                    f"{', '.join(columns)}"
                )
            if doubled := [name for name in needed if columns.count(name) > 1]:
                raise DataError(
                    f"{path}:{number}: the header has {doubled[0]!r} more than once"
                )
            continue
        yield f"{path}:{number}", _cells(columns, row)


def _csv(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """(first line, cells) of every row that is not empty."""
    reader, rows = csv.reader(io.StringIO(text, newline=""), strict=True), []
    limit = csv.field_size_limit(len(text))  # the process has one for all readers
    try:
        while True:
            number = reader.line_num + 1
            if (row := next(reader, None)) is None:
                return rows
            if not row:
                continue
            rows.append((number, row))
            if len(row) != (width := len(rows[0][1])):
                raise DataError(
                    f"{path}:{number}: a row must have as many columns as the first, "
                    f"{width}, got {len(row)}"
                )
    except csv.Error as error:
        raise DataError(
            f"{path}:{number}: a quotation mark is left open, or text follows it "
            f"({error})"
        ) from error
    finally:
        csv.field_size_limit(limit)


def _json(path: Path, lines: list[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: no JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: not an object of JSON")
        yield f"{path}:{number}", record


def _object(path: Path, text: str) -> dict[str, list] | None:
    """The object of lists that a file is; None for lines of JSON."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: no JSON ({error})") from error
    except (ValueError, RecursionError) as error:  # a number too long, or too deep
        raise DataError(f"{path}: no JSON ({error})") from error
    lists = isinstance(value, dict) and all(isinstance(v, list) for v in value.values())
    return value if lists and not text[end:].strip() else None
