"""reverse_text for verifiers 0.3, in the classic API. Nothing of Sluice is in it."""

from __future__ import annotations

import difflib
import random

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def alike(completion: list[dict[str, str]], answer: str, **_: object) -> float:
    """Return how alike the last message and the answer are, 0 to 1."""
    return difflib.SequenceMatcher(None, completion[-1]["content"], answer, autojunk=False).ratio()


def load_environment(train: int = 4096, evaluate: int = 256) -> vf.Environment:
    """Ask for strings of five to ten letters, reversed."""
    rng = random.Random(7)  # noqa: S311 - words, not secrets
    drawn = dict.fromkeys("".join(rng.choices(LETTERS, k=rng.randint(5, 10))) for _ in range(train + evaluate))
    rows = [{"question": word, "answer": word[::-1]} for word in drawn]
    held_out, trained = Dataset.from_list(rows[:evaluate]), Dataset.from_list(rows[evaluate:])
    return vf.SingleTurnEnv(dataset=trained, eval_dataset=held_out, rubric=vf.Rubric(funcs=[alike]))
