"""Agents play beside each other through two gateways while the orchestrator is killed again and again, in the middle of calls."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from pathlib import Path

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from external_agents import Played, gateway
from orchestrator_doubles import RolloutDouble
from test_external_episodes import Killed, ended, play, trained_ids
from test_orchestrator_run import make_scene, trained

from orchestrator_svc.commands.audit_compare import audit
from orchestrator_svc.journal.store import read_facts
from sluice.versions import Lineage

pytestmark = pytest.mark.slow

AGENTS = 6
KILLS = 3
STEPS = 100_000
DEADLINE_S = 300


async def killed_again_and_again(orchestrator: Killed, chance: random.Random) -> None:
    """Kill the orchestrator at random moments after it made progress, and start it again."""
    trainer = orchestrator.scene.trainer
    for number in range(KILLS + 1):
        before = trainer.version
        while trainer.version == before and orchestrator.process.returncode is None:  # noqa: ASYNC110 - a double's progress
            await asyncio.sleep(0.01)
        await asyncio.sleep(chance.uniform(0, 0.3))
        assert orchestrator.process.returncode is None, "it ended by itself"
        if number < KILLS:
            await orchestrator.kill()
            await orchestrator.start()


async def test_what_agents_were_told_is_trained_once_although_the_orchestrator_dies_in_the_middle_of_calls(
    tmp_path,
) -> None:
    chance = random.Random(7)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        scene = await make_scene(tmp_path, stack, [RolloutDouble()])
        orchestrator = Killed(scene, max_steps=STEPS)
        await orchestrator.start()
        stack.push_async_callback(ended, orchestrator)
        played: list[Played] = []
        problems: list[str] = []

        async def agent(number: int) -> None:
            async with gateway(scene.target, ("ann", "bob")[number % 2]) as door:
                door.name = f"gateway-{number}"
                while True:
                    try:
                        played.append(
                            await play(door, scene, turns=1 + chance.randrange(3), forks=chance.random() < 0.3)
                        )
                    except grpc.aio.AioRpcError as error:
                        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # nothing is on offer
                            problems.append(str(error))

        agents = [asyncio.create_task(agent(number)) for number in range(AGENTS)]
        await killed_again_and_again(orchestrator, chance)
        for each in agents:
            each.cancel()
        await asyncio.wait(agents)
        assert not problems, "an agent was told something else than before"
        async with scene.client() as client:
            await client.stop("test")
        assert await orchestrator.process.wait() == 0, (tmp_path / "orchestrator.log").read_text()[-4000:]
        told = {name: each for each in played for name in each.trajectory_ids}
        tokens = trained_ids(scene)
        assert len(trained(scene)) == len(set(trained(scene)))
        assert set(tokens.values()) == {1}
        for name in set(trained(scene)) & told.keys():
            assert all(tokens[each] for each in told[name].sampled), "a sampled token is not trained"
        assert not audit(read_facts(scene.run_dir), scene.trainer.record, Lineage()).differences
