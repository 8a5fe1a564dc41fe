"""Files that are kept from one run to the next, and how they are written."""

import os
from pathlib import Path


def cache_folder(of: str) -> Path:
    home = os.environ.get("JAXCOMPACT_CACHE") or Path.home() / ".cache" / "jaxcompact"
    return Path(home) / of


def write_whole(path: str | Path, text: str) -> None:
    """The whole file or none of it, whoever else writes it. Raises OSError."""
    part = Path(f"{path}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
