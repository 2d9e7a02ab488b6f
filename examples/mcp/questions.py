"""Writes the questions: which of two items is cheaper? One pair of items in eight is held out.

python examples/mcp/questions.py outputs/mcp_questions
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tool_use"))

from env import errands, question


def price_of(item: str) -> int:
    """Return what server.py says."""
    return 1 + hashlib.blake2b(item.encode()).digest()[0] % 9


def main() -> None:
    """Write train.jsonl and eval.jsonl into the directory."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 4096), ("eval", 256)):
        rows = []
        for one, other, *_ in errands(split, 0):
            if price_of(one) != price_of(other):
                rows.append({"question": question(one, other), "answer": str(min(price_of(one), price_of(other)))})
            if len(rows) == count:
                break
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{directory / split}.jsonl: {count} questions")


if __name__ == "__main__":
    main()
