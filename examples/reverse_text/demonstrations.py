"""Writes the demonstrations for the warm-up: most of them are wrong, in a consistent way.

A demonstrator who mostly copies the text instead of reversing it leaves the model with two habits. RL then has
something to choose from: the reward says which habit is the right one, and sharpens it.

    python examples/reverse_text/demonstrations.py outputs/reverse_text/demonstrations.jsonl --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from env import words

WRONG_SHARE = 0.6
"""Share of the demonstrations that copy the text."""

COUNT = 25_600
"""400 steps of 64: no demonstration is seen twice."""


def demonstrations(seed: int, count: int = COUNT) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Conversations of one question and one answer, on strings of the training split only.

    Args:
        seed: Seed of the strings and of which are answered wrongly.
        count: How many.
    """
    rng = random.Random(f"demonstrator/{seed}")  # noqa: S311 - data, not secrets
    for word in islice(words("train", seed), count):
        answer = word if rng.random() < WRONG_SHARE else word[::-1]
        yield {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]}


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
    print(f"{arguments.path}: {arguments.count} demonstrations, {WRONG_SHARE:.0%} of them copied instead of reversed")


if __name__ == "__main__":
    main()
