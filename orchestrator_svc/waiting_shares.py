"""Who waits for whom: shares of time in which a condition held. No clock inside: the caller says what time it is."""

from __future__ import annotations

__all__ = ["HeldShare", "bottleneck"]

_NOTABLE = 0.1
"""Share of the time below which waiting is not worth a name."""


class HeldShare:
    """Measures for how much of the time something held.

    Args:
        now: Monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._holds = False
        self._since = self._began = self._all_began = now
        self._held = self._all_held = 0.0

    def set(self, holds: bool, now: float) -> None:
        """From now on it holds, or no longer."""
        if self._holds:
            self._held += now - self._since
        self._holds, self._since = holds, now

    def report(self, now: float) -> float:
        """Share since the last report, 0 to 1; begins the next period."""
        self.set(self._holds, now)
        elapsed = now - self._began
        share = self._held / elapsed if elapsed > 0 else 0.0
        self._all_held += self._held
        self._began, self._held = now, 0.0
        return min(1.0, share)

    def overall(self, now: float) -> float:
        """Share since the start."""
        held = self._all_held + self._held + (now - self._since if self._holds else 0.0)
        elapsed = now - self._all_began
        return min(1.0, held / elapsed) if elapsed > 0 else 0.0


def bottleneck(trainer_idle: float, dispatch_blocked: float) -> str:
    """Whom the others wait for: "rollout", "trainer", or nobody in particular."""
    if max(trainer_idle, dispatch_blocked) < _NOTABLE:
        return ""
    return "rollout" if trainer_idle >= dispatch_blocked else "trainer"
