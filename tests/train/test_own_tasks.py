"""Files of one's own: a class a text, several, or a rating; and what is refused."""

import json

import pytest

from readers import DataError
from tasks import Example, own_task, read_task
from tests.train.task_files import lines, write


def test_own_files_of_each_form_are_alike(tmp_path):
    rows = [("what, now?", "ask"), ('say "it"', "tell")]
    csv = 'text,label\n"what, now?",ask\n"say ""it""",tell\n'
    tsv = "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)
    bare = "".join(f"{label}\t{text}\n" for text, label in rows)
    records = lines(*({"label": label, "text": text} for text, label in rows))
    named, numbered = (
        own_task("text", "label", "classify"),
        own_task("2", "1", "classify"),
    )
    for task, suffix, text in (
        (named, ".csv", csv),
        (named, ".tsv", tsv),
        (named, ".jsonl", records),
        (numbered, ".tsv", bare),
    ):
        folder = write(tmp_path / suffix[1:], {"train": text, "valid": text}, suffix)
        splits = read_task(task, folder)
        assert splits.train == [Example((rows[0][0],), 0), Example((rows[1][0],), 1)]
        assert splits.task.labels == ("ask", "tell")
        assert splits.dev == {"valid": splits.train}


def test_own_pairs_and_ratings(tmp_path):
    path = tmp_path / "all.jsonl"
    path.write_text(lines(*({"a": f"x{i}", "b": "y", "r": i / 4} for i in range(100))))
    splits = read_task(own_task("a,b", "r", "rate"), path)
    assert splits.train[0] == Example(("x0", "y"), 0.0)
    assert splits.task.labels == () and splits.task.outputs == 1
    # A tenth by a hash of the content: four standard deviations of 100 draws is 12.
    assert 1 <= len(splits.dev["dev"]) <= 22
    assert len(splits.train) + len(splits.dev["dev"]) == 100
    assert read_task(own_task("a,b", "r", "rate"), path).dev == splits.dev


@pytest.mark.parametrize(
    "suffix, text, told",
    [
        (".jsonl", '{"text": "a", "label": "b"}\n{"text"\n', "train.jsonl:2: no JSON"),
        (".jsonl", '["a", "b"]\n', "train.jsonl:1: not an object"),
        (".jsonl", '{"text": "a"}\n', "train.jsonl:1: .* no column 'label'"),
        (
            ".tsv",
            "text\tkind\na\tb\n",
            "train.tsv:1: no column 'label', the header has text, kind",
        ),
        (
            ".tsv",
            "text\tlabel\tlabel\na\tb\tc\n",
            "train.tsv:1: the header has 'label' more than once",
        ),
        (
            ".tsv",
            "text\tlabel\ra\tb\rc\td\r",
            r"train.tsv:1: lines must end with .n, this has .r within$",
        ),
        (
            ".jsonl",
            '{"text": "a\\ud83d", "label": "b"}',
            r"train.jsonl:1: text must .* half a surrogate, '\\ud83d'",
        ),
        (
            ".jsonl",
            '{"text": "a", "label": "\\ude00"}',
            r"train.jsonl:1: label must .* half a surrogate, '\\ude00'",
        ),
        (".csv", "text,label\na,b\nc,b\n", r"two or more, train has \['b'\]"),
        (  # rows with names, as R writes them
            ".tsv",
            "text\tlabel\n1\ta\tb\n2\tc\td\n",
            "train.tsv:2: the line has more columns than the header; 'b'",
        ),
        (
            ".tsv",
            "text\tlabel\na\tb\t\nwith a\ttab\tb\n",
            "train.tsv:3: the line has more columns than the header; 'b'",
        ),
        (
            ".jsonl",
            '{"text": "a", "label": "b"}\n{"text": "c", "label": NaN}\n',
            "train.jsonl:2: label must be a text or a number; nan",
        ),
    ],
)
def test_own_files_that_do_not_fit(suffix, text, told, tmp_path):
    write(tmp_path, {"train": text, "dev": text}, suffix)
    with pytest.raises(DataError, match=told):
        read_task(own_task("text", "label", "classify"), tmp_path)


