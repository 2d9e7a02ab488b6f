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
        check: What was checked, such as ``disk``.
        found: What was found.
        remedy: What to do; empty if all is well.
    """

    check: str
    state: State
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Return the finding that all is well."""
    return Finding(check, State.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that is likely to cause trouble later."""
    return Finding(check, State.WARNING, found, remedy)


def wrong(check: str, found: str, remedy: str) -> Finding:
    """Return a finding with which a run cannot work."""
    return Finding(check, State.WRONG, found, remedy)
