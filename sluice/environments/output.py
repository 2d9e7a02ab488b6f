"""Output of an environment's process, cut into lines and rate-limited, so that a flood fills neither log nor memory. Pure."""

from __future__ import annotations

LINES_PER_MINUTE = 600
"""Maximum number of lines per minute from one process in the log. Further lines are counted."""

LINE_CHARACTERS = 1000
"""Maximum number of characters of a logged line. The rest of a longer line is left out."""


class BoundedLines:
    """Cuts the output of a process into lines, and lets `per_minute` of them pass.

    Args:
        per_minute: Lines that pass per minute. After ten quiet seconds, a sixth of them may pass at once.
        now: Seconds on a monotonic clock.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute, self._at_once = per_minute, max(1.0, per_minute / 6)
        self._allowed, self._then = self._at_once, now
        self._left_out = 0
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the lines to log. Empty `data` is the end of the output.

        Lines that were left out are counted. The count is logged when lines pass again, and at the end.
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
