"""number_guess: the tasks of a guessing game. The agent holds the conversation, and gives the reward."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from sluice.environments import Task

__all__ = ["WIDTH", "NumberGuess", "games"]

WIDTH = 16
"""Numbers in a range."""

LARGEST_LOW = 83
"""Ranges begin with 0 to 83, so that all numbers have at most two digits."""

HELD_OUT_SHARE = 8
"""One game in eight is held out for evaluation."""


class NumberGuess:
    """The environment: it only lists tasks."""

    name = "number_guess"

    def tasks(self, split: str, seed: int) -> list[Task]:
        """The games of a split; the held-out ones are the same for every seed, so that runs compare."""
        chosen = [
            Task(f"{low}+{secret - low}", {"low": low, "high": low + WIDTH - 1, "secret": secret})
            for low, secret in games(split)
        ]
        if split == "train":
            random.Random(f"number_guess/{seed}").shuffle(chosen)  # noqa: S311 - an order, not a secret
        return chosen


def games(split: str) -> Iterator[tuple[int, int]]:
    """The games of a split: the lowest number of the range, and the secret one.

    Args:
        split: ``train`` or ``eval``.

    Raises:
        ValueError: if there is no such split.
    """
    if split not in {"train", "eval"}:
        raise ValueError(f"number_guess has the splits train and eval, not {split!r}")
    pairs = [(low, secret) for low in range(LARGEST_LOW + 1) for secret in range(low, low + WIDTH)]
    pairs.sort(key=lambda pair: hashlib.blake2b(repr(pair).encode(), digest_size=8).digest())
    held_out = len(pairs) // HELD_OUT_SHARE
    yield from pairs[:held_out] if split == "eval" else pairs[held_out:]
