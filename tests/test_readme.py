"""README's code runs as it stands, and its shell lines name what is there."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcompact import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_python_blocks_run_in_order(optax_promotion):
    assert len(blocks("python")) >= 3
    namespace = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)


def test_shell_blocks_name_make_targets_and_scripts_that_exist(capsys):
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert lines
    for line in lines:
        words = line.split("#")[0].split()
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True)
        elif words[:3] == ["python", "-m", "jaxcompact"]:
            with pytest.raises(SystemExit, match="0"):
                cli.main([words[3], "--help"])
            options = [word for word in words[5:] if word.startswith("--")]
            help_ = capsys.readouterr().out
            assert options and all(option in help_ for option in options), line
        else:
            assert words[0] == "python" and (ROOT / words[1]).is_file(), line


def test_training_options_in_the_readme_are_understood():
    import finetune_options
    import pretrain_options

    parsed = {
        "train/pretrain.py": pretrain_options.parse,
        "train/finetune.py": finetune_options.parse,
    }
    seen = set()
    for line in "\n".join(blocks("sh")).splitlines():
        words = line.split("#")[0].split()
        if len(words) > 3 and words[1] in parsed:
            assert parsed[words[1]](words[2:])
            seen.add(words[1])
    assert seen == set(parsed)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


@pytest.mark.parametrize(
    "script",
    [
        "pretraining",
        "checkpointing",
        "memory",
        "models",
        "plans",
        "finetuning",
        "functions",
        "architectures",
        "collectives",
        "traffic",
    ],
)
def test_results_hold_the_tables_that_the_benchmarks_print(script, monkeypatch, capsys):
    file = str(ROOT / "benchmarks" / f"{script}.py")
    monkeypatch.setattr(sys, "argv", [file, "table"])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    runpy.run_path(file, run_name="__main__")
    table = capsys.readouterr().out
    assert table.count("\n") > 3
    assert table in (ROOT / "docs" / "results.md").read_text()
