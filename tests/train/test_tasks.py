"""Files in the exact forms of GLUE's, made small; one's own; and what is refused."""

import gzip
import json
import lzma
import re
from pathlib import Path

import pytest

import finetune_options
from readers import DataError
from tasks import TASKS, Example, own_task, read_task

MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1"
)
STSB = (
    "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\t"
    "score"
)
MNLI_DEV = f"{MNLI}\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label"
PARSES = "( a b )\t( c d )\t(ROOT (a))\t(ROOT (c))"
# Task -> file -> its text, as GLUE's own begin.
FILES = {
    "cola": {  # no header; the mark stands where the label is 0
        "train": "gj04\t1\t\tOne more idea.\ngj04\t0\t*\tThey drank.\n",
        "dev": "clc95\t1\t\tThe sailors rode the breeze.\n",
    },
    "sst2": {
        "train": 'sentence\tlabel\nhide new " secretions \t0\na depth . \t1\n',
        "dev": "sentence\tlabel\nit 's charming . \t1\n",
    },
    "mrpc": {  # begins with a byte order mark
        "train": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
        '1\t702876\t702977\tHe called him " a witness " .\tHe did , he said .\r\n',
        "dev": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\tHe\tNot he\n",
    },
    "stsb": {
        "train": f"{STSB}\n0\tmain\tMSRvid\t2012\t0001\tnone\tnone\tA plane is taking "
        "off.\tAn air plane is taking off.\t5.000\n",
        "dev": f"{STSB}\n0\tmain\tMSRvid\t2012\t0\tnone\tnone\tA man.\tMen.\t2.75\n",
    },
    "qqp": {
        "train": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        '133273\t213221\t213222\tHow is "it"?\tWhat is it?\t1\n',
        "dev": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n5\t6\t7\tA\tB\t0\n",
    },
    "mnli": {
        "train": f"{MNLI}\tgold_label\n0\t31193\t31193n\ttravel\t{PARSES}\tIt is "
        "of it.\tOf two.\tneutral\tneutral\n",
        "dev_matched": f"{MNLI_DEV}\n0\t6\t6e\t"
        f"slate\t{PARSES}\tNew\tOld\tentailment\tneutral\tneutral\tneutral\tneutral\t"
        "contradiction\n",
        "dev_mismatched": f"{MNLI_DEV}\n0\t7\t7e\t"
        f"letters\t{PARSES}\tYour gift\tA gift\tneutral\tneutral\tneutral\tneutral\t"
        "neutral\tentailment\n",
    },
    "qnli": {
        "train": "index\tquestion\tsentence\tlabel\n0\tWhen did it begin?\tIn 1829.\t"
        "not_entailment\n",
        "dev": "index\tquestion\tsentence\tlabel\n0\tWhat?\tThat.\tentailment\n",
    },
    "rte": {
        "train": "index\tsentence1\tsentence2\tlabel\n0\tNo weapons.\tWeapons.\t"
        "not_entailment\n",
        "dev": "index\tsentence1\tsentence2\tlabel\n0\tD. Reeve.\tReeve.\tentailment\n",
    },
}
READ = {  # task -> first training example, last held-out one
    "cola": (
        Example(("One more idea.",), 1),
        Example(("The sailors rode the breeze.",), 1),
    ),
    "sst2": (
        Example(('hide new " secretions ',), 0),
        Example(("it 's charming . ",), 1),
    ),
    "mrpc": (
        Example(('He called him " a witness " .', "He did , he said ."), 1),
        Example(("He", "Not he"), 0),
    ),
    "stsb": (
        Example(("A plane is taking off.", "An air plane is taking off."), 5.0),
        Example(("A man.", "Men."), 2.75),
    ),
    "qqp": (
        Example(('How is "it"?', "What is it?"), 1),
        Example(("A", "B"), 0),
    ),
    "mnli": (
        Example(("It is of it.", "Of two."), 2),
        Example(("Your gift", "A gift"), 1),
    ),
    "qnli": (
        Example(("When did it begin?", "In 1829."), 1),
        Example(("What?", "That."), 0),
    ),
    "rte": (
        Example(("No weapons.", "Weapons."), 1),
        Example(("D. Reeve.", "Reeve."), 0),
    ),
}


def write(folder, files, suffix=".tsv"):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}{suffix}").write_bytes(text.encode())
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_glues_own_files_are_read(name, tmp_path):
    splits = read_task(TASKS[name], write(tmp_path / "task", FILES[name]))
    held_out = [example for examples in splits.dev.values() for example in examples]
    assert (splits.train[0], held_out[-1]) == READ[name]
    assert not splits.broken
    rating = isinstance(splits.train[0].target, float)
    assert splits.task.outputs == (1 if rating else len(splits.task.labels))
    assert rating == (name == "stsb")


def test_cola_has_no_header_to_lose(tmp_path):
    splits = read_task(TASKS["cola"], write(tmp_path, FILES["cola"]))
    assert splits.train[1] == Example(("They drank.",), 0)


def test_mnli_has_two_held_out_sets(tmp_path):
    splits = read_task(TASKS["mnli"], write(tmp_path, FILES["mnli"]))
    assert list(splits.dev) == ["dev_matched", "dev_mismatched"]
    assert splits.dev["dev_matched"] == [Example(("New", "Old"), 0)]
    (tmp_path / "dev_mismatched.tsv").unlink()
    with pytest.raises(DataError, match=f"{tmp_path}: no dev_mismatched.tsv"):
        read_task(TASKS["mnli"], tmp_path)


