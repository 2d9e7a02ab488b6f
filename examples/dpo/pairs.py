"""Writes pairs of answers to the strings of examples/reverse_text: the reversed string is preferred.

What is rejected is a copy of the string, or with `--slips` a reversal in which two neighbours are swapped.

    python examples/dpo/pairs.py outputs/dpo/pairs.jsonl --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "reverse_text"))

from env import words

COUNT = 2048


def pairs(seed: int, count: int, slips: float) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Pairs on strings of the training split only.

    Args:
        seed: Seed of the strings and of which are slips.
        count: How many.
        slips: Share of pairs whose rejected answer is a reversal with a slip.
    """
    rng = random.Random(f"pairs/{seed}")  # noqa: S311 - data, not secrets
    for word in islice(words("train", seed), count):
        chosen = word[::-1]
        rejected = slipped(chosen, rng) if rng.random() < slips else word
        if rejected != chosen:
            yield {
                "prompt": said("user", word),
                "chosen": said("assistant", chosen),
                "rejected": said("assistant", rejected),
            }


def slipped(word: str, rng: random.Random) -> str:
    """The word with two neighbouring letters swapped."""
    place = rng.randrange(len(word) - 1)
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]


def said(role: str, content: str) -> list[dict[str, str]]:
    """One message, as a list."""
    return [{"role": role, "content": content}]


def main() -> None:
    """Write them to a JSONL file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--slips", type=float, default=0.0, help="share of rejected answers that are nearly right")
    arguments = parser.parse_args()
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(pairs(arguments.seed, arguments.count, arguments.slips))
    arguments.path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{arguments.path}: {len(rows)} pairs")


if __name__ == "__main__":
    main()
