"""Writes the demonstrations for the warm-up: games of a player who often forgets what the answers were.

python examples/number_guess/demonstrations.py outputs/number_guess/demonstrations.jsonl --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from env import WIDTH, games

CARELESS_SHARE = 0.5
"""Share of the guesses that ignore the answers so far."""

GUESSES = 8
"""Most guesses of a game, as agent.ts has it."""

COUNT = 25_600


def demonstrations(seed: int, count: int = COUNT) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Games of the training split, until the number is found or the guesses are used up.

    Args:
        seed: Seed of games and guesses.
        count: How many.
    """
    rng = random.Random(f"number_guess/demonstrator/{seed}")  # noqa: S311 - data, not secrets
    choices = list(games("train"))
    for _ in range(count):
        low, secret = rng.choice(choices)
        least, most = low, low + WIDTH - 1
        messages = [{"role": "user", "content": f"{least}-{most}"}]
        for _turn in range(GUESSES):
            careless = rng.random() < CARELESS_SHARE
            guess = rng.randint(low, low + WIDTH - 1) if careless else rng.randint(least, most)
            messages.append({"role": "assistant", "content": str(guess)})
            if guess == secret:
                break
            least, most = (max(least, guess + 1), most) if guess < secret else (least, min(most, guess - 1))
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
    print(
        f"{arguments.path}: {arguments.count} games, {CARELESS_SHARE:.0%} of the guesses without regard to the answers"
    )


if __name__ == "__main__":
    main()
