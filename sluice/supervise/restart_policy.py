"""Whether a child that died is started again: a pure state machine; the caller passes the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

EXIT_CONFIG = 2
"""Exit code of a child whose settings are wrong: a restart would read the same settings."""

EXIT_FOR_GOOD = 3
"""Exit code of a child that gave up: a restart would fail the same way."""


@dataclass(frozen=True)
class RestartLimits:
    """Bounds on restarts of one child.

    Attributes:
        restarts: Most restarts within the window; 0 allows none.
        window_s: Seconds after which a restart no longer counts: a child that dies once a day may go on.
        first_delay_s: Pause before the first restart, in seconds; doubles with each further restart within the window.
        max_delay_s: Longest pause, in seconds.
    """

    restarts: int = 3
    window_s: float = 600.0
    first_delay_s: float = 0.5
    max_delay_s: float = 8.0


@dataclass(frozen=True)
class StartAgain:
    """Start the child again.

    Attributes:
        delay_s: Pause before that, in seconds.
        attempt: Number of this restart within the window, from 1.
    """

    delay_s: float
    attempt: int


@dataclass(frozen=True)
class GiveUp:
    """Do not start it again; the run ends.

    Attributes:
        reason: Completes a sentence that begins with how the child died; empty if restarts are switched off.
    """

    reason: str


@dataclass
class RestartPolicy:
    """Counts the restarts of one child.

    Attributes:
        limits: Bounds.
    """

    limits: RestartLimits
    _restarts: deque[float] = field(default_factory=deque)

    def on_exit(self, code: int, now: float, *, was_ready: bool) -> StartAgain | GiveUp:
        """Decide what to do about a child that ended by itself.

        Args:
            code: As `subprocess` gives it: the exit code, or minus the signal's number.
            now: Seconds on a monotonic clock.
            was_ready: Whether it, or an earlier process of this child, ever served.
        """
        if code == EXIT_CONFIG:
            return GiveUp("its settings are wrong")
        if code == EXIT_FOR_GOOD:
            return GiveUp("it gave up")
        if self.limits.restarts == 0:
            return GiveUp("")
        if code > 0 and not was_ready:
            # It exited by itself before it served: another start would end the same way.
            return GiveUp("it never began to serve")
        while self._restarts and now - self._restarts[0] > self.limits.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.limits.restarts:
            return GiveUp(f"it was restarted {len(self._restarts)} times within {self.limits.window_s:g} s")
        self._restarts.append(now)
        attempt = len(self._restarts)
        delay = min(self.limits.first_delay_s * 2.0 ** (attempt - 1), self.limits.max_delay_s)
        return StartAgain(delay_s=delay, attempt=attempt)
