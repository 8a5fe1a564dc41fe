"""CSV, and splits in one JSON file, as CLINC150's; test_own_tasks.py has the others."""

import csv
import json

import pytest

from readers import DataError
from tables import read_splits, read_table
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


@pytest.mark.parametrize(
    "names, read",
    [
        (["eval"], "eval"),
        (["validation_matched", "validation_mismatched", "test"], "validation"),
        (["test.clean", "Dev.clean", "dev-other"], "dev"),
    ],
)
def test_held_out_splits_have_their_word_anywhere(names, read, tmp_path):
    held_out = {name: [[f"of {name}", "p"]] for name in names}
    rows = [[f"text {i}", "pq"[i % 2]] for i in range(100)]
    data = write(tmp_path / "data.json", {"train": rows} | held_out)
    splits = read_task(PAIRS, data)
    taken = [Example((f"of {n}",), 0) for n in names if n.lower().startswith(read)]
    assert len(splits.train) == 100
    assert splits.dev == {read: taken}


@pytest.mark.parametrize("count", [2, 4, 9, 20, 100])
def test_train_alone_is_cut(count, tmp_path):
    """Of a few, by their texts' hashes, none may be the one in ten."""
    rows = [[f"text {i}", "pq"[i % 2]] for i in range(count)]
    splits = read_task(PAIRS, write(tmp_path / "data.json", {"train": rows}))
    assert len(splits.train) + len(splits.dev["dev"]) == count
    assert splits.train and splits.dev["dev"]


def test_one_text_alone_can_not_be_cut(tmp_path):
    data = write(tmp_path / "data.json", {"train": [["same", "p"], ["same", "q"]]})
    with pytest.raises(DataError, match="two different texts, .* got one, 2 times"):
        read_task(PAIRS, data)


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
            "data.json:train:2: a row must be a list .* are numbers, got 'c'",
        ),
        ("[" * 100_000, "data.json: no JSON .maximum recursion"),
        ('{"train": [[' + "9" * 5000 + "]]}", "data.json: no JSON .Exceeds the limit"),
        ({"train": [["a"]]}, "data.json:train:1: the line has no column '2'"),
        ({"training": [["a", "b"]]}, "no train among its splits, training"),
        (
            {"train": [["a", "b"]] * 50, "holdout": [["c", "d"]]},
            "data.json: no held-out split among train, holdout: one must have one of "
            "dev, valid, validation, val, eval, test as a word of its name",
        ),
        ({"train": [["a", "b"], ["c", "d"]], "val": []}, "no example in val"),
        (CLINC | {"val": [["a", "x"]]}, "data.json:val:1: 2 must be one of .*; 'x'"),
    ],
)
def test_files_that_do_not_fit(content, told, tmp_path):
    with pytest.raises(DataError, match=told):
        read_task(PAIRS, write(tmp_path / "data.json", content))


def test_lines_of_json_that_are_too_deep(tmp_path):
    path = write(tmp_path / "data.jsonl", '{"a": 1}\n' + "[" * 100_000)
    with pytest.raises(DataError, match="data.jsonl:2: no JSON .maximum recursion"):
        list(read_table(path, None))


def test_rows_may_have_names(tmp_path):
    rows = [{"text": text, "label": label} for text, label in CLINC["train"]]
    path = write(tmp_path / "data.json", {"train": rows, "dev": rows[:1]})
    splits = read_task(own_task("text", "label", "classify"), path)
    assert splits.train == [Example(("what is hi",), 1), Example(("pay it",), 0)]
    assert splits.dev == {"dev": splits.train[:1]}


def test_rows_without_names_need_numbers_and_rows_with_names_need_names(tmp_path):
    path = write(tmp_path / "data.json", CLINC)
    told = "data.json:oos_val:1: a row must be an object .* are names, got .'why"
    with pytest.raises(DataError, match=told):
        read_task(own_task("text", "label", "classify"), path)
    path = write(tmp_path / "data.json", {"train": [{"text": "a", "label": "b"}]})
    told = "data.json:train:1: a row must be a list .* are numbers, got {'text'"
    with pytest.raises(DataError, match=told):
        read_task(PAIRS, path)


# --- CSV -------------------------------------------------------------------------


def test_a_row_of_csv_is_placed_where_it_begins(tmp_path):
    text = 'text,label\n"a\nb",x\n\nc,"y"\n'
    path = write(tmp_path / "data.csv", text)
    assert list(read_table(path, None)) == [
        (f"{path}:2", {"text": "a\nb", "label": "x"}),
        (f"{path}:5", {"text": "c", "label": "y"}),
    ]


def test_a_long_text_of_csv_is_read_and_the_limit_is_as_before(tmp_path):
    limit, text = csv.field_size_limit(), "a" * (csv.field_size_limit() + 1)
    path = write(tmp_path / "data.csv", f"text,label\n{text},x\n")
    assert [row["text"] for _, row in read_table(path, None)] == [text]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    "rows, told",
    [
        ('a,x\n"b,y\nc,z\n', "data.csv:3: a quotation mark is left open"),
        ('a,x\n"b,y\n"c",z\n', "data.csv:3: a quotation mark is left open"),
        ('a,"x" y\n', "data.csv:2: .* or text follows it"),
        ('a,x\n"b,y\nc,"\n', "data.csv:3: .* as the first, 2, got 1"),
        ("a,x\nb,and c,y\n", "data.csv:3: .* as the first, 2, got 3"),
    ],
)
def test_rows_of_csv_that_are_not_whole(rows, told, tmp_path):
    path = write(tmp_path / "data.csv", f"text,label\n{rows}")
    with pytest.raises(DataError, match=told):
        list(read_table(path, None))


def test_suffixes_are_read_in_any_case(tmp_path):
    path = write(tmp_path / "MINE.CSV", "text,label\nhi there,1\n")
    rows = [row for _, row in read_table(path, None)]
    assert rows == [{"text": "hi there", "label": "1"}]
