"""Each test compiles by itself, with no cache that others have filled."""

import pytest

from jaxcompact.memory import compiler


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "memory"


@pytest.fixture
def compiles(monkeypatch):
    """How many programs were compiled."""
    done = []
    compile_lowered = compiler.compile_lowered

    def counted(lowered, device):
        done.append(device.name)
        return compile_lowered(lowered, device)

    monkeypatch.setattr(compiler, "compile_lowered", counted)
    return done
