"""The folder of a training run: its settings, a row per epoch, and its checkpoint."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..._files.checkpoint import CheckpointError, load
from .settings import Settings

_REMEDY = (
    "Name another folder, or start afresh (--afresh on the command line, resume=False)."
)


@dataclass(frozen=True)
class RunFolder:
    """Files of one run; of the processes of a distributed run the first one writes."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "settings.json"

    @property
    def rows(self) -> Path:
        return self.path / "epochs.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.npz"

    @property
    def weights(self) -> Path:
        return self.path / "weights.npz"

    @property
    def best(self) -> Path:
        return self.path / "best.npz"

    def claim(self, mine: dict[str, Any], resume: bool) -> list[dict[str, Any]]:
        """Make the folder this run's; rows of the epochs that its checkpoint holds."""
        self.path.mkdir(parents=True, exist_ok=True)
        if resume and self.checkpoint.exists():
            self._check_same(mine)
            return self._earlier_rows()
        # By every process: none may find what another is about to discard.
        for path in (self.rows, self.checkpoint, self.weights, self.best):
            path.unlink(missing_ok=True)
        if jax.process_index() == 0:
            self.settings.write_text(strict_json(mine, indent=1) + "\n")
        return []

    def add(self, row: dict[str, Any]) -> None:
        """Write the row of an epoch."""
        if jax.process_index() == 0:
            with self.rows.open("a") as file:
                file.write(strict_json(row) + "\n")

    def _check_same(self, mine: dict[str, Any]) -> None:
        # What a default came to when the run began is a part of its settings.
        theirs = read_settings(self.settings) | settings_of(self.path).as_row()
        for name, value in mine.items():
            if theirs.get(name, value) != value:
                raise CheckpointError(
                    f"{self.path} holds another run: its {name} is {theirs[name]!r}, "
                    f"this one has {value!r}. {_REMEDY}"
                )

    def _earlier_rows(self) -> list[dict[str, Any]]:
        done = len(load(self.checkpoint)[0].get("history_evaluated_at", [0])) - 1
        try:
            lines = self.rows.read_text().splitlines()[:done]
            rows = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.rows}: {error}. {_REMEDY}") from error
        if len(rows) < done:
            raise CheckpointError(
                f"{self.rows} has {len(rows)} rows, the checkpoint beside it {done} "
                f"epochs. {_REMEDY}"
            )
        # An epoch whose checkpoint was not written is run again.
        if jax.process_index() == 0:
            kept = self.rows.with_suffix(".tmp")
            kept.write_text("".join(strict_json(row) + "\n" for row in rows))
            kept.replace(self.rows)
        return rows


def strict_json(record: Any, **options) -> str:
    """As JSON, in which there is no NaN: null instead."""
    return json.dumps(_finite(record), allow_nan=False, **options)


def _finite(record: Any) -> Any:
    if isinstance(record, dict):
        return {name: _finite(value) for name, value in record.items()}
    if isinstance(record, list | tuple):
        return [_finite(value) for value in record]
    if isinstance(record, float) and not math.isfinite(record):
        return None
    return record


def read_settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("it is no record of settings")
        return found
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}, which `train` writes, cannot be read: {error}. {_REMEDY}"
        ) from error


def settings_of(folder: str | os.PathLike) -> Settings:
    """The settings of the run in `folder`."""
    path = RunFolder(Path(folder)).settings
    recorded = read_settings(path)
    # Where the run started is no setting.
    recorded.pop("start", None)
    try:
        return Settings(**recorded)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or of another version of bilevax: {error}. {_REMEDY}"
        ) from error
