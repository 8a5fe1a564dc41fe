"""Rows of results: where one comes from, and the files that keep them."""

import datetime
import json
import os
import subprocess
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent


def provenance() -> dict:
    """Card, versions, commit and date: what a figure is worth nothing without."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": os.environ.get("COMMIT") or commit or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def rows_of(file: Path) -> list[dict]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def append(file: Path, row: dict) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
