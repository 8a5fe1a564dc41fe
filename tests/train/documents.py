"""A file of documents, which tokens are made of."""

import json
from pathlib import Path


def write_source(path: Path, documents: int = 60) -> Path:
    lines = [json.dumps({"text": f"Document {i}: größer 🐍"}) for i in range(documents)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
