"""What the children write: kept in one file per child, and as labelled lines for whoever watches."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ChildLog", "LogLine", "read_line"]

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Names of severities in order."""

TAIL_LINES = 30
"""Lines of a dead child's log that are shown: a traceback with some of what led to it."""

_CHUNK_BYTES = 1 << 16
_LINE_CHARACTERS = 1 << 16
"""A longer line is cut into several: a child must not fill the supervisor's memory."""

_PLAIN_LEVEL = re.compile(r"^(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
"""How libraries that bypass our logging write a level: ``WARNING ...`` or ``(EngineCore pid=7) ERROR ...``."""

_LIBRARY_WARNING = re.compile(r"\S+\.py:\d+: \w*Warning: ")
"""How Python writes a warning of a library; our logging passes it on as an event."""

_SOURCE = re.compile(r"\[\w+\.py:\d+\]")
"""Where in a library a line comes from: ``[core.py:1512]``."""

_HIDDEN_FIELDS = frozenset({"event", "level", "timestamp", "service", "exception"})


@dataclass(frozen=True)
class LogLine:
    """One line of a child.

    Attributes:
        level: Severity as in `LEVELS`; lines without one count as info.
        text: The line for people, without time and level.
        structured: True for what our own services have to say; False for libraries.
        kind: What lines that say the same have in common: the event's name, or where in a library they come from.
    """

    level: int
    text: str
    structured: bool
    kind: str = ""


def read_line(raw: str) -> LogLine:
    """Understand a line: JSON of our own logging, or whatever a library writes."""
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
    """The event, its fields, and under it the traceback if there is one."""
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in _HIDDEN_FIELDS)
    sentence = f"{record['event']} {fields}".rstrip()
    trace = record.get("exception")
    return f"{sentence}\n{trace}" if trace else sentence


class ChildLog:
    """The log of one child, through all its restarts.

    Args:
        path: File that every line is appended to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def tail(self) -> list[str]:
        """The last lines, tracebacks unfolded; at most `TAIL_LINES`."""
        unfolded = [line for raw in self._tail for line in read_line(raw).text.splitlines()]
        return unfolded[-TAIL_LINES:]

    async def follow(self, stream: asyncio.StreamReader, on_line: Callable[[LogLine], None]) -> None:
        """Write down what a process says until it closes its end.

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
    """Lines of any length; bytes that are not UTF-8 are shown as such rather than lost."""
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
