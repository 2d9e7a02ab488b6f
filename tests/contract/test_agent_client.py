"""`sluice.agent` plays a run to its end through the real gateway, orchestrator and journal."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from orchestrator_doubles import RolloutDouble
from test_external_episodes import EXTERNAL
from test_orchestrator_run import DEADLINE_S, make_scene, trained

from gateway_svc.app import serve
from gateway_svc.config import GatewayConfig
from sluice.agent import AgentClient, Episode
from sluice.config import CommonConfig, PeersConfig
from sluice.rpc.server import free_ports
from sluice.v1.tokens_pb2 import ChatMessage

pytestmark = pytest.mark.slow


async def test_episodes_are_played_until_the_run_has_ended_and_those_that_fail_are_given_up(tmp_path) -> None:
    attempts: list[str] = []

    async def play(episode: Episode) -> float:
        attempts.append(episode.opened.episode_id)
        if len(attempts) == 2:
            raise RuntimeError("the agent's own code failed")
        messages = [ChatMessage(role="user", content="Say something.")]
        for _turn in range(2):
            reply = await episode.generate(messages)
            messages += [reply.message, ChatMessage(role="user", content="And then?")]
        await episode.reward(0.5, generation_id=reply.generation_id)
        return len(attempts) / 100

    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [RolloutDouble()])
        running = scene.start(**EXTERNAL)
        grpc_port, http_port = free_ports(2)
        peers = PeersConfig(orchestrator=f"127.0.0.1:{scene.port}")
        common = CommonConfig(run="test", output_dir=scene.directory, model="double", peers=peers)
        settings = GatewayConfig.model_validate({"server": {"port": grpc_port, "http_port": http_port}})
        serving = asyncio.create_task(serve(common, settings))
        async with AgentClient(f"127.0.0.1:{grpc_port}", "test") as agent:
            submitted = await agent.run(play, at_a_time=3)
        await running
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    names = {name.partition(".")[0] for name in trained(scene)}
    assert len(names) <= submitted <= len(attempts) - 1
    assert len(attempts) >= 8, "two batches of two groups of two episodes"
