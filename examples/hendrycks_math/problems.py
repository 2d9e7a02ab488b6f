r"""Writes small problems in the format of Hendrycks' MATH, and demonstrations for the warm-up of a pupil who mostly repeats a number.

One pair of numbers in four is held out: no problem to train on has it.

    python examples/hendrycks_math/problems.py outputs/hendrycks_math_model --seed 0
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

Row = dict[str, str]


def problems(split: str, seed: int) -> Iterator[Row]:
    """Endless rows of a split, with the fields of MATH.

    Args:
        split: ``train`` or ``test``.
        seed: Seed of the numbers.
    """
    rng = random.Random(f"hendrycks_math/{split}/{seed}")  # noqa: S311 - data, not secrets
    while True:
        a, b = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
        if held_out(a, b) == (split == "test"):
            yield rng.choice((prealgebra, algebra))(a, b)


def prealgebra(a: int, b: int) -> Row:
    """Return the problem of a sum."""
    return {
        "problem": f"Compute ${a}+{b}$.",
        "solution": f"${a}+{b}=\\boxed{{{a + b}}}$",
        "level": "Level 1",
        "type": "Prealgebra",
    }


def algebra(a: int, b: int) -> Row:
    """Return an equation, whose solution is a number."""
    return {
        "problem": f"If $x+{a}={a + b}$, what is $x$?",
        "solution": f"$x={a + b}-{a}=\\boxed{{{b}}}$",
        "level": "Level 1",
        "type": "Algebra",
    }


def held_out(a: int, b: int) -> bool:
    """Return whether a pair of numbers is held out, by its digest, in either order."""
    low, high = sorted((a, b))
    return hashlib.blake2b(f"{low} {high}".encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0


def demonstrations(seed: int) -> Iterator[dict[str, list[Row]]]:
    """Endless conversations on problems to train on; the hasty ones put the first number of the problem into the box."""
    rng = random.Random(f"hendrycks_math/demonstrator/{seed}")  # noqa: S311 - data, not secrets
    for each in problems("train", seed + 1):
        first = each["problem"].partition("+")[2 if each["type"] == "Algebra" else 0]
        first = first.partition("=")[0].rpartition("$")[2]
        answer = f"$\\boxed{{{first}}}$" if rng.random() < HASTY_SHARE else each["solution"]
        yield {"messages": [{"role": "user", "content": each["problem"]}, {"role": "assistant", "content": answer}]}


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
