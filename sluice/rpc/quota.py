"""How much one principal uses a server: a token bucket for its calls per second, and its calls in progress. Pure."""

from __future__ import annotations

from math import ceil

from sluice.rpc.errors import SluiceError
from sluice.rpc.principals import Principal

_BUSY_RETRY_S = 1.0
"""Seconds after which to retry when too many calls are in progress: nobody knows when one ends."""


class Usage:
    """What a principal uses of one server.

    Args:
        principal: The principal, with its quota.
        now: A monotonic time in seconds, as in `begin`.

    Attributes:
        principal: The principal.
    """

    def __init__(self, principal: Principal, now: float) -> None:
        self.principal = principal
        quota = principal.quota
        self._name = principal.name
        self._rate = quota.requests_per_s
        self._burst = quota.burst if quota.burst is not None else max(1, ceil(quota.requests_per_s or 1))
        self._most = quota.in_flight
        self._left = float(self._burst)
        self._then = now
        self.in_flight = 0

    def begin(self, now: float) -> None:
        """Account for a call that begins. `end` must follow.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED with the time after which a repeat may succeed; nothing is accounted for then.
        """
        if self._most is not None and self.in_flight >= self._most:
            raise SluiceError.resource_exhausted(
                "QUOTA_IN_FLIGHT",
                f"principal {self._name!r} has {self.in_flight} calls in progress, the most that its quota allows"
                " (in_flight in the principals file); retry when one has ended",
                _BUSY_RETRY_S,
            )
        if self._rate is not None:
            # If the clock stands still or goes back, the bucket does not change.
            self._left = min(self._burst, self._left + max(0.0, now - self._then) * self._rate)
            self._then = max(self._then, now)
            if self._left < 1:
                raise SluiceError.resource_exhausted(
                    "QUOTA_RATE",
                    f"principal {self._name!r} calls more often than {self._rate:g} times a second, which its quota allows"
                    " (requests_per_s in the principals file); retry after the delay",
                    (1 - self._left) / self._rate,
                )
            self._left -= 1
        self.in_flight += 1

    def end(self) -> None:
        """Account for the end of a call that `begin` accepted."""
        self.in_flight -= 1
