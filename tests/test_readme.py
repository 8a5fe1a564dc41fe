"""README's code runs as it stands, and its shell lines name what is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order(optax_promotion):
    assert len(blocks("python")) >= 3
    namespace = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)


def test_shell_blocks_name_make_targets_and_scripts_that_exist():
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert lines
    for line in lines:
        words = line.split("#")[0].split()
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True)
        elif words[:3] == ["python", "-m", "jaxcompact"]:
            help_ = subprocess.run(
                [sys.executable, *words[1:4], "--help"], capture_output=True, text=True
            )
            options = [word for word in words[5:] if word.startswith("--")]
            assert all(option in help_.stdout for option in options), line
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
        "architectures",
    ],
)
def test_results_hold_the_tables_that_the_benchmarks_print(script):
    command = [sys.executable, f"benchmarks/{script}.py", "table"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    table = done.stdout.decode()
    assert table.count("\n") > 3
    assert table in (ROOT / "docs" / "results.md").read_text()
