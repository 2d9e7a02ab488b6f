# ruff: noqa: N802 - gRPC names the methods
"""`sluice.agent` plays a run to its end through the real gateway, orchestrator and journal."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from orchestrator_doubles import RolloutDouble
from test_external_episodes import EXTERNAL
from test_gateway_run import served_gateway
from test_orchestrator_run import DEADLINE_S, make_scene, trained

from sluice.agent import AgentClient, Episode
from sluice.config import SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError
from sluice.v1 import episode_pb2, episode_pb2_grpc
from sluice.v1.tokens_pb2 import ChatMessage

pytestmark = pytest.mark.slow


async def test_episodes_are_played_until_the_run_has_ended_and_those_that_fail_are_given_up(tmp_path) -> None:
    attempts: list[str] = []

    async def play(episode: Episode) -> float:
        attempts.append(episode.opened.episode_id)
        attempt = len(attempts)
        if attempt == 2:
            raise RuntimeError("the agent's own code failed")
        if attempt in {3, 4}:
            await episode.abandon("not this one", requeue=True)
            if attempt == 4:
                episode.ended = False  # as if the orchestrator had given it up: the submission is refused
            return 0.0
        messages = [ChatMessage(role="user", content="Say something.")]
        for _turn in range(2):
            reply = await episode.generate(messages)
            messages += [reply.message, ChatMessage(role="user", content="And then?")]
        await episode.reward(0.5, generation_id=reply.generation_id)
        return attempt / 100

    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [RolloutDouble()])
        running = scene.start(**EXTERNAL)
        target, _ = await stack.enter_async_context(served_gateway(scene))
        async with AgentClient(target, "test") as agent:
            played = await agent.run(play, at_a_time=3)
        await running
    names = {name.partition(".")[0] for name in trained(scene)}
    assert len(names) <= played <= len(attempts) - 2
    assert len(attempts) >= 8, "two batches of two groups of two episodes, and those that were given up"


async def test_without_a_gateway_the_agent_says_what_to_check(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("sluice.agent.PATIENCE_S", 1.0)
    async with AgentClient(f"unix:{tmp_path}/none", "test") as agent:
        with pytest.raises(SluiceError, match=r"no gateway answered for 1 s .*gateway\.server\.port"):
            await agent.run(fails)


class Busy(episode_pb2_grpc.EpisodeServiceServicer):
    """Lends one episode when it has been asked often enough, then the run has ended."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def LeaseTasks(self, request, _context):
        self.asked.append(request.request_id)
        if len(self.asked) < 3:
            raise SluiceError.resource_exhausted("QUOTA_RATE", "too many calls", 0.01)
        if len(self.asked) > 3:
            raise SluiceError.failed_precondition("RUN_ENDED", "the run has ended")
        return episode_pb2.LeaseTasksResponse(tasks=[{"lease_id": "one", "lease": {"seconds": 60}}])

    async def OpenEpisode(self, _request, _context):
        return episode_pb2.OpenEpisodeResponse(episode_id="g1-0-0")

    async def SubmitTrajectory(self, _request, _context):
        return episode_pb2.SubmitTrajectoryResponse(trajectory_ids=["g1-0"])


async def test_an_agent_waits_when_a_quota_asks_it_to() -> None:
    async def play(_episode: Episode) -> float:
        return 1.0

    busy = Busy()
    server = RpcServer("gateway", ServerConfig(host="127.0.0.1", port=0), SecurityConfig(), run="test")
    server.add(episode_pb2_grpc.add_EpisodeServiceServicer_to_server, busy, "sluice.v1.EpisodeService")
    await server.start()
    try:
        async with asyncio.timeout(DEADLINE_S), AgentClient(server.target, "test") as agent:
            assert await agent.run(play, at_a_time=1) == 1
    finally:
        await server.stop(0.0)
    assert len(set(busy.asked[:3])) == 1, "the same request: a lease whose answer is lost is given again"


async def fails(_episode: Episode) -> float:
    raise AssertionError("nothing was leased")
