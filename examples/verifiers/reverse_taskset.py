"""reverse_text for verifiers 0.4, as a taskset. Nothing of Sluice is in it."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TASKS = 4096


class WordData(vf.TaskData):
    """A string, reversed."""

    answer: str


class Word(vf.Task[WordData]):
    """Asks for the string."""

    @vf.reward
    async def alike(self, trace: vf.Trace) -> float:
        """Return how alike the reply and the answer are, 0 to 1."""
        return difflib.SequenceMatcher(None, trace.last_reply, self.data.answer, autojunk=False).ratio()


class ReverseTaskset(vf.Taskset[Word, vf.TasksetConfig]):
    """Strings of five to ten letters."""

    def load(self) -> Iterator[Word]:
        """Make the tasks."""
        rng = random.Random(7)  # noqa: S311 - words, not secrets
        drawn = dict.fromkeys("".join(rng.choices(LETTERS, k=rng.randint(5, 10))) for _ in range(TASKS))
        for word in drawn:
            yield Word(WordData(prompt=word, answer=word[::-1]), self.config.task)
