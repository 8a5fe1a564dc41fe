"""Files in the exact forms of GLUE's, made small; and what is refused."""

import gzip
import lzma

import pytest

from readers import DataError
from tasks import TASKS, Example, own_task, read_task
from tests.train.task_files import write

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
