"""Who paused the replica and until when: a pure state machine, told the time by its caller."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PauseHeldError", "Pauses"]

MAX_TTL_S = 3600.0
"""Longest pause, in seconds: a forgotten one must not stop a run for ever."""


class PauseHeldError(Exception):
    """Another owner's pause lasts."""


@dataclass
class Pauses:
    """At most one pause at a time, with an owner and an end.

    Attributes:
        owner: Who paused; empty if nobody.
        ends: When the pause ends by itself, on the caller's monotonic clock in seconds.
    """

    owner: str = field(default="", init=False)
    ends: float = field(default=0.0, init=False)

    def begin(self, owner: str, ttl_s: float, now: float) -> None:
        """Pause, or prolong one's own pause.

        Raises:
            PauseHeldError: if another owner's pause lasts.
            ValueError: if owner or time to live cannot be.
        """
        if not owner:
            raise ValueError("owner must be named")
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl must be above 0 and at most {MAX_TTL_S:.0f} s, not {ttl_s:g}")
        self._require(owner, now)
        self.owner, self.ends = owner, now + ttl_s

    def end(self, owner: str, now: float) -> bool:
        """End one's own pause; True if there was one.

        Raises:
            PauseHeldError: if another owner's pause lasts.
        """
        self._require(owner, now)
        return self._clear()

    def expire(self, now: float) -> bool:
        """End a pause whose time is over; True if there was one."""
        return bool(self.owner) and now >= self.ends and self._clear()

    def release(self) -> None:
        """Forget a pause that could not be had."""
        self._clear()

    def _require(self, owner: str, now: float) -> None:
        if self.owner and self.owner != owner and now < self.ends:
            raise PauseHeldError(f"{self.owner!r} holds a pause for {self.ends - now:.0f} s more")

    def _clear(self) -> bool:
        held, self.owner = bool(self.owner), ""
        return held
