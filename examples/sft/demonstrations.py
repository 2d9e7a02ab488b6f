"""Writes demonstrations of a small task: the user gives letters, the assistant answers with them in capitals.

python examples/sft/demonstrations.py outputs/sft/demonstrations.jsonl --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHORTEST, LONGEST = 3, 8
COUNT = 4096


def main() -> None:
    """Write them to a JSONL file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)  # noqa: S311 - data, not secrets
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    with arguments.path.open("w", encoding="utf-8") as file:
        for _ in range(COUNT):
            word = "".join(rng.choices(LETTERS, k=rng.randint(SHORTEST, LONGEST)))
            messages = [{"role": "user", "content": word}, {"role": "assistant", "content": word.upper()}]
            file.write(json.dumps({"messages": messages}) + "\n")
    print(f"{arguments.path}: {COUNT} demonstrations")


if __name__ == "__main__":
    main()
