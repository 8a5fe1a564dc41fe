"""Which runs are compared; pretraining/test_folders.py has what else is there."""

import json

import pytest

import finetune_options
import pretrain_options
from folders import compared

PRETRAIN = ["--method", "exact", "--lr", "1e-3"]
FINETUNE = [*PRETRAIN, "--task", "classify", "--task-data", "x", "--weights", "y"]


@pytest.mark.parametrize(
    "options, given, change, alike",
    [
        (pretrain_options, PRETRAIN, ["--method", "compact", "--lr", "1e-2"], True),
        (pretrain_options, PRETRAIN, ["--weight-decay", "0.1"], False),
        (pretrain_options, PRETRAIN, ["--clip", "inf"], False),
        (pretrain_options, PRETRAIN, ["--warmup", "0.2"], False),
        (finetune_options, FINETUNE, ["--text-columns", "title"], False),
        (finetune_options, FINETUNE, ["--label-column", "kind"], False),
    ],
)
def test_compared_runs_differ_in_method_alone(options, given, change, alike, tmp_path):
    for name, arguments in (("own", given), ("other", [*given, *change])):
        [config] = options.parse(arguments)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config.fixed()))
    found = [folder.name for folder in compared(tmp_path / "own")]
    assert found == (["other", "own"] if alike else ["own"])
