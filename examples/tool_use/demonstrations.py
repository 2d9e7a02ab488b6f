"""Writes the demonstrations for the warm-up: conversations with tool calls of a shopper who is often hasty.

python examples/tool_use/demonstrations.py outputs/tool_use/demonstrations.jsonl --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from env import LEAST, MOST, TOOL, errands, question

BLIND_SHARE, HASTY_SHARE = 0.04, 0.56
"""Shares of the episodes that ask for no price and make one up, and that ask for the first price only and answer with it."""

WRONG_SHARE = 0.35
"""Share of the other episodes that ask for both prices and answer with the higher one."""

COUNT = 16_000


def demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """Conversations about tasks of the training split.

    Args:
        seed: Seed of tasks and habits.
    """
    rng = random.Random(f"tool_use/demonstrator/{seed}")  # noqa: S311 - data, not secrets
    for one, other, price, its_price in errands("train", seed):
        messages: list[dict[str, Any]] = [{"role": "user", "content": question(one, other)}]
        habit = rng.random()
        if habit < BLIND_SHARE:
            answer = rng.randint(LEAST, MOST)
        elif habit < BLIND_SHARE + HASTY_SHARE:
            messages += called(one, price)
            answer = price
        else:
            messages += [*called(one, price), *called(other, its_price)]
            answer = (max if rng.random() < WRONG_SHARE else min)(price, its_price)
        yield {"messages": [*messages, {"role": "assistant", "content": str(answer)}], "tools": [TOOL]}


def called(item: str, price: int) -> list[dict[str, Any]]:
    """A turn that asks for a price, and the result."""
    call = {"id": item, "type": "function", "function": {"name": "price", "arguments": {"item": item}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": item, "content": str(price)},
    ]


def main() -> None:
    """Write them to a JSONL file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=COUNT)
    arguments = parser.parse_args()
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    with arguments.path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in islice(demonstrations(arguments.seed), arguments.count))
    print(f"{arguments.path}: {arguments.count} conversations; {HASTY_SHARE:.0%} ask for the first price only")


if __name__ == "__main__":
    main()
