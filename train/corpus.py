"""Text documents from files, directories and the Hugging Face hub, in a fixed order.

    corpus = open_corpus("c4/")          # or "book.txt", "hf:allenai/c4:en", None
    for text in corpus.documents("train", Tally()):
        ...

A directory whose files (or folders) have train and valid, val, dev, eval or test in
their names, as words, brings its own splits: test is never read. Anything else is split
here: about one document in 50 is held out, or of fewer than 50 the tail of each.
"""

import functools
import itertools
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from readers import DataError, read_records, require, text_of

Split = Literal["train", "valid"]

HELD_OUT = 50  # one document in this many is held out

# Files about the data that lie beside it: not data.
_ABOUT = {"readme", "license", "licence", "provenance", "manifest"}
_SPLIT_NAME = re.compile(
    r"(?<![a-z])(?:(?P<train>train)|(?P<valid>val|dev|eval)|(?P<test>test))"
    r"(?:ing|id|idation|uation)?(?![a-z])",
    re.IGNORECASE,
)
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_HUB_CONFIGS = {"allenai/c4": "en"}  # C4 has no default; its papers train on English


@dataclass
class Tally:
    """What a pass over a corpus came across."""

    documents: int = 0
    skipped: int = 0  # corrupt lines, undecodable files
    first_skipped: str = ""  # "path:line"


class Corpus(Protocol):
    """A source of documents. Each call of `documents` is a fresh pass over it."""

    name: str

    def identity(self) -> list:
        """Plain values that change when the documents may have changed."""

    def documents(self, split: Split, tally: Tally) -> Iterator[str]:
        """The documents of a split, in order. Adds what it read to `tally`.

        A split held out here is read beside the training split, whose pass has
        counted everything: the pass over "valid" then adds nothing.
        """


def open_corpus(source: str | os.PathLike | None) -> Corpus:
    """The corpus at a path, at `hf:name[:config]`, or, for None, Python's own library.

    Raises DataError if there is no such path, or no file under it.
    """
    if source is None:
        return FileCorpus("Python's standard library", _stdlib_files())
    if str(source).startswith("hf:"):
        name, _, config = str(source).removeprefix("hf:").partition(":")
        return HubCorpus(name, config or _HUB_CONFIGS.get(name))
    root = Path(source)
    if os.path.isfile(root):
        return FileCorpus(str(source), [root])
    if os.path.exists(root) and not os.path.isdir(root):
        raise DataError(f"{source} must be a file or a folder: it is read twice")
    if not os.path.isdir(root):
        raise DataError(f"{source}: no such file or directory")
    return _directory_corpus(root)


class FileCorpus:
    """Documents of files; those of `train` are split where `valid` is not given."""

    def __init__(self, name: str, train: list[Path], valid: list[Path] | None = None):
        self.name, self.train, self.valid = name, train, valid

    def identity(self) -> list:
        def stamps(paths: Iterable[Path]) -> list:
            stats = ((path, path.stat()) for path in paths)
            return [[str(p.resolve()), s.st_size, s.st_mtime_ns] for p, s in stats]

        try:
            return [stamps(self.train), stamps(self.valid or [])]
        except OSError as error:
            raise DataError(f"{self.name}: unreadable ({error})") from error

    def documents(self, split: Split, tally: Tally) -> Iterator[str]:
        read = functools.partial(read_records, self.train)
        valid = None if self.valid is None else read_records(self.valid)
        return _documents(read, valid, split, tally)


class HubCorpus:
    """Documents streamed from the Hugging Face hub by `datasets`."""

    def __init__(self, dataset: str, config: str | None):
        self.name = f"hf:{dataset}" + (f":{config}" if config else "")
        self.dataset, self.config = dataset, config

    def identity(self) -> list:
        return [self.name]

    def documents(self, split: Split, tally: Tally) -> Iterator[str]:
        try:
            datasets = require("datasets", self.name)
            splits = datasets.load_dataset(self.dataset, self.config, streaming=True)
            train, valid = functools.partial(self._records, splits["train"]), None
            if "validation" in splits:
                valid = self._records(splits["validation"])
            yield from _documents(train, valid, split, tally)
        except DataError:
            raise
        except Exception as error:  # `datasets` raises its own, fsspec's and httpx's
            raise DataError(
                f"{self.name}: cannot be read from the Hugging Face hub: no network, "
                f"or no such dataset ({type(error).__name__}: {error})"
            ) from error

    def _records(self, rows: Iterable[dict]) -> Iterator[tuple[str, str | None]]:
        for number, row in enumerate(rows, start=1):
            yield f"{self.name}:{number}", text_of(row)


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    files = [root / p for p in sorted(paths) if _STDLIB_LEFT_OUT.isdisjoint(p.parts)]
    if not files:
        raise DataError(f"{root}: Python's library has no source here; name a source")
    return files


def _directory_corpus(root: Path) -> FileCorpus:
    named: dict[str | None, list[Path]]
    named = {"train": [], "valid": [], "test": [], None: []}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") for part in parts) or _stem(path) in _ABOUT:
            continue
        match = next(filter(None, map(_SPLIT_NAME.search, parts)), None)
        named[match and match.lastgroup].append(path)
    train, valid, test, rest = named.values()
    if train and (valid or test):
        return FileCorpus(str(root), train, valid or None)
    files = sorted(train + valid + test + rest)
    if not files:
        raise DataError(f"{root}: no file in this directory")
    return FileCorpus(str(root), files)


def _stem(path: Path) -> str:
    return path.name.partition(".")[0].lower()


def _documents(
    train: Callable[[], Iterator[tuple[str, str | None]]],
    valid: Iterator[tuple[str, str | None]] | None,
    split: Split,
    tally: Tally,
) -> Iterator[str]:
    """The texts of a split, held out of `train` where there is no `valid`.

    Each call of `train` is a pass of its own: one finds out whether there are few,
    which may be too large to be held in memory together.
    """
    if valid is not None:
        yield from _counted(train() if split == "train" else valid, tally)
        return
    begin = itertools.islice(_counted(train(), Tally()), HELD_OUT)
    few = sum(1 for _ in begin) < HELD_OUT
    counted = _counted(train(), tally if split == "train" else Tally())
    yield from _tails(counted, split) if few else _hold_out(counted, split)


def _counted(records: Iterable[tuple[str, str | None]], tally: Tally) -> Iterator[str]:
    """The texts among (place, text) pairs; a text of None is corrupt."""
    for place, text in records:
        if text is None:
            tally.skipped += 1
            tally.first_skipped = tally.first_skipped or place
        elif text and not text.isspace():
            tally.documents += 1
            yield text


def _tails(documents: Iterator[str], split: Split) -> Iterator[str]:
    """The part of each document that belongs to a split: all are cut near their end."""
    for text in documents:
        cut = len(text) - max(1, len(text) // HELD_OUT)
        if part := text[:cut] if split == "train" else text[cut:]:
            yield part


def _hold_out(documents: Iterator[str], split: Split) -> Iterator[str]:
    """The documents of a stream that belong to a split.

    By a hash of the content, so that copies fall on one side and a growing corpus keeps
    its split; the first two documents go to "train" and "valid", so that neither is
    ever empty.
    """
    for index, text in enumerate(documents):
        by_hash = zlib.crc32(text.encode()) % HELD_OUT == 0
        held_out = index == 1 if index < 2 else by_hash
        if held_out == (split == "valid"):
            yield text
