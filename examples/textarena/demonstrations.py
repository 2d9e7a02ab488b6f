"""Writes demonstrations for the warm-up: games of somebody who mostly ignores the hints.

.venv-games/bin/python examples/textarena/demonstrations.py outputs/textarena/demonstrations.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import textarena

HASTY_SHARE = 0.75
"""Share of the guesses that ignore the hints."""


def play(seed: int, rng: random.Random) -> list[dict[str, str]]:
    """Return the conversation of one game."""
    game = textarena.make("GuessTheNumber-v0-raw", max_turns=5)
    game.reset(num_players=1, seed=seed)
    messages: list[dict[str, str]] = []
    guessed: set[int] = set()
    guess, low, high, done = 0, 1, 20, False
    while not done:
        said = [text for sender, text, _ in game.get_observation()[1] if sender != 0]
        messages.append({"role": "user", "content": "\n".join(said)})
        if guessed:
            low, high = (max(low, guess + 1), high) if "higher" in said[-1] else (low, min(high, guess - 1))
        hasty = rng.random() < HASTY_SHARE
        guess = rng.choice([each for each in range(1, 21) if each not in guessed]) if hasty else (low + high) // 2
        if guess in guessed:
            break
        guessed.add(guess)
        messages.append({"role": "assistant", "content": f"[{guess}]"})
        done, _ = game.step(f"[{guess}]")
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


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
    print(f"{arguments.path}: {arguments.count} games")


if __name__ == "__main__":
    main()
