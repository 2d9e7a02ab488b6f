"""An environment class and a reward function as TRL's GRPOTrainer takes them. Nothing of Sluice is in it."""

from __future__ import annotations

from typing import Any


class Store:
    """Knows prices. Its public methods are the tools."""

    def reset(self, prices: dict[str, int], **_: object) -> None:
        """Begin an episode with the columns of its row."""
        self.prices = prices

    def price(self, item: str) -> str:
        """Price of an item.

        Args:
            item: The item.
        """
        return str(self.prices.get(item, "no such item"))


def cheaper(completions: list[list[dict[str, Any]]], prices: list[dict[str, int]], **_: object) -> list[float]:
    """Give 1 for the lower price, else 0."""
    said = [str(each[-1]["content"]).strip() for each in completions]
    return [float(answer == str(min(each.values()))) for answer, each in zip(said, prices, strict=True)]
