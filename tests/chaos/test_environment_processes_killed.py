"""Many episodes share processes that some of them kill: each ends as it would alone, and nothing is left of any."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from sluice.environments.base import Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.worker import EnvironmentFailedError

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[1] / "unit" / "misbehaving_environment.py"
DEADLINE_S = 200.0
EPISODES = 80
STEPS = 5


@pytest.mark.parametrize("seed", [0, 1])
async def test_episodes_end_as_they_would_alone_while_others_kill_their_process(seed: int) -> None:
    rng = random.Random(seed)
    at_a_time = asyncio.Semaphore(20)
    ended: dict[int, str] = {}
    poison = {number: rng.choice(["exit", "kill", "segfault", "sleep"]) for number in range(0, EPISODES, 16)}
    leaving = {number: rng.uniform(0.0, 0.3) for number in range(5, EPISODES, 10)}
    config = EnvironmentProcessesConfig(count=2, call_s=3.0, max_restarts=EPISODES)

    async def play(number: int) -> None:
        async with environment.episode(Task(str(number), {"do": ""}), number) as episode:
            total = number
            for step in range(STEPS):
                if step == STEPS // 2 and number in poison:
                    await episode.step(poison[number])
                letters = "x" * rng.randint(1, 9)
                total += len(letters)
                assert (await episode.step(letters)).messages[0]["content"] == str(total)
                await asyncio.sleep(rng.uniform(0, 0.02))

    async def attend(number: int) -> None:
        async with at_a_time:
            playing = asyncio.create_task(play(number))
            if number in leaving:
                await asyncio.sleep(leaving[number])
                playing.cancel()
            (outcome,) = await asyncio.gather(playing, return_exceptions=True)
        if isinstance(outcome, EnvironmentFailedError):
            assert (outcome.culprit, outcome.task_id) == (True, str(number))
        elif outcome is not None and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
        ended[number] = "failed" if isinstance(outcome, EnvironmentFailedError) else "left" if outcome else "whole"

    async with asyncio.timeout(DEADLINE_S):
        async with EnvironmentProcesses(f"{FILE}:Several", {}, config, (60.0, "start_s")) as environment:
            async with asyncio.TaskGroup() as group:
                for number in range(EPISODES):
                    group.create_task(attend(number))
            assert {number for number, how in ended.items() if how == "failed"} == set(poison)
            assert {number for number, how in ended.items() if how == "left"} <= set(leaving)
            assert sum(environment.failures.values()) == len(poison)
            task = Task("last", {"do": ""})
            async with environment.episode(task, 0) as one, environment.episode(task, 0) as two:
                open_episodes = [(await each.step("open")).reward for each in (one, two)]
            assert open_episodes in ([1.0, 1.0], [2.0, 2.0]), "these two, in two processes or in one"
