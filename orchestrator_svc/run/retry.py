"""The workflow `retry`: a question is asked again until its answer is good enough, and each further try is worth less.

It makes episodes of several turns from an environment that poses questions and scores answers, for `MultiTurn`. Their reward
is the score of the last answer times `discount` to the power of the tries before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from orchestrator_svc.config import RetryConfig
from sluice.environments.base import Message, Task, Turn
from sluice.environments.processes import EnvironmentProcesses


class RetriedQuestions:
    """Opens an episode for each question.

    Args:
        environment: Poses the questions and scores the answers.
        rule: What is said to a wrong answer, and what a later one is worth.
    """

    def __init__(self, environment: EnvironmentProcesses, rule: RetryConfig) -> None:
        self._environment, self._rule = environment, rule

    @contextlib.asynccontextmanager
    async def episode(self, task: Task, seed: int) -> AsyncIterator[RetriedQuestion]:
        """Pose a question. Nothing of it is random, so the seed is not used.

        Raises:
            EnvironmentFailedError: if the environment fails.
        """
        del seed
        yield RetriedQuestion(await self._environment.messages(task), task, self._environment, self._rule)


@dataclass
class RetriedQuestion:
    """A question with the answers that it got.

    Attributes:
        messages: The question.
        answers: How many there were.
        worth: What the last one was worth.
    """

    messages: Sequence[Message]
    task: Task
    environment: EnvironmentProcesses
    rule: RetryConfig
    answers: int = 0
    worth: float = 0.0

    async def step(self, completion: str | Message, *, last: bool = False) -> Turn:
        """Score an answer; ask again if it is not good enough. Each answer is scored, so that the `last` one is nothing special.

        The reward of a turn is what its answer is worth more than the one before, since an episode's reward is the sum of its turns'.
        Without a score the episode ends, and its reward is missing.

        Raises:
            EnvironmentFailedError: if the environment is given up.
        """
        text = completion if isinstance(completion, str) else str(completion["content"])
        (scored,) = await self.environment.judge(self.task, [text])
        if (score := scored.reward) is None:
            return Turn(done=True)
        before, self.worth = self.worth, score * self.rule.discount**self.answers
        self.answers += 1
        again = [] if score >= self.rule.enough else [{"role": "user", "content": self.rule.message}]
        return Turn(messages=again, reward=self.worth - before, done=not again, metrics=scored.metrics)
