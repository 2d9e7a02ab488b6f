"""Who waits for whom: shares of time in which a condition held. No clock inside: the caller says what time it is."""

from __future__ import annotations

__all__ = ["HeldTime", "ShareSince", "bottleneck"]

_NOTABLE = 0.1
"""Share of the time below which waiting is not worth a name."""


class HeldTime:
    """Adds up the seconds for which something held.

    Args:
        now: Monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._holds = False
        self._since = now
        self._held = 0.0

    def set(self, holds: bool, now: float) -> None:
        """From now on it holds, or no longer."""
        self._held = self.seconds(now)
        self._holds, self._since = holds, now

    def seconds(self, now: float) -> float:
        """Seconds for which it held so far."""
        return self._held + (now - self._since if self._holds else 0.0)


class ShareSince:
    """The share of the time since one looked last.

    Args:
        held: What is measured.
        now: Monotonic seconds.
    """

    def __init__(self, held: HeldTime, now: float) -> None:
        self._held = held
        self._last, self._last_held = now, held.seconds(now)

    def take(self, now: float) -> float:
        """Share since the last call, 0 to 1."""
        held = self._held.seconds(now)
        elapsed, gained = now - self._last, held - self._last_held
        self._last, self._last_held = now, held
        return min(1.0, gained / elapsed) if elapsed > 0 else 0.0


def bottleneck(trainer_idle: float, rollout_idle: float) -> str:
    """Whom the others wait for: "rollout", "trainer", or nobody in particular."""
    if max(trainer_idle, rollout_idle) < _NOTABLE:
        return ""
    return "rollout" if trainer_idle >= rollout_idle else "trainer"
