import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from readers import DataError, read_records, require

TEXTS = ["First.\nOf two lines.", "Zweiter, größer: ∑ 🐍", "third"]


def json_lines(texts: list[str]) -> bytes:
    return "".join(
        json.dumps({"url": "x", "text": text}) + "\n" for text in texts
    ).encode()


def zstd(data: bytes) -> bytes:
    return zstandard.compress(data)


def read(path: Path, data: bytes) -> list[str | None]:
    path.write_bytes(data)
    return [text for _, text in read_records([path])]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".JSONL"])
@pytest.mark.parametrize(
    ("compression", "compress"),
    [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)],
)
def test_json_lines(tmp_path, suffix, compression, compress):
    path = tmp_path / f"c4-train.00000-of-01024{suffix}{compression}"
    assert read(path, compress(json_lines(TEXTS))) == TEXTS


@pytest.mark.parametrize(
    "name", ["a.txt", "a.py", "a.md", "a.log", "README", "b.1.TXT"]
)
def test_any_other_file_is_one_text(tmp_path, name):
    assert read(tmp_path / name, TEXTS[1].encode()) == [TEXTS[1]]


@pytest.mark.parametrize(
    ("compression", "compress"),
    [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)],
)
def test_compressed_text(tmp_path, compression, compress):
    assert read(tmp_path / f"a.txt{compression}", compress(b"text")) == ["text"]
    parts = compress(b"text, ") + compress(b"more")
    assert read(tmp_path / f"b{compression}", parts) == ["text, more"]


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "text": [*TEXTS, None]}), path)
    assert [text for _, text in read_records([path])] == [*TEXTS, None]
    pq.write_table(pa.table({"id": [1], "body": ["b"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text'.*: id, body"):
        list(read_records([path]))


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "cut in the mid',
        b'["text"]',
        b'{"content": "no text"}',
        b'{"text": 7}',
        b'{"text": null}',
        b'{"text": "half a pair: \\ud800"}',
        b'{"text": "not UTF-8: \xff"}',
        b"[" * 100_000,
        b"\x00\x01\x02",
    ],
)
def test_a_corrupt_line_has_no_text_and_keeps_its_number(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(TEXTS[:1]) + line + b"\n" + json_lines(TEXTS[1:]))
    assert list(read_records([path])) == [
        (f"{path}:1", TEXTS[0]),
        (f"{path}:2", None),
        (f"{path}:3", TEXTS[1]),
        (f"{path}:4", TEXTS[2]),
    ]


def test_a_blank_line_is_no_corrupt_one(tmp_path):
    assert read(tmp_path / "a.jsonl", json_lines(["a"]) + b" \r\n\n") == ["a", "", ""]


def test_text_that_is_not_utf8_is_corrupt(tmp_path):
    assert read(tmp_path / "a.txt", "größer".encode("latin-1")) == [None]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert read(tmp_path / "a.txt", "\ufefftext".encode()) == ["text"]


@pytest.mark.parametrize(
    ("compression", "compress"),
    [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)],
)
def test_a_broken_archive_is_an_error(tmp_path, compression, compress):
    path = tmp_path / f"a.txt{compression}"
    whole = compress(b"".join(i.to_bytes(2, "big") for i in range(2**16)))
    for broken in (whole[:-20], b"not an archive at all"):
        with pytest.raises(DataError, match=rf"a\.txt\{compression}: unreadable"):
            read(path, broken)


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(DataError, match="gone.txt: unreadable"):
        list(read_records([tmp_path / "gone.txt"]))


def test_a_broken_parquet_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"a\.parquet: unreadable"):
        read(tmp_path / "a.parquet", b"PAR1")


def test_require_names_the_package_and_who_needs_it():
    with pytest.raises(DataError, match="x.zst: needs the package 'no_such'"):
        require("no_such.part", "x.zst")
