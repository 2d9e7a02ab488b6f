"""Decide which operation runs next: pure state machines, without clock and I/O.

`Training` puts the operations of one training into the order of their numbers and keeps their outcomes. `Turns` shares the engine
among the trainings: in turn, each training runs one operation.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_AHEAD = 64
"""A training accepts this many sequence numbers, counted from the first operation that has not begun."""

OUTCOMES_KEPT = 256
"""Outcomes that are kept per training, for callers that ask late, and to recognise repeats."""

Payload = TypeVar("Payload")
Outcome = TypeVar("Outcome")


class Refusal(enum.Enum):
    """Why an operation is not accepted."""

    OTHER_OPERATION = "another operation has this sequence number"
    TOO_FAR_AHEAD = "too many operations before it are missing"
    FORGOTTEN = "its outcome is no longer kept"
    UNKNOWN = "no operation has this sequence number yet"


class RefusedError(Exception):
    """The operation is not accepted, or not known.

    Attributes:
        refusal: The reason.
        next_sequence_no: Number of the first operation that has not begun.
    """

    def __init__(self, refusal: Refusal, sequence_no: int, next_sequence_no: int) -> None:
        super().__init__(
            f"operation {sequence_no}: {refusal.value}; the first number that has not been run is {next_sequence_no}"
        )
        self.refusal, self.next_sequence_no = refusal, next_sequence_no


@dataclass
class Entry(Generic[Payload, Outcome]):
    """One operation.

    Attributes:
        digest: Digest of its content.
        payload: The work to do; None once it has begun.
        outcome: Its result; None until it has ended.
    """

    digest: str
    payload: Payload | None
    outcome: Outcome | None = None


@dataclass
class Training(Generic[Payload, Outcome]):
    """The operations of one training.

    Attributes:
        next_sequence_no: Number of the first operation that has not begun.
    """

    next_sequence_no: int = 1
    _entries: OrderedDict[int, Entry[Payload, Outcome]] = field(default_factory=OrderedDict)

    def known(self, sequence_no: int, digest: str) -> Entry[Payload, Outcome] | None:
        """Return the known operation with this number and digest; None if the operation is new.

        Raises:
            RefusedError: if a different operation has this number, or the number is too far ahead or too old.
        """
        known = self._entries.get(sequence_no)
        if known is not None:
            if known.digest != digest:
                raise RefusedError(Refusal.OTHER_OPERATION, sequence_no, self.next_sequence_no)
            return known
        if sequence_no < self.next_sequence_no:
            raise RefusedError(Refusal.FORGOTTEN, sequence_no, self.next_sequence_no)
        if sequence_no >= self.next_sequence_no + MOST_AHEAD:
            raise RefusedError(Refusal.TOO_FAR_AHEAD, sequence_no, self.next_sequence_no)
        return None

    def submit(self, sequence_no: int, digest: str, payload: Payload) -> Entry[Payload, Outcome]:
        """Accept an operation, or return the one that it repeats. For errors see `known`."""
        entry = self.known(sequence_no, digest)
        if entry is None:
            entry = self._entries[sequence_no] = Entry[Payload, Outcome](digest, payload)
        return entry

    def find(self, sequence_no: int) -> Entry[Payload, Outcome]:
        """Return an operation.

        Raises:
            RefusedError: if there is no operation with this number, or its outcome is no longer kept.
        """
        known = self._entries.get(sequence_no)
        if known is None:
            refusal = Refusal.FORGOTTEN if sequence_no < self.next_sequence_no else Refusal.UNKNOWN
            raise RefusedError(refusal, sequence_no, self.next_sequence_no)
        return known

    @property
    def ready(self) -> bool:
        """Whether the next operation has arrived."""
        return self.next_sequence_no in self._entries

    @property
    def left(self) -> int:
        """Number of operations that are in progress, or can run without waiting for another one to be submitted."""
        under_way = sum(each.payload is None and each.outcome is None for each in self._entries.values())
        number = self.next_sequence_no
        while number in self._entries:
            number += 1
        return under_way + number - self.next_sequence_no

    def waiting(self) -> list[Payload]:
        """Return the payloads of the operations that have not begun."""
        return [each.payload for each in self._entries.values() if each.payload is not None]

    def begin(self) -> tuple[Entry[Payload, Outcome], Payload]:
        """Begin the next operation.

        Raises:
            KeyError: if the next operation has not arrived.
        """
        entry = self._entries[self.next_sequence_no]
        self.next_sequence_no += 1
        payload, entry.payload = entry.payload, None
        if payload is None:
            raise RuntimeError("an operation was begun twice")
        return entry, payload

    def end(self, entry: Entry[Payload, Outcome], outcome: Outcome) -> None:
        """Keep the outcome of an operation, and forget the oldest outcomes."""
        entry.outcome = outcome
        ended = [number for number, each in self._entries.items() if each.outcome is not None]
        for number in sorted(ended)[: max(0, len(ended) - OUTCOMES_KEPT)]:
            del self._entries[number]


@dataclass
class Turns:
    """Which training runs an operation next: trainings that are ready take turns, with one operation each.

    Attributes:
        waiting: Names of trainings; the first one has waited longest.
    """

    waiting: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Add a training behind all others."""
        self.waiting.append(name)

    def remove(self, name: str) -> None:
        """Remove a training."""
        self.waiting.remove(name)

    def take(self, ready: set[str]) -> str | None:
        """Return the next training that is ready, and put it behind all others; None if no training is ready."""
        for name in self.waiting:
            if name in ready:
                self.waiting.remove(name)
                self.waiting.append(name)
                return name
        return None
