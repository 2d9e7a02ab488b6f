"""Rows of equal answers, such as answers to agents that poll for work. The log shows the beginning and the end of a row, not each call."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

QUIET_S = 60.0
"""A row has ended after this many seconds without another such answer."""

log = structlog.get_logger(__name__)


class Rows:
    """Distinguishes the first of equal answers from the rest of their row.

    There is one row per distinct answer. So the texts of answers must not come from clients, which could make up any number.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: dict[tuple[str, str], list[float]] = {}
        """For each answer: when its row began, when the last answer came, and how many answers there were."""
        self._look_at = 0.0

    def begins(self, call: str, outcome: str) -> bool:
        """Account for an answer; return whether a row begins with it."""
        self.end_quiet()
        now = self._clock()
        row = self._rows.setdefault((call, outcome), [now, now, 0])
        row[1:] = now, row[2] + 1
        return row[2] == 1

    def end_quiet(self) -> None:
        """Log the number of answers in each row that has ended, and forget these rows. It is cheap: call it often."""
        now = self._clock()
        if now < self._look_at:
            return
        for (call, outcome), (begun, last, count) in [*self._rows.items()]:
            if last + QUIET_S <= now:
                del self._rows[call, outcome]
                if count > 1:
                    log.info("no longer", call=call, outcome=outcome, count=int(count), seconds=round(last - begun, 1))
        self._look_at = min((last for _, last, _ in self._rows.values()), default=now) + QUIET_S


ROWS = Rows()
"""The rows of this process."""
