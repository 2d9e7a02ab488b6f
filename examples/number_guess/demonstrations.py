"""Writes the demonstrations for the warm-up: games of two players, of whom one counts and one bisects.

Most games are of the player who counts up from the lowest number. The model then has two habits, and RL has something to choose
from: the reward says which habit finds the number sooner.

    python examples/number_guess/demonstrations.py outputs/number_guess/demonstrations.jsonl --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from env import WIDTH, games

COUNTING_SHARE = 0.6
"""Share of the games of the player who counts."""

GUESSES = 6
"""Most guesses of a game, as agent.ts has it."""

COUNT = 25_600
"""400 steps of 64."""


def demonstrations(seed: int, count: int = COUNT) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Games of the training split, until the number is found or the guesses are used up.

    Args:
        seed: Seed of games and players.
        count: How many.
    """
    rng = random.Random(f"number_guess/demonstrator/{seed}")  # noqa: S311 - data, not secrets
    choices = list(games("train"))
    for _ in range(count):
        low, secret = rng.choice(choices)
        counts = rng.random() < COUNTING_SHARE
        least, most = low, low + WIDTH - 1
        messages = [{"role": "user", "content": f"{least}-{most}"}]
        for _turn in range(GUESSES):
            guess = least if counts else (least + most) // 2
            messages.append({"role": "assistant", "content": str(guess)})
            if guess == secret:
                break
            least, most = (guess + 1, most) if guess < secret else (least, guess - 1)
            messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
        yield {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}


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
    print(f"{arguments.path}: {arguments.count} games, in {COUNTING_SHARE:.0%} of them the player counts up")


if __name__ == "__main__":
    main()
