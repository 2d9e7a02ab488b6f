"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        check: What was looked at, such as ``disk``.
        found: What is so.
        remedy: What to do; empty if all is well.
    """

    check: str
    state: State
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Return that all is well."""
    return Finding(check, State.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Return that something will hurt sooner or later."""
    return Finding(check, State.WARNING, found, remedy)


def wrong(check: str, found: str, remedy: str) -> Finding:
    """Return that a run cannot work like this."""
    return Finding(check, State.WRONG, found, remedy)
