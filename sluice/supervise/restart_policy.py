"""Whether a child that died is started again: a pure function; the caller passes the time and remembers the restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_CONFIG = 2
"""Exit code of a child whose settings are wrong: a restart would read the same settings. Once they have served, something else is
wrong that may pass."""

EXIT_FOR_GOOD = 3
"""Exit code of a child that gave up: a restart would fail the same way."""

EXIT_BIND = 4
"""Exit code of a child that cannot listen at its address: another program took the port. Once it has served, that may pass."""

EXIT_SET_ASIDE = 5
"""Exit code of an orchestrator whose run paused because too much was set aside, and which nobody let go on: a restart would wait again."""

EXIT_MISSING_PEER = 6
"""Exit code of a service whose peer never served: a restart waits for it anew."""

EXIT_UNFINISHED = 143
"""Exit code of a service that a signal ended before its work was done; shells report it for SIGTERM. A Job of Kubernetes takes 0 as done."""

_FOR_GOOD = {EXIT_FOR_GOOD: "it gave up", EXIT_SET_ASIDE: "too much was set aside"}
"""Why a child is not started again that has waited for whatever waiting could cure, by exit code."""

_WRONG_AT_START = {EXIT_CONFIG: "its settings are wrong", EXIT_BIND: "it cannot listen at its address"}
"""Why a child that never served is not started again, by exit code."""

START_S = 600.0
"""Seconds until a child must serve, unless a flag says otherwise."""

MOST_RESTARTS = 3
"""Restarts of one child within the window, unless a flag says otherwise."""

WINDOW_S = 600.0
"""Seconds after which a restart no longer counts: a child that dies once a day may go on."""

SETTLED_S = 5.0
"""Seconds that a child must have served for its start to count as a success: one that dies sooner may die of its start."""

FIRST_DELAY_S = 0.5
"""Pause in seconds after the second start in a row that was no success; doubles with each further one. Before there is no pause."""

MAX_DELAY_S = 8.0
"""Longest pause, in seconds."""


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


def after_exit(
    code: int, now: float, restarts: Sequence[float], most: int, *, was_ready: bool, fruitless: int = 0
) -> StartAgain | GiveUp:
    """Decide what to do about a child that ended by itself.

    Args:
        code: As `subprocess` gives it: the exit code, or minus the signal's number.
        now: Seconds on a monotonic clock.
        restarts: When the child was restarted before, on the same clock.
        most: Most restarts within the window; 0 allows none.
        was_ready: Whether it, or an earlier process of this child, ever served.
        fruitless: Processes of this child in a row, up to the one that ended, that did not serve for `SETTLED_S`.
    """
    if code in _WRONG_AT_START and not was_ready:
        return GiveUp(_WRONG_AT_START[code])
    if code in _FOR_GOOD:
        return GiveUp(_FOR_GOOD[code])
    if most == 0:
        return GiveUp("")
    if code > 0 and code != EXIT_MISSING_PEER and not was_ready:
        # It exited by itself before it served: another start would end the same way.
        return GiveUp("it never began to serve")
    recent = sum(now - at <= WINDOW_S for at in restarts)
    if recent >= most:
        return GiveUp(f"it was restarted {recent} times within {WINDOW_S:g} s")
    delay_s = min(FIRST_DELAY_S * 2.0 ** (fruitless - 2), MAX_DELAY_S) if fruitless > 1 else 0.0
    return StartAgain(delay_s, attempt=recent + 1)
