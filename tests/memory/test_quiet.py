"""What compilers and solvers write past Python."""

import os
import subprocess
import sys

import pytest

from tests.cases import slow

WRITES = """
import ctypes, os, sys
from jaxcompact.memory.quiet import without

stream = (sys.stdout, sys.stderr)[{0} - 1]
print("before", file=stream)
with without((b"noise", b"trace"), {0}):
    os.write({0}, b"a line\\na noise\\n")
    print("another", file=stream)
    if {0} == 1:
        ctypes.CDLL(None).puts(b"a trace in C's buffer")
print("after", file=stream)
"""


@pytest.mark.parametrize("descriptor", [1, slow(2)])
def test_noise_is_left_out_and_all_else_comes(descriptor):
    code = [sys.executable, "-c", WRITES.format(descriptor)]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        code, check=True, capture_output=True, text=True, env=buffered
    )
    shown, other = (done.stdout, done.stderr)[:: 3 - 2 * descriptor]
    assert shown == "before\na line\nanother\nafter\n" and not other


def test_a_closed_stdout_stays_closed():
    code = "import os; os.close(1)\nfrom jaxcompact.memory.quiet import without\n"
    code += "with without((), 1): pass\n"
    code += "try: os.fstat(1)\nexcept OSError: raise SystemExit(7)\n"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7
