"""Tokens on disk: used again, made anew, never in part."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import data
from data import DataError, prepare
from tests.train.documents import write_source


def test_the_cache_is_used_again(tmp_path, monkeypatch):
    source, cache = write_source(tmp_path / "a.jsonl"), tmp_path / "cache"
    first = prepare(source, "bytes", cache)
    with monkeypatch.context() as context:
        context.setattr(data, "_write", None)
        again = prepare(source, "bytes", cache)
    np.testing.assert_array_equal(first.train, again.train)
    np.testing.assert_array_equal(first.valid, again.valid)
    assert first.report == again.report
    write_source(source, documents=61)
    assert prepare(source, "bytes", cache).report.documents == 61
    assert prepare(source, "bytes", cache, max_tokens=1).train.size
    assert len(list(cache.iterdir())) == 3


def test_where_valid_begins_is_part_of_the_checksum(tmp_path):
    """The same tokens, one of them in the other split."""
    sums = []
    for cut in (40, 41):
        folder = tmp_path / str(cut)
        folder.mkdir()
        lines = [f"document {i}" for i in range(60)]
        for name, part in (("train", lines[:cut]), ("valid", lines[cut:])):
            texts = [json.dumps({"text": text}) for text in part]
            (folder / f"{name}.jsonl").write_text("\n".join(texts))
        sums.append(prepare(folder, "bytes", tmp_path / "cache").checksum)
    assert sums[0] != sums[1]


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("train.bin", lambda x: x[:7] + b"\1" + x[8:], "tokens have changed since it"),
        (
            "valid.bin",
            lambda x: x[:-1] + b"\2",
            "tokens have changed since it was made",
        ),
        ("train.bin", lambda x: x + b"\0", "train.bin holds .* and must hold"),
        ("meta.json", lambda x: x.replace(b'_tokens": ', b'_tokens": "x'), "meta.json"),
        ("meta.json", lambda x: x[:-9], "meta.json cannot be read"),
        ("meta.json", lambda x: b"\xff", "meta.json cannot be read"),
        ("meta.json", lambda x: b"[]", "meta.json cannot be read"),
        ("meta.json", lambda x: x.replace(b"dtype", b"type"), "meta.json cannot be"),
        ("meta.json", lambda x: x.replace(b"uint16", b"uint61"), "meta.json cannot be"),
    ],
)
def test_a_damaged_cache_is_refused_and_named(tmp_path, file, change, told):
    source, cache = write_source(tmp_path / "a.jsonl"), tmp_path / "cache"
    prepare(source, "bytes", cache)
    [folder] = cache.iterdir()
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(DataError, match=told) as error:
        prepare(source, "bytes", cache)
    assert str(error.value).endswith(f"remove {folder}, and it is made again")


@pytest.mark.parametrize("how", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch, how):
    source, cache = write_source(tmp_path / "a.jsonl"), tmp_path / "cache"

    def encoded(documents, tokenizer):
        yield np.zeros(10)
        raise how

    with monkeypatch.context() as context:
        context.setattr(data, "_encoded", encoded)
        with pytest.raises(how):
            prepare(source, "bytes", cache)
    assert list(cache.iterdir()) == []
    assert prepare(source, "bytes", cache).report.documents == 60


def test_a_killed_build_leaves_no_half_cache(tmp_path):
    source, cache = write_source(tmp_path / "a.jsonl"), tmp_path / "cache"
    killed = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(data.__file__).parent)!r})
import data, numpy
def encoded(documents, tokenizer):
    yield numpy.zeros(10)
    os.kill(os.getpid(), signal.SIGKILL)
data._encoded = encoded
data.prepare({str(source)!r}, "bytes", {str(cache)!r})
"""
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -9
    assert [path.name.startswith(".") for path in cache.iterdir()] == [True]
    assert prepare(source, "bytes", cache).report.documents == 60


def test_another_process_may_be_faster(tmp_path, monkeypatch):
    source, cache = write_source(tmp_path / "a.jsonl"), tmp_path / "cache"
    write = data._write

    def overtaken(*args):
        monkeypatch.setattr(data, "_write", write)
        prepare(source, "bytes", cache)
        write(*args)

    monkeypatch.setattr(data, "_write", overtaken)
    assert prepare(source, "bytes", cache).report.documents == 60
    assert len(list(cache.iterdir())) == 1


def test_the_cache_folder_by_default(tmp_path, monkeypatch):
    source = write_source(tmp_path / "a.jsonl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    prepare(source, "bytes")
    assert len(list((tmp_path / "xdg" / "jaxcompact").iterdir())) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare(source, "bytes")
    assert len(list((tmp_path / ".cache" / "jaxcompact").iterdir())) == 1


def test_bpe_is_trained_and_kept_in_the_cache(tmp_path, monkeypatch):
    source, cache = write_source(tmp_path / "a.jsonl"), tmp_path / "cache"
    first = prepare(source, "bpe:300", cache)
    assert 257 < first.vocab_size <= 300
    assert (next(cache.iterdir()) / "tokenizer.json").is_file()
    monkeypatch.setattr(data, "load_tokenizer", None)
    again = prepare(source, "bpe:300", cache)
    assert again.tokenizer.name == first.tokenizer.name
    start = again.tokenizer.decode(again.train[:20])
    assert start.startswith("Document 0: gr")


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        DataError,
        match="file: cannot write tokens.*; set XDG_CACHE_HOME to another folder",
    ):
        prepare(write_source(tmp_path / "a.jsonl"), "bytes", tmp_path / "file")


def test_no_home_for_the_cache_is_an_error(tmp_path, monkeypatch):
    """As of a user that a container makes up: no HOME, no entry in passwd."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    with pytest.raises(DataError, match="no home folder .* set XDG_CACHE_HOME to a"):
        prepare(write_source(tmp_path / "a.jsonl"), "bytes")
