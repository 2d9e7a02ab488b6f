"""Tasks whose answers have known, long-tailed lengths: the environment of `sluice bench async`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from orchestrator_svc.envs.base import Message, Task

__all__ = ["LongTail", "lengths"]

QUESTION = "go on"


def lengths(count: int, *, seed: int, median: int, p99: int, longest: int) -> list[int]:
    """Lognormal lengths in tokens, the same for the same seed.

    Args:
        count: How many.
        seed: Seed of the draws.
        median: Half of them are shorter.
        p99: One in a hundred is longer.
        longest: Longer ones are cut to this.
    """
    rng = random.Random(f"long_tail/{seed}")  # noqa: S311 - a workload, not a secret
    sigma = math.log(p99 / median) / NormalDist().inv_cdf(0.99)
    return [min(longest, max(1, round(median * rng.lognormvariate(0, sigma)))) for _ in range(count)]


class LongTail:
    """Asks for texts of given lengths, in a given order, once for each session that the benchmark measures.

    Args:
        answer_tokens: Length of each answer of a session, in order of dispatch.
        sessions: How often the whole order is asked.
    """

    name = "long_tail"

    def __init__(self, answer_tokens: Sequence[int], sessions: int) -> None:
        self._answer_tokens = list(answer_tokens) * sessions

    def tasks(self, split: str, seed: int) -> list[Task]:
        """The tasks, placed so that the stream, which shuffles them by the seed, gives them in the wanted order."""
        from orchestrator_svc.dispatch import TaskStream  # noqa: PLC0415 - brings gRPC, which scoring processes do not need

        del split
        count = len(self._answer_tokens)
        places = TaskStream([Task(str(number)) for number in range(count)], seed)
        tasks: dict[int, Task] = {}
        for position, tokens in enumerate(self._answer_tokens):
            tasks[int(places.at(position).task_id)] = Task(f"{position:05d}", max_tokens=tokens)
        return [tasks[place] for place in range(count)]

    def messages(self, task: Task) -> Sequence[Message]:
        """The same question for all."""
        del task
        return [{"role": "user", "content": QUESTION}]

    def score(self, task: Task, completion: str) -> float:
        """Share of lower-case letters: differs from sample to sample, so that every sample is trained."""
        del task
        return sum(character.islower() for character in completion) / max(1, len(completion))
