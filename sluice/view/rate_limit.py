"""Rate-limit repeated log lines: the first three are shown, then a count and the last one. Pure; the caller passes the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RateLimit"]

SHOWN = 3
"""Lines of one kind that are shown before further ones are counted."""

WINDOW_S = 10.0
"""Seconds without a line of a kind after which its count starts again."""


@dataclass
class _Kind:
    seen: int = 0
    hidden: int = 0
    last: str = ""
    last_at: float = 0.0


class RateLimit:
    """The lines of one child. The last hidden line of a kind is kept, because the end of a traceback names the error."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._current = ""

    def offer(self, kind: str, text: str, now: float) -> Sequence[str]:
        """Return the lines to show now: the summaries of kinds that ended, and this line unless its kind was shown too often.

        Args:
            kind: Equal for lines that report the same thing.
            text: The line.
            now: Seconds on a monotonic clock.
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
        """Return the summary of the hidden lines of a kind, or of every kind."""
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
