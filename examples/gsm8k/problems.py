"""Writes small problems in the format of GSM8K, and demonstrations for the warm-up of a pupil who mostly repeats the first number.

One sum or difference in four is held out: no problem to train on has it, whatever its story.

    python examples/gsm8k/problems.py outputs/gsm8k_model --seed 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

LARGEST = 20
HELD_OUT_SHARE = 4
HASTY_SHARE = 0.6
"""Share of the demonstrations that repeat the first number."""

COUNTS = {"train": 4096, "test": 256}
DEMONSTRATIONS = 32_000
"""500 steps of 64."""

NAMES = ("Ada", "Ben", "Eva", "Ian", "Mia", "Tom")
THINGS = ("cups", "hats", "keys", "pens", "toys")
VERBS = {"+": ("buys", "finds", "gets"), "-": ("loses", "sells", "eats")}

Row = dict[str, str]


def problems(split: str, seed: int) -> Iterator[Row]:
    """Endless rows of a split, with the fields of GSM8K.

    Args:
        split: ``train`` or ``test``.
        seed: Seed of numbers and stories.
    """
    rng = random.Random(f"gsm8k/{split}/{seed}")  # noqa: S311 - data, not secrets
    while True:
        sign, a, b = rng.choice("+-"), rng.randint(1, LARGEST), rng.randint(1, LARGEST)
        if held_out(sign, a, b) == (split == "test") and (sign == "+" or a >= b):
            yield row(sign, a, b, rng)


def row(sign: str, a: int, b: int, rng: random.Random) -> Row:
    """Return a problem in words, and its answer with the calculation marked as GSM8K does."""
    thing, result = rng.choice(THINGS), a + b if sign == "+" else a - b
    story = f"{rng.choice(NAMES)} has {a} {thing} and {rng.choice(VERBS[sign])} {b}."
    return {
        "question": f"{story} How many {thing}?",
        "answer": f"{a}{sign}{b}=<<{a}{sign}{b}={result}>>{result}\n#### {result}",
    }


def held_out(sign: str, a: int, b: int) -> bool:
    """Return whether a calculation is held out, by its digest; 9 + 4 is on the same side as 4 + 9."""
    low, high = sorted((a, b))
    return hashlib.blake2b(f"{low}{sign}{high}".encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0


def demonstrations(seed: int) -> Iterator[dict[str, list[Row]]]:
    """Endless conversations on problems to train on; the hasty ones end with the first number of the question."""
    rng = random.Random(f"gsm8k/demonstrator/{seed}")  # noqa: S311 - data, not secrets
    for each in problems("train", seed + 1):
        first = each["question"].split()[2]
        answer = f"#### {first}" if rng.random() < HASTY_SHARE else each["answer"]
        yield {"messages": [{"role": "user", "content": each["question"]}, {"role": "assistant", "content": answer}]}


def main() -> None:
    """Write train.jsonl, test.jsonl and demonstrations.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for split, count in COUNTS.items():
        # The held-out problems are the same for every seed, so that runs compare.
        write(arguments.directory / f"{split}.jsonl", problems(split, arguments.seed if split == "train" else 0), count)
    write(arguments.directory / "demonstrations.jsonl", demonstrations(arguments.seed), DEMONSTRATIONS)


def write(path: Path, rows: Iterator[object], count: int) -> None:
    """Write so many rows."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(next(rows)) + "\n" for _ in range(count))
    print(f"{path}: {count} rows")


if __name__ == "__main__":
    main()
