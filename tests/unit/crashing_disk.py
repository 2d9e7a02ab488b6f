"""A disk of the journal whose process dies at one of its calls, and a thread that works at once, so that a run repeats itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
from pathlib import Path
from typing import BinaryIO

from orchestrator_svc.journal.segments import Disk


class CrashedError(Exception):
    """The process was killed."""


class CrashingDisk(Disk):
    """Kills the process at one of its calls, before or after it took effect. Unsynced writes may be lost or torn.

    Args:
        calls: Number of calls until the kill; None: never.
        chance: Decides which unsynced bytes are left.
    """

    def __init__(self, calls: int | None, *, after: bool, chance: random.Random) -> None:
        self.dead = False
        self.died_in = ""
        self._calls, self._after, self._chance = calls, after, chance
        self._files: dict[str, tuple[BinaryIO, int]] = {}
        self._unsynced_names: set[str] = set()

    @contextlib.contextmanager
    def _call(self, name: str):
        if self.dead:
            raise CrashedError
        dies = self._calls == 0
        if self._calls is not None:
            self._calls -= 1
        if dies:
            self.dead, self.died_in = True, f"{'after' if self._after else 'before'} {name}"
        if dies and not self._after:
            raise CrashedError
        yield
        if dies:
            raise CrashedError

    def write(self, file: BinaryIO, content: bytes) -> None:
        if file.name not in self._files:
            self._files[file.name] = (file, 0)
            self._unsynced_names.add(file.name)
        with self._call("write"):
            super().write(file, content)

    def sync(self, file: BinaryIO) -> None:
        with self._call("sync"):
            super().sync(file)
            self._files[file.name] = (file, file.tell())

    def sync_directory(self, directory: Path) -> None:
        with self._call("sync of the directory"):
            super().sync_directory(directory)
            self._unsynced_names.clear()

    def commit(self, connection: sqlite3.Connection) -> None:
        with self._call("commit"):
            super().commit(connection)

    def lose(self) -> None:
        """Lose writes that a crash of the machine may lose."""
        self.dead = True
        for name, (file, synced) in self._files.items():
            with contextlib.suppress(ValueError):
                file.close()
            path = Path(name)
            if not path.exists():
                continue  # it was deleted because nobody needs it
            if name in self._unsynced_names and self._chance.random() < 0.5:
                path.unlink()
            else:
                os.truncate(path, self._chance.randint(synced, path.stat().st_size))


class Inline:
    """Runs at once what the journal's thread would do, so that a run repeats itself exactly."""

    def __init__(self, name: str) -> None:
        del name

    def submit(self, function, *arguments):
        answer = asyncio.get_running_loop().create_future()
        try:
            answer.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - as the thread does
            answer.set_exception(error)
        return answer

    def end(self) -> None:
        pass
