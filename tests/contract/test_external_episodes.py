"""External agents run the episodes of a run over real gRPC, with the real journal; the orchestrator dies meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter

import grpc
import pytest
from external_agents import Gateway, Played, gateway
from orchestrator_doubles import RolloutDouble
from simulated_clock import SimulatedClock
from test_orchestrator_run import DEADLINE_S, Scene, finished, make_scene, trained

from orchestrator_svc.commands.audit_compare import audit
from orchestrator_svc.journal import DATABASE
from orchestrator_svc.journal.store import read_facts
from orchestrator_svc.sessions.desk import BACK_S
from sluice.config import ConfigError, FailedForGoodError, SecurityConfig
from sluice.rpc import SluiceError
from sluice.rpc.principals import add_token
from sluice.v1 import episode_pb2, session_pb2
from sluice.versions import Lineage

pytestmark = pytest.mark.slow

EXTERNAL = {"workflow": "external", "max_steps": 2, "pacing": {"enabled": False}}

IDLE_S, GROUP_S = 5.0, 5.0
"""On the simulated clock."""

BARE = """
from sluice.environments.base import Task

class Bare:
    name = "bare"

    def tasks(self, split, seed):
        return [Task(f"{split}-{index}", {"text": "abc", "level": index}) for index in range(9)]
