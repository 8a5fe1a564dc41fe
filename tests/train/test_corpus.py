import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from corpus import DataError, Tally, open_corpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def json_lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def splits(source, tally: Tally | None = None) -> tuple[list[str], list[str]]:
    corpus, tally = open_corpus(source), tally or Tally()
    train, valid = (list(corpus.documents(s, tally)) for s in ("train", "valid"))
    return train, valid


def test_a_directory_is_read_whole_and_in_order(tmp_path):
    write(
        tmp_path,
        {
            "b/2.txt": "three",
            "b/1.jsonl": json_lines(["one", "two"]),
            "a.py": "zero",
            ".hidden": "no",
            ".git/config": "no",
            "README.md": "no",
            "b/LICENSE": "no",
        },
    )
    train, valid = splits(tmp_path)
    assert (train, valid) == (["zer", "on", "tw", "thre"], ["o", "e", "o", "e"])


@pytest.mark.parametrize("valid", ["valid", "validation-00000-of-00001", "val"])
def test_a_directory_brings_its_own_splits(tmp_path, valid):
    files = {
        "train-00000-of-00002.jsonl": json_lines(["a", "b"]),
        "train-00001-of-00002.jsonl": json_lines(["c"]),
        f"{valid}.jsonl": json_lines(["v", "w"]),
        "test.jsonl": json_lines(["never"]),
        "notes.txt": "never",
    }
    tally = Tally()
    assert splits(write(tmp_path, files), tally) == (["a", "b", "c"], ["v", "w"])
    assert tally.documents == 5


def test_splits_may_be_folders(tmp_path):
    files = {"train/x.txt": "x", "valid/y.txt": "y", "test/z.txt": "never"}
    assert splits(write(tmp_path, files)) == (["x"], ["y"])


@pytest.mark.parametrize(
    "train, valid, test",
    [
        ("c4-train.00000-of-00001.jsonl", "c4-validation.00000-of-00001.jsonl", ""),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("book_train.txt", "book_valid.txt", "book_TEST.txt"),
        ("train.txt", "dev.txt", "testing.txt"),
        ("my training.txt", "my evaluation.txt", "my test.txt"),
        ("a/train1.txt", "a/eval.txt", "a/test2.txt"),
    ],
)
def test_a_split_is_named_anywhere_in_a_name(tmp_path, train, valid, test):
    names = {train: "x", valid: "y", test: "never", "latest.txt": "never"}
    kind = {True: json_lines, False: "".join}
    files = {n: kind[n.endswith("jsonl")]([text]) for n, text in names.items() if n}
    assert splits(write(tmp_path, files)) == (["x"], ["y"])


def test_test_files_do_not_leak_where_nothing_is_named_valid(tmp_path):
    files = {
        "train.jsonl": json_lines(["a1", "b2", "c3"]),
        "test.jsonl": json_lines(["t4"]),
    }
    assert splits(write(tmp_path, files)) == (["a", "b", "c"], ["1", "2", "3"])


def test_a_name_like_a_split_is_no_split_alone(tmp_path):
    train, _ = splits(write(tmp_path, {"train.py": "t1", "model.py": "m1"}))
    assert sorted(train) == ["m", "t"]
    files = {"trainers.txt": "a1", "values.txt": "b1", "testimony.txt": "c1"}
    files |= {"pretrain.txt": "d1", "my_devices.txt": "e1", "latest.txt": "f1"}
    train, _ = splits(write(tmp_path / "words", files))
    assert sorted(train) == ["a", "b", "c", "d", "e", "f"]


def test_one_document_in_fifty_is_held_out(tmp_path):
    texts = [f"document {i}" for i in range(5000)]
    path = write(tmp_path, {"a.jsonl": json_lines(texts)}) / "a.jsonl"
    tally = Tally()
    train, valid = splits(path, tally)
    assert sorted(train + valid) == sorted(texts)
    assert 60 <= len(valid) <= 140  # 100, standard deviation 10
    assert tally.documents == 5000
    # More text moves no document to the other side.
    path.write_text(json_lines(texts + [f"new {i}" for i in range(1000)]))
    more_train, more_valid = splits(path)
    assert set(train) < set(more_train)
    assert set(valid) < set(more_valid)


def test_copies_fall_on_one_side(tmp_path):
    texts = [f"document {i % 499}" for i in range(2000)]
    path = write(tmp_path, {"a.jsonl": json_lines(["x", "y", *texts])}) / "a.jsonl"
    train, valid = splits(path)
    assert len(valid) > 1
    assert not set(train) & set(valid)


