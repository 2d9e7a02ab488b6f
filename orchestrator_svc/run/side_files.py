"""``trajectories/dropped.jsonl`` and ``events.jsonl``: what a run notes beside its steps, for people and for what shows a run.

Nothing that continues, forks or audits a run reads them. Each is at most two files of a fixed size: when ``NAME.jsonl`` is full it becomes
``NAME.1.jsonl`` in place of the one before. Every method blocks, except where it says so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from sluice.host_files import rotate
from sluice.telemetry import cut_torn_line
from sluice.v1 import common_pb2, orchestrator_pb2
from sluice.versions import Version

DROPPED_FILE = "dropped.jsonl"
EVENTS_FILE = "events.jsonl"

EVENTS_BYTES = 64 << 20
"""Size of one of the two files of events: that of a month of a run that reports its load."""

LOAD_EVERY_S = 10.0
"""Least seconds between two loads in the file: it has a day of them in 3 MB, while watchers get each."""

_IS_ID = '"trajectory_id": '


class BoundedLines:
    """Appends lines to a file, and begins a new one when it is full.

    What a kill left of a line is cut off when the next process begins to write. A disk that is full leaves no part of a line.

    Args:
        path: The file, as ``NAME.jsonl``.
        most_bytes: Size of one file; a longer line has one of its own.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._begun = False

    @property
    def paths(self) -> tuple[Path, Path]:
        """The file and the one before it, which need not be there."""
        return self._path, self._path.with_suffix(".1.jsonl")

    def append(self, lines: Iterable[str]) -> bool:
        """Append lines together; return whether a new file was begun for them.

        Raises:
            OSError: if they cannot be written; then none of them is.
        """
        data = "".join(lines).encode()
        if not self._begun:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.is_symlink():  # it is not followed below either
                cut_torn_line(self._path)
            self._begun = True
        rotated = self._path.exists() and 0 < self._path.lstat().st_size > self._most_bytes - len(data)
        if rotated:
            rotate(self.paths)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            left = memoryview(data)
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        return rotated


class DroppedFile:
    """Has the trajectories that never reached a batch, in the format of ``step_*.jsonl``.

    A trajectory has at most one row in the two files, also over restarts: those that are there are known by their names. The rows
    of a process that is killed may be missing for what it dropped last; what the journal then lost is dropped again, and has its row from
    the first time.

    Args:
        directory: That of the trajectories.
        most_bytes: Size of one of the two files.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._lines = BoundedLines(directory / DROPPED_FILE, most_bytes)
        self._newer: set[str] | None = None  # None until the files of earlier processes were read
        self._older: set[str] = set()

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, without those of trajectories that have one.

        Raises:
            OSError: if they cannot be written.
        """
        if self._newer is None:
            self._newer, self._older = (_ids(path) for path in self._lines.paths)
        new: dict[str, str] = {}
        for row in rows:
            name = row["trajectory_id"]
            if name not in self._newer and name not in self._older:
                new[name] = json.dumps(row, ensure_ascii=False) + "\n"
        if new and self._lines.append(new.values()):
            self._older, self._newer = self._newer, set()
        self._newer |= new.keys()


def _ids(path: Path) -> set[str]:
    """Return the names of the trajectories in a file; a line that is not whole counts for nothing."""
    found, decoder = set[str](), json.JSONDecoder()
    if not path.exists() or path.is_symlink():
        return found
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # The whole row need not be read: its text is a thousand times as long, and no key before this one has a text.
            place = line.find(_IS_ID)
            if place >= 0 and line.endswith("\n"):
                found.add(decoder.raw_decode(line, place + len(_IS_ID))[0])
    return found


class EventFile:
    """Has the events of a run, each as a JSON line: all but scored groups, whose rewards are in the journal and in the trajectories.

    Args:
        run_dir: The run's directory.
        most_bytes: Size of one of the two files.
    """

    def __init__(self, run_dir: Path, most_bytes: int = EVENTS_BYTES) -> None:
        self._lines = BoundedLines(run_dir / EVENTS_FILE, most_bytes)
        self._last_load_s = 0.0

    def takes(self, event: orchestrator_pb2.RunEvent) -> bool:
        """Return whether an event is to be written, and note that it will be. Does not block."""
        kind = event.WhichOneof("kind")
        if kind == "load":
            now = event.time.ToMicroseconds() / 1e6
            if 0 <= now - self._last_load_s < LOAD_EVERY_S:
                return False
            self._last_load_s = now
        return kind != "group_scored"

    def write(self, event: orchestrator_pb2.RunEvent) -> None:
        """Append an event.

        Raises:
            OSError: if it cannot be written.
        """
        self._lines.append([json.dumps(event_row(event), ensure_ascii=False) + "\n"])


def event_row(event: orchestrator_pb2.RunEvent) -> dict[str, Any]:
    """Return an event as a line of the file has it: number, time in seconds since 1970, kind, and the fields of that kind.

    Names are those of the contract, versions and enums are written as in the trajectories: ``1.7``, ``running``. A finished step has no
    metrics: ``metrics.jsonl`` has them.
    """
    kind = event.WhichOneof("kind") or ""
    fields = _plain(getattr(event, kind), without="metrics" if kind == "step_finished" else "") if kind else {}
    seconds = event.time.ToMicroseconds() / 1e6
    return {"sequence_no": event.sequence_no, "time": seconds, "kind": kind, **fields}


def _plain(message: Message, *, without: str = "") -> Any:  # noqa: ANN401 - anything that JSON has
    """Return a message as JSON has it, with the fields that are 0 or empty, and whole numbers as numbers; without one of its fields."""
    if isinstance(message, common_pb2.PolicyVersion):
        return str(Version.from_proto(message))
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.name == without or (field.has_presence and not message.HasField(field.name)):
            continue
        value, kind = getattr(message, field.name), field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            found[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            found[field.name] = [_plain(each) for each in value] if kind is not None else list(value)
        elif kind is not None:
            found[field.name] = _plain(value)
        elif field.enum_type is not None:
            found[field.name] = _enum(field.enum_type.name, field.enum_type.values_by_number, value)
        else:
            found[field.name] = value
    return found


def _enum(name: str, values: Mapping[int, Any], number: int) -> str | int:
    """Return the name of a value without that of its enum, in small letters; of one that this release does not know its number."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper() + "_"
    return str(values[number].name).removeprefix(prefix).lower() if number in values else number


def dropped_row(row: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the row of a trajectory that never reached a batch."""
    return {**row, "step": None, "staleness": None, "outcome": "dropped", "reason": reason}
