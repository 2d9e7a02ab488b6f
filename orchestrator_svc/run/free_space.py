"""Watches the free space of a run's disks. With little left the run pauses before a write fails, and continues when there is room again.

`FreeSpace` decides, and is pure. `DiskWatch` asks the file systems.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import structlog

from sluice.clock import CLOCK, Clock
from sluice.threads import SerialThread

LOOK_S = 2.0
"""Seconds between two checks. In this time a disk that takes 500 MB/s fills half of the default bound."""

_ANSWER_S = 30.0
"""Seconds for a file system to answer; a network file system whose server is down answers much later, or never."""

RESUME_FACTOR = 1.25
"""A disk has room again with this factor times the bound. At the bound itself each new file would make the run pause and continue."""

SETTING = "orchestrator.disk.min_free_mb"

_MIB = 1 << 20

log = structlog.get_logger(__name__)


class FreeSpace:
    """Follows the free bytes of some directories, and says whether the run has to wait for room.

    Args:
        least_bytes: Free bytes below which a directory is short of room; 0: never.

    Attributes:
        short: What to tell people about the directories that are short of room; empty if none is.
    """

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._short: dict[Path, int] = {}
        self.short = ""

    def look(self, free: Mapping[Path, int | None]) -> bool:
        """Take the bytes that are free now, by directory. Return whether the run begins or stops waiting for room.

        A directory with None keeps its state: its file system did not answer. A directory that is missing in `free` is forgotten.
        """
        before, self._short = self._short, {}
        for directory, size in free.items():
            now = before.get(directory) if size is None else size
            enough = self._least_bytes * (RESUME_FACTOR if directory in before else 1.0)
            if now is not None and now < enough:
                self._short[directory] = now
        self.short = self._described()
        return bool(before) != bool(self._short)

    def _described(self) -> str:
        if not self._short:
            return ""
        listed = " and ".join(f"{directory} has {size // _MIB} MiB free" for directory, size in self._short.items())
        return (
            f"room on a disk: {listed}, and {self._least_bytes // _MIB} MiB are to be left ({SETTING}). Make room: `sluice doctor` with"
            " the run's directory or its settings shows what takes how much. The run goes on by itself when"
            f" {int(self._least_bytes * RESUME_FACTOR) // _MIB} MiB are free; nothing is lost"
        )


class Room(NamedTuple):
    """What a file system reports about a directory.

    Attributes:
        device: Number of the file system: two directories with the same one share their room.
        free_bytes: Bytes that this user may still write to it.
    """

    device: int
    free_bytes: int


def measure(directory: Path) -> Room:
    """Ask the file system of a directory. Blocks.

    Raises:
        FileNotFoundError: if there is no such directory.
        OSError: if the file system does not answer.
    """
    return Room(directory.stat().st_dev, shutil.disk_usage(directory).free)


class DiskWatch:
    """Asks the file systems of some directories for their room, in a thread: one of them may hang. A context manager.

    Args:
        directories: Directories on this machine that the run may write to. Those that do not exist are left out.
        space: Takes what they answer.
        changed: Set when the run begins or stops waiting for room.
        clock: Time of the deadline of an answer.
        ask: Asks the file system of a directory, as `measure` does.

    Attributes:
        space: As in the arguments.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        space: FreeSpace,
        changed: asyncio.Event,
        *,
        clock: Clock = CLOCK,
        ask: Callable[[Path], Room] = measure,
    ) -> None:
        self._directories, self.space, self._changed = directories, space, changed
        self._clock, self._ask = clock, ask
        self._thread = SerialThread("free space")
        self._asked: asyncio.Future[dict[Path, int | None]] | None = None
        self._silent = False

    async def look(self) -> None:
        """Ask once, and let `space` judge the answers. A file system that does not answer is asked again the next time."""
        if self._asked is None:
            self._asked = self._thread.submit(self._ask_all)
        try:
            async with self._clock.timeout(_ANSWER_S):
                await asyncio.wait({self._asked})
        except TimeoutError:
            self._note_silence(f"no answer within {_ANSWER_S:g} s")
            return
        answers, self._asked = self._asked.result(), None
        if self.space.look(answers):
            self._changed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        """End the thread. If it hangs, leave it behind."""
        self._thread.end()

    def _ask_all(self) -> dict[Path, int | None]:
        answers: dict[Path, int | None] = {}
        devices: set[int] = set()
        for directory in self._directories:
            try:
                room = self._ask(directory)
            except FileNotFoundError:
                continue
            except OSError as error:
                answers[directory] = None
                self._note_silence(f"{directory}: {error.strerror}")
                continue
            if room.device not in devices:
                devices.add(room.device)
                answers[directory] = room.free_bytes
        self._silent = self._silent and None in answers.values()
        return answers

    def _note_silence(self, problem: str) -> None:
        """Log that a disk does not say how much room it has, once until all do."""
        if not self._silent:
            log.warning("a disk does not say how much room it has; the run goes on", problem=problem)
        self._silent = True
