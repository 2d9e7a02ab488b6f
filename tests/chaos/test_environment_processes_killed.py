"""Many episodes share processes that some of them kill: each ends as it would alone, and nothing is left of any."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from simulated_clock import SimulatedClock

from sluice.environments.base import Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.worker import EnvironmentFailedError

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[1] / "unit" / "misbehaving_environment.py"
DEADLINE_S = 200.0
EPISODES = 80
STEPS = 5
CALL_S = 60.0
STRIDE_S = CALL_S / 4


async def let_those_be_late_who_sleep(clock: SimulatedClock, environment: EnvironmentProcesses) -> None:
    """Let time pass so that those that sleep are late, and no other: an awake call sees three strides at most, a quarter of its limit each."""
    while True:
        running = [(worker, call) for worker in environment._workers for call in worker.running.values()]
        awake = [(worker, call) for worker, call in running if call.arguments.get("completion") != "sleep"]
        await clock.advance(STRIDE_S if len(awake) < len(running) else 1.0)
        left_s = STRIDE_S
        while not all(worker.ended.is_set() or call.number not in worker.running for worker, call in awake):
            await asyncio.sleep(0.001)
            if left_s > 0:  # calls may wait until a process has ended, which has limits of its own
                await clock.advance(0.1)
                left_s -= 0.1


@pytest.mark.parametrize("seed", [0, 1])
async def test_episodes_end_as_they_would_alone_while_others_kill_their_process(seed: int) -> None:
    rng = random.Random(seed)
    at_a_time = asyncio.Semaphore(20)
    ended: dict[int, str] = {}
    poison = {number: rng.choice(["exit", "kill", "segfault", "sleep"]) for number in range(0, EPISODES, 16)}
    leaving = {number: rng.uniform(0.0, 0.3) for number in range(5, EPISODES, 10)}
    config = EnvironmentProcessesConfig(count=2, call_s=CALL_S, max_restarts=EPISODES)
    clock = SimulatedClock()

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
        async with EnvironmentProcesses(f"{FILE}:Several", {}, config, (1e6, "start_s"), clock=clock) as environment:
            passing = asyncio.create_task(let_those_be_late_who_sleep(clock, environment))
            async with asyncio.TaskGroup() as group:
                for number in range(EPISODES):
                    group.create_task(attend(number))
            assert {number for number, how in ended.items() if how == "failed"} == set(poison)
            assert {number for number, how in ended.items() if how == "left"} <= set(leaving)
            assert sum(environment.failures.values()) == len(poison)
            task = Task("last", {"do": ""})
            async with environment.episode(task, 0) as one, environment.episode(task, 0) as two:
                open_episodes = [(await each.step("open")).reward for each in (one, two)]
            passing.cancel()
            assert open_episodes in ([1.0, 1.0], [2.0, 2.0]), "these two, in two processes or in one"
