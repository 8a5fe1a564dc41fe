"""The texts in files: plain, JSON lines or Parquet, compressed or not.

A file of plain text is one record; so is each line of JSON and each row of Parquet,
with a "text" in it. A corrupt record reads as None; a file that breaks off is an error.
"""

import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_JSON_SUFFIXES = {".json", ".jsonl", ".ndjson"}
_COMPRESSED = {".gz", ".xz", ".zst"}


class DataError(ValueError):
    """The data, or what was asked of it, is at fault; the message says where."""


def require(package: str, user: str):
    """Import an optional package, or say plainly what needs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.partition(".")[0]
        raise DataError(
            f"{user}: needs the package {top!r}, which cannot be imported ({error}): "
            f"pip install {top}"
        ) from error


def read_records(paths: Iterable[Path]) -> Iterator[tuple[str, str | None]]:
    """("path:number", text) of every record of the files; a corrupt one has no text.

    Raises DataError for a file that cannot be read to its end.
    """
    for path in paths:
        try:
            for number, text in enumerate(_read(path), start=1):
                yield f"{path}:{number}", text
        except DataError:
            raise
        except Exception as error:  # decompressors and parsers raise their own kinds
            raise DataError(
                f"{path}: unreadable ({type(error).__name__}: {error})"
            ) from error


def _read(path: Path) -> Iterator[str | None]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if suffix == ".parquet":
        yield from _read_parquet(path)
        return
    with open_data(path) as file:
        if suffix in _JSON_SUFFIXES:
            yield from map(_parse_line, file)
        else:
            yield _decode(file.read())


def crc_of(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc


def open_data(path: Path) -> BinaryIO:
    """The content of a file, as its suffix says to decompress it."""
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path)
        case ".xz":
            return lzma.open(path)
        case ".zst":
            decompressor = require("zstandard", str(path)).ZstdDecompressor()
            return io.BufferedReader(_ZstdFile(path.open("rb"), decompressor))
        case _:
            return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """Every frame of a file; like gzip's and lzma's, EOFError where it ends within one.

    The package's own reader takes a cut file for a whole one.
    """

    def __init__(self, file: BinaryIO, decompressor):
        self._file, self._decompressor = file, decompressor
        self._frame = None
        self._compressed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._file.read(2**17)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a compressed frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = self._frame.decompress(self._compressed)
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_parquet(path: Path) -> Iterator[str | None]:
    with require("pyarrow.parquet", str(path)).ParquetFile(path) as file:
        if "text" not in file.schema_arrow.names:
            columns = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path}: no column 'text' among its columns: {columns}")
        for batch in file.iter_batches(batch_size=1024, columns=["text"]):
            yield from map(text_of, batch.to_pylist())


def _decode(data: bytes) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _parse_line(line: bytes) -> str | None:
    if line.isspace():
        return ""
    try:
        text = text_of(json.loads(line))
        str(text).encode()  # fails on half a surrogate pair, which JSON can spell
    except (ValueError, RecursionError):
        return None
    return text


def text_of(record: object) -> str | None:
    """The string under "text", or None if there is none."""
    text = record.get("text") if isinstance(record, dict) else None
    return text if isinstance(text, str) else None
