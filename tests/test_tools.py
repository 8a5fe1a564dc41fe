"""The search for a Python and the installation, on machines that are made up."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import conftest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def python(path: Path, *version: int, level: str = "final", without: str = "") -> Path:
    """This interpreter, which says that it lies at `path` and is of that version."""
    pretend = (
        f"import sys; sys.version_info = (*{version}, '{level}', 0);"
        f"sys.executable = '$0'; sys.modules.update(dict.fromkeys({[without]}));"
        "exec(sys.argv[1])"
    )
    return script(path, f'exec "{sys.executable}" -c "{pretend}" "$2"')


def shim(path: Path) -> Path:
    """What pyenv puts on the PATH for a version that is not the chosen one."""
    return script(path, "echo 'pyenv: command not found' >&2; exit 127")


@pytest.fixture
def find(tmp_path: Path):
    def find() -> subprocess.CompletedProcess:
        env = {"PATH": f"{tmp_path}/shims:{tmp_path}/bin", "HOME": f"{tmp_path}/home"}
        return subprocess.run(
            [TOOLS / "find-python"], env=env, capture_output=True, text=True
        )

    return find


def test_what_is_on_the_path_must_run_and_be_new_enough(tmp_path: Path, find):
    shim(tmp_path / "shims/python3.13")
    shim(tmp_path / "shims/python3.12")
    python(tmp_path / "bin/python3.14", 3, 14, 0, without="ensurepip")
    good = python(tmp_path / "bin/python3.12", 3, 12, 1)
    python(tmp_path / "bin/python3", 3, 11, 7)
    assert find().stdout == f"{good}\n"


def test_the_newest_on_the_path_comes_first(tmp_path: Path, find):
    python(tmp_path / "shims/python3.12", 3, 12, 1)
    python(tmp_path / "shims/python3", 3, 14, 0)
    newest = python(tmp_path / "bin/python3.13", 3, 13, 0)
    assert find().stdout == f"{newest}\n"


def test_the_default_python_may_be_the_one(tmp_path: Path, find):
    default = python(tmp_path / "bin/python3", 3, 15, 0)
    assert find().stdout == f"{default}\n"


def test_pyenv_has_one_though_the_default_is_old(tmp_path: Path, find):
    python(tmp_path / "shims/python3", 3, 11, 7)
    shim(tmp_path / "shims/python3.13")
    versions = tmp_path / "home/.pyenv/versions"
    python(versions / "3.14-dev/bin/python", 3, 14, 0, level="candidate")
    newest = python(versions / "3.13.0/bin/python", 3, 13, 0)
    python(versions / "3.12.1/bin/python", 3, 12, 1)
    python(versions / "3.9.18/bin/python", 3, 9, 18)
    assert find().stdout == f"{newest}\n"


def test_uv_has_one_or_fetches_one(tmp_path: Path, find):
    remote, local = tmp_path / "remote", tmp_path / "python3.13"
    python(remote, 3, 13, 0)
    script(
        tmp_path / "bin/uv",
        f"""case "$1 $2" in
        "python install") /bin/mv {remote} {local} ;;
        "python find") [ -e {local} ] && echo {local} ;;
        esac""",
    )
    assert find().stdout == f"{local}\n"
    assert find().stdout == f"{local}\n"  # now there is nothing to fetch


def test_none_is_one_line_that_says_what_to_install(tmp_path: Path, find):
    python(tmp_path / "bin/python3", 3, 11, 7)
    python(tmp_path / "bin/python3.13", 3, 13, 0, without="ensurepip")
    done = find()
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "Python >= 3.12" in line and "install" in line


@pytest.fixture
def checkout(tmp_path: Path):
    """A checkout whose Python notes what pip is told, in pip.log."""
    shutil.copytree(TOOLS, tmp_path / "tools")
    (tmp_path / "pyproject.toml").write_text("one")
    fake = script(
        tmp_path / "fake-python",
        """case "$2" in
        venv) for venv; do :; done; mkdir -p "$venv/bin"; cp "$0" "$venv/bin/python" ;;
        pip) [ "$3" = --version ] || { echo "$@" >>pip.log; [ ! -e offline ]; } ;;
        esac""",
    )
    script(tmp_path / "tools/find-python", f"echo {fake}")
    script(tmp_path / "bin/nvidia-smi", "exit 9")
    return tmp_path


def install(checkout: Path, *arguments: str) -> list[str]:
    """What pip was told up to now, after another `tools/venv .venv <arguments>`."""
    env = {**os.environ, "PATH": f"{checkout}/bin:{os.environ['PATH']}"}
    command = [checkout / "tools/venv", ".venv", *arguments]
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL)
    return (checkout / "pip.log").read_text().splitlines()


@pytest.mark.parametrize(
    "says, extras",
    [
        ("echo 580.95.05; echo 580.95.05", "train,cuda"),
        ("echo 1000.10", "train,cuda"),
        ("echo 570.86.10", "train,cuda12"),
        ("echo 'No devices were found'", "train"),
        ("echo 'NVIDIA-SMI has failed. Is the driver loaded?'; exit 9", "train"),
    ],
    ids=["two cards", "later driver", "older driver", "no card", "no driver"],
)
def test_cuda_is_the_one_that_the_driver_can_run(checkout: Path, says, extras):
    script(checkout / "bin/nvidia-smi", says)
    (told,) = install(checkout, "train")
    assert told.endswith(f"--editable .[{extras}]")


def test_installs_again_only_if_something_changed(checkout: Path):
    assert len(install(checkout, "dev")) == 1
    assert len(install(checkout, "dev")) == 1
    assert install(checkout, "dev", "jax==1")[1:] == [
        "-m pip install --quiet --disable-pip-version-check --no-compile "
        "--editable .[dev] jax==1"
    ]
    (checkout / "pyproject.toml").write_text("two")
    assert len(install(checkout, "dev", "jax==1")) == 3
    (checkout / ".venv/bin/python").unlink()
    assert len(install(checkout, "dev", "jax==1")) == 4


def test_an_installation_that_failed_is_tried_again(checkout: Path):
    (checkout / "offline").touch()
    assert len(install(checkout, "dev")) == 1
    assert len(install(checkout, "dev")) == 2
    (checkout / "offline").unlink()
    assert len(install(checkout, "dev")) == 3
    assert len(install(checkout, "dev")) == 3


def test_lines_to_break_are_there_once(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    for mutation in importlib.import_module("mutations").MUTATIONS:
        text = (TOOLS.parent / mutation.path).read_text()
        assert text.count(mutation.old) == 1, mutation
        if mutation.path.endswith(".py"):
            ast.parse(text.replace(mutation.old, mutation.new), mutation.what)


def test_tests_that_see_them_broken_are_there(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    for mutation in importlib.import_module("mutations").MUTATIONS:
        path, name = mutation.test.split("::")
        nodes = ast.parse((TOOLS.parent / path).read_text()).body
        name = name.partition("[")[0]
        assert name in [getattr(node, "name", None) for node in nodes], mutation


@pytest.mark.parametrize(
    ("option", "left"),
    [
        (None, ["a[1]", "a[2]", "b[1]", "c"]),
        ("one_case", ["a[1]", "b[1]", "c"]),
        ("all_cases", ["a[1]", "a[2]", "a[3]", "b[1]", "b[2]", "c"]),
    ],
)
def test_of_each_test_a_case_is_run(option, left):
    slow = {"a[3]", "b[1]", "b[2]", "c"}
    gone, items = [], []
    for name in ("a[1]", "b[1]", "a[2]", "a[3]", "b[2]", "c"):
        marker = {"slow": name} if name in slow else {}
        items.append(Mock(nodeid=name, get_closest_marker=marker.get))
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    config = SimpleNamespace(hook=hook, getoption=lambda name: name == option)
    every = list(items)
    conftest.pytest_collection_modifyitems(config, items)
    assert sorted(item.nodeid for item in items) == left
    assert [item for item in every if item not in items] == gone
