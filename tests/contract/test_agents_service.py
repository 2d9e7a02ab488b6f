# ruff: noqa: N802 - gRPC names the methods
"""`sluice agents` against a gateway that lends a few episodes: what becomes of each shape of agent, and of those that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from simulated_clock import SimulatedClock

from agents_svc.app import serve
from agents_svc.config import AgentsConfig
from agents_svc.player import Player, load_agent
from sluice.agent import AgentClient, Episode
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, ConfigError, FailedForGoodError, PeersConfig, SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError
from sluice.v1 import episode_pb2, episode_pb2_grpc

DEADLINE_S = 60.0

AGENTS = """
import asyncio, os, threading, time

class Coroutine:
    def __init__(self, bonus=0):
        self.bonus = bonus
    async def run(self, data, base_url, api_key):
        assert (base_url, api_key) == ("http://gateway/v1", f"key of {data['number']}")
        return data["number"] + self.bonus

class Function:
    def run(self, data, base_url, api_key):
        assert threading.current_thread() is not threading.main_thread()
        return data["number"]

class Process(Coroutine):
    def run(self, data, base_url, api_key):
        assert threading.current_thread() is threading.main_thread()
        return data["number"] + self.bonus

class Dies(Coroutine):
    def run(self, data, base_url, api_key):
        if data["number"] == 3:
            os._exit(3)
        return 1

class PerGeneration:
    async def run(self, **given):
        return {"one": 0.5, "two": 0.25}

class Scored:
    async def arun_episode(self, engine, task):
        await engine.reward(task["number"])

class Picky:
    async def run(self, data, base_url, api_key):
        if data["number"] % 2:
            raise ValueError("I do not like odd numbers")
        return 1

class Broken:
    async def run(self, data, base_url, api_key):
        return "good"

class Late:
    async def run(self, data, base_url, api_key):
        await asyncio.Event().wait()

class LateFunction:
    def run(self, data, base_url, api_key):
        time.sleep(1000)

class Nothing:
    pass

class NotAsync:
    def arun_episode(self, engine, task):
        pass

class Raises:
    def __init__(self, key=""):
        raise RuntimeError("no licence")
