"""An open episode of a multi-turn environment, and its replay when its process ends because of another episode."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from sluice.environments.base import Message, Task, Turn
from sluice.environments.framing import encode
from sluice.environments.worker import EnvironmentFailedError, Reason, Worker

log = structlog.get_logger(__name__)

MOST_LOSSES = 8
"""How often the process of a call or an episode may end because of others, before the call or the episode fails, too."""


class ReplayDiffersError(Exception):
    """An episode cannot be continued in another process. It has to begin again."""


class OpenEpisode:
    """An episode of a multi-turn environment. If its process ends because of another episode, it is replayed in another process.

    Attributes:
        name: Its name in its process.
        messages: Messages to begin with.
        tools: Functions that the assistant may call.
        worker: Its process.
        done: Whether the environment has ended it.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Awaitable[tuple[Any, Worker]]],
        limit: tuple[float, str],
        task: Task,
        seed: int,
    ) -> None:
        self.name = name
        self.messages: list[Message] = []
        self.tools: list[Mapping[str, Any]] = []
        self.worker: Worker | None = None
        self.done = False
        self._call, self._limit, self._task, self._seed = call, limit, task, seed
        self._answers: list[tuple[str | Message, bytes]] = []

    async def begin(self) -> None:
        """Open it, and repeat the steps that were made before.

        Raises:
            EnvironmentFailedError: if the environment fails.
            ReplayDiffersError: if its answers differ from the earlier ones.
        """
        self.worker = None
        arguments = {"episode": self.name, "task": task_fields(self._task), "seed": self._seed}
        opening, self.worker = await self._call("reset", self._task.task_id, arguments, self._limit)
        if self._answers and opening != {"messages": self.messages, "tools": self.tools}:
            raise self._differs("reset")
        self.messages, self.tools = opening["messages"], opening["tools"]
        for number, (completion, before) in enumerate(self._answers):
            if _digest(await self._step(completion)) != before:
                raise self._differs(f"step {number + 1}")

    async def step(self, completion: str | Message, *, last: bool = False) -> Turn:
        """Take the assistant's turn: its text, or its message if there are tools; `last` if the run takes no further turn.

        Raises:
            EnvironmentFailedError: if the environment fails.
            ReplayDiffersError: if the process ended because of another episode, and this one cannot be replayed.
        """
        losses, alone = 0, False
        while True:
            try:
                if losses:
                    await self.begin()
                answer = await self._step(completion, last=last, alone=alone)
                break
            except EnvironmentFailedError as error:
                if error.culprit or error.reason == Reason.GIVEN_UP or losses == MOST_LOSSES:
                    raise
                losses, alone = losses + 1, error.suspect
                log.info(
                    "an episode is replayed", task=self._task.task_id, turns=len(self._answers), problem=error.message
                )
        self._answers.append((completion, _digest(answer)))
        self.done = answer["done"]
        return Turn(**answer)

    async def _step(self, completion: str | Message, *, last: bool = False, alone: bool = False) -> dict[str, Any]:
        arguments = {"episode": self.name, "completion": completion, "last": last}
        answer, _ = await self._call("step", self._task.task_id, arguments, self._limit, self.worker, alone=alone)
        found: dict[str, Any] = answer
        return found

    def _differs(self, what: str) -> ReplayDiffersError:
        return ReplayDiffersError(
            f"the process of an episode of task {self._task.task_id} ended because of another one, and {what} answered otherwise when it"
            " was replayed: an episode can only be continued if its seed and the completions determine it"
        )


def _digest(answer: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(encode(answer), digest_size=16).digest()


def task_fields(task: Task) -> dict[str, Any]:
    """Return a task in the form that its environment's process expects."""
    return {"task_id": task.task_id, "data": task.data, "max_tokens": task.max_tokens}