@pytest.mark.parametrize(
    "suffix, compress", [(".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_compressed_files_are_read(suffix, compress, tmp_path):
    for name, text in FILES["rte"].items():
        (tmp_path / f"{name}.tsv{suffix}").write_bytes(compress(text.encode()))
    assert read_task(TASKS["rte"], tmp_path).train[0] == READ["rte"][0]


def test_a_text_may_hold_what_looks_like_a_line_end(tmp_path):
    odd = "a\u2028b\x0bc\rd"
    text = f"sentence\tlabel\n{odd}\t1\nlast\t0"
    splits = read_task(TASKS["sst2"], write(tmp_path, {"train": text, "dev": text}))
    assert splits.train == [Example((odd,), 1), Example(("last",), 0)]


def test_qqps_broken_lines_are_counted_and_left_out(tmp_path):
    files = FILES["qqp"] | {
        "train": FILES["qqp"]["train"] + "1\t2\t3\tWhy\nnot?\tB\t0\n"
    }
    splits = read_task(TASKS["qqp"], write(tmp_path, files))
    train = tmp_path / "train.tsv"
    assert splits.broken == [f"{train}:3", f"{train}:4"]
    assert "2 lines left out that lack columns" in str(splits)
    assert f"{train}:3" in str(splits)
    assert len(splits.train) == 1


@pytest.mark.parametrize(
    "name, line, told",
    [
        ("rte", "1\tonly this\n", r"train.tsv:3: the line has no column 'sentence2'"),
        (
            "rte",
            "1\ta\tb\tmaybe\n",
            r"train.tsv:3: label .* of entailment, .*'maybe'",
        ),
        ("cola", "gj04\t2\t\tTwo.\n", r"train.tsv:3: label must be one of 0, 1; '2'"),
        ("cola", "gj04\t1\n", r"train.tsv:3: the line has no column 'sentence'"),
        (
            "stsb",
            "\t".join(["1"] * 9) + "\thigh\n",
            r"train.tsv:3: score must be a finite number in float32; 'high'",
        ),
        (
            "stsb",
            "\t".join(["1"] * 9) + "\t1_0\n",
            r"train.tsv:3: score must be a finite number in float32; '1_0'",
        ),
    ],
)
def test_a_bad_line_is_named(name, line, told, tmp_path):
    files = FILES[name] | {"train": FILES[name]["train"] + line}
    with pytest.raises(DataError, match=told):
        read_task(TASKS[name], write(tmp_path, files))


@pytest.mark.parametrize(
    "files, told",
    [
        ({"train": FILES["qnli"]["train"]}, "no dev.tsv"),
        ({"dev": FILES["qnli"]["dev"]}, "no train.tsv"),
        (FILES["rte"], "train.tsv:1: no column 'question', .* has index, "),
        (
            FILES["qnli"] | {"dev": "index\tquestion\tsentence\tlabel\n"},
            "no example in dev",
        ),
    ],
)
def test_folders_that_hold_another_task(files, told, tmp_path):
    with pytest.raises(DataError, match=told):
        read_task(TASKS["qnli"], write(tmp_path, files))


def test_a_folder_that_is_not_there_or_a_file(tmp_path):
    for task in (TASKS["rte"], own_task("text", "label", "classify")):
        with pytest.raises(DataError, match=f"data must exist, got {tmp_path / 'RTE'}"):
            read_task(task, tmp_path / "RTE")
    (tmp_path / "RTE").write_text("")
    with pytest.raises(DataError, match=f"must be a folder .* {tmp_path / 'RTE'}"):
        read_task(TASKS["rte"], tmp_path / "RTE")


# --- one's own -------------------------------------------------------------------


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


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


# --- published sets, by README's own command lines -------------------------------

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
LINES = re.findall(r"^python train/finetune.py (.*--task-data data/.*)", README, re.M)
SETS = {  # name -> examples of train, of what is held out, outputs
    "banking77": (10003, {"test": 3080}, 77),
    "clinc150": (15100, {"val": 3100}, 151),
    "goemotions": (43410, {"dev": 5426}, 28),
    "query_wellformedness": (17500, {"dev": 3750}, 1),
}


def published(name, data_dir):
    """(task, where it is), by README."""
    (line,) = (line for line in LINES if f"data/{name}" in line)
    (config,) = finetune_options.parse([*line.split(), "--method", "exact"])
    path = data_dir / config.task.task_data.relative_to("data")
    return config.task.described, path if path.exists() else Path(f"{path}.xz")


def test_readme_has_a_line_for_each_set():
    assert len(LINES) == len(SETS) + 1


@pytest.mark.parametrize("name", SETS)
def test_published_sets_are_read(name, data_dir):
    splits = read_task(*published(name, data_dir))
    dev = {split: len(examples) for split, examples in splits.dev.items()}
    assert (len(splits.train), dev, splits.task.outputs) == SETS[name]
    if name == "goemotions":
        assert splits.task.labels == tuple(map(str, range(28)))
        several = [len(example.target) > 1 for example in splits.train]
        assert sum(several) == 7102
    if name == "clinc150":
        assert "oos" in splits.task.labels


def test_qnli_is_read_from_its_file_and_from_a_folder(data_dir, tmp_path):
    task, path = published("qnli_dev", data_dir)
    splits = read_task(task, path)
    assert len(splits.train) + len(splits.dev["dev"]) == 5463
    for name in ("train", "dev"):
        source = path.with_name(f"split_{name}.tsv.xz")
        (tmp_path / f"{name}.tsv.xz").symlink_to(source)
    folder = read_task(TASKS["qnli"], tmp_path)
    assert (len(folder.train), len(folder.dev["dev"])) == (4443, 1020)
    assert folder.task.labels == splits.task.labels
