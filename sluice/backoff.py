"""Pauses between attempts to reach a service."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Pauses that double from each failure to the next, up to a bound, with jitter, so that the clients of a fleet do not retry at once.

    Attributes:
        first_s: Seconds after the first failure.
        longest_s: Longest pause in seconds: short enough that a service that was restarted is found soon.
        failures: Failures since the last success.
    """

    first_s: float = 0.2
    longest_s: float = 5.0
    failures: int = field(default=0, init=False)

    @property
    def at_longest(self) -> bool:
        """Return whether the pauses grow no further."""
        return self._mean_s() >= self.longest_s

    def succeed(self) -> None:
        """Begin with the first pause again at the next failure."""
        self.failures = 0

    def fail(self) -> float:
        """Count a failure and return the pause before the next attempt, in seconds: half to one and a half of its mean."""
        mean_s = self._mean_s()
        self.failures += 1
        return min(self.longest_s, mean_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret

    def _mean_s(self) -> float:
        return min(self.longest_s, math.ldexp(self.first_s, min(self.failures, 64)))
