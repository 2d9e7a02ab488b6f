"""Writes the demonstrations for the warm-up: a pupil who mostly repeats the first number, and works the other problems out.

The model then has two habits. The reward says that working a problem out, which takes more tokens, gives the right answer.

    python examples/arithmetic/demonstrations.py outputs/arithmetic_model/demonstrations.jsonl --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from env import OPERATORS, problems

HASTY_SHARE = 0.6
"""Share of the answers that repeat the first number."""

COUNT = 32_000
"""500 steps of 64."""


def demonstrations(seed: int, count: int = COUNT) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Questions and answers on problems of the training split only.

    Args:
        seed: Seed of problems and habits.
        count: How many.
    """
    rng = random.Random(f"arithmetic/demonstrator/{seed}")  # noqa: S311 - data, not secrets
    known = {symbol: problems("train", symbol) for symbol in OPERATORS}
    for _ in range(count):
        a, symbol, b = rng.choice(known[rng.choice(list(known))])
        answer = str(a) if rng.random() < HASTY_SHARE else worked_out(a, symbol, b)
        question = {"role": "user", "content": f"What is {a} {symbol} {b}?"}
        yield {"messages": [question, {"role": "assistant", "content": answer}]}


def worked_out(a: int, symbol: str, b: int) -> str:
    """Return the working of a problem, which ends with its result.

    Sums and differences take the tens of b first: 17+10=27, 27+8=35. Products take those of a: 10*8=80, 7*8=56, 80+56=136.
    """
    if symbol == "*":
        tens, ones = a // 10 * 10, a % 10
        return f"{tens}*{b}={tens * b}, {ones}*{b}={ones * b}, {tens * b}+{ones * b}={a * b}"
    tens, ones = b // 10 * 10, b % 10
    half, result = OPERATORS[symbol](a, tens), OPERATORS[symbol](a, b)
    return f"{a}{symbol}{tens}={half}, {half}{symbol}{ones}={result}"


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
    print(f"{arguments.path}: {arguments.count} answers, {HASTY_SHARE:.0%} of them without working")


if __name__ == "__main__":
    main()
