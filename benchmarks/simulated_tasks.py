"""The environments of `sluice bench orchestrator`: real ones, so that their processes and threads are the real ones, and cheap."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.environments.base import Message, Task, Turn

TASKS = 4096
TURNS = 4


def _tasks(split: str) -> list[Task]:
    return [Task(f"{split}-{number}", {"question": f"What comes after {number}?"}) for number in range(TASKS)]


def _lower_case_share(text: str) -> float:
    return sum(map(str.islower, text)) / max(1, len(text))


class Question:
    """One question; the share of lower-case letters is the reward."""

    name = "question"

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the tasks."""
        del seed
        return _tasks(split)

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the question."""
        return [{"role": "user", "content": task.data["question"]}]

    def score(self, task: Task, completion: str) -> float:
        """Return the share of lower-case letters."""
        del task
        return _lower_case_share(completion)


class TalkEpisode:
    """A conversation of a fixed number of turns."""

    def __init__(self, task: Task) -> None:
        self.messages: Sequence[Message] = [{"role": "user", "content": task.data["question"]}]
        self._turn = 0

    def step(self, completion: str) -> Turn:
        """Continue the conversation, and reward the last turn."""
        self._turn += 1
        if self._turn == TURNS:
            return Turn(reward=_lower_case_share(completion), done=True)
        return Turn([{"role": "user", "content": "Go on."}])


class Talk:
    """Several turns; the share of lower-case letters of the last one is the reward."""

    name = "talk"

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the tasks."""
        del seed
        return _tasks(split)

    def reset(self, task: Task, seed: int) -> TalkEpisode:
        """Begin a conversation."""
        del seed
        return TalkEpisode(task)
