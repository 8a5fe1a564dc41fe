"""Tokens made of text, and what is said of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import data
from corpus import FileCorpus
from data import DataError, Report, prepare
from tests.train.documents import write_source
from tokenizer import load_tokenizer


def test_prepare_keeps_every_document(tmp_path):
    source = write_source(tmp_path / "a.jsonl")
    tokens = prepare(source, "bytes", tmp_path / "cache")
    assert (tokens.vocab_size, tokens.train.dtype) == (257, np.uint16)
    assert isinstance(tokens.train, np.memmap)
    texts = [
        tokens.tokenizer.decode(ids)
        for split in (tokens.train, tokens.valid)
        for ids in np.split(split, np.flatnonzero(split == 256) + 1)[:-1]
    ]
    assert sorted(texts) == sorted(
        json.loads(line)["text"] for line in source.read_text().splitlines()
    )
    report = tokens.report
    assert report.documents == 60
    assert (report.train_tokens, report.valid_tokens) == (
        len(tokens.train),
        len(tokens.valid),
    )


def test_a_large_vocabulary_takes_four_bytes(tmp_path, monkeypatch):
    class Large:
        vocab_size, eot = 2**16 + 1, 2**16
        encode, save = load_tokenizer("bytes").encode, load_tokenizer("bytes").save

    monkeypatch.setattr(data, "load_tokenizer", lambda spec, texts: Large())
    tokens = prepare(write_source(tmp_path / "a.jsonl"), "bytes", tmp_path / "cache")
    assert tokens.train.dtype == np.uint32
    assert (tokens.train == 2**16).any()


def test_a_long_document_ends_once(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_GROUP", 250_000)
    text = "A line of text.\n" * 40_000
    (tmp_path / "a.txt").write_text(text)
    tokens = prepare(tmp_path / "a.txt", "bytes", tmp_path / "cache")
    whole = np.concatenate([tokens.train, tokens.valid])
    assert tokens.tokenizer.decode(whole) == text
    assert np.flatnonzero(whole == 256).tolist() == [
        len(tokens.train) - 1,
        len(whole) - 1,
    ]
    assert tokens.report.documents == 1


def test_bpe_sees_the_training_split_alone(tmp_path, monkeypatch):
    seen = []

    def load(spec, texts):
        seen.extend(texts)
        return load_tokenizer("bytes")

    monkeypatch.setattr(data, "load_tokenizer", load)
    (tmp_path / "train.txt").write_text("to learn")
    (tmp_path / "valid.txt").write_text("to judge")
    prepare(tmp_path, "bpe:300", tmp_path / "cache")
    assert seen == ["to learn"]


@pytest.mark.parametrize("group", [100, 2_000_000])
def test_max_tokens_ends_the_reading(tmp_path, monkeypatch, group):
    """There, however much is encoded at once; what is held out stays long enough."""
    monkeypatch.setattr(data, "_GROUP", group)
    texts, read = [f"document {i}" for i in range(100_000)], []

    def documents(corpus, split, tally):
        for text in texts:
            read.append(split)
            yield text

    monkeypatch.setattr(FileCorpus, "documents", documents)
    source, cache = write_source(tmp_path / "a.jsonl"), tmp_path / "cache"
    small = prepare(source, "bytes", cache, max_tokens=5000)
    assert (len(small.train), len(small.valid)) == (5000, data.VALID)
    assert small.report.train_tokens == 5000
    if group == 100:
        assert read.count("train") < 5000 / 12 + 10
    large = prepare(source, "bytes", cache, max_tokens=1_000_000)
    assert len(large.train) == 1_000_000
    np.testing.assert_array_equal(large.train[:5000], small.train)
    huge = prepare(source, "bytes", cache, max_tokens=50 * (data.VALID + 1))
    assert len(huge.valid) == data.VALID + 1


def test_c4_with_gpt2(data_dir, tmp_path):
    spec = data_dir / "tokenizers" / "gpt2_hf_tokenizer" / "tokenizer.json"
    tokens = prepare(data_dir / "c4_sample", str(spec), tmp_path)
    assert tokens.report.documents == 30  # few: of each the end is held out
    for split in (tokens.train, tokens.valid):
        assert (split == 50256).sum() == 30
    assert tokens.batch(0, batch_size=2, seq_len=128, seed=0).max() < tokens.vocab_size


# What is said.


def test_the_report_is_one_line():
    assert str(Report(812, 0, "", 11_234_567, 234_567)) == (
        "data: 812 documents, 11.2 M tokens train, 0.2 M valid"
    )
    assert str(Report(1, 1, "a.jsonl:7", 4321, 99)) == (
        "data: 1 document, 4321 tokens train, 99 valid, "
        "1 line skipped (corrupt; first: a.jsonl:7)"
    )
    assert "3 lines skipped (corrupt; first: a:1)" in str(Report(9, 3, "a:1", 1, 1))


def test_corrupt_lines_are_reported(tmp_path):
    source = write_source(tmp_path / "a.jsonl")
    with source.open("a") as file:
        file.write('\n{"text": 3}\n{"te')
    report = prepare(source, "bytes", tmp_path / "cache").report
    assert (report.documents, report.skipped) == (60, 2)
    assert report.first_skipped == f"{source}:61"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt: no document: it is empty"),
        ("a.jsonl", b"\n \n", "a.jsonl: no document: it is empty"),
        ("a.jsonl", b"{}\nx\n", "a.jsonl: no document: all 2 records are corrupt.*:1"),
        ("a.txt", b"\xff", "a.txt: no document: all 1 records"),
        ("a.txt", b"x", "a.txt: too little text: none is left for the train split"),
        ("a.gz", b"x", "a.gz: unreadable"),
    ],
)
def test_a_source_without_a_document_is_an_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / name, "bytes", cache)
    assert list(cache.iterdir()) == []


def test_what_can_be_read_once_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe must be a file or a folder: it is read"):
        prepare(tmp_path / "pipe", "bytes", tmp_path / "cache")


def test_a_missing_source_is_an_error_and_makes_no_cache(tmp_path):
    with pytest.raises(DataError, match="gone: no such file"):
        prepare(tmp_path / "gone", "bytes", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_only_numpy_is_needed():
    """Whoever has no optional package trains on bytes."""
    blocked = ["tokenizers", "zstandard", "pyarrow", "datasets", "jax"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import data"
    path = {"PYTHONPATH": str(Path(data.__file__).parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | path)
