"""One line of JSON per finished run, on disk the moment the run ends."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any


class Journal:
    """The rows of a comparison, by their identity; in memory where `path` is None.

    A line that a killed process left unfinished is dropped when the file is opened.
    Finished lines are never written again.
    """

    def __init__(self, path: str | os.PathLike | None = None):
        self.path = None if path is None else Path(path)
        self.rows: dict[str, dict] = {}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                for row in _mended(self.path):
                    self.rows.setdefault(row["id"], row)

    def __contains__(self, identity: str) -> bool:
        return identity in self.rows

    def __getitem__(self, identity: str) -> dict:
        return self.rows[identity]

    def append(self, row: dict, written: bool = True) -> dict:
        """Keep `row`, `written` or for now; returns it as it will be read back."""
        line = json.dumps(_plain(row), allow_nan=False) + "\n"
        if self.path is not None and written:
            with open(self.path, "ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        row = json.loads(line)
        self.rows[row["id"]] = row
        return row


def read_rows(path: str | os.PathLike) -> list[dict]:
    """All rows of a file, as they are."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def identity(description: Any) -> str:
    """A short digest of everything that decides the outcome of a run."""
    text = json.dumps(_plain(description), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _mended(path: Path) -> list[dict]:
    """The rows of a file, which loses an unfinished last line."""
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    rows, kept = [], 0
    for number, line in enumerate(lines, 1):
        row = _parsed(line)
        if row is None:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number} is no row of a comparison. The file was "
                    "left alone: remove the line, or name another folder."
                )
            os.truncate(path, kept)
            return rows
        rows.append(row)
        kept += len(line)
    if lines and not lines[-1].endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b"\n")
    return rows


def _parsed(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "id" in row else None


def _plain(value: Any) -> Any:
    """Without numbers that JSON cannot hold: they become null."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