"""


@pytest.fixture
async def scene(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        built = await make_scene(tmp_path, stack, [RolloutDouble()])
        yield built
        if (built.run_dir / DATABASE).exists():
            assert not audit(read_facts(built.run_dir), built.trainer.record, Lineage()).differences


async def play(agent: Gateway, scene: Scene, *, turns: int = 2, forks: bool = False) -> Played:
    """Play one episode to its submission."""
    (task,) = await agent.lease(max_episodes=1)
    opened = await agent.open(task.lease_id)
    played, history = Played(opened.episode_id, task.lease_id), []
    for turn in range(turns):
        samples = await agent.turn(
            opened.episode_id, history, scene.replicas[0].version, samples=1 + (forks and turn == turns - 1)
        )
        for each in samples:
            played.sampled += each[-2:]
        history = samples[0]
    await agent.reward(opened.episode_id, float(len(played.name) % 2))
    played.trajectory_ids = await agent.submit(opened.episode_id)
    return played


def trained_ids(scene: Scene) -> Counter[int]:
    """How often each token was trained."""
    tokens: Counter[int] = Counter()
    for batch in scene.trainer.history.values():
        for each in batch:
            position = 0
            for index, length in enumerate(each.mask_runs):
                if index % 2:
                    tokens.update(each.token_ids[position : position + length])
                position += length
    return tokens


async def until_serving(task: asyncio.Task, agent: Gateway) -> None:
    """Wait until the orchestrator lists the replica, or raise what ended it."""

    async def listed() -> None:
        while True:
            calls = agent.sessions.WatchReplicas(session_pb2.WatchReplicasRequest(), wait_for_ready=True)
            try:
                async for answer in calls:
                    if [each.replica for each in answer.replicas if each.usable] == ["replica-0"]:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # it may still read its journal
                    raise

    asked = asyncio.create_task(listed())
    await asyncio.wait({asked, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        asked.cancel()
        task.result()
    await asked


async def test_agents_train_a_run_to_its_end_and_each_token_is_trained_once(scene) -> None:
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**EXTERNAL)
        await until_serving(running, agent)
        # Two batches of two groups of two episodes.
        played = [await play(agent, scene, forks=index % 2 == 1) for index in range(8)]
        await running
    told = {name: each for each in played for name in each.trajectory_ids}
    assert set(trained(scene)) == told.keys()
    tokens = trained_ids(scene)
    assert set(tokens.values()) == {1}
    assert tokens.keys() == {each for episode in played for each in episode.sampled}
    forked = [each for each in played if len(each.trajectory_ids) == 2]
    assert forked[0].trajectory_ids == [f"{forked[0].trajectory_ids[0][:-2]}.{branch}" for branch in (0, 1)]
    assert scene.report()["state"] == "succeeded"


async def test_a_run_whose_agents_do_not_come_says_that_it_waits_for_them(scene) -> None:
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**{**EXTERNAL, "max_steps": 1, "external": {"notice_s": 0.001}})
        await until_serving(running, agent)
        async with scene.client() as client:
            run = await scene.until_run(client, lambda run: run.waits_for)
            assert run.waits_for[0].startswith("agents: ")
            for _ in range(4):
                await play(agent, scene)
        await running
    assert scene.report()["state"] == "succeeded"


async def test_other_environments_are_trained_while_no_agent_comes_and_its_share_is_back_when_one_does(scene) -> None:
    letters = f"{scene.directory / 'letters_env.py'}:Letters"
    mix = [{"name": "ours", "environment": letters}, {"name": "theirs", "environment": letters, "workflow": "external"}]
    clock = SimulatedClock()
    settings = {"environment": "", "environments": mix, "pacing": {"enabled": False}, "external": {"notice_s": IDLE_S}}
    limits = {"start_s": 1e6, "lost_s": 1e6, "step_s": 1e6, "update_s": 1e6, "episode_s": 1e6}
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**settings, max_steps=60, deadlines=limits, clock=clock)
        await until_serving(running, agent)
        await clock.until(lambda: max(scene.trainer.history, default=0) >= 4, step_s=0.5)
        assert not running.done()
        async with scene.client() as client:
            (reason,) = (await client.run("test")).waits_for
            assert reason.startswith("agents: none came for environment theirs, and others are played meanwhile")
            asking = asyncio.create_task(agent.lease())
            await clock.until(asking.done, step_s=0.5)
            (task,) = await asking
            for reward in (0.0, 1.0):
                opened = await agent.open(task.lease_id)
                await agent.turn(opened.episode_id, [], scene.replicas[0].version)
                await agent.submit(opened.episode_id, reward=reward)
            await clock.until(running.done, step_s=0.5)
            await running
    report = scene.report()
    assert (report["state"], report["steps"], report["groups_failed"]) == ("succeeded", 60, {})
    put_off = [fact.group_dropped for _, fact in read_facts(scene.run_dir) if fact.HasField("group_dropped")]
    assert {(each.reason, each.redraw) for each in put_off} == {("NO_AGENT", True)}
    groups = {each.group_id for batch in scene.trainer.history.values() for each in batch}
    assert task.group_id in groups, "what the agent played is trained"


async def test_other_environments_are_trained_after_all_agents_have_left(scene) -> None:
    letters = f"{scene.directory / 'letters_env.py'}:Letters"
    mix = [{"name": "ours", "environment": letters}, {"name": "theirs", "environment": letters, "workflow": "external"}]
    external = {"notice_s": IDLE_S, "lease_s": IDLE_S, "idle_s": IDLE_S, "group_s": 1e6}
    settings = {"environment": "", "environments": mix, "pacing": {"enabled": False}, "external": external}
    limits = {"start_s": 1e6, "lost_s": 1e6, "step_s": 1e6, "update_s": 1e6, "episode_s": 1e6}
    clock = SimulatedClock()
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**settings, max_steps=4, deadlines=limits, clock=clock)
        await until_serving(running, agent)
        (task,) = await agent.lease()
        opened = await agent.open(task.lease_id)
        await agent.turn(opened.episode_id, [], scene.replicas[0].version)
        await clock.until(running.done, step_s=0.5)
        await running
    report = scene.report()
    assert (report["steps"], report["groups_failed"], report["sessions_ended"]) == (4, {}, {"IDLE": 1})
    assert not any(name.startswith(f"{task.group_id}-") for name in trained(scene))


async def test_a_run_whose_agents_are_away_for_too_long_ends_in_order_and_says_why(scene) -> None:
    external = {"notice_s": IDLE_S, "absent_s": 10 * IDLE_S}
    limits = {"start_s": 1e6, "lost_s": 1e6, "step_s": 1e6, "update_s": 1e6}
    clock = SimulatedClock()
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**{**EXTERNAL, "external": external}, deadlines=limits, clock=clock)
        await until_serving(running, agent)
        began = clock()
        for _ in range(4):
            await play(agent, scene)
        await clock.until(running.done, step_s=0.5)
        with pytest.raises(
            FailedForGoodError, match=r"no agent .* environment .* for 50 s \(orchestrator.external.absent_s\)"
        ):
            await running
    assert clock() - began >= 10 * IDLE_S
    report = scene.report()
    assert (report["state"], report["steps"]) == ("stopped", 1)
    assert "absent_s" in report["stop_reason"]
    assert scene.trainer.checkpoints == [1], "what was trained is kept"


async def test_an_episode_without_a_reward_is_scored_by_its_environment_branch_by_branch(scene) -> None:
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**{**EXTERNAL, "max_steps": 1})
        await until_serving(running, agent)
        for _ in range(2):
            (task,) = await agent.lease()
            assert (task.episodes, task.opening.messages[0].content, dict(task.task.data)) == (
                2,
                "abc",
                {"text": "abc"},
            )
            for episode in range(2):
                opened = await agent.open(task.lease_id)
                await agent.turn(opened.episode_id, [], scene.replicas[0].version, samples=2 - episode)
                await agent.submit(opened.episode_id)
        await running
    # The environment gives "ab" 0.5 and "bb" 0: branches of 0.5 and 0 have the mean 0.25 against 0.5 of the linear episode.
    found = {each.trajectory_id: each for each in scene.trainer.history[1]}
    assert {name: each.reward for name, each in found.items() if name.startswith("g1")} == {
        "g1-0.0": 0.25,
        "g1-0.1": 0.25,
        "g1-1": 0.5,
    }
    assert list(found["g1-0.0"].advantages) == [0.125, 0.125]
    assert list(found["g1-0.1"].advantages) == [-0.375, -0.375]
    assert list(found["g1-1"].advantages) == [0.125]


async def test_an_environment_with_tasks_alone_is_enough(scene) -> None:
    path = scene.directory / "bare_env.py"
    path.write_text(BARE)
    with pytest.raises(ConfigError, match="only external agents can run"):
        await scene.run(environment=f"{path}:Bare")
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**{**EXTERNAL, "max_steps": 1}, environment=f"{path}:Bare")
        await until_serving(running, agent)
        (task,) = await agent.lease()
        assert not task.opening.messages
        running.cancel()
        await asyncio.wait({running})


async def test_wrong_calls_get_codes_that_say_what_is_wrong(scene) -> None:
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent, gateway(scene.target, "bob") as stranger:
        arguments = {"sampling": {"chat_template_kwargs": {"enable_thinking": False}}}
        running = scene.start(**EXTERNAL, **arguments, external={"lease_s": 60, "most_sessions": 1})
        await until_serving(running, agent)
        (task,) = await agent.lease("lease")
        assert [each.lease_id for each in await agent.lease("lease")] == [task.lease_id]
        opened = await agent.open(task.lease_id, "open")
        again = await agent.open(task.lease_id, "open")
        assert (opened.episode_id, opened.session_key) == (again.episode_id, again.session_key)
        assert opened.sampling.max_tokens == 256
        found = await agent.call("FindSession", session_pb2.FindSessionRequest(session_key=opened.session_key))
        assert (found.episode_id, found.principal, found.group_id) == (opened.episode_id, "ann", task.group_id)
        assert found.template_arguments_json == '{"enable_thinking": false}'

        async def code(caller: Gateway, method: str, request, **metadata: str) -> str:
            try:
                await caller.call(method, request, **metadata)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        wrong_key = opened.session_key[:-1] + ("0" if opened.session_key[-1] != "0" else "1")
        by_name = session_pb2.FindSessionRequest(episode_id=opened.episode_id)
        other_run = episode_pb2.LeaseTasksRequest(run="runs/other", request_id="r", max_tasks=1)
        no_name = episode_pb2.LeaseTasksRequest(run="runs/test", max_tasks=1)
        assert [
            await code(stranger, "FindSession", by_name),
            await code(agent, "FindSession", session_pb2.FindSessionRequest(session_key=wrong_key)),
            await code(agent, "FindSession", session_pb2.FindSessionRequest(session_key="sk-")),
            await code(agent, "FindSession", by_name, **{"on-behalf-of": ""}),
            await code(agent, "LeaseTasks", other_run),
            await code(agent, "LeaseTasks", no_name),
            await code(stranger, "RenewLease", episode_pb2.RenewLeaseRequest(lease_id=task.lease_id)),
            await code(agent, "OpenEpisode", episode_pb2.OpenEpisodeRequest(lease_id=task.lease_id, request_id="2")),
            await code(stranger, "AbandonEpisode", episode_pb2.AbandonEpisodeRequest(episode_id=opened.episode_id)),
            await code(agent, "SubmitTrajectory", episode_pb2.SubmitTrajectoryRequest(episode_id=opened.episode_id)),
            await code(agent, "Generate", episode_pb2.EpisodeServiceGenerateRequest(episode_id=opened.episode_id)),
            await code(agent, "AbandonEpisode", episode_pb2.AbandonEpisodeRequest(episode_id=opened.episode_id)),
            await code(agent, "FindSession", by_name),
        ] == [
            "NOT_FOUND",
            "NOT_FOUND",
            "NOT_FOUND",
            "INVALID_ARGUMENT",
            "NOT_FOUND",
            "INVALID_ARGUMENT",
            "NOT_FOUND",
            "RESOURCE_EXHAUSTED",
            "NOT_FOUND",
            "FAILED_PRECONDITION",
            "UNIMPLEMENTED",
            "OK",
            "FAILED_PRECONDITION",
        ]
        late = session_pb2.FindSessionRequest(session_key=opened.settling_key, ended=True)
        assert (await agent.call("FindSession", late)).principal == "ann"
        late.session_key = opened.session_key  # a gateway of v0.1.0 asks so for whoever sends it
        assert await code(agent, "FindSession", late) == "PERMISSION_DENIED"
        running.cancel()
        await asyncio.wait({running})


async def test_an_agent_cannot_speak_for_another_principal_with_its_own_token(scene) -> None:
    file = scene.directory / "principals.toml"
    for name, role in (("door", "gateway"), ("ann", "agent")):
        (scene.directory / name).write_text(add_token(file, name, role))
    running = scene.start(**EXTERNAL, common={"security": {"principals_file": file}})
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        door, direct = [
            await stack.enter_async_context(
                gateway(scene.target, security=SecurityConfig(token_file=scene.directory / each))
            )
            for each in ("door", "ann")
        ]
        await until_serving(running, door)
        (task,) = await door.lease()
        for method, request in (
            ("LeaseTasks", episode_pb2.LeaseTasksRequest(run="runs/test", request_id="r", max_tasks=1)),
            ("RenewLease", episode_pb2.RenewLeaseRequest(lease_id=task.lease_id)),
            ("FindSession", session_pb2.FindSessionRequest(session_key="sk-")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await direct.call(method, request)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        running.cancel()
        await asyncio.wait({running})


async def test_an_episode_that_its_agent_left_is_on_offer_again_as_its_next_attempt(scene) -> None:
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent, gateway(scene.target, "bob") as other:
        clock = SimulatedClock()
        running = scene.start(**EXTERNAL, external={"idle_s": IDLE_S, "lease_s": 600}, max_concurrent=2, clock=clock)
        await until_serving(running, agent)
        left = [await agent.lease(), await agent.lease()]  # all that the bound allows
        first = await agent.open(left[0][0].lease_id)
        leasing = asyncio.create_task(other.lease())  # it waits until the first agent was silent for too long
        await clock.until(leasing.done, step_s=IDLE_S / 10)
        (again,) = await leasing
        second = await other.open(again.lease_id)
        assert (first.episode_id, second.episode_id) == ("g1-0-0", "g1-0-1")
        assert first.session_key != second.session_key
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await agent.turn(first.episode_id, [], scene.replicas[0].version)
        assert SluiceError.from_rpc(refused.value).metadata["ended"] == "IDLE"
        running.cancel()
        await asyncio.wait({running})


async def test_who_waits_for_an_offer_learns_that_the_run_has_ended(scene) -> None:
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**{**EXTERNAL, "max_steps": 1, "batch_size": 1}, max_concurrent=1)
        await until_serving(running, agent)
        (task,) = await agent.lease()
        waiting = asyncio.create_task(agent.lease())
        for _ in range(2):
            session = (await agent.open(task.lease_id)).episode_id
            await agent.turn(session, [], scene.replicas[0].version)
            await agent.submit(session, reward=1.0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await waiting
        assert SluiceError.from_rpc(refused.value).reason == "RUN_ENDED"
        await running


async def test_a_group_whose_time_is_over_is_trained_with_what_was_submitted(scene) -> None:
    clock = SimulatedClock()
    settings = {**EXTERNAL, "max_steps": 1, "batch_size": 1, "external": {"group_s": GROUP_S}, "clock": clock}
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**settings)
        await until_serving(running, agent)
        (task,) = await agent.lease()
        opened = [(await agent.open(task.lease_id)).episode_id for _ in range(2)]
        for each in opened:
            await agent.turn(each, [], scene.replicas[0].version)
        await agent.submit(opened[0], reward=1.0)
        await clock.advance(GROUP_S)
        await finished(running, clock)
    assert trained(scene) == ["g1-0"]
    assert scene.report()["sessions_ended"] == {"SUBMITTED": 1, "GROUP_ENDED": 1}


async def test_a_call_that_repeats_a_running_request_waits_and_gets_what_is_recorded(scene) -> None:
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**EXTERNAL)
        await until_serving(running, agent)
        (task,) = await agent.lease()
        session = (await agent.open(task.lease_id)).episode_id
        begin = session_pb2.BeginGenerationRequest(
            episode_id=session, request_id="one", gateway="east", body_digest=bytes(16)
        )
        begin.claim.seconds = 60
        assert not (await agent.call("BeginGeneration", begin)).running
        begin.request_id, begin.gateway, begin.is_retry = "two", "west", True
        waiting = asyncio.create_task(agent.call("BeginGeneration", begin))
        await asyncio.sleep(0)
        release = session_pb2.ReleaseGenerationRequest(episode_id=session, request_id="one", gateway="east")
        await agent.call("ReleaseGeneration", release)
        assert (await waiting) == session_pb2.BeginGenerationResponse(), "it was released: the other one samples"
        running.cancel()
        await asyncio.wait({running})


async def test_the_claims_of_a_gateway_end_soon_after_its_stream_broke(scene) -> None:
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**EXTERNAL)
        await until_serving(running, agent)
        (task,) = await agent.lease()
        session = (await agent.open(task.lease_id)).episode_id
        begin = session_pb2.BeginGenerationRequest(
            episode_id=session, request_id="one", gateway="east", body_digest=bytes(16)
        )
        begin.claim.seconds = 600
        async with gateway(scene.target) as doomed:
            stream = doomed.sessions.WatchReplicas(session_pb2.WatchReplicasRequest(gateway="east"))
            await stream.read()
            assert not (await doomed.call("BeginGeneration", begin)).running
        begin.request_id, begin.gateway, begin.is_retry = "two", "west", True
        taken_over = await agent.call("BeginGeneration", begin)
        assert taken_over == session_pb2.BeginGenerationResponse(), "the call waits until the claim has ended"
        running.cancel()
        await asyncio.wait({running})


async def test_a_gateway_whose_stream_broke_and_that_is_back_keeps_its_claims(scene) -> None:
    clock = SimulatedClock()
    async with asyncio.timeout(DEADLINE_S), gateway(scene.target) as agent:
        running = scene.start(**EXTERNAL, external={"idle_s": 600, "lease_s": 600}, clock=clock)
        await until_serving(running, agent)
        (task,) = await agent.lease()
        session = (await agent.open(task.lease_id)).episode_id
        begin = session_pb2.BeginGenerationRequest(
            episode_id=session, request_id="one", gateway="east", body_digest=bytes(16)
        )
        begin.claim.seconds = 600
        watched = session_pb2.WatchReplicasRequest(gateway="east")
        async with gateway(scene.target) as cut_off:
            stream = cut_off.sessions.WatchReplicas(watched)
            await stream.read()
            await cut_off.call("BeginGeneration", begin)
            back = agent.sessions.WatchReplicas(watched)
            await back.read()
        begin.request_id, begin.gateway, begin.is_retry = "two", "west", True
        sent = (("on-behalf-of", agent.principal),)
        joining = asyncio.ensure_future(agent.sessions.BeginGeneration(begin, metadata=sent, timeout=DEADLINE_S))
        await clock.until(joining.done, step_s=BACK_S / 10)
        joined = await joining
        assert joined.running == "one", (
            "the call waited for half of its time, which is longer than a dead gateway's claims last"
        )
        running.cancel()
        await asyncio.wait({running})


class Killed:
    """The orchestrator as a process that is killed and started again."""

    def __init__(self, scene: Scene, max_steps: int = 3) -> None:
        self.scene = scene
        path = scene.directory / "bare_env.py"
        path.write_text(BARE)
        (scene.directory / "run.toml").write_text(f'''
run = "test"
model = "double"
output_dir = "{scene.directory}"
[peers]
trainer = "{scene.trainer_address}"
rollout = {scene.replica_addresses}
[orchestrator]
environment = "{path}:Bare"
workflow = "external"
batch_size = 2
group_size = 2
max_steps = {max_steps}
pacing = {{ enabled = false }}
''')
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self.scene.directory / "orchestrator.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "sluice.cli.main", "orchestrator", "@", str(self.scene.directory / "run.toml"),
                "--server.host", self.scene.target, stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


async def test_no_answer_is_taken_back_by_an_orchestrator_that_is_killed_between_calls(tmp_path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [RolloutDouble()])
        orchestrator = Killed(scene)
        await orchestrator.start()
        stack.push_async_callback(ended, orchestrator)
        agent = await stack.enter_async_context(gateway(scene.target))
        async with asyncio.timeout(2 * DEADLINE_S):
            played: list[Played] = []
            (task,) = await agent.lease("first")
            await orchestrator.kill()
            await orchestrator.start()
            assert [each.lease_id for each in await agent.lease("first")] == [task.lease_id]
            opened = await agent.open(task.lease_id, "first")
            (history,) = await agent.turn(opened.episode_id, [], scene.replicas[0].version)
            await orchestrator.kill()
            await orchestrator.start()
            assert await agent.open(task.lease_id, "first") == opened, "the key too"
            samples = await agent.turn(opened.episode_id, history, scene.replicas[0].version, samples=2)
            await agent.reward(opened.episode_id, 1.0)
            names = await agent.submit(opened.episode_id)
            played.append(Played(opened.episode_id, task.lease_id, [history[1], history[2]], names))
            played[0].sampled = [*history[-2:], *samples[0][-2:], *samples[1][-2:]]
            await orchestrator.kill()
            await orchestrator.start()
            assert await agent.submit(opened.episode_id) == names == ["g1-0.0", "g1-0.1"]
            second = await agent.open(task.lease_id)
            await agent.turn(second.episode_id, [], scene.replicas[0].version)
            await agent.submit(second.episode_id, reward=0.0)
            played += [await play(agent, scene) for _ in range(10)]
            await orchestrator.process.wait()
        told = {name: each for each in played for name in each.trajectory_ids}
        tokens = trained_ids(scene)
        assert set(tokens.values()) == {1}
        assert set(trained(scene)) == {*told, "g1-1"}
        assert tokens.keys() >= {each for episode in played for each in episode.sampled}
        result = audit(read_facts(scene.run_dir), scene.trainer.record, Lineage())
        assert not result.differences
        assert (scene.run_dir / "sessions.key").stat().st_mode & 0o777 == 0o600


async def ended(orchestrator: Killed) -> None:
    with contextlib.suppress(ProcessLookupError):
        orchestrator.process.kill()
    await orchestrator.process.wait()
