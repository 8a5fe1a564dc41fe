import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import data
from corpus import FileCorpus
from data import DataError, Dataset, Report, permute, prepare
from tokenizer import load_tokenizer

SEQ = 16


def mapped(tokens: int) -> np.memmap:
    with tempfile.TemporaryFile() as file:
        np.arange(tokens, dtype=np.uint16).tofile(file)
        return np.memmap(file, np.uint16, mode="r")


def dataset(train_tokens: int = 1000, valid_tokens: int = 300) -> Dataset:
    """Tokens that are their own positions."""
    return Dataset(
        train=mapped(train_tokens),
        valid=mapped(valid_tokens),
        tokenizer=load_tokenizer("bytes"),
        report=Report(2, 0, "", train_tokens, valid_tokens),
        checksum="",
    )


def epoch(
    tokens: Dataset, number: int, seed: int = 0, seq_len: int = SEQ
) -> np.ndarray:
    """The first token of every window of an epoch, in order, read one at a time."""
    windows = len(tokens.train) // seq_len
    steps = range(number * windows, (number + 1) * windows)
    options = {"batch_size": 1, "seq_len": seq_len, "seed": seed}
    return np.array([tokens.batch(step, **options)[0, 0] for step in steps])


def write_source(path: Path, documents: int = 60) -> Path:
    lines = [json.dumps({"text": f"Document {i}: größer 🐍"}) for i in range(documents)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


# The order of training.


@pytest.mark.parametrize("tokens", [1000, 17, 992, 33])
def test_an_epoch_shows_every_window_once(tokens):
    for number in range(3):
        start = np.sort(epoch(dataset(tokens), number))
        assert len(start) == tokens // SEQ
        # A stride of SEQ, around the end: one gap takes what SEQ does not divide.
        gaps = np.diff(np.append(start, start[0] + tokens))
        assert sorted(gaps)[:-1] == [SEQ] * (len(gaps) - 1)
        assert max(gaps) == SEQ + tokens % SEQ


def test_windows_are_consecutive_tokens_around_the_end():
    batch = dataset(992).batch(3, batch_size=62, seq_len=SEQ, seed=1)
    assert batch.shape == (62, SEQ + 1)
    assert batch.dtype == np.int32
    assert type(batch) is np.ndarray
    np.testing.assert_array_equal(np.diff(batch) % 992, 1)
    assert (batch == 991).any() and (batch[:, 1:] == 0).any()


def test_epochs_and_seeds_differ_in_order_and_offset():
    tokens = dataset()
    orders = [epoch(tokens, 0), epoch(tokens, 1), epoch(tokens, 2), epoch(tokens, 0, 1)]
    assert len({tuple(order // SEQ) for order in orders}) == 4
    assert len({min(order) for order in orders}) > 1
    assert not np.array_equal(orders[0], np.sort(orders[0]))


def test_the_batch_is_a_function_of_seed_and_step():
    steps = [0, 7, 8, 100]  # of 62 windows by 8: within the first epochs and across
    options = {"batch_size": 8, "seq_len": SEQ, "seed": 5}
    read = {step: dataset().batch(step, **options) for step in steps}
    tokens = dataset()
    for step in reversed(steps):
        np.testing.assert_array_equal(tokens.batch(step, **options), read[step])
    assert not np.array_equal(read[0], read[8])


def test_the_order_does_not_depend_on_the_batch_size():
    rows = [dataset().batch(s, batch_size=8, seq_len=SEQ, seed=0) for s in range(9)]
    more = [dataset().batch(s, batch_size=24, seq_len=SEQ, seed=0) for s in range(3)]
    np.testing.assert_array_equal(np.concatenate(rows), np.concatenate(more))


def test_the_order_stays_what_it_is():
    """A run of one version resumes in the next: these numbers may not change."""
    assert epoch(dataset(), 0)[:4].tolist() == [558, 142, 62, 590]
    assert epoch(dataset(), 1, seed=3)[:4].tolist() == [616, 520, 968, 120]


@pytest.mark.parametrize("step", [0, 7, 20])
def test_rows_are_a_slice_of_the_batch(step):
    options = {"batch_size": 8, "seq_len": SEQ, "seed": 0}
    whole = dataset().batch(step, **options)
    for rows in (slice(0, 4), slice(4, 8), slice(2, 3), slice(None)):
        part = dataset().batch(step, **options, rows=rows)
        np.testing.assert_array_equal(part, whole[rows])


def test_a_batch_may_hold_several_epochs():
    tokens = dataset(3 * SEQ)
    batch = tokens.batch(0, batch_size=12, seq_len=SEQ, seed=0)
    expected = np.concatenate([epoch(tokens, number) for number in range(4)])
    np.testing.assert_array_equal(batch[:, 0], expected)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1023, 1025, 4097])
def test_permute_is_a_permutation(size):
    keys = [np.uint64(k) for k in (3, 1, 4, 1, 5, 9)]
    image = permute(np.arange(size), size, keys)
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


def test_permute_needs_no_array_of_its_size():
    keys = [np.uint64(k) for k in (3, 1, 4, 1, 5, 9)]
    index = np.arange(10**12, 10**12 + 4096)
    image = permute(index, 10**12 + 4096, keys)
    assert len(np.unique(image)) == 4096
    # Uniform over the range: the mean of 4096 has a deviation of 1/sqrt(12 * 4096).
    assert abs(image.mean() / 10**12 - 0.5) < 4 / np.sqrt(12 * 4096)
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 4 / np.sqrt(4096)


# Evaluation.


def test_eval_batches_are_in_order_and_the_same_at_every_call():
    tokens = dataset(valid_tokens=SEQ * 10 + 1)
    first = list(tokens.eval_batches(4, SEQ))
    assert [batch[:, 0].tolist() for batch in first] == [
        [0, 16, 32, 48],
        [64, 80, 96, 112],
    ]
    assert all(batch.shape == (4, SEQ + 1) for batch in first)
    assert first[0].dtype == np.int32
    np.testing.assert_array_equal(first, list(tokens.eval_batches(4, SEQ)))
    np.testing.assert_array_equal(first[:1], list(tokens.eval_batches(4, SEQ, count=1)))
    np.testing.assert_array_equal(first, list(tokens.eval_batches(4, SEQ, count=99)))
    assert first[1][-1, -1] == 128


def test_few_windows_fill_an_eval_batch_by_turns():
    (batch,) = dataset(valid_tokens=SEQ * 3 + 1).eval_batches(8, SEQ)
    assert batch[:, 0].tolist() == [0, 16, 32, 0, 16, 32, 0, 16]


def test_a_sequence_longer_than_a_split_is_an_error():
    tokens = dataset(train_tokens=64, valid_tokens=32)
    assert tokens.batch(0, batch_size=2, seq_len=63, seed=0).shape == (2, 64)
    with pytest.raises(
        DataError, match="sequence of 64 tokens .* train split holds 64"
    ):
        tokens.batch(0, batch_size=2, seq_len=64, seed=0)
    # Already here, before the first batch is asked for.
    with pytest.raises(
        DataError, match="sequence of 32 tokens .* valid split holds 32"
    ):
        tokens.eval_batches(2, 32)


# Tokens on disk.


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
    pytest.importorskip("tokenizers")
    source, cache = write_source(tmp_path / "a.jsonl"), tmp_path / "cache"
    first = prepare(source, "bpe:300", cache)
    assert 257 < first.vocab_size <= 300
    assert (next(cache.iterdir()) / "tokenizer.json").is_file()
    monkeypatch.setattr(data, "load_tokenizer", None)
    again = prepare(source, "bpe:300", cache)
    assert again.tokenizer.name == first.tokenizer.name
    start = again.tokenizer.decode(again.train[:20])
    assert start.startswith("Document 0: gr")


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
    pytest.importorskip("tokenizers")
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


def test_a_missing_source_is_an_error_and_makes_no_cache(tmp_path):
    with pytest.raises(DataError, match="gone: no such file"):
        prepare(tmp_path / "gone", "bytes", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


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


def test_only_numpy_is_needed():
    """Whoever has no optional package trains on bytes."""
    blocked = ["tokenizers", "zstandard", "pyarrow", "datasets", "jax"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import data"
    path = {"PYTHONPATH": str(Path(data.__file__).parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | path)
