"""Calls the code of an environment in threads of its own, with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from sluice.rpc import SluiceError
from sluice.threads import CallHungError, DeadlineThreads, TooManyHungError

__all__ = ["EnvironmentCalls"]

log = structlog.get_logger(__name__)

_Answer = TypeVar("_Answer")

_MOST_HUNG = 256
"""Threads that may hang at a time: each costs memory, and an environment that hangs so often will not recover."""


class EnvironmentCalls:
    """Runs functions of an environment in threads that hung calls do not use up; use it from one event loop.

    Args:
        threads: Calls that run at a time; further ones wait.
        deadline_s: Seconds that one call may run.
        most_hung: Calls that may hang at a time before further ones are refused.
    """

    def __init__(self, threads: int, deadline_s: float, most_hung: int = _MOST_HUNG) -> None:
        self._threads = DeadlineThreads("environment", threads, deadline_s, most_hung)
        self._deadline_s = deadline_s

    @property
    def hung(self) -> int:
        """Return the number of calls that missed their deadline so far."""
        return self._threads.hung

    @property
    def hanging(self) -> int:
        """Return the number of calls without a caller whose threads have not ended yet."""
        return self._threads.hanging

    async def run(self, function: Callable[..., _Answer], *arguments: Any) -> _Answer:  # noqa: ANN401 - those of any function
        """Call a function in a thread and return its answer.

        Raises:
            TimeoutError: if it is not done by the deadline.
            SluiceError: ABORTED if too many calls hang.
            Exception: whatever the function raises.
        """
        try:
            return await self._threads.run(function, *arguments)
        except CallHungError:
            log.warning("a call of the environment hangs", limit_s=self._deadline_s, hanging=self.hanging)
            raise
        except TooManyHungError as error:
            raise SluiceError.aborted(
                "ENVIRONMENT_HANGS",
                f"{self.hanging} calls of the environment have not ended by their deadline"
                " (orchestrator.deadlines.environment_s): repair the environment, or raise the deadline",
            ) from error
