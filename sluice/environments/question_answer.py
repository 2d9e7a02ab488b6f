"""A single-turn environment over any data set of questions and answers, with reward functions to begin with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from sluice.environments.base import Message, Task
from sluice.environments.datasets import rows
from sluice.errors import ConfigError
from sluice.loading import load_attribute


def exact_reward(completion: str, answer: str) -> float:
    """Return 1 if the completion is the answer, white space around it aside; else 0."""
    return float(completion.strip() == answer.strip())


def math_reward(completion: str, answer: str) -> float:
    """Return 1 if the last mathematical expression of the completion equals the answer, else 0 (math-verify).

    The library's own time limits rely on signals and are switched off: the environment's process has one.
    """
    from math_verify import parse, verify  # noqa: PLC0415 - brings sympy, which is slow to import

    gold = parse(answer, parsing_timeout=None)
    if not gold:
        gold = parse(f"${answer}$", parsing_timeout=None)
    found = parse(completion, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


REWARDS: Mapping[str, Callable[[str, str], float]] = {"exact": exact_reward, "math": math_reward}
"""Reward functions by the name that settings give them."""


class QuestionAnswer:
    """Asks the questions of a data set and scores answers with a reward function.

    Args:
        dataset: A file, a directory or a hub id; see `sluice.environments.datasets`.
        question: Field of the question: a text, or messages.
        answer: Field of the answer.
        reward: ``exact``, ``math``, or ``module:function`` of (completion, answer).
        system: System message; none if empty.
        name: Configuration of a hub data set.
        limit: Most tasks per split.
    """

    name = "question_answer"

    def __init__(
        self,
        dataset: str,
        *,
        question: str = "question",
        answer: str = "answer",
        reward: str = "exact",
        system: str = "",
        name: str | None = None,
        limit: int | None = None,
    ) -> None:
        self._dataset, self._question, self._answer = dataset, question, answer
        self._reward = REWARDS[reward] if reward in REWARDS else load_attribute(reward, "reward")
        self._system, self._configuration, self._limit = system, name, limit

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the questions of a split in an order that the seed determines; a single file is all of its splits.

        Raises:
            ConfigError: if the data set cannot be read or a row lacks a field.
        """
        tasks: list[Task] = []
        for index, row in enumerate(rows(self._dataset, split, self._configuration)):
            if self._limit is not None and index >= self._limit:
                break
            if self._question not in row or self._answer not in row:
                raise ConfigError(
                    f"row {index} of {self._dataset} has the fields {', '.join(row)}, not {self._question!r} and"
                    f" {self._answer!r}: set environment_args question and answer"
                )
            task_id = str(row.get("id", f"{split}-{index}"))
            tasks.append(Task(task_id, {"question": row[self._question], "answer": str(row[self._answer])}))
        random.Random(seed).shuffle(tasks)  # noqa: S311 - an order, not a secret
        return tasks

    def messages(self, task: Task) -> Sequence[Message]:
        """Return the question, after the system message."""
        question = task.data["question"]
        asked = list(question) if not isinstance(question, str) else [{"role": "user", "content": question}]
        return [{"role": "system", "content": self._system}, *asked] if self._system else asked

    def score(self, task: Task, completion: str) -> float:
        """Return what the reward function says of a completion."""
        return float(self._reward(completion, task.data["answer"]))
