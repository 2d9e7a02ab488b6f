"""arithmetic: "What is 17 + 18?", also with - and *; the reward is 1 if the last number of the answer is right, else 0."""

from __future__ import annotations

import hashlib
import operator
import random
import re
from itertools import product

from sluice.environments import Message, Task

__all__ = ["OPERATORS", "Arithmetic", "problems"]

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

LARGEST = 30
"""Largest operand; the second one of a product has one digit."""

HELD_OUT_SHARE = 4
"""One problem in four is held out for evaluation."""

NUMBER = re.compile(r"\d+(?:\.\d+)?")

Problem = tuple[int, str, int]
"""First operand, operator, second operand."""


class Arithmetic:
    """The environment.

    Args:
        train_tasks: Number of problems to train on.
        eval_tasks: Number of held-out problems.
    """

    name = "arithmetic"

    def __init__(self, train_tasks: int = 672, eval_tasks: int = 192) -> None:
        self._sizes = {"train": train_tasks, "eval": eval_tasks}

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the problems of a split, each operator equally often. The held-out ones are the same for every seed.

        Args:
            split: ``train`` or ``eval``.
            seed: Seed of the choice and the order.

        Raises:
            ValueError: if there is no such split.
        """
        rng = random.Random(f"arithmetic/{split}/{seed if split == 'train' else 0}")  # noqa: S311 - tasks, not secrets
        shuffled = [rng.sample(found, len(found)) for found in (problems(split, symbol) for symbol in OPERATORS)]
        in_turns = [problem for three in zip(*shuffled, strict=False) for problem in three]
        return [
            Task(f"{a} {symbol} {b}", {"answer": OPERATORS[symbol](a, b)})
            for a, symbol, b in in_turns[: self._sizes[split]]
        ]

    def messages(self, task: Task) -> list[Message]:
        """Return the question."""
        return [{"role": "user", "content": f"What is {task.task_id}?"}]

    def score(self, task: Task, completion: str) -> float:
        """Return 1 if the last number of the answer is right, else 0. What stands before it is working, and free."""
        numbers = NUMBER.findall(completion)
        return float(bool(numbers) and float(numbers[-1]) == task.data["answer"])


def problems(split: str, symbol: str) -> list[Problem]:
    """Return all problems of a split with one operator. No result is negative.

    Args:
        split: ``train`` or ``eval``.
        symbol: ``+``, ``-`` or ``*``.

    Raises:
        ValueError: if there is no such split.
    """
    if split not in {"train", "eval"}:
        raise ValueError(f"arithmetic has the splits train and eval, not {split!r}")
    seconds = range(10 if symbol == "*" else LARGEST + 1)
    found = [(a, symbol, b) for a, b in product(range(LARGEST + 1), seconds) if symbol != "-" or a >= b]
    return [problem for problem in found if held_out(*problem) == (split == "eval")]


def held_out(a: int, symbol: str, b: int) -> bool:
    """Return whether a problem is held out, by its digest. 17 + 18 and 18 + 17 are always in the same split."""
    low, high = sorted((a, b))
    return hashlib.blake2b(f"{low}{symbol}{high}".encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0
