"""The output of children: appended to one file per child, parsed into lines, and rate-limited for the view."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ChildLog", "LogLine", "RateLimit", "read_line"]

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Severities by name."""

TAIL_LINES = 30
"""Lines of a dead child's log that are shown: a traceback and a few lines before it."""

_CHUNK_BYTES = 1 << 16
_LINE_CHARACTERS = 1 << 16
"""A longer line is split, so that a child cannot fill the supervisor's memory."""

_PLAIN_LEVEL = re.compile(r"^(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
"""The level in a line of a library with logging of its own: ``WARNING ...`` or ``(EngineCore pid=7) ERROR ...``."""

_LIBRARY_WARNING = re.compile(r"\S+\.py:\d+: \w*Warning: ")
"""A Python warning of a library; our logging passes it on as an event."""

_SOURCE = re.compile(r"\[\w+\.py:\d+\]")
"""The place in a library that wrote a line: ``[core.py:1512]``."""

SHOWN = 3
"""Lines of one kind that are shown before further ones are counted."""

WINDOW_S = 10.0
"""Seconds without a line of a kind after which its count starts again."""

_HIDDEN_FIELDS = frozenset({"event", "level", "timestamp", "service", "exception"})


@dataclass(frozen=True)
class LogLine:
    """One line of a child's output.

    Attributes:
        level: Severity as in `LEVELS`; info if the line names none.
        text: The line without time and level.
        structured: Whether one of our services wrote it; False for libraries.
        kind: Equal for lines that report the same thing: the event's name, or the place in the library.
    """

    level: int
    text: str
    structured: bool
    kind: str = ""


def read_line(raw: str) -> LogLine:
    """Parse a line: JSON of our own logging, or the text of a library."""
    if raw.startswith("{"):
        try:
            record = json.loads(raw)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and "event" in record:
            level = LEVELS.get(str(record.get("level", "info")).lower(), LEVELS["info"])
            event = str(record["event"])
            return LogLine(level, _sentence(record), structured=not _LIBRARY_WARNING.match(event), kind=event)
    found = _PLAIN_LEVEL.match(raw)
    level = LEVELS[found.group(1).lower()] if found else LEVELS["info"]
    source = _SOURCE.search(raw)
    return LogLine(level, raw, structured=False, kind=source.group() if source else "")


def _sentence(record: dict[str, object]) -> str:
    """Return the event and its fields, followed by the traceback if there is one."""
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in _HIDDEN_FIELDS)
    sentence = f"{record['event']} {fields}".rstrip()
    trace = record.get("exception")
    return f"{sentence}\n{trace}" if trace else sentence


class ChildLog:
    """The log of one child across its restarts.

    Args:
        path: The file that every line is appended to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def tail(self) -> list[str]:
        """Return the last lines, with each line of a traceback on its own; at most `TAIL_LINES`."""
        unfolded = [line for raw in self._tail for line in read_line(raw).text.splitlines()]
        return unfolded[-TAIL_LINES:]

    async def follow(self, stream: asyncio.StreamReader, on_line: Callable[[LogLine], None]) -> None:
        """Write a process's output to the file until the process closes it.

        Args:
            stream: The process's output.
            on_line: Called with each line.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", buffering=1) as file:
            async for raw in _lines(stream):
                file.write(raw + "\n")
                self._tail.append(raw)
                on_line(read_line(raw))


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines of any length; bytes that are not UTF-8 are escaped, not dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    rest = ""
    while chunk := await stream.read(_CHUNK_BYTES):
        *whole, rest = (rest + decoder.decode(chunk)).split("\n")
        for line in whole:
            yield line.removesuffix("\r")
        if len(rest) > _LINE_CHARACTERS:
            yield rest
            rest = ""
    if rest:
        yield rest


@dataclass
class _Kind:
    seen: int = 0
    hidden: int = 0
    last: str = ""
    last_at: float = 0.0


class RateLimit:
    """Shows the first lines of a kind, then a count and the last one. Pure: the caller passes the time.

    The last hidden line is kept, because the end of a traceback names the error.
    """

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
