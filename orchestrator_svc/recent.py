"""The last trajectories whose fate is known, for operators who ask; bounded in bytes, older ones are in the files."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2

__all__ = ["RecentTrajectories"]

_DEFAULT_PAGE = 50
_LARGEST_PAGE = 500
_PAGE_BYTES = 3 << 20
"""A page stays below the size limit of a message."""


class RecentTrajectories:
    """A bounded history.

    Args:
        max_bytes: Serialised size of what is kept.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._kept: deque[tuple[int, int, orchestrator_pb2.TrajectoryRecord]] = deque()
        self._max_bytes, self._bytes, self._next = max_bytes, 0, 1

    def add(self, records: Iterable[orchestrator_pb2.TrajectoryRecord]) -> None:
        """Keep some, forgetting the oldest."""
        for record in records:
            size = record.ByteSize()
            self._kept.append((self._next, size, record))
            self._next += 1
            self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._kept.popleft()[1]

    def page(self, request: orchestrator_pb2.ListTrajectoriesRequest) -> orchestrator_pb2.ListTrajectoriesResponse:
        """A page, newest first; its token is the number of the last one shown.

        Raises:
            SluiceError: INVALID_ARGUMENT if the token is not one of ours.
        """
        if request.page_token and not request.page_token.isdecimal():
            raise SluiceError.invalid_argument("page_token", "is not one that ListTrajectories gave: list anew")
        before = int(request.page_token) if request.page_token else self._next
        wanted = min(request.page_size or _DEFAULT_PAGE, _LARGEST_PAGE)
        answer = orchestrator_pb2.ListTrajectoriesResponse()
        taken = last = 0
        for number, size, record in reversed(self._kept):
            if number >= before or not _matches(record, request):
                continue
            if len(answer.trajectories) == wanted or (answer.trajectories and taken + size > _PAGE_BYTES):
                answer.next_page_token = str(last)
                break
            answer.trajectories.append(record)
            taken, last = taken + size, number
        return answer


def _matches(record: orchestrator_pb2.TrajectoryRecord, request: orchestrator_pb2.ListTrajectoriesRequest) -> bool:
    if request.HasField("step") and record.step != request.step:
        return False
    if not request.HasField("reward_below"):
        return True
    return record.trajectory.HasField("reward") and record.trajectory.reward < request.reward_below
