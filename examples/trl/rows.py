"""Writes the data set: questions of two items with their prices. One pair of items in eight is held out.

python examples/trl/rows.py outputs/trl_rows
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tool_use"))

from env import errands, question


def main() -> None:
    """Write train.jsonl and eval.jsonl into the directory."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 4096), ("eval", 256)):
        with (directory / f"{split}.jsonl").open("w") as file:
            for one, other, price, its_price in islice(errands(split, 0), count):
                prompt = [{"role": "user", "content": question(one, other)}]
                file.write(json.dumps({"prompt": prompt, "prices": {one: price, other: its_price}}) + "\n")
        print(f"{directory / split}.jsonl: {count} rows")


if __name__ == "__main__":
    main()
