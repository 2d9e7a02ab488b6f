"""Who paused the replica, and until when: a pure state machine. Its caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PauseHeldError", "Pauses"]

MAX_TTL_S = 3600.0
"""Maximum time to live of a pause, in seconds: a forgotten one must not stop a run for ever."""


class PauseHeldError(Exception):
    """Another owner holds a pause."""


@dataclass
class Pauses:
    """At most one pause at a time, with an owner and a time to live.

    Attributes:
        owner: Who paused; empty if nobody.
        ends: When the pause ends by itself, on the caller's monotonic clock in seconds.
    """

    owner: str = field(default="", init=False)
    ends: float = field(default=0.0, init=False)

    def begin(self, owner: str, ttl_s: float, now: float) -> None:
        """Begin a pause, or extend that of the same owner.

        Raises:
            PauseHeldError: if another owner holds a pause.
            ValueError: if the owner or the time to live is invalid.
        """
        if not owner:
            raise ValueError("owner must be named")
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl must be above 0 and at most {MAX_TTL_S:.0f} s, not {ttl_s:g}")
        self._require(owner, now)
        self.owner, self.ends = owner, now + ttl_s

    def end(self, owner: str, now: float) -> bool:
        """End the pause of this owner. Return whether there was one.

        Raises:
            PauseHeldError: if another owner holds a pause.
        """
        self._require(owner, now)
        return self._clear()

    def expire(self, now: float) -> bool:
        """End a pause whose time to live is over. Return whether there was one."""
        return bool(self.owner) and now >= self.ends and self._clear()

    def release(self) -> None:
        """Forget the pause of any owner."""
        self._clear()

    def _require(self, owner: str, now: float) -> None:
        if self.owner and self.owner != owner and now < self.ends:
            raise PauseHeldError(f"{self.owner!r} holds a pause for {self.ends - now:.0f} s more")

    def _clear(self) -> bool:
        held, self.owner = bool(self.owner), ""
        return held
