"""The sums of examples/sums, of which one ends the process that poses it, as a crash in a native library would."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from sluice.environments import Message, Task
from sluice.loading import load_attribute

__all__ = ["FaultySums"]

SUMS = load_attribute(f"{Path(__file__).parents[1] / 'sums' / 'env.py'}:Sums", "environment")


class FaultySums:
    """The environment.

    Args:
        sums: Number of sums to train on.
        crashes: The sum that kills its process, such as ``3+4``; it comes first.
    """

    name = "faulty_sums"

    def __init__(self, sums: int = 64, crashes: str = "3+4") -> None:
        self._sums, self._count, self._crashes = SUMS(), sums, crashes

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return sums of a split, the one that crashes among them."""
        a, b = map(int, self._crashes.split("+"))
        rest = [each for each in self._sums.tasks(split, seed) if each.task_id != self._crashes]
        return [Task(self._crashes, {"a": a, "b": b}), *rest[: self._count - 1]]

    def messages(self, task: Task) -> list[Message]:
        """Return the question."""
        if task.task_id == self._crashes:
            os.kill(os.getpid(), signal.SIGSEGV)
        return list(self._sums.messages(task))

    def score(self, task: Task, completion: str) -> float:
        """Return 1 if the last number of the answer is the sum, else 0."""
        return float(self._sums.score(task, completion))
