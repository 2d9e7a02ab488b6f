"""Writes demonstrations for the warm-up: hands of Blackjack of somebody who tosses a coin for each card.

.venv-games/bin/python examples/textarena/demonstrations.py outputs/textarena/demonstrations.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import textarena


def play(seed: int, rng: random.Random) -> list[dict[str, str]]:
    """Return the conversation of one hand."""
    game = textarena.make("Blackjack-v0-raw", num_hands=1)
    game.reset(num_players=1, seed=seed)
    messages: list[dict[str, str]] = []
    done = False
    while not done:
        said = [text for sender, text, _ in game.get_observation()[1] if sender != 0]
        move = rng.choice(["[Hit]", "[Stand]"])
        messages += [{"role": "user", "content": "\n".join(said)}, {"role": "assistant", "content": move}]
        done, _ = game.step(move)
    return messages


def main() -> None:
    """Write them to a JSONL file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=8000)
    arguments = parser.parse_args()
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)  # noqa: S311 - data, not secrets
    with arguments.path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": play(seed, rng)}) + "\n" for seed in range(arguments.count))
    print(f"{arguments.path}: {arguments.count} hands")


if __name__ == "__main__":
    main()