def test_a_class_that_training_never_shows(tmp_path):
    head = "text\tlabel\n"
    write(tmp_path, {"train": f"{head}a\tx\nb\ty\n", "dev": f"{head}c\tz\n"})
    with pytest.raises(DataError, match=r"dev.tsv:2: label must be one of x, y; 'z'"):
        read_task(own_task("text", "label", "classify"), tmp_path)


@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_a_class_that_the_split_here_leaves_to_dev_alone(kind, tmp_path):
    """Each of 100 classes occurs once: of some the only example is held out."""
    (tmp_path / "all.tsv").write_text("".join(f"text {i}\tc{i}\n" for i in range(100)))
    splits = read_task(own_task("1", "2", kind), tmp_path / "all.tsv")
    assert splits.dev["dev"]
    assert splits.task.labels == tuple(sorted(f"c{i}" for i in range(100)))


def test_a_class_may_be_a_long_number(tmp_path):
    long = "7" * 5000
    write(tmp_path, {"train": f"text\tlabel\na\t{long}\nb\t10\nc\t9\nd\tx\n"})
    (tmp_path / "dev.tsv").write_text("text\tlabel\na\tx\n")
    labels = read_task(own_task("text", "label", "classify"), tmp_path).task.labels
    assert labels == ("9", "10", long, "x")


def test_a_whole_number_is_one_class_however_json_writes_it(tmp_path):
    labels = enumerate(20 * (1, 1.0, "1", 2.0, 0.5))
    rows = [{"text": f"text {i}", "label": x} for i, x in labels]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    task = own_task("text", "label", "classify")
    assert read_task(task, tmp_path / "all.jsonl").task.labels == ("1", "2", "0.5")


@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_a_header_is_no_example_of_numbered_columns(kind, tmp_path):
    path, task = tmp_path / "all.csv", own_task("1", "2", kind)
    rows = [f"text {i},{'xy'[i % 2]}\n" for i in range(19)]
    path.write_text("".join(["text,kind\n", *rows]))
    told = "all.csv:1: --text-columns and --label-column must be names .* 'kind', is of"
    with pytest.raises(DataError, match=told):
        read_task(task, path)
    path.write_text("".join([*rows, "text,kind\n"]))  # whatever it is, no header
    assert read_task(task, path).task.labels == ("kind", "x", "y")
    path.write_text("".join(["text,kind\n", *rows[:8]]))  # too few to tell
    assert read_task(task, path).task.labels == ("kind", "x", "y")


@pytest.mark.parametrize("texts", ["", "a,,b", "a,b,c", "1"])
def test_columns_that_cannot_be(texts):
    with pytest.raises(DataError, match="--text-columns"):
        own_task(texts, "label", "classify")


def test_a_column_of_a_large_number(tmp_path):
    """No name is made for what no row has."""
    write(tmp_path, {"train": "a\tx\n", "dev": "b\ty\n"})
    with pytest.raises(DataError, match="train.tsv:1: the line has no column '10000"):
        read_task(own_task("1", str(10**12), "classify"), tmp_path)


# --- several classes a text ------------------------------------------------------


def test_several_classes_in_every_form(tmp_path):
    rows = [("a", ["10", "9"]), ("b", []), ("c", ["joy"])]
    targets = [(1, 0), (), (2,)]
    tsv = "".join(f"{text}\t{','.join(names)}\tid\n" for text, names in rows)
    csv = "text,label\n" + "".join(f'{t},"{", ".join(n)}"\n' for t, n in rows)
    lists = lines(*({"text": text, "label": names} for text, names in rows))
    for suffix, columns, text in (
        (".tsv", ("1", "2"), tsv),  # GoEmotions' own
        (".csv", ("text", "label"), csv),
        (".jsonl", ("text", "label"), lists),
    ):
        folder = write(tmp_path / suffix[1:], {"train": text, "dev": text}, suffix)
        splits = read_task(own_task(*columns, "tag"), folder)
        assert splits.task.labels == ("9", "10", "joy")  # numbers by their value
        assert [example.target for example in splits.train] == targets
        assert splits.dev["dev"] == splits.train
        assert splits.task.outputs == 3
        assert splits.task.scores == ("macro_f1", "micro_f1")


