"""The output of a child, as lines for people and as records of its log.

Every line of a log is JSON. Lines that our services log are JSON already and are not changed. All other output (lines of libraries,
progress bars, the traceback of an interpreter) is *foreign*: each line becomes a record of its own, with the text in `event`.

    {"event": "I1126 10:04:33.1 7 fork_posix.cc:71] fork", "level": "info", "timestamp": "...Z", "service": "trainer", "foreign": true}

Some foreign text is dropped: terminal control sequences (colors, titles, links), blank lines, and the earlier states of a progress bar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Severities by name."""

_OUR_FIELDS = ("event", "level", "timestamp", "service")
"""Fields that every record has, see `sluice.telemetry.configure_logging`."""

_PLAIN_LEVEL = re.compile(r"^(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
"""The level in a line of a library with logging of its own: ``WARNING ...`` or ``(EngineCore pid=7) ERROR ...``."""

_GLOG_LEVEL = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d")
"""The level in a line of gRPC's core and of other C++ libraries: ``E1126 10:04:33.123456 ...``."""

_GLOG_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "critical"}

_PROCESS = re.compile(r"^\([^)]*\) ")
"""Prefix of each line that vLLM's processes write: ``(EngineCore pid=7) ``."""

_TRACEBACK = re.compile(r"\s*(?:\+ Exception Group )?Traceback \(most recent call last\):|Fatal Python error: ")

_LIBRARY_WARNING = re.compile(r"\S+\.py:\d+: \w*Warning: ")
"""A Python warning of a library; our logging passes it on as an event."""

_SOURCE = re.compile(r"\[\w+\.py:\d+\]")
"""The place in a library that wrote a line: ``[core.py:1512]``."""

_HIDDEN_FIELDS = frozenset({"event", "level", "timestamp", "service", "exception"})

_CONTROL_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colors, movements of the cursor
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|[@-Z\\^_])"
)
"""Control sequences, which a terminal executes and does not show (ECMA-48)."""

_NO_LETTER = re.compile(r"[\W\d_]+")


@dataclass(frozen=True)
class LogLine:
    """One line of a child's output, for people.

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
    record = _object(raw)
    if record is not None and "event" in record:
        level = LEVELS.get(str(record.get("level", "info")).lower(), LEVELS["info"])
        event = str(record["event"])
        return LogLine(level, _sentence(record), structured=not _LIBRARY_WARNING.match(event), kind=event)
    found = _PLAIN_LEVEL.match(raw)
    level = LEVELS[found.group(1).lower()] if found else LEVELS["info"]
    source = _SOURCE.search(raw)
    return LogLine(level, raw, structured=False, kind=source.group() if source else "")


def original(line: str) -> str:
    """Return a line of a log as the process wrote it: the text of a foreign record, or the line itself. Without the line's end."""
    record = _object(line)
    foreign = record is not None and record.get("foreign") is True
    return str(record["event"]) if record and foreign and "event" in record else line.rstrip("\n")


class Records:
    """Turns the lines of one process into records of its log.

    Args:
        service: Name of the child, for the records of foreign text.
        now: Returns the time in UTC. A foreign record has the time at which its line was read.
    """

    def __init__(self, service: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._service, self._now = service, now
        self._in_traceback = False

    def of(self, raw: str, *, cut: bool = False) -> list[str]:
        """Return the records of one line, as JSON without line ends; none for a blank line.

        A line has several if a progress bar and a record of ours share it, or if carriage returns put several texts over one another.

        Args:
            raw: The line, without its end.
            cut: Whether the line has no end, because the process ended within it, or the line was too long and its rest follows.
        """
        records: list[str] = []
        parts = list(_parts(raw))
        for number, (text, ours) in enumerate(parts, 1):
            if text:
                records.append(self._foreign(text, cut=cut and not ours and number == len(parts)))
            if ours:
                records.append(ours)
                self._in_traceback = False
        return records

    def note(self, level: str, event: str, **fields: object) -> str:
        """Return a record of the supervisor's own."""
        head = {"event": event, "level": level, "timestamp": self._timestamp(), "service": self._service}
        return json.dumps({**head, **fields})

    def _foreign(self, text: str, *, cut: bool) -> str:
        return self.note(self._level(text), text, foreign=True, **({"cut": True} if cut else {}))

    def _timestamp(self) -> str:
        return self._now().isoformat().replace("+00:00", "Z")

    def _level(self, text: str) -> str:
        """Return the level that a line names, `error` for a traceback, and otherwise `info`."""
        bare = _PROCESS.sub("", text)
        if _TRACEBACK.match(bare):
            self._in_traceback = True
            return "error"
        if self._in_traceback:
            # Frames are indented. The first line that is not indented has the error, and ends the traceback.
            self._in_traceback = bare[:1].isspace()
            return "error"
        if found := _PLAIN_LEVEL.match(text):
            return found.group(1).lower()
        if found := _GLOG_LEVEL.match(text):
            return _GLOG_LEVELS[found.group(1)]
        return "info"


def _parts(raw: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a line, each with the record of our logging that follows it. Either may be empty.

    Carriage returns make several texts overwrite each other. If successive texts differ only in digits and punctuation, as with a progress
    bar, only the last one is yielded.
    """
    last = ""
    for state in _CONTROL_SEQUENCE.sub("", raw).split("\r"):
        text, ours = _split(state)
        if text.strip():
            if last and _letters(text) != _letters(last):
                yield last, ""
            last = text
        if ours:
            yield last, ours
            last = ""
    if last:
        yield last, ""


def _letters(text: str) -> str:
    return _NO_LETTER.sub("", text)


def _object(raw: str) -> dict[str, object] | None:
    """Parse a line as a JSON object; return None if it is not one."""
    if not raw.startswith("{"):
        return None
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):  # also for huge integers and deep nesting
        return None
    return record if isinstance(record, dict) else None


def _split(text: str) -> tuple[str, str]:
    """Return the foreign text of a line, and the record of our own logging that ends it, as strict JSON; each may be empty."""
    at = text.find('{"')
    record = _object(text[at:]) if at >= 0 else None
    if record is None or not all(isinstance(record.get(name), str) for name in _OUR_FIELDS):
        return text, ""
    ours = text[at:]
    if "NaN" in ours or "Infinity" in ours:
        # Python writes and reads these numbers, JSON has none of them.
        ours = json.dumps(json.loads(ours, parse_constant=str))
    return text[:at], ours


def _sentence(record: dict[str, object]) -> str:
    """Return the event and its fields, followed by the traceback if there is one."""
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in _HIDDEN_FIELDS)
    sentence = f"{record['event']} {fields}".rstrip()
    trace = record.get("exception")
    return f"{sentence}\n{trace}" if trace else sentence
