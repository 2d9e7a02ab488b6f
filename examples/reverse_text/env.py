"""reverse_text: the prompt is a string, the answer is the string reversed, the reward is how alike the two are."""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Iterator
from itertools import islice

from sluice.environments import Message, Task

__all__ = ["ReverseText", "belongs_to", "words"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHORTEST, LONGEST = 5, 10
"""Letters in a string."""

HELD_OUT_SHARE = 8
"""One string in eight is held out for evaluation."""


class ReverseText:
    """The environment.

    Args:
        train_tasks: Number of strings to train on.
        eval_tasks: Number of held-out strings.
    """

    name = "reverse_text"

    def __init__(self, train_tasks: int = 8192, eval_tasks: int = 256) -> None:
        self._sizes = {"train": train_tasks, "eval": eval_tasks}

    def tasks(self, split: str, seed: int) -> list[Task]:
        """The strings of a split. The held-out ones are the same for every seed, so that runs compare."""
        order = 0 if split == "eval" else seed
        return [Task(word, {"text": word}) for word in islice(words(split, order), self._sizes[split])]

    def messages(self, task: Task) -> list[Message]:
        """The string, as the user's message."""
        return [{"role": "user", "content": task.data["text"]}]

    def score(self, task: Task, completion: str) -> float:
        """Difflib's ratio of matching characters, 0 to 1; 1 is the reversed string itself."""
        return difflib.SequenceMatcher(None, completion, task.data["text"][::-1], autojunk=False).ratio()


def words(split: str, seed: int) -> Iterator[str]:
    """Endless strings of a split, without repetition, the same for the same seed.

    Args:
        split: ``train`` or ``eval``.
        seed: Seed of the order.

    Raises:
        ValueError: if there is no such split.
    """
    if split not in {"train", "eval"}:
        raise ValueError(f"reverse_text has the splits train and eval, not {split!r}")
    rng = random.Random(f"reverse_text/{split}/{seed}")  # noqa: S311 - data, not secrets
    seen: set[str] = set()
    while True:
        word = "".join(rng.choices(LETTERS, k=rng.randint(SHORTEST, LONGEST)))
        if belongs_to(word) == split and word not in seen:
            seen.add(word)
            yield word


def belongs_to(word: str) -> str:
    """The split of a string, by its digest: no seed and no order can bring one string into both."""
    return "eval" if hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0 else "train"
