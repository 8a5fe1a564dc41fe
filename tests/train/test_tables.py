"""Splits in one JSON file, in the form of CLINC150's; test_tasks.py has the others."""

import json

import pytest

from readers import DataError
from tables import read_splits
from tasks import Example, own_task, read_task

PAIRS = own_task("1", "2", "classify")
CLINC = {
    "oos_val": [["why?", "oos"]],
    "val": [["say hi in french", "translate"]],
    "train": [["what is hi", "translate"], ["pay it", "pay"]],
    "test": [["not read", "never seen"]],
    "oos_train": [["how so?", "oos"]],
}


def write(path, text):
    path.write_text(text if isinstance(text, str) else json.dumps(text, indent=4))
    return path


def test_splits_and_what_is_named_after_them(tmp_path):
    splits = read_task(PAIRS, write(tmp_path / "data.json", CLINC))
    assert splits.task.labels == ("oos", "pay", "translate")
    texts = [(example.texts[0], example.target) for example in splits.train]
    assert texts == [("what is hi", 2), ("pay it", 1), ("how so?", 0)]
    said = [Example(("why?",), 0), Example(("say hi in french",), 2)]
    assert splits.dev == {"val": said}


def test_columns_of_pairs_and_lists_of_classes(tmp_path):
    rows = [["x", "a", "b", ["p", "q"]], ["y", "c", "d", []]]
    path = write(tmp_path / "data.json", {"train": rows, "dev": rows})
    splits = read_task(own_task("2,3", "4", "tag"), path)
    assert splits.train == [Example(("a", "b"), (0, 1)), Example(("c", "d"), ())]


def test_train_alone_is_cut(tmp_path):
    rows = [[f"text {i}", "pq"[i % 2]] for i in range(100)]
    splits = read_task(PAIRS, write(tmp_path / "data.json", {"train": rows}))
    assert len(splits.train) + len(splits.dev["dev"]) == 100
    assert splits.dev["dev"]


def test_lines_of_json_are_no_splits(tmp_path):
    lines = '\n{"text": "a", "label": ["x", "y"]}\n{"text": "b", "label": []}\n'
    rows = list(read_splits(write(tmp_path / "lines.json", lines), None)["train"])
    assert [place.rpartition(":")[2] for place, _ in rows] == ["2", "3"]
    assert rows[1][1] == {"text": "b", "label": []}


@pytest.mark.parametrize(
    "content, told",
    [
        ('{"train": [\n["a", "b"],\n["c" "d"]\n]}', r"data.json:3: no JSON"),
        ('{"train": [["a", "b"]]}\n{}', "data.json:1: the line has no column '1'"),
        (
            {"train": [["a", "b"], "c"]},
            "data.json:train:2: a row must .* list, got 'c'",
        ),
        ({"train": [["a"]]}, "data.json:train:1: the line has no column '2'"),
        ({"training": [["a", "b"]]}, "no train among its splits, training"),
        ({"train": [["a", "b"], ["c", "d"]], "val": []}, "no example in val"),
        (CLINC | {"val": [["a", "x"]]}, "data.json:val:1: 2 must be one of .*; 'x'"),
    ],
)
def test_files_that_do_not_fit(content, told, tmp_path):
    with pytest.raises(DataError, match=told):
        read_task(PAIRS, write(tmp_path / "data.json", content))


def test_rows_without_names_need_numbers(tmp_path):
    path = write(tmp_path / "data.json", CLINC)
    with pytest.raises(DataError, match="data.json: .* --label-column must be numbers"):
        read_task(own_task("text", "label", "classify"), path)
