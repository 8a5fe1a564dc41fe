"""Published sets, read by README's own command lines."""

import re
from pathlib import Path

import pytest

import finetune_options
from tasks import TASKS, read_task

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
