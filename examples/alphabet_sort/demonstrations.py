"""Writes the demonstrations for the warm-up: most are of somebody who puts new names at the end of the list.

The model then has two habits, and the reward says which one is right.

    python examples/alphabet_sort/demonstrations.py outputs/alphabet_sort_model/demonstrations.jsonl --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from env import expected, request, tasks_of

APPENDED_SHARE = 0.6
"""Share of the conversations in which new names are put at the end."""

TURNS, MOST = 3, 2
"""As rl.toml has them."""

COUNT = 19_200
"""600 steps of 32."""


def demonstrations(seed: int, count: int = COUNT) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Conversations about tasks of the training split only.

    Args:
        seed: Seed of tasks and habits.
        count: How many.
    """
    rng = random.Random(f"alphabet_sort/demonstrator/{seed}")  # noqa: S311 - data, not secrets
    for task in islice(tasks_of("train", seed, TURNS, MOST, last_names=False), count):
        turns, appends = task.data["turns"], rng.random() < APPENDED_SHARE
        messages: list[dict[str, str]] = []
        answer: list[str] = []
        for past, names in enumerate(turns):
            messages.append({"role": "user", "content": request(names)})
            if appends and past:
                answer = [*(line.rstrip("*") for line in answer), *(f"{name}*" for name in names)]
            else:
                answer = expected(turns[: past + 1], "")
            messages.append({"role": "assistant", "content": "\n".join(answer)})
        yield {"messages": messages}


def main() -> None:
    """Write them to a JSONL file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=COUNT)
    arguments = parser.parse_args()
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    with arguments.path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in demonstrations(arguments.seed, arguments.count))
    print(f"{arguments.path}: {arguments.count} conversations, {APPENDED_SHARE:.0%} of them with new names at the end")


if __name__ == "__main__":
    main()