def test_a_class_in_a_list_may_have_a_comma(tmp_path):
    text = lines({"text": "a", "label": ["x, y", 3]})
    write(tmp_path, {"train": text, "dev": text}, ".jsonl")
    splits = read_task(own_task("text", "label", "tag"), tmp_path)
    assert splits.task.labels == ("3", "x, y")
    assert splits.train[0].target == (1, 0)


@pytest.mark.parametrize(
    "kind, text, told",
    [
        ("tag", "a\tx,y\nb\n", "train.tsv:2: the line has no column '2'"),
        ("tag", "a\t\nb\t\n", r"classes must be two or more, train has \[\]"),
        ("tag", "a\tx,y\nb\ty", r"dev.tsv:1: 2 must be one of x, y; 'z'"),
    ],
)
def test_several_classes_that_do_not_fit(kind, text, told, tmp_path):
    write(tmp_path, {"train": text, "dev": "c\tx,z\n"})
    with pytest.raises(DataError, match=told):
        read_task(own_task("1", "2", kind), tmp_path)


@pytest.mark.parametrize("kind", ["classify", "rate"])
def test_lists_are_of_several_classes_alone(kind, tmp_path):
    text = lines({"text": "a", "label": ["x"]})
    write(tmp_path, {"train": text, "dev": text}, ".jsonl")
    with pytest.raises(DataError, match=r"jsonl:1: label must not .* tag; \['x'\]"):
        read_task(own_task("text", "label", kind), tmp_path)


def test_spaces_around_a_class_are_no_part_of_it(tmp_path):
    text = "a\tneg \nb\tneg\nc\t pos\n"
    write(tmp_path, {"train": text, "dev": text})
    splits = read_task(own_task("1", "2", "classify"), tmp_path)
    assert splits.task.labels == ("neg", "pos")
    assert [example.target for example in splits.train] == [0, 0, 1]


@pytest.mark.parametrize("kind", ["classify", "rate"])
def test_an_empty_label_is_refused(kind, tmp_path):
    write(tmp_path, {"train": "a\t1\nb\t \n", "dev": "a\t1\n"})
    with pytest.raises(DataError, match=r"train.tsv:2: 2 must not be empty; ' '"):
        read_task(own_task("1", "2", kind), tmp_path)


@pytest.mark.parametrize(
    "rating", ["nan", "inf", "-inf", "1e39", float("nan"), float("inf"), 10**40, True]
)
def test_ratings_are_finite_in_float32(rating, tmp_path):
    text = lines({"text": "a", "label": 3.4e38}, {"text": "b", "label": rating})
    write(tmp_path, {"train": text, "dev": text}, ".jsonl")
    told = rf"jsonl:2: label must be a finite number in float32; '{rating}'"
    with pytest.raises(DataError, match=told):
        read_task(own_task("text", "label", "rate"), tmp_path)


@pytest.mark.parametrize(
    "kind, record, told",
    [
        ("classify", {"text": ["b"], "label": "y"}, r"text must be a text .*; \['b'\]"),
        ("rate", {"text": {"b": 1}, "label": 1}, r"text must be a text .*; {'b': 1}"),
        ("classify", {"text": "b", "label": {"y": 1}}, r"label must .*; {'y': 1}"),
        ("tag", {"text": "b", "label": {"y": 1}}, r"label must be a text .*; {'y': 1}"),
        ("tag", {"text": "b", "label": ["x", ["y"]]}, r"label must .*; \['y'\]"),
        ("tag", {"text": "b", "label": ["x", None]}, "label must be .*; None"),
    ],
)
def test_lists_and_objects_are_no_texts_nor_labels(kind, record, told, tmp_path):
    text = lines({"text": "a", "label": "1"}, record)
    write(tmp_path, {"train": text, "dev": text}, ".jsonl")
    with pytest.raises(DataError, match=f"train.jsonl:2: {told}"):
        read_task(own_task("text", "label", kind), tmp_path)
