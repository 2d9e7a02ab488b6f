"""Environments that do next to nothing, for `benchmarks.environment`. Named by its path, so that the processes load nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sluice.environments.base import Message, Task, Turn


class Letters:
    """Scores the share of a letter."""

    name = "letters"

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return one task."""
        del split, seed
        return [Task("task", {"letter": "a"})]

    def messages(self, task: Task) -> Sequence[Message]:
        """Ask for the letter."""
        return [{"role": "user", "content": task.data["letter"]}]

    def score(self, task: Task, completion: str) -> float:
        """Return the share of the letter; end the process if that is asked for."""
        if completion == "exit":
            os._exit(1)
        return completion.count(task.data["letter"]) / max(1, len(completion))


class Count:
    """Episodes that count their steps."""

    name = "count"

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return one task."""
        del split, seed
        return [Task("task")]

    def reset(self, task: Task, seed: int) -> CountEpisode:
        """Begin an episode."""
        del task, seed
        return CountEpisode()


class CountEpisode:
    """One episode."""

    messages: Sequence[Message] = ({"role": "user", "content": "go"},)

    def step(self, completion: str) -> Turn:
        """Answer a turn."""
        return Turn(messages=[{"role": "user", "content": completion[:10]}], reward=1.0)
