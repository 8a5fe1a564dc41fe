"""What the compiler makes of kernels, for a card that need not be here."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from jaxcompact.memory.cards import find_device
from jaxcompact.memory.compiler import lower, not_kept


def compiled(fun: Callable, *args: jax.ShapeDtypeStruct, card: str = "h200") -> str:
    """The optimized program's text."""
    with not_kept():
        return lower(fun, args, find_device(card), None, None).compile().as_text()


def kernels_in(text: str) -> int:
    return len(re.findall(r"custom_call_target=\"mosaic_gpu", text))


def resources(fun: Callable, *args: jax.ShapeDtypeStruct) -> list[tuple[int, int]]:
    """Registers of a thread and bytes spilled, of each kernel in the program."""
    return list(map(_assembled, assembly(fun, *args)))


def assembly(fun: Callable, *args: jax.ShapeDtypeStruct) -> list[str]:
    """PTX of each kernel in the program that this process has not compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            compiled(fun, *args)
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        return [file.read_text() for file in sorted(Path(folder).glob("*.ptx"))]


def _assembled(ptx: str) -> tuple[int, int]:
    said = subprocess.run(
        [_ptxas(), "-v", "-arch=sm_90a", "-", "-o", os.devnull],
        input=ptx,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    registers = re.search(r"Used (\d+) registers", said)[1]
    spilled = re.search(r"(\d+) bytes spill stores", said)[1]
    return int(registers), int(spilled)


def _ptxas() -> Path:
    """The one that jax's plugin compiles with."""
    found = (Path(p) / "nvidia" for p in sys.path)
    return next(p for folder in found for p in folder.glob("*/bin/ptxas"))
