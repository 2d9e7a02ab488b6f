"""The file that an evaluation adds each task's attempts to as they end, so that one that was interrupted continues."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from orchestrator_svc.run.evaluation import Attempted, EvalSample
from sluice.config import ConfigError


class AttemptsFile:
    """JSON lines: what is evaluated, then a line for each task.

    Args:
        path: The file; made if it is not there.
        what: Model, environment, sampling and all else that decides what is evaluated.

    Attributes:
        known: Attempts by task.

    Raises:
        ConfigError: if it cannot be read or written, or belongs to another evaluation.
    """

    def __init__(self, path: Path, what: Mapping[str, Any]) -> None:
        self.known: dict[str, Attempted] = {}
        what = json.loads(json.dumps(what, default=str))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = _without_torn_line(path)
            self._file: IO[str] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot use {path} for attempts: {error}") from error
        if not whole:
            self._add({"evaluation": what})
            return
        try:
            first, *others = map(json.loads, whole)
            begun = first["evaluation"]
            for row in others:
                samples = [EvalSample(**sample) for sample in row["samples"]]
                self.known[row["task"]] = Attempted(samples, row["failed_episodes"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no file of attempts: {error!r}; name another one, or delete it") from error
        changed = sorted(name for name in {*begun, *what} if begun.get(name) != what.get(name))
        if changed:
            shown = "; ".join(f"{name} was {begun.get(name)!r}, is {what.get(name)!r}" for name in changed)
            raise ConfigError(f"{path} belongs to another evaluation: {shown}; name another file, or delete it")

    def add(self, task_id: str, attempted: Attempted) -> None:
        """Keep the attempts at a task; they are on the disk when this returns."""
        rows = [asdict(sample) for sample in attempted.samples]
        self._add({"task": task_id, "samples": rows, "failed_episodes": attempted.failed_episodes})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _without_torn_line(path: Path) -> list[str]:
    """Return the lines of a file; cut off a last one that was not written whole."""
    if not path.exists():
        return []
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return content[:end].decode(errors="replace").splitlines()
