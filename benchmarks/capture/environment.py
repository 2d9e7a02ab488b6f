"""Tasks of `sluice bench capture`: which of two items is cheaper? Only the tool of the agents knows prices."""

from __future__ import annotations

import random

from sluice.environments.base import Message, Task

ITEMS = ("ink", "pen", "cup", "pot", "hat", "map", "bag", "box", "key", "fan", "mug", "jar", "net", "rug", "tie", "bow")

TASKS = 4096


def question(dice: random.Random) -> tuple[str, str, str]:
    """Return two items, and a question about them."""
    one, other = dice.sample(ITEMS, 2)
    return one, other, f"cheaper: {one} or {other}?"


def draw_prices(dice: random.Random) -> dict[str, str]:
    """Return a price for each item."""
    return {item: str(dice.randint(1, 9)) for item in ITEMS}


class Shop:
    """The environment: it lists tasks and poses them; agents serve the tool and give the reward."""

    name = "capture"

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Return the tasks of a split."""
        dice = random.Random(f"capture/{split}/{seed}")  # noqa: S311 - tasks, not secrets
        return [
            Task(f"{split}-{number}", {"question": question(dice)[2], "prices": draw_prices(dice)})
            for number in range(TASKS)
        ]

    def messages(self, task: Task) -> list[Message]:
        """Return the agent's first messages."""
        return [{"role": "user", "content": task.data["question"]}]
