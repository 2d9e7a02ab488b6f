"""Writes the demonstrations for the warm-up: conversations of a hasty reader, who often searches for one word only.

Many towns are on the same river. Whoever searches for it alone and reads the first article mostly reads of another town.

    python examples/wiki_search/demonstrations.py outputs/wiki_search_model --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from articles import QUESTIONS, question, text, towns
from env import TOOLS, Index, held_out

HASTY_SHARE = 0.5
"""Share of the conversations that search for the river or the goods alone."""

PER_ENCYCLOPEDIA = 32

COUNT = 6_400
"""400 steps of 16."""


def demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """Conversations about the articles of other encyclopedias, so that no answer can be learned by heart.

    No town whose name is held out is asked about or read about.

    Args:
        seed: Seed of encyclopedias, questions and habits.
    """
    rng = random.Random(f"wiki_search/demonstrator/{seed}")  # noqa: S311 - data, not secrets
    while True:
        known = {town["name"]: town for town in towns(rng.randrange(1, 1 << 30))}
        index = Index({"title": name, "text": text(town)} for name, town in known.items())
        for town in rng.sample(list(known.values()), PER_ENCYCLOPEDIA):
            asked, clues = rng.choice(list(QUESTIONS)), [town["river"], town["good"]]
            query = rng.choice(clues) if rng.random() < HASTY_SHARE else " ".join(clues)
            titles = index.search(query)
            first = titles.split("\n")[0]
            if held_out(town["name"]) or held_out(first):
                continue
            messages = [
                {"role": "user", "content": question(town, asked)},
                *called("search", "query", query, titles),
                *called("read", "title", first, index.read(first)),
                {"role": "assistant", "content": known[first][asked]},
            ]
            yield {"messages": messages, "tools": TOOLS}


def called(name: str, parameter: str, value: str, result: str) -> list[dict[str, Any]]:
    """Return a turn that calls a tool, and the result."""
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": {parameter: value}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": result},
    ]


def main() -> None:
    """Write demonstrations.jsonl into the directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=COUNT)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    path = arguments.directory / "demonstrations.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in islice(demonstrations(arguments.seed), arguments.count))
    print(f"{path}: {arguments.count} conversations; {HASTY_SHARE:.0%} search for one word only")


if __name__ == "__main__":
    main()