@pytest.mark.parametrize("count, cut", [(2, True), (49, True), (50, False)])
def test_few_documents_are_each_cut_near_their_end(tmp_path, count, cut):
    """A large one is not held out whole, nor a third of three."""
    texts = [f"{i:02} " + "x" * 997 for i in range(count)]
    path = write(tmp_path, {"a.jsonl": json_lines(texts)}) / "a.jsonl"
    tally = Tally()
    train, valid = splits(path, tally)
    assert tally == Tally(count, 0, "")
    if cut:
        assert train == [text[:980] for text in texts]
        assert valid == [text[980:] for text in texts]
    else:  # the first two are one of each split
        assert (train[0], valid[0]) == (texts[0], texts[1])
        assert sorted(train + valid) == texts


def test_a_document_of_one_character_is_held_out(tmp_path):
    assert splits(write(tmp_path, {"1": "a", "2": "two"})) == (["tw"], ["a", "o"])


def test_a_single_document_is_cut_near_its_end(tmp_path):
    text = "".join(chr(i) for i in range(32, 1032))
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    tally = Tally()
    assert splits(path, tally) == ([text[:980]], [text[980:]])
    assert tally.documents == 1


def test_corrupt_records_are_counted_once(tmp_path):
    lines = json_lines(["ab"]) + "{\n" + json_lines(["cd", "  "]) + "{}\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xfd")
    tally = Tally()
    assert splits(tmp_path, tally) == (["a", "c"], ["b", "d"])
    assert tally == Tally(2, 3, f"{tmp_path / 'a.jsonl'}:2")


def test_identity_changes_with_the_files(tmp_path):
    path = write(tmp_path, {"a.txt": "one", "b.txt": "two"}) / "a.txt"
    before = open_corpus(tmp_path).identity()
    assert open_corpus(tmp_path).identity() == before
    path.write_text("longer")
    assert open_corpus(tmp_path).identity() != before


@pytest.mark.parametrize("name", ["gone.txt", "gone/"])
def test_a_missing_path_is_an_error(tmp_path, name):
    with pytest.raises(DataError, match=f"{name}: no such file or directory"):
        open_corpus(f"{tmp_path}/{name}")


def test_a_directory_without_files_is_an_error(tmp_path):
    write(tmp_path, {".hidden": "x", "README.md": "x"})
    with pytest.raises(DataError, match=f"{tmp_path}: no file in this directory"):
        open_corpus(tmp_path)


def test_the_standard_library_is_the_default():
    corpus = open_corpus(None)
    parts = {part for path in corpus.train for part in path.parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages"}
    assert corpus.train == open_corpus(None).train == sorted(corpus.train)
    train, valid = splits(None)
    assert sum(map(len, train)) > 1_000_000
    assert 0 < len(valid) < len(train) / 10
    names = {path.name for path in corpus.train}
    assert {"argparse.py", "dataclasses.py", "heapq.py"} <= names


def test_the_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"hf:allenai/c4:en: needs the package 'datasets'"
    ):
        splits("hf:allenai/c4")


def test_the_hub_without_a_network(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset)
    )
    with pytest.raises(DataError, match=r"hf:a/b.*no network.*no route to host"):
        splits("hf:a/b")


@pytest.mark.parametrize("validation", [True, False])
def test_the_hub_streams(monkeypatch, validation):
    rows = [{"text": "ab", "url": "x"}, {"text": "cd"}, {"url": "no text"}]
    hub = {"train": rows} | ({"validation": [{"text": "v"}]} if validation else {})
    asked = []

    def load_dataset(name, config, streaming):
        asked.append((name, config, streaming))
        return hub

    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset)
    )
    tally = Tally()
    expected = (["ab", "cd"], ["v"]) if validation else (["a", "c"], ["b", "d"])
    assert splits("hf:owner/name:cfg", tally) == expected
    assert set(asked) == {("owner/name", "cfg", True)}
    assert (tally.skipped, tally.first_skipped) == (1, "hf:owner/name:cfg:3")
    splits("hf:allenai/c4")
    assert asked[-1] == ("allenai/c4", "en", True)


def test_c4(data_dir):
    tally = Tally()
    train, valid = splits(data_dir / "c4_sample", tally)
    assert (tally.documents, tally.skipped) == (30, 0)
    assert sum(map(len, train + valid)) > 50_000
    assert not any("PROVENANCE" in text or "sha256" in text for text in train + valid)


def test_novels_keep_their_test_split_out(data_dir):
    corpus = open_corpus(data_dir / "english_novels")
    assert [path.name for path in corpus.train] == ["train.jsonl.xz"]
    assert [path.name for path in corpus.valid] == ["valid.jsonl.xz"]
