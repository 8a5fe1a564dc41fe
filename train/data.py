"""Tokens on disk, and batches of them in an order that is a function of (seed, step).

    dataset = prepare("c4/", "bpe:8192")      # tokenized once, then memory-mapped
    print(dataset.report)                     # data: 812 documents, 11.2 M tokens ...
    dataset.batch(step, batch_size=8, seq_len=256, seed=0)           # (8, 257) int32

Nothing has to be saved for a run to resume: it asks for the batch of its next step.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from corpus import HELD_OUT, Corpus, Split, Tally, open_corpus
from readers import DataError, crc_of
from tokenizer import Tokenizer, fingerprint, load_saved, load_tokenizer, pieces

_FORMAT = 5  # of the cache: raise it when the same source would give other tokens
_GROUP = 2_000_000  # characters encoded in one call
VALID = 2**16  # tokens that `max_tokens` leaves of the held-out text at least
_FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class Report:
    """What a source held. Prints as one line."""

    documents: int
    skipped: int  # corrupt lines, undecodable files
    first_skipped: str  # "path:line"
    train_tokens: int
    valid_tokens: int

    def __str__(self) -> str:
        line = (
            f"data: {self.documents} document{'s' * (self.documents != 1)}, "
            f"{_short(self.train_tokens)} tokens train, "
            f"{_short(self.valid_tokens)} valid"
        )
        if self.skipped:
            lines = f"{self.skipped} line{'s' * (self.skipped != 1)}"
            line += f", {lines} skipped (corrupt; first: {self.first_skipped})"
        return line


@dataclass(frozen=True, eq=False)
class Dataset:
    """The tokens of two splits; documents end with `tokenizer.eot`."""

    train: np.memmap
    valid: np.memmap
    tokenizer: Tokenizer
    report: Report
    checksum: str  # of the tokens of both, each by itself

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def batch(
        self,
        step: int,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        rows: slice | None = None,
    ) -> np.ndarray:
        """The (B, T+1) int32 windows of a step, or the `rows` of them alone.

        An epoch shows every window of T+1 tokens, at a stride of T, exactly once. Each
        epoch has an order and an offset of its own; windows wrap around the end. A
        window is found from its number alone: a step costs O(B T) and needs no history.
        """
        self._require_window(seq_len, "train")
        windows = len(self.train) // seq_len
        first = step * batch_size
        number_b = np.arange(first, first + batch_size)[rows or slice(None)]
        start_b = np.empty_like(number_b)
        for epoch in np.unique(number_b // windows):
            offset, *keys = np.random.SeedSequence([seed, int(epoch)]).generate_state(
                1 + _FEISTEL_ROUNDS, np.uint64
            )
            here_b = number_b // windows == epoch
            window_b = permute(number_b[here_b] % windows, windows, keys)
            start_b[here_b] = window_b * seq_len + int(offset) % seq_len
        return self._windows(self.train, start_b, seq_len)

    def eval_batches(
        self, batch_size: int, seq_len: int, count: int | None = None
    ) -> Iterator[np.ndarray]:
        """At most `count` (B, T+1) int32 batches of "valid": in order, always the same.

        All are full: the remainder is left out, and windows that do not fill a single
        batch are repeated in it.
        """
        self._require_window(seq_len, "valid")
        windows = (len(self.valid) - 1) // seq_len
        batches = max(1, windows // batch_size)
        if count is not None:
            batches = min(batches, count)
        return (
            self._windows(
                self.valid,
                np.arange(i * batch_size, (i + 1) * batch_size) % windows * seq_len,
                seq_len,
            )
            for i in range(batches)
        )

    def _require_window(self, seq_len: int, split: Split) -> None:
        tokens = len(getattr(self, split))
        if tokens < seq_len + 1:
            raise DataError(
                f"a sequence of {seq_len} tokens and the next one need {seq_len + 1}, "
                f"but the {split} split holds {tokens}: shorten it or add text"
            )

    def _windows(
        self, tokens: np.memmap, start_b: np.ndarray, seq_len: int
    ) -> np.ndarray:
        position_bt = start_b[:, None] + np.arange(seq_len + 1)[None, :]
        # Before reading, as a page that is gone kills the process without a word;
        # after it, as the rest of a page that was cut is read as zeros.
        _require_whole(tokens)
        window_bt = tokens[position_bt % len(tokens)].astype(np.int32)
        _require_whole(tokens)
        return window_bt


def prepare(
    source: str | os.PathLike | None,
    tokenizer_spec: str,
    cache_dir: str | os.PathLike | None = None,
    *,
    max_tokens: int | None = None,
) -> Dataset:
    """The tokens of a source (see corpus.py), from the cache if they are there.

    `max_tokens` ends the training split there, and the reading soon after: of a source
    like C4 a run reads only what it needs. Held out is a fiftieth, or `VALID` if that
    is more. Raises DataError if the source, the tokenizer or the cache folder cannot be
    used.
    """
    corpus = open_corpus(source)
    identity = corpus.identity()
    key = [_FORMAT, identity, fingerprint(tokenizer_spec), max_tokens]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    cache = Path(cache_dir or _default_cache_dir())
    folder = cache / digest
    if not folder.exists():
        # Complete or absent: a folder appears under its name by one rename.
        building = cache / f".{digest}-{uuid.uuid4().hex[:8]}"
        try:
            building.mkdir(parents=True)
            _write(corpus, tokenizer_spec, building, max_tokens)
            if corpus.identity() != identity:
                raise DataError(f"{corpus.name}: changed while it was read")
            building.rename(folder)
        except OSError as error:
            if not folder.exists():  # else another process was faster: its work is ours
                raise DataError(
                    f"{cache}: cannot write tokens ({error}); set XDG_CACHE_HOME to "
                    f"another folder"
                ) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return _load(folder)


def permute(index: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    """A pseudo-random permutation of range(size), evaluated at `index` alone.

    A Feistel network permutes the next power of four. Where it leads out of the range
    it is applied again, less than four times on average, until it leads back in: this
    too is one to one (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def feistel(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return left << half | right

    x = feistel(index.astype(np.uint64))
    while (outside := x >= size).any():
        x[outside] = feistel(x[outside])
    return x.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every bit of x moves half the bits of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _write(corpus: Corpus, spec: str, folder: Path, max_tokens: int | None) -> None:
    tokenizer = load_tokenizer(spec, corpus.documents("train", Tally()))
    tokenizer.save(folder)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    tally, tokens = Tally(), {}
    limits = {"train": max_tokens, "valid": None}
    if max_tokens is not None:
        limits["valid"] = max(VALID, max_tokens // HELD_OUT)
    for split, limit in limits.items():
        documents = corpus.documents(split, tally)
        with (folder / f"{split}.bin").open("wb") as file:
            tokens[split] = 0
            for ids in _encoded(documents, tokenizer):
                ids = ids if limit is None else ids[: limit - tokens[split]]
                file.write(ids.astype(dtype).tobytes())
                tokens[split] += len(ids)
                if tokens[split] == limit:
                    break
    if empty := [split for split in tokens if not tokens[split]]:
        raise DataError(_nothing(corpus.name, tally, empty[-1]))
    report = Report(
        documents=tally.documents,
        skipped=tally.skipped,
        first_skipped=tally.first_skipped,
        train_tokens=tokens["train"],
        valid_tokens=tokens["valid"],
    )
    meta = {"source": corpus.name, "dtype": dtype, "report": asdict(report)}
    meta["checksum"] = _checksum(folder)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")


def _encoded(documents: Iterator[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The ids of documents, each closed by the end of text, in large arrays."""
    eot = np.array([tokenizer.eot])
    for group in _groups(documents):
        ids = tokenizer.encode([piece for piece, _ in group])
        parts = [
            part
            for piece_ids, (_, last) in zip(ids, group, strict=True)
            for part in ((piece_ids, eot) if last else (piece_ids,))
        ]
        yield np.concatenate(parts)


def _groups(documents: Iterator[str]) -> Iterator[list[tuple[str, bool]]]:
    """(piece, whether it ends its document), gathered to _GROUP characters.

    Many at a time, since `tokenizers` works in parallel over them; in pieces, since a
    document may be a whole corpus.
    """
    group, characters = [], 0
    for document in documents:
        read = 0
        for piece in pieces(document):
            read += len(piece)
            characters += len(piece)
            group.append((piece, read == len(document)))
            if characters >= _GROUP:
                yield group
                group, characters = [], 0
    if group:
        yield group


def _nothing(name: str, tally: Tally, split: Split) -> str:
    if tally.documents:
        return f"{name}: too little text: none is left for the {split} split"
    if tally.skipped:
        return (
            f"{name}: no document: all {tally.skipped} records are corrupt, the first "
            f"at {tally.first_skipped}; a line of JSON must be an object with a string "
            'under "text", text must be UTF-8'
        )
    return f"{name}: no document: it is empty"


def _checksum(folder: Path) -> str:
    sums = (crc_of(folder / f"{split}.bin") for split in ("train", "valid"))
    return "-".join(f"{crc:08x}" for crc in sums)


def _load(folder: Path) -> Dataset:
    path, again = folder / "meta.json", f"remove {folder}, and it is made again"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        report, checksum = Report(**meta["report"]), meta["checksum"]
        dtype = np.dtype(meta["dtype"]).name
        counts = int(report.train_tokens), int(report.valid_tokens)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}): {again}") from error
    train = _tokens(folder / "train.bin", dtype, counts[0])
    valid = _tokens(folder / "valid.bin", dtype, counts[1])
    if _checksum(folder) != checksum:
        raise DataError(f"{folder}: tokens have changed since it was made: {again}")
    return Dataset(train, valid, load_saved(folder), report, checksum)


def _tokens(path: Path, dtype: str, count: int) -> np.memmap:
    found, size = path.stat().st_size, count * np.dtype(dtype).itemsize
    if found != size:
        raise DataError(
            f"{path} holds {found} bytes and must hold {size}: remove {path.parent}, "
            f"and it is made again"
        )
    return np.memmap(path, dtype, mode="r")


def _require_whole(tokens: np.memmap) -> None:
    found = tokens.base.size()  # of the file, which may have another name by now
    if found < tokens.nbytes:
        raise DataError(
            f"{tokens.filename} has shrunk to {found} bytes of {tokens.nbytes}: remove "
            f"{Path(tokens.filename).parent}, and it is made again"
        )


def _default_cache_dir() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return caches.expanduser() / "jaxcompact"
    except RuntimeError as error:  # no HOME, no entry in passwd
        raise DataError(
            f"{caches}: no home folder to keep tokens in ({error}); set XDG_CACHE_HOME "
            f"to a folder"
        ) from error


def _short(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 50_000 else str(count)
