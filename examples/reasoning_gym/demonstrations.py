"""Writes demonstrations for the warm-up: words spelt backwards by somebody who often swaps two letters.

.venv-reasoning/bin/python examples/reasoning_gym/demonstrations.py outputs/reasoning_gym/demonstrations.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import reasoning_gym

WRONG_SHARE = 0.6
"""Share of the answers with two letters swapped."""

SEED = 11
"""Of the demonstrations: other questions than those of the run, which draws its own seed."""


def main() -> None:
    """Write them to a JSONL file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=16_000)
    arguments = parser.parse_args()
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)  # noqa: S311 - data, not secrets
    words = reasoning_gym.create_dataset("spell_backward", size=arguments.count, seed=SEED << 20, max_word_len=6)
    held_out = reasoning_gym.create_dataset("spell_backward", size=256, seed=0x5EED, max_word_len=6)
    asked_later = {entry["question"] for entry in held_out}
    with arguments.path.open("w", encoding="utf-8") as file:
        for entry in words:
            if entry["question"] in asked_later:
                continue
            letters = list(entry["answer"])
            if rng.random() < WRONG_SHARE:
                one, other = rng.sample(range(len(letters)), 2)
                letters[one], letters[other] = letters[other], letters[one]
            said = [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": "".join(letters)}]
            file.write(json.dumps({"messages": said}) + "\n")
    print(f"{arguments.path}: answers to {arguments.count} questions, without those for evaluation")


if __name__ == "__main__":
    main()
