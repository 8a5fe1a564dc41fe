"""Where a row of results comes from."""

import datetime
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
