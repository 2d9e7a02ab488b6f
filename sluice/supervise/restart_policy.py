"""Whether a child that died is started again: a pure function; the caller passes the time and remembers the restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_CONFIG = 2
"""Exit code of a child whose settings are wrong: a restart would read the same settings. If the child has served with them before, the
cause is another one, which may be transient."""

EXIT_FOR_GOOD = 3
"""Exit code of a child that gave up: a restart would fail the same way."""

EXIT_BIND = 4
"""Exit code of a child that cannot listen at its address: another program took the port. If the child has served before, that may be
transient."""

EXIT_SET_ASIDE = 5
"""Exit code of an orchestrator whose run paused because too much was set aside, and that nobody resumed: a restart would wait again."""

EXIT_MISSING_PEER = 6
"""Exit code of a service whose peer never served: a restart waits for it anew."""

EXIT_UNFINISHED = 143
"""Exit code of a service that a signal ended before its work was done. Shells report it for SIGTERM. It is not 0, because a Kubernetes Job
counts 0 as done."""

_FOR_GOOD = {EXIT_FOR_GOOD: "it gave up", EXIT_SET_ASIDE: "too much was set aside"}
"""By exit code, why a child is never restarted: it has waited already, and waiting again would not help."""

_WRONG_AT_START = {EXIT_CONFIG: "its settings are wrong", EXIT_BIND: "it cannot listen at its address"}
"""By exit code, why a child that never served is not restarted."""

START_S = 600.0
"""Seconds until a child must serve, unless a flag says otherwise."""

MOST_RESTARTS = 3
"""Restarts of one child within the window, unless a flag says otherwise."""

WINDOW_S = 600.0
"""Seconds after which a restart no longer counts, so that a child that dies once a day is always restarted."""

SETTLED_S = 5.0
"""Seconds that a child must serve for its start to count as a success. If it dies sooner, the start may be the cause."""

FIRST_DELAY_S = 0.5
"""Pause in seconds after the second failed start in a row. It doubles with each further failed start. After the first there is no pause."""

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
