"""The strings of the task: two splits that cannot share one, and the reward."""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Iterator

__all__ = ["LONGEST", "SHORTEST", "belongs_to", "reward", "words"]

SHORTEST, LONGEST = 5, 10
"""Letters in a string."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"

HELD_OUT_SHARE = 8
"""One string in eight is held out for evaluation."""


def belongs_to(word: str) -> str:
    """The split of a string, by its digest: no seed and no order can bring one string into both."""
    return "eval" if hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0 else "train"


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


def reward(word: str, answer: str) -> float:
    """How much of the reversed string an answer has, 0 to 1: difflib's ratio of matching characters."""
    return difflib.SequenceMatcher(None, answer, word[::-1], autojunk=False).ratio()
