"""What senders gave that was refused at the door: counted by principal and task, and a sender that does it again and again has to wait.

Pure: the caller passes the time. A refusal is its sender's fault: it never counts towards a pause of the run.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2

MOST_KNOWN = 100
"""Senders, tasks and reasons that are counted, the last ones."""

MOST_PER_MINUTE = 60
"""Refusals of one principal within a minute after which it has to wait until the first of them is a minute old."""

_MINUTE_S = 60.0


class Refusals:
    """Counts refusals."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        self._recent: dict[str, deque[float]] = {}

    def check(self, principal: str, now: float) -> None:
        """Let a principal give something, unless too much of it was refused just now.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED with the time after which it may go on.
        """
        recent = self._recent.get(principal)
        if recent is None or len(recent) < MOST_PER_MINUTE:
            return
        wait_s = recent[0] + _MINUTE_S - now
        if wait_s > 0:
            raise SluiceError.resource_exhausted(
                "REFUSED_TOO_OFTEN",
                f"{MOST_PER_MINUTE} rewards of principal {principal!r} were refused within a minute: correct them first",
                wait_s,
            )

    def note(self, principal: str, task_id: str, reason: str, now: float) -> None:
        """Count a refusal."""
        key = (principal, task_id, reason)
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > MOST_KNOWN:
            self._counts.popitem(last=False)
        self._recent[principal] = recent = self._recent.pop(principal, deque(maxlen=MOST_PER_MINUTE))
        recent.append(now)
        if len(self._recent) > MOST_KNOWN:
            del self._recent[next(iter(self._recent))]

    def describe(self) -> list[orchestrator_pb2.RefusedInput]:
        """Describe them, the oldest first."""
        return [
            orchestrator_pb2.RefusedInput(principal=principal, task_id=task_id, reason=reason, count=count)
            for (principal, task_id, reason), count in self._counts.items()
        ]
