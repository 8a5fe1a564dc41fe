"""What a program of train/ says before it does anything."""

from pathlib import Path
from types import ModuleType


def refused_by(program: ModuleType, capsys, arguments: list[str]) -> str:
    """The error, which comes with exit code 2 and before any training."""
    try:
        code = program.main(arguments)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert "compiled" not in captured.out
    error = captured.err.splitlines()[-1]
    assert error.startswith(f"{Path(program.__file__).name}: error: ")
    return error
