"""The endless stream of tasks: every task once per pass, each pass in an order of its own, any place known by number."""

from __future__ import annotations

import random
from collections.abc import Sequence

from orchestrator_svc.envs.base import Task

__all__ = ["TaskStream"]


class TaskStream:
    """Tasks by position, the same for the same seed, so that a restart finds them again.

    Args:
        tasks: The tasks of a split.
        seed: Seed of the orders.

    Raises:
        ValueError: if there are no tasks.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise ValueError("the split has no tasks: check orchestrator.split and environment_args")
        self._tasks, self._seed = tasks, seed
        self._pass = -1
        self._order: list[int] = []

    def at(self, position: int) -> Task:
        """The task at a position, from 0."""
        number, place = divmod(position, len(self._tasks))
        if number != self._pass:
            self._order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{number}").shuffle(self._order)  # noqa: S311 - an order, not a secret
            self._pass = number
        return self._tasks[self._order[place]]
