"""Many lines of one kind become a few and a count: pure, told the time by its caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Flood"]

SHOWN = 3
"""Lines of one kind that are shown before the rest is counted."""

WINDOW_S = 10.0
"""Seconds without a line of the kind after which the next one is news again."""


@dataclass
class _Kind:
    seen: int = 0
    hidden: int = 0
    last: str = ""
    last_at: float = 0.0


class Flood:
    """Thins out what one child says; the last line of a kind is kept, as a traceback says at its end what was wrong."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._current = ""

    def offer(self, kind: str, text: str, now: float) -> Sequence[str]:
        """Take a line in.

        Args:
            kind: What makes two lines alike.
            text: The line.
            now: Seconds on a monotonic clock.

        Returns:
            The lines to show now: what an ended flood came to, and this one unless it is too much.
        """
        shown = [] if kind == self._current else self.flush(self._current)
        shown += [line for name in list(self._kinds) if self._is_over(name, now) for line in self._forget(name)]
        self._current = kind
        state = self._kinds.setdefault(kind, _Kind())
        state.seen += 1
        state.last, state.last_at = text, now
        if state.seen > SHOWN:
            state.hidden += 1
            return shown
        return [*shown, text]

    def flush(self, kind: str | None = None) -> list[str]:
        """What was hidden of a kind, or of all, in one line each."""
        kinds = list(self._kinds) if kind is None else [kind]
        lines = []
        for name in kinds:
            state = self._kinds.get(name)
            if state is not None and state.hidden:
                more = "" if state.hidden == 1 else f"({state.hidden - 1} more like it) "
                lines.append(f"{more}{state.last}")
                state.hidden = 0
        return lines

    def _is_over(self, kind: str, now: float) -> bool:
        return now - self._kinds[kind].last_at > WINDOW_S

    def _forget(self, kind: str) -> list[str]:
        lines = self.flush(kind)
        del self._kinds[kind]
        return lines
