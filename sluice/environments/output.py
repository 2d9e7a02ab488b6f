"""What an environment's process prints, cut into lines and bounded, so that a flood fills neither log nor memory. Pure."""

from __future__ import annotations

LINES_PER_MINUTE = 600
"""Lines that one process may print to the log in a minute; further ones are counted."""

LINE_CHARACTERS = 1000
"""Longest line that is logged; the rest of a longer one is left out."""


class BoundedLines:
    """Cuts what a process prints into lines, and lets so many a minute pass.

    Args:
        per_minute: Lines that pass in a minute; a sixth of them at once, after ten quiet seconds.
        now: Seconds on a monotonic clock.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute, self._at_once = per_minute, max(1.0, per_minute / 6)
        self._allowed, self._then = self._at_once, now
        self._left_out = 0
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the lines that may be logged; an empty text is the end of the output.

        Lines that were left out are counted, and the count is logged as soon as lines pass again, and at the end.
        """
        self._allowed = min(self._at_once, self._allowed + (now - self._then) * self._per_minute / 60)
        self._then = now
        if not data:
            lines = [] if self._skipping else self._passed(self._rest)
            self._rest, self._skipping = b"", False
            return lines + self._told()
        if self._allowed < 1:  # a flood is counted without being cut into lines
            unended = not data.endswith(b"\n")
            self._left_out += data.count(b"\n") + unended - self._skipping
            self._rest, self._skipping = b"", unended
            return []
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = []
        for line in whole:
            lines += [] if self._skipping else self._passed(line)
            self._skipping = False
        if len(self._rest) > LINE_CHARACTERS:
            lines += [] if self._skipping else self._passed(self._rest)
            self._rest, self._skipping = b"", True
        return lines

    def _passed(self, line: bytes) -> list[str]:
        text = line[: 4 * LINE_CHARACTERS].decode(errors="replace").rstrip()[:LINE_CHARACTERS]
        if not text:
            return []
        if self._allowed < 1:
            self._left_out += 1
            return []
        told = self._told()
        self._allowed -= 1
        return [*told, text]

    def _told(self) -> list[str]:
        count, self._left_out = self._left_out, 0
        return [f"({count} lines were left out)"] if count else []
