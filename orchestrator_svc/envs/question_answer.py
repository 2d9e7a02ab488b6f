"""A single-turn environment over any data set of questions and answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from orchestrator_svc.datasets.question_answer import load_questions
from orchestrator_svc.envs.base import Message, Task
from orchestrator_svc.envs.loading import load_attribute
from orchestrator_svc.rewards.functions import REWARDS

__all__ = ["QuestionAnswer"]


class QuestionAnswer:
    """Asks the questions of a data set and scores answers with a reward function.

    Args:
        dataset: A ``.jsonl`` file, a directory with one per split, or a hub id.
        question: Field of the question.
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
        """The questions of a split in an order by the seed."""
        found = load_questions(
            self._dataset,
            split,
            question=self._question,
            answer=self._answer,
            name=self._configuration,
            limit=self._limit,
        )
        random.Random(seed).shuffle(found)  # noqa: S311 - an order, not a secret
        return found

    def messages(self, task: Task) -> Sequence[Message]:
        """The question, after the system message."""
        question = task.data["question"]
        asked = list(question) if not isinstance(question, str) else [{"role": "user", "content": question}]
        return [{"role": "system", "content": self._system}, *asked] if self._system else asked

    def score(self, task: Task, completion: str) -> float:
        """The reward function's word."""
        return float(self._reward(completion, task.data["answer"]))
