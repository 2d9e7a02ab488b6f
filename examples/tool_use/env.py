"""tool_use: what does the cheaper of two items cost? The prices are known to a tool alone.

The agent holds the conversation, serves the tool, and gives the reward.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator

from sluice.environments import Message, Task

__all__ = ["ITEMS", "Store", "errands", "question"]

ITEMS = [
    "ink", "pen", "cup", "pot", "hat", "map", "bag", "box", "key", "fan", "mug", "jar", "net", "rug", "tie", "bow",
    "axe", "saw", "oil", "tea", "jam", "pie", "bun", "ham", "fig", "nut", "egg", "cod", "yam", "gum", "soap", "comb",
    "belt", "sock", "ring", "vase", "lamp", "drum", "kite", "rope",
]  # fmt: skip

LEAST, MOST = 1, 9
"""Prices have one digit."""

HELD_OUT_SHARE = 8
"""One pair of items in eight is held out for evaluation."""

EVALUATED = 256
"""Held-out tasks."""

TRAINED = 4096
"""Tasks to train on, drawn with the seed of the run."""

Errand = tuple[str, str, int, int]
"""Two items in the order of the question, and their prices."""


class Store:
    """The environment: tasks, and how an episode begins."""

    name = "tool_use"

    def tasks(self, split: str, seed: int) -> list[Task]:
        """The tasks of a split. The held-out ones are the same for every seed, and no pair of items is in both splits."""
        found = errands(split, seed if split == "train" else 0)
        chosen = itertools.islice(found, TRAINED if split == "train" else EVALUATED)
        return [
            Task(f"{number}-{one}-{other}", {"prices": {one: price, other: its_price}, "items": [one, other]})
            for number, (one, other, price, its_price) in enumerate(chosen)
        ]

    def messages(self, task: Task) -> list[Message]:
        """What the agent begins with."""
        return [{"role": "user", "content": question(*task.data["items"])}]


def question(one: str, other: str) -> str:
    """What the user asks."""
    return f"lower price: {one} or {other}?"


def errands(split: str, seed: int) -> Iterator[Errand]:
    """Draw tasks of a split for ever.

    Args:
        split: ``train`` or ``eval``.
        seed: Decides which.

    Raises:
        ValueError: if there is no such split.
    """
    if split not in {"train", "eval"}:
        raise ValueError(f"tool_use has the splits train and eval, not {split!r}")
    pairs = sorted(itertools.combinations(ITEMS, 2), key=lambda pair: hashlib.blake2b(repr(pair).encode()).digest())
    held_out = len(pairs) // HELD_OUT_SHARE
    pairs = pairs[:held_out] if split == "eval" else pairs[held_out:]
    rng = random.Random(f"tool_use/{split}/{seed}")  # noqa: S311 - tasks, not secrets
    while True:
        one, other = rng.sample(rng.choice(pairs), 2)
        price, its_price = rng.sample(range(LEAST, MOST + 1), 2)
        yield one, other, price, its_price