"""


@dataclass
class Lender(episode_pb2_grpc.EpisodeServiceServicer):
    """A gateway that lends so many episodes; then the run has ended."""

    lends: int
    loses: bool = False
    lent: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    submitted: dict[str, float | None] = field(default_factory=dict)
    rewards: dict[tuple[str, str], float] = field(default_factory=dict)
    abandoned: dict[str, tuple[str, bool]] = field(default_factory=dict)
    all_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        if len(self.submitted) + len(self.abandoned) == self.lends:
            self.all_ended.set()

    async def LeaseTasks(self, request, _context):
        self.asked[request.request_id] += 1
        if self.lent == self.lends:
            if self.loses and self.asked[request.request_id] > 1:  # the lease whose answer was lost is given again
                return self.lease()
            await self.all_ended.wait()  # the run lasts as long as its episodes
            raise SluiceError.failed_precondition("RUN_ENDED", "the run has ended")
        return self.lease()

    def lease(self):
        self.lent += 1
        data = Struct()
        data.update({"number": self.lent})
        task = {"task_id": str(self.lent), "data": data}
        return episode_pb2.LeaseTasksResponse(
            tasks=[{"task": task, "lease_id": str(self.lent), "lease": {"seconds": 60}}]
        )

    async def OpenEpisode(self, request, _context):
        return episode_pb2.OpenEpisodeResponse(
            episode_id=request.lease_id,
            openai_base_url="http://gateway/v1",
            session_key=f"key of {request.lease_id}",
            settling_key=f"settles {request.lease_id}",
        )

    def check_settles(self, request, context) -> None:
        assert ("session-key", f"settles {request.episode_id}") in context.invocation_metadata()

    async def RecordReward(self, request, context):
        self.check_settles(request, context)
        self.rewards[request.episode_id, request.generation_id] = request.reward
        return episode_pb2.RecordRewardResponse()

    async def SubmitTrajectory(self, request, context):
        self.check_settles(request, context)
        self.submitted[request.episode_id] = request.reward if request.HasField("reward") else None
        self.end()
        return episode_pb2.SubmitTrajectoryResponse()

    async def AbandonEpisode(self, request, context):
        self.check_settles(request, context)
        self.abandoned[request.episode_id] = (request.reason, request.requeue)
        self.end()
        return episode_pb2.AbandonEpisodeResponse()


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    (tmp_path / "agents_of_mine.py").write_text(AGENTS)
    return tmp_path / "agents_of_mine.py"


@contextlib.asynccontextmanager
async def lending(lender: Lender):
    server = RpcServer("gateway", ServerConfig(port=0), SecurityConfig(), run="test")
    server.add(episode_pb2_grpc.add_EpisodeServiceServicer_to_server, lender, "sluice.v1.EpisodeService")
    await server.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield server.target
    finally:
        await server.stop(0.0)


async def played(agents: Path, name: str, lends: int = 3, clock: Clock = CLOCK, **settings: Any) -> Lender:
    lender = Lender(lends)
    async with lending(lender) as target:
        common = CommonConfig(run="test", output_dir=agents.parent, peers=PeersConfig(gateway=target))
        config = AgentsConfig.model_validate({"agent": f"{agents}:{name}", "at_a_time": 2, **settings})
        await serve(common, config, clock)
    return lender


@pytest.mark.parametrize("name", ["Coroutine", "Function"])
async def test_what_run_returns_is_the_reward_of_the_episode(agents, name) -> None:
    assert (await played(agents, name)).submitted == {"1": 1, "2": 2, "3": 3}


@pytest.mark.parametrize("name", ["Coroutine", "Process"])
async def test_a_class_may_run_in_processes_of_its_own(agents, name) -> None:
    lender = await played(agents, name, args={"bonus": 10}, environment_processes={"count": 1})
    assert lender.submitted == {"1": 11, "2": 12, "3": 13}


async def test_an_episode_whose_process_dies_is_given_up_and_the_others_go_on(agents) -> None:
    lender = await played(agents, "Dies", 6, environment_processes={"count": 1}, at_a_time=1)
    assert lender.submitted.keys() == {"1", "2", "4", "5", "6"}
    assert "ended with exit code 3 in run of task 3" in lender.abandoned["3"][0]


async def test_a_class_without_run_cannot_have_processes(agents) -> None:
    with pytest.raises(ConfigError, match=r"run\(data, base_url, api_key\)"):
        await played(agents, "Scored", environment_processes={"count": 1})


async def test_the_class_gets_its_arguments(agents) -> None:
    assert (await played(agents, "Coroutine", args={"bonus": 10})).submitted == {"1": 11, "2": 12, "3": 13}


async def test_an_agent_may_reward_its_generations_or_record_a_reward_itself(agents) -> None:
    lender = await played(agents, "PerGeneration", 1)
    assert lender.rewards == {("1", "one"): 0.5, ("1", "two"): 0.25}
    assert lender.submitted == {"1": None}
    lender = await played(agents, "Scored", 2)
    assert lender.rewards == {("1", ""): 1, ("2", ""): 2}
    assert lender.submitted == {"1": None, "2": None}


async def test_an_episode_whose_agent_raises_is_given_up_and_the_others_go_on(agents) -> None:
    lender = await played(agents, "Picky", 6, most_failures=2)
    assert set(lender.submitted) == {"2", "4", "6"}
    assert {name: reason for name, (reason, _) in lender.abandoned.items()} == dict.fromkeys(
        ("1", "3", "5"), "ValueError('I do not like odd numbers')"
    )


@pytest.mark.parametrize(
    ("name", "step_s", "why"), [("Late", 1.0, "episode_s"), ("LateFunction", 1.0, "episode_s"), ("Broken", 0.0, "good")]
)
async def test_agents_of_which_no_episode_ends_in_order_give_up_and_say_why(agents, name, step_s, why) -> None:
    clock = SimulatedClock()
    settings = {"most_failures": 4, "episode_s": 60.0, "server": {"drain_s": 0}}
    playing = asyncio.create_task(played(agents, name, 100, clock, **settings))
    await clock.until(playing.done, step_s=step_s)
    with pytest.raises(FailedForGoodError, match=rf"(?s)episodes in a row failed .*{why}.*--resume"):
        await playing


async def test_failures_at_the_same_moment_are_not_enough_to_give_up() -> None:
    outage = asyncio.Event()

    async def fails(_episode: Episode) -> None:
        await outage.wait()
        raise ConnectionError("the gateway died")

    player = Player((fails, False), at_a_time=8, episode_s=60, most_failures=4)
    episode = Episode(None, episode_pb2.LeasedTask(), episode_pb2.OpenEpisodeResponse())
    playing = [asyncio.create_task(player.play(episode)) for _ in range(8)]
    await asyncio.sleep(0)
    outage.set()
    await asyncio.gather(*playing, return_exceptions=True)
    assert (player.failures, player.gave_up) == (8, "")
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await player.play(episode)
    assert "the gateway died" in player.gave_up
    assert player.ended.is_set()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Nothing", "has neither `run"),
        ("NotAsync", "async def arun_episode"),
        ("Coroutine", r"refuses its agents\.args \(secret\)"),
        ("Raises", r"RuntimeError: no licence .*agents_of_mine\.py:\d+.*correct it"),
        ("Absent", "it defines .*Coroutine"),
    ],
)
def test_a_class_that_cannot_play_is_refused_with_the_reason(agents, name, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_agent(f"{agents}:{name}", {"secret": "hush"} if name == "Coroutine" else {})


def test_a_missing_class_is_found_before_anything_starts(tmp_path) -> None:
    run = CommonConfig(run="test")
    with pytest.raises(ConfigError, match=r"agents\.agent"):
        AgentsConfig().check_start(run)
    with pytest.raises(ConfigError, match="there is no agent file"):
        AgentsConfig(agent=f"{tmp_path}/none.py:Agent").check_start(run)


async def test_agents_that_are_stopped_end_what_they_can_and_give_the_rest_back(agents, monkeypatch) -> None:
    monkeypatch.setattr("sluice.agent.RETURN_S", DEADLINE_S)
    begun, stop, slow_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    lender = Lender(2)

    async def play(episode: Episode) -> float:
        if episode.data["number"] == 1:
            await begun.wait()
            stop.set()
            await asyncio.sleep(0)
            return 1.0
        begun.set()
        await slow_ended.wait()
        return 0.0

    def workers() -> list[asyncio.Task[Any]]:
        return [each for each in asyncio.all_tasks() if each.get_name().startswith("agent ")]

    lender.loses = True
    clock = SimulatedClock()
    async with lending(lender) as target, AgentClient(target, "test", clock=clock) as client:
        running = asyncio.create_task(client.run(play, at_a_time=4, stop=stop, drain_s=1.0))
        await clock.until(lambda: clock.waits and len(workers()) == 1)  # the drain goes on for the one that is slow
        await clock.advance(1.0)
        assert await running == 1
    assert lender.submitted == {"1": 1.0}
    given_back = lender.abandoned.pop("3")
    assert given_back == lender.abandoned["2"] == ("its agent was stopped", True), (
        "3 was leased as the agent was stopped"
    )
