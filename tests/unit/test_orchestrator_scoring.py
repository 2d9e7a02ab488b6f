"""Scoring in worker processes: what fails is missing, and spoils nothing else."""

from __future__ import annotations

import os
from types import MappingProxyType

import pytest

from orchestrator_svc.envs.base import Task
from orchestrator_svc.envs.question_answer import exact_reward, math_reward
from orchestrator_svc.envs.scoring import Scorer

ENVIRONMENT = """
import os, time
from orchestrator_svc.envs.base import Task

class Moody:
    name = "moody"

    def tasks(self, split, seed):
        return [Task("only", {})]

    def messages(self, task):
        return []

    def score(self, task, completion):
        match completion:
            case "hang":
                time.sleep(3600)
            case "die":
                os._exit(3)
            case "raise":
                raise RuntimeError("no")
            case "nan":
                return float("nan")
            case "pid":
                return float(os.getpid())
            case "limit":
                return float(task.max_tokens or 0)
        return float(len(completion))
"""

TASK = Task("only", {})


@pytest.fixture
def environment(tmp_path) -> str:
    path = tmp_path / "moody_env.py"
    path.write_text(ENVIRONMENT)
    return f"{path}:Moody"


async def test_completions_are_scored_in_another_process(environment) -> None:
    async with Scorer(environment, {}, workers=1, time_limit_s=10.0, retries=1) as scorer:
        rewards = await scorer.score(TASK, ["a", "bb", "pid"])
    assert rewards[:2] == [1.0, 2.0]
    assert rewards[2] != os.getpid()
    assert not scorer.failures


async def test_the_task_reaches_the_scoring_process_whole(environment) -> None:
    async with Scorer(environment, {}, workers=1, time_limit_s=10.0, retries=0) as scorer:
        assert await scorer.score(Task("only", MappingProxyType({}), max_tokens=9), ["limit"]) == [9.0]


@pytest.mark.parametrize("bad", ["hang", "die", "raise", "nan"])
async def test_a_completion_that_cannot_be_scored_is_missing_and_spoils_no_other(environment, bad) -> None:
    async with Scorer(environment, {}, workers=1, time_limit_s=0.5, retries=1) as scorer:
        assert await scorer.score(TASK, ["a", bad, "bbb"]) == [1.0, None, 3.0]
        assert scorer.failures["missing"] == 1
        assert await scorer.score(TASK, ["cc"]) == [2.0], "the pool goes on"


def test_answers_are_compared_as_text_or_as_mathematics() -> None:
    assert exact_reward(" 12\n", "12") == 1.0
    assert exact_reward("12.", "12") == 0.0
    assert math_reward("so it is \\boxed{\\frac{1}{2}}", "0.5") == 1.0
    assert math_reward("so it is \\boxed{3}", "0.5") == 0.0
