"""The step reports of one epoch: a bounded log that any number of watchers read at their own pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from sluice.rpc import SluiceError
from sluice.v1.trainer_pb2 import StepReport

__all__ = ["KEPT", "StepLog"]

KEPT = 1024
"""Reports kept, as the contract says."""


class StepLog:
    """Reports by version number, without gaps; a watcher holds a position in it rather than a queue of its own.

    Args:
        begins_after: Version number that the epoch began from.
        held: Reports of the batches that this version holds, up to it and without a gap; what is known of them after a
            restart.
    """

    def __init__(self, begins_after: int, held: Iterable[StepReport] = ()) -> None:
        self._reports: deque[StepReport] = deque(held, maxlen=KEPT)
        self._next = begins_after + 1
        self._changed = asyncio.Event()
        self._ended: SluiceError | None = None

    @property
    def first_number(self) -> int:
        """Number of the oldest report kept, or of the next one if there is none."""
        return self._next - len(self._reports)

    def append(self, report: StepReport) -> None:
        """Add the next version's report."""
        self._reports.append(report)
        self._next += 1
        self._wake()

    def end(self, error: SluiceError) -> None:
        """No report will follow: watchers get this error behind what they have not read yet."""
        self._ended = error
        self._wake()

    async def follow(self, from_number: int) -> AsyncIterator[StepReport]:
        """Reports from a version number on, until the epoch ends.

        Args:
            from_number: First number to report; 0 is the oldest one kept.

        Raises:
            SluiceError: NOT_FOUND if a report is no longer kept; otherwise what ended the epoch.
        """
        number = from_number or self.first_number
        while True:
            changed = self._changed
            while number < self._next:
                if number < self.first_number:
                    raise SluiceError.not_found(
                        "REPORT_NOT_KEPT",
                        f"the report of version {number} is no longer kept: watch from {self.first_number} on",
                    )
                yield self._reports[number - self.first_number]
                number += 1
            if self._ended is not None:
                raise self._ended
            await changed.wait()

    def _wake(self) -> None:
        """Wake all who wait, each once."""
        self._changed.set()
        self._changed = asyncio.Event()
