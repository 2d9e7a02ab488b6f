"""sums: "What is 7 + 15?"; the reward is 1 if the last number of the answer is the sum, else 0."""

from __future__ import annotations

import hashlib
import random
import re

from sluice.environments import Message, Task

__all__ = ["Sums"]

LARGEST = 20
"""Largest operand: 441 sums in all."""

HELD_OUT = 128
"""Sums that no run trains on."""

NUMBER = re.compile(r"\d+")


class Sums:
    """The environment."""

    name = "sums"

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the sums of a split in an order by the seed; the held-out ones are the same for every seed.

        Args:
            split: ``train`` or ``eval``.
            seed: Seed of the order.

        Raises:
            ValueError: if there is no such split.
        """
        if split not in {"train", "eval"}:
            raise ValueError(f"sums has the splits train and eval, not {split!r}")
        sums = [Task(f"{a}+{b}", {"a": a, "b": b}) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
        sums.sort(key=lambda task: hashlib.blake2b(task.task_id.encode(), digest_size=8).digest())
        chosen = sums[:HELD_OUT] if split == "eval" else sums[HELD_OUT:]
        if split == "train":
            random.Random(f"sums/{seed}").shuffle(chosen)  # noqa: S311 - an order, not a secret
        return chosen

    def messages(self, task: Task) -> list[Message]:
        """Return the question."""
        return [{"role": "user", "content": f"What is {task.data['a']} + {task.data['b']}?"}]

    def score(self, task: Task, completion: str) -> float:
        """Return 1 if the last number of the answer is the sum, else 0."""
        numbers = NUMBER.findall(completion)
        return float(bool(numbers) and int(numbers[-1]) == task.data["a"] + task.data["b"])
