"""tool_use: what does the cheaper of two items cost? The prices are known to a tool alone.

`Store` leaves conversation, tool and reward to an agent outside; `Shop` has them itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator

from sluice.environments import Message, Task, Turn

__all__ = ["ITEMS", "TOOL", "Shop", "Store", "errands", "question"]

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

TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
"""The tool as the model is told of it: the chat template writes the same for what each framework sends."""

Errand = tuple[str, str, int, int]
"""Two items in the order of the question, and their prices."""


class Store:
    """Tasks, and how an episode begins."""

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


class Shop(Store):
    """The same tasks as episodes with a tool, which need no agent."""

    def reset(self, task: Task, seed: int) -> Errands:
        """Begin an episode."""
        return Errands(self.messages(task), task.data["prices"])


class Errands:
    """An episode: answers calls with prices, and takes the first text as the answer."""

    tools = (TOOL,)

    def __init__(self, messages: list[Message], prices: dict[str, int]) -> None:
        self.messages, self.prices = messages, prices

    def step(self, said: Message, last: bool = False) -> Turn:
        """Answer the calls of a turn, or give 1 for the lower price, else 0: also to calls in the `last` turn."""
        calls = said.get("tool_calls")
        if calls and not last:
            return Turn(messages=[self.result(call) for call in calls])
        right = not calls and said["content"].strip() == str(min(self.prices.values()))
        return Turn(reward=float(right), done=True, truncated=bool(calls))

    def result(self, call: Message) -> Message:
        """Return what the tool says to a call."""
        try:
            found = str(self.prices[json.loads(call["function"]["arguments"])["item"]])
        except (ValueError, KeyError, TypeError):
            found = "no such item"
        return {"role": "tool", "tool_call_id": call["id"], "content": found}


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
