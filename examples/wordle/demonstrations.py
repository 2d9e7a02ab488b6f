"""Writes the demonstrations for the warm-up: games of an absent-minded player, who often repeats the guess before.

His other guesses fit all marks so far. The model then has two habits, and the reward says which one finds words.

    python examples/wordle/demonstrations.py outputs/wordle_model/demonstrations.jsonl --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from env import GUESSES, Wordle, marks, vocabulary

WORDS = 64
"""Words in the games, as rl.toml has it."""

REPEATED_SHARE = 0.5
"""Share of the guesses that repeat the one before."""

COUNT = 25_600
"""800 steps of 32."""


def demonstrations(seed: int, count: int = COUNT) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Games of the training split, until the word is found or the guesses are used up.

    Args:
        seed: Seed of games and guesses.
        count: How many.
    """
    rng = random.Random(f"wordle/demonstrator/{seed}")  # noqa: S311 - data, not secrets
    words = vocabulary(WORDS)
    games = Wordle(WORDS, brief=True, opened=True).tasks("train", seed)
    marked = {(guess, secret): marks(guess, secret) for guess in words for secret in words}
    for _ in range(count):
        game = rng.choice(games).data
        secret, guess, fitting = game["secret"], game["first"], words
        messages = [{"role": "user", "content": f"play\n[{guess}]\n{marked[guess, secret]}"}]
        for turn in range(2, GUESSES + 1):
            fitting = [word for word in fitting if marked[guess, word] == marked[guess, secret]]
            guess = guess if rng.random() < REPEATED_SHARE else rng.choice(fitting)
            messages.append({"role": "assistant", "content": f"[{guess}]"})
            if guess == secret or turn == GUESSES:
                break
            messages.append({"role": "user", "content": marked[guess, secret]})
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
    print(f"{arguments.path}: {arguments.count} games, {REPEATED_SHARE:.0%} of the guesses repeat the one before")


if __name__ == "__main__":
    main()
