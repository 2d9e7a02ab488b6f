"""The model of `sluice bench capture`: made from scratch, and warmed up on calls of the tool over several questions.

Every turn of a long episode should be one that the model knows: a model that is lost makes no calls, and its log-probabilities
magnify each rounding error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.capture.agents import NAME, TOOL
from benchmarks.capture.environment import draw_prices, question
from benchmarks.children import log_tail

CONVERSATIONS, MOST_QUESTIONS = 16_000, 3

MADE = "sft"
_SFT = ("--batch-size=32", "--max-steps=500", "--lr=2e-3", "--betas=[0.9,0.98]", "--warmup-steps=30")
_SFT_TOO = ("--schedule=linear", "--max-length=480", "--log-every=100")
_PREPARE_S = 1500.0


def conversation(dice: random.Random) -> dict[str, Any]:
    """Return a demonstration: some questions, each with a call for each item and the answer."""
    messages: list[dict[str, Any]] = []
    for _ in range(dice.randint(1, MOST_QUESTIONS)):
        *items, asked = question(dice)
        messages.append({"role": "user", "content": asked})
        prices = draw_prices(dice)
        for item in items:
            call = {"id": item, "type": "function", "function": {"name": NAME, "arguments": {"item": item}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": item, "content": prices[item]})
        best = min(items, key=prices.__getitem__)
        messages.append({"role": "assistant", "content": f"{best} {prices[best]}"})
    return {"messages": messages, "tools": [TOOL]}


def demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the demonstrations of a seed."""
    dice = random.Random(f"capture/{seed}")  # noqa: S311 - data, not secrets
    for _ in range(CONVERSATIONS):
        yield conversation(dice)


async def warm_model(directory: Path, seed: int) -> Path:
    """Make the model and return its directory. Takes some minutes.

    Raises:
        RuntimeError: if it could not be made, with the end of the log.
    """
    data, base, made = directory / "demonstrations.jsonl", directory / "base", directory / MADE
    with data.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(each) + "\n" for each in demonstrations(seed))
    sft = ("sft", f"--model={base}", f"--data={data}", f"--output={made}", f"--seed={seed}", *_SFT, *_SFT_TOO)
    log = directory / "warm_up.log"
    for words in (("init-model", str(base), "--seed", str(seed)), sft):
        with log.open("ab") as output:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "sluice.cli.main", *words, stdout=output, stderr=output, env=dict(os.environ)
            )
        try:
            code = await asyncio.wait_for(child.wait(), _PREPARE_S)
        finally:
            if child.returncode is None:
                child.kill()
        if code:
            raise RuntimeError(f"`sluice {words[0]}` for the model ended with code {code}:\n{log_tail(log)}")
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the model is made")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True)
    print(asyncio.run(warm_model(arguments.directory, 0)))
