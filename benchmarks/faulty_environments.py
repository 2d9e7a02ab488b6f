"""Misbehaving environments for `benchmarks.environment_faults`. A task asks for a letter; the reward is the letter's share."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence

from sluice.environments.base import Message, Task

TASKS = 64

FAULTY = 8
"""One task in `FAULTY` goes wrong."""

LEAKED_MIB = 17
"""MiB leaked per second: 1 GiB a minute."""


class Sound:
    """Nothing goes wrong here."""

    name = "letters"

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the tasks, each with whether something goes wrong with it."""
        del split
        letters = random.Random(seed)  # noqa: S311 - data, not secrets
        return [
            Task(f"{number}", {"text": "".join(letters.choices("abcdefgh", k=6)), "faulty": number % FAULTY == 0})
            for number in range(TASKS)
        ]

    def messages(self, task: Task) -> Sequence[Message]:
        """Ask for the first letter of some."""
        if task.data["faulty"]:
            self.ask_wrongly()
        return [{"role": "user", "content": task.data["text"]}]

    def score(self, task: Task, completion: str) -> object:
        """Return the share of the letter in the completion."""
        share = completion.count(task.data["text"][0]) / max(1, len(completion))
        return self.score_wrongly(share) if task.data["faulty"] else share

    def ask_wrongly(self) -> None:
        """Fail before an answer is asked for."""

    def score_wrongly(self, share: float) -> object:
        """Fail while scoring."""
        return share


class HangsBefore(Sound):
    """Hangs when the messages are asked for."""

    def ask_wrongly(self) -> None:
        """Never return."""
        time.sleep(1e6)


class HangsAtScore(Sound):
    """Hangs when an answer is scored."""

    def score_wrongly(self, share: float) -> object:
        """Never return."""
        time.sleep(1e6)
        return share


class Crashes(Sound):
    """Ends its process as a fault in native code does."""

    def score_wrongly(self, share: float) -> object:
        """End the process."""
        del share
        os.abort()


class Leaks(Sound):
    """Takes memory and gives none back, whatever it is asked for."""

    def __init__(self) -> None:
        self._held: list[bytearray] = []
        threading.Thread(target=self._leak, daemon=True).start()

    def _leak(self) -> None:
        while True:
            self._held.append(bytearray(b"x") * (LEAKED_MIB << 20))
            time.sleep(1)


class AnswersTwice(Sound):
    """Forks while it scores, so that two processes answer the same call."""

    def score_wrongly(self, share: float) -> object:
        """Return, in two processes."""
        return share if os.fork() else 1 - share


class AnswersGarbage(Sound):
    """Returns something that is not a reward, and prints."""

    def __init__(self) -> None:
        self._count = 0

    def score_wrongly(self, share: float) -> object:
        """Print a line of a megabyte, and return something else each time."""
        print("x" * (1 << 20), flush=True)
        self._count += 1
        return (float("nan"), "a lot", [share], {"reward": share}, float("inf"), b"\xff", 10**400)[self._count % 7]
