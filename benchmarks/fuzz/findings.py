"""What fuzzing found, each defect once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NUMBERS = re.compile(r"[0-9a-f]{8,}|\d+|'[^']*'")


@dataclass
class Findings:
    """Findings, grouped by place and by text without numbers and names."""

    _seen: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)

    def add(self, place: str, what: str, example: str) -> None:
        """Take a finding.

        Args:
            place: RPC, route or parser.
            what: What is wrong.
            example: Input that shows it; printed the first time.
        """
        key = (place, _NUMBERS.sub("#", what)[-160:])
        first, count = self._seen.get(key, ("", 0))
        if not count:
            first = f"{place}: {what}"
            print(f"FOUND {first}\n      {example[:2000]}", flush=True)
        self._seen[key] = (first, count + 1)

    def at(self, place: str) -> int:
        """Return how many different findings a place has."""
        return sum(where == place for where, _ in self._seen)

    def lines(self) -> list[str]:
        """Return each finding with the number of inputs that showed it."""
        return [f"{first} ({count} times)" for first, count in self._seen.values()]
