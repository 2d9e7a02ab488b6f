"""Tasks in a file, so that a split may be larger than memory."""

from __future__ import annotations

import json
import os
import random
from array import array
from collections.abc import Sequence
from tempfile import TemporaryFile, gettempdir
from typing import IO, overload

from sluice.environments.base import Task
from sluice.environments.framing import encode
from sluice.errors import ConfigError

_IN_MEMORY_BYTES = 64 << 20
"""Bytes of tasks to collect before writing them. Smaller data sets stay in memory, so that most need no file."""

_LENGTH_BYTES = 4


class StoredTasks(Sequence[Task]):
    """Tasks that are read back one by one, each time that they are accessed.

    Memory holds the place of each task (8 bytes), and at most 64 MiB of tasks. The file is in the directory for temporary files (`TMPDIR`),
    and is gone with the process.
    """

    def __init__(self) -> None:
        self._starts = array("Q")
        self._unwritten = bytearray()
        self._written = 0
        self._file: IO[bytes] | None = None

    def append(self, task: Task) -> None:
        """Add a task.

        Raises:
            NotPlainError: if its data is not plain.
            ConfigError: if the file cannot be written.
        """
        frame = encode({"task_id": task.task_id, "data": task.data, "max_tokens": task.max_tokens})
        self._starts.append(self._written + len(self._unwritten))
        self._unwritten += frame
        if len(self._unwritten) > _IN_MEMORY_BYTES:
            self._write()

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = TemporaryFile()  # noqa: SIM115 - it lives as long as the tasks
            self._file.write(self._unwritten)
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"cannot write the tasks into {gettempdir()}: {error.strerror}; set TMPDIR to a directory with room"
            ) from error
        self._written += len(self._unwritten)
        self._unwritten.clear()

    def shuffle(self, seed: int) -> None:
        """Shuffle the tasks by a seed, into the same order as `random.shuffle` gives a list."""
        random.Random(seed).shuffle(self._starts)  # noqa: S311 - an order, not a secret

    def cut(self, count: int | None) -> None:
        """Keep the first `count` tasks; None keeps all."""
        if count is not None:
            del self._starts[count:]

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        """Read a task, or the tasks of a slice."""
        if isinstance(index, slice):
            return [self._read(start) for start in self._starts[index]]
        return self._read(self._starts[index])

    def __eq__(self, other: object) -> bool:
        """Return whether another sequence has the same tasks in the same order."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # it grows

    def _read(self, start: int) -> Task:
        length = int.from_bytes(self._bytes(start, _LENGTH_BYTES), "big")
        return Task(**json.loads(self._bytes(start + _LENGTH_BYTES, length)))

    def _bytes(self, start: int, count: int) -> bytes:
        if self._file is not None and start < self._written:
            return os.pread(self._file.fileno(), count, start)
        start -= self._written
        return bytes(self._unwritten[start : start + count])
