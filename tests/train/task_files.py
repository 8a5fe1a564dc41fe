"""Files of a task, written to a folder."""

import json


def write(folder, files, suffix=".tsv"):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}{suffix}").write_bytes(text.encode())
    return folder


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)
