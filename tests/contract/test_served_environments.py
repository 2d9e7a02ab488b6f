"""An environment behind EnvironmentService: the real server and the real client, each with the environment's own processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import structlog
from orchestrator_doubles import RolloutDouble
from prometheus_client import REGISTRY
from simulated_clock import SimulatedClock
from test_external_episodes import trained_ids
from test_gateway_run import ToolReplica
from test_orchestrator_run import DEADLINE_S, make_scene, trained

from envserver_svc.app import serve
from envserver_svc.config import EnvServerConfig
from orchestrator_svc.commands.audit_compare import audit
from orchestrator_svc.journal.store import read_facts
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, ConfigError, SecurityConfig
from sluice.environments import Task, Turn, remote
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.episode import OpenEpisode
from sluice.environments.processes import SCORE_S, EnvironmentProcesses
from sluice.environments.worker import EnvironmentFailedError
from sluice.rpc import SluiceError, connect
from sluice.rpc.server import free_ports
from sluice.v1 import environment_pb2, environment_pb2_grpc, tokens_pb2
from sluice.versions import Lineage

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DIALOGUE = f"{HERE}/dialogue_environment.py:Dialogue"
LIMIT_S = 300.0
"""Limit of calls and starts in the run."""

QUESTIONS = """
from sluice.environments import Task

class Questions:
    name = "questions"

    def tasks(self, split, seed):
        return [Task(f"{split}-{seed + number}", {"number": number, "half": number / 2}, 7) for number in range(1500)]

    def messages(self, task):
        return [{"role": "user", "content": f"{task.data['number']!r} {task.data['half']!r} {task.max_tokens}"}]

    def score(self, task, completion):
        if completion == "raise":
            raise ValueError("I cannot read that")
        return len(completion) + task.data["half"]
"""


@pytest.fixture
def address() -> Iterator[str]:
    """A socket where servers may listen one after the other: no other program takes it in between."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as directory:  # a socket's path must be short
        yield f"unix:{directory}/environment"


@contextlib.asynccontextmanager
async def served(reference: str, address: str, clock: Clock = CLOCK, **settings) -> AsyncIterator[str]:
    """Serve an environment at an address."""
    config = EnvServerConfig.model_validate(
        {"source": reference, "server": {"host": address}, "environment_processes": {"count": 1}, **settings}
    )
    serving = asyncio.create_task(serve(CommonConfig(), config, clock))
    try:
        yield address
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def used(address: str, *, score_s: float = LIMIT_S, **arguments) -> EnvironmentProcesses:
    """What a run makes of the address."""
    config = EnvironmentProcessesConfig(count=1, call_s=LIMIT_S, score_s=score_s)
    return EnvironmentProcesses(f"grpc://{address}", arguments, config, (LIMIT_S, "start_s"), "test", group_size=4)


@contextlib.asynccontextmanager
async def stub_of(address: str):
    channel = connect(address, SecurityConfig(), role="dispatcher")
    try:
        yield environment_pb2_grpc.EnvironmentServiceStub(channel)
    finally:
        await channel.close()


async def stepped(episode: OpenEpisode, *completions: str) -> list[Turn]:
    return [await episode.step(each) for each in completions]


async def test_questions_are_listed_posed_and_scored_as_in_a_process_of_the_run(tmp_path, address) -> None:
    (tmp_path / "env.py").write_text(QUESTIONS)
    questions = served(f"{tmp_path}/env.py:Questions", address)
    async with asyncio.timeout(DEADLINE_S), questions, used(address) as there:
        assert (there.name, there.single_turn, there.multi_turn) == ("questions", True, False)
        tasks = await there.tasks("eval", 3)
        assert len(tasks) == 1500
        assert tasks[5] == Task("eval-8", {"number": 5, "half": 2.5}, 7)
        assert await there.messages(tasks[5]) == [{"role": "user", "content": "5 2.5 7"}]
        assert await there.score(tasks[5], ["", "four", "raise", "x"]) == [2.5, 6.5, None, 3.5]
        assert there.failures["missing"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("define", "group_s"), [("def score", 4 * 40.0), ("async def score", 40.0)])
async def test_a_server_says_how_long_its_environment_may_score(tmp_path, address, define, group_s) -> None:
    limited = QUESTIONS.replace("def score", define).replace(
        '    name = "questions"', '    name, scoring_s = "questions", 40.0'
    )
    (tmp_path / "env.py").write_text(limited)
    async with asyncio.timeout(DEADLINE_S), served(f"{tmp_path}/env.py:Questions", address):
        async with used(address, score_s=0.0) as there:
            assert there.scoring.limit_s(4) == group_s + SCORE_S
        async with used(address, score_s=group_s):
            pass
        with pytest.raises(ConfigError, match=rf"test\.score_s is .* may take {group_s:g} s for a group"):
            await used(address, score_s=group_s - 1.0).__aenter__()


async def test_an_episode_takes_the_turns_that_it_takes_in_a_process_of_the_run(address) -> None:
    completions = ("one", "two", "three")
    async with asyncio.timeout(DEADLINE_S), served(DIALOGUE, address), used(address) as there:
        local = EnvironmentProcesses(DIALOGUE, {}, EnvironmentProcessesConfig(count=1), (60.0, "start_s"))
        async with local as here:
            taken = []
            for environment in (here, there):
                async with environment.episode(Task("t", {}), 4) as episode:
                    assert episode.messages == [{"role": "user", "content": "go"}]
                    taken.append(await stepped(episode, *completions))
                    assert episode.done
        assert taken[0] == taken[1]


async def test_a_server_is_told_that_a_turn_is_the_last(address) -> None:
    patient, task = DIALOGUE.replace(":Dialogue", ":Patient"), Task("t", {})
    async with served(patient, address), used(address) as there, there.episode(task, 0) as episode:
        assert (await episode.step("one")).reward is None
        last = await episode.step("two", last=True)
        assert last == Turn([], 1.5, done=True, truncated=True, metrics={"last": 1.0})


async def tried(address: str) -> None:
    """Wait until somebody connects to an address where no server is, and hang up."""
    path, connected = address.removeprefix("unix:"), asyncio.Event()

    def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        connected.set()

    async with await asyncio.start_unix_server(hang_up, path):
        await connected.wait()
    await asyncio.to_thread(Path(path).unlink, missing_ok=True)


@pytest.mark.slow
async def test_an_episode_outlives_its_server(address) -> None:
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as first:
        await first.enter_async_context(served(DIALOGUE, address))
        async with used(address) as there, there.episode(Task("t", {}), 0) as episode:
            await stepped(episode, "one", "two")
            await first.aclose()
            last = asyncio.create_task(episode.step("three"))
            await tried(address)
            async with served(DIALOGUE, address):
                assert (await last).done


@pytest.mark.slow
async def test_an_episode_ends_if_the_next_server_answers_otherwise(address) -> None:
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as first:
        await first.enter_async_context(served(DIALOGUE, address, args={"fickle": True}))
        async with used(address) as there, there.episode(Task("t", {}), 0) as episode:
            await stepped(episode, "one")
            await first.aclose()
            async with served(DIALOGUE, address, args={"fickle": True}):
                with pytest.raises(EnvironmentFailedError, match="answered otherwise"):
                    await episode.step("two")


async def test_calls_may_be_repeated_and_wrong_ones_say_what_is_right(address) -> None:
    async with asyncio.timeout(DEADLINE_S), served(DIALOGUE, address, most_episodes=1), stub_of(address) as stub:
        reset = environment_pb2.ResetRequest(episode_id="e", task={"task_id": "t"})
        opened = await asyncio.gather(stub.Reset(reset), stub.Reset(reset))
        assert opened[0] == opened[1] == await stub.Reset(reset)
        said = tokens_pb2.ChatMessage(role="assistant", content="one")
        step = environment_pb2.StepRequest(episode_id="e", message=said)
        answers = await asyncio.gather(stub.Step(step), stub.Step(step))
        assert answers[0] == answers[1] == await stub.Step(step)
        assert answers[0].reward == 1.0

        async def refused(call) -> SluiceError:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            return SluiceError.from_rpc(error.value)

        late = environment_pb2.StepRequest(episode_id="e", turn=2, message=said)
        assert "turn 1 is due" in (await refused(stub.Step(late))).message
        other = environment_pb2.ResetRequest(episode_id="f", task={"task_id": "t"})
        full = await refused(stub.Reset(other))
        assert (full.reason, full.retry_after_s) == ("TOO_MANY_EPISODES", 1.0)
        assert (await refused(stub.Score(environment_pb2.ScoreRequest()))).reason == "NO_SCORE"
        await stub.CloseEpisode(environment_pb2.CloseEpisodeRequest(episode_id="e"))
        await stub.CloseEpisode(environment_pb2.CloseEpisodeRequest(episode_id="e"))
        assert (await refused(stub.Step(step))).reason == "UNKNOWN_EPISODE"
        await stub.Reset(other)


def refused_resets() -> float:
    labels = {"service": "sluice.v1.EnvironmentService", "method": "Reset", "code": "RESOURCE_EXHAUSTED"}
    return REGISTRY.get_sample_value("sluice_rpc_total", labels) or 0.0


@pytest.mark.slow
async def test_an_episode_without_calls_makes_room_after_a_while(address) -> None:
    clock, before = SimulatedClock(), refused_resets()
    async with (
        asyncio.timeout(DEADLINE_S),
        served(DIALOGUE, address, clock, most_episodes=1, idle_s=60.0),
        used(address) as there,
        contextlib.AsyncExitStack() as episodes,
    ):
        lost = await episodes.enter_async_context(there.episode(Task("t", {}), 0))
        opening = asyncio.create_task(episodes.enter_async_context(there.episode(Task("t", {}), 0)))
        await clock.until(lambda: refused_resets() > before)
        await clock.advance(60.0 * 1.25)
        next_one = await opening
        assert (await next_one.step("one")).reward == 1.0
        before = refused_resets()
        stepping = asyncio.create_task(lost.step("one"))
        await clock.until(lambda: refused_resets() > before)
        await clock.advance(60.0 * 1.25)
        assert (await stepping).reward == 1.0, "opened again, when the other one is idle"


async def test_a_failing_environment_is_the_servers_and_the_run_is_told_why(address) -> None:
    clock = SimulatedClock()
    limits = {"count": 1, "call_s": 60.0}
    async with (
        asyncio.timeout(DEADLINE_S),
        served(DIALOGUE, address, clock, args={"odd_seeds_hang": True}, environment_processes=limits),
        used(address) as there,
    ):
        with structlog.testing.capture_logs() as logs:
            opening = asyncio.create_task(there.episode(Task("t", {}), 1).__aenter__())
            await clock.until(lambda: "hangs" in [each.get("text") for each in logs])
            await clock.advance(60.0)
            with pytest.raises(EnvironmentFailedError, match=r"envserver\.environment_processes\.call_s"):
                await opening
        async with there.episode(Task("t", {}), 2) as episode:
            assert (await episode.step("one")).reward == 1.0


@pytest.mark.slow
async def test_a_run_trains_on_an_environment_that_is_served(tmp_path, address) -> None:
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(served(DIALOGUE, address))
        scene = await make_scene(tmp_path, stack, [RolloutDouble()])
        await scene.start(environment=f"grpc://{address}", max_steps=2)
    assert trained(scene)
    assert not audit(read_facts(scene.run_dir), scene.trainer.record, Lineage()).differences


TOOLS = """
from sluice.environments import Task, Turn

class Looks:
    name = "looks"

    def tasks(self, split, seed):
        return [Task(str(number)) for number in range(8)]

    def reset(self, task, seed):
        return Look()


class Look:
    messages = [{"role": "user", "content": "Where is it?"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    def step(self, message):
        calls = message.get("tool_calls")
        if calls:
            (call,) = calls
            assert call["function"] == {"name": "look", "arguments": '{"place":"a"}'}, call
            return Turn(messages=[{"role": "tool", "tool_call_id": call["id"], "content": "a cat"}], reward=0.25)
        return Turn(reward=float(message["content"] == "It said a cat."), done=True, metrics={"looks": 1})
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "there"])
async def test_a_run_trains_on_episodes_with_tools_and_each_token_is_trained_once(tmp_path, address, where) -> None:
    (tmp_path / "env.py").write_text(TOOLS)
    reference = f"{tmp_path}/env.py:Looks"
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        if where == "there":
            reference = f"grpc://{await stack.enter_async_context(served(reference, address))}"
        scene = await make_scene(tmp_path, stack, [ToolReplica()])
        await scene.start(environment=reference, max_steps=2)
    assert trained(scene)
    counted = trained_ids(scene)
    assert set(counted.values()) == {1}
    assert counted.keys() <= set(itertools.chain.from_iterable(scene.replicas[0].sampled))
    first, second = scene.replicas[0].calls[0].request, scene.replicas[0].calls[-1].request
    assert [tool.name for tool in first.conversation.tools] == ["look"]
    assert second.continues.messages == 2, "the question and the call"
    assert second.conversation.messages[2].tool_call_id == second.conversation.messages[1].tool_calls[0].id != ""
    rows = [line for file in scene.run_dir.glob("trajectories/step_*.jsonl") for line in file.read_text().splitlines()]
    assert {json.loads(row)["reward"] for row in rows} == {1.25}
    steps = [json.loads(line) for line in (scene.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["environment/looks"] for step in steps if "reward/mean" in step] == [1.0, 1.0]
    assert not audit(read_facts(scene.run_dir), scene.trainer.record, Lineage()).differences


async def test_a_server_that_is_not_there_is_named(address) -> None:
    clock = SimulatedClock()
    describing = asyncio.create_task(remote.describe(address, SecurityConfig(), clock))
    async with asyncio.timeout(DEADLINE_S):
        await tried(address)
    await clock.advance(remote.DESCRIBE_S)
    problem = rf"{re.escape(address)} cannot be used: no answer within 30 s; check that it runs"
    with pytest.raises(ConfigError, match=problem):
        await describing


THERE_AND_BACK = """
const { load, plain, struct } = await import(process.argv[1]);
const call = load("environment").EnvironmentService.service.ListTasks;
const data = { n: 1.5, t: "x", b: false, z: null, l: [1, "a", [true], { q: null }], o: { deep: { er: [] } } };
const sent = call.responseSerialize({ tasks: [{ task_id: "a", data: struct(data) }] });
process.exit(JSON.stringify(plain(call.responseDeserialize(sent).tasks[0].data)) === JSON.stringify(data) ? 0 : 1);
"""


@contextlib.asynccontextmanager
async def typescript(address: str) -> AsyncIterator[None]:
    """Serve the example in TypeScript, which was built."""
    directory = ROOT / "examples/typescript_environment"
    process = await asyncio.create_subprocess_exec("node", "env.js", address, cwd=directory)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.mark.ecosystem
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_an_environment_in_typescript_is_one_as_every_other() -> None:
    directory = ROOT / "examples/typescript_environment"
    for words in (("ci", "--no-audit", "--no-fund", "--silent"), ("run", "--silent", "build")):
        building = await asyncio.create_subprocess_exec("npm", *words, cwd=directory)
        async with asyncio.timeout(300):
            assert await building.wait() == 0
    contract = ROOT / "examples/clients/typescript/dist/contract.js"
    checking = await asyncio.create_subprocess_exec("node", "--input-type=module", "-e", THERE_AND_BACK, str(contract))
    assert await checking.wait() == 0, "plain data is not what it was"
    (port,) = free_ports(1)  # two servers after each other have it; gRPC for Node refuses our calls at a socket
    address = f"127.0.0.1:{port}"
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as first:
        await first.enter_async_context(typescript(address))
        async with used(address) as there:
            assert (there.name, there.single_turn, there.multi_turn) == ("guess", False, True)
            train, held_out = await there.tasks("train", 1), await there.tasks("eval", 1)
            assert len(train) == 7 * len(held_out) == 7 * 168
            assert not {each.task_id for each in train} & {each.task_id for each in held_out}
            assert [each.task_id for each in train] != [each.task_id for each in await there.tasks("train", 2)]
            game = next(each for each in train if each.data["secret"] - each.data["low"] == 8)
            low, high, secret = (game.data[name] for name in ("low", "high", "secret"))
            async with there.episode(game, 0) as episode:
                assert episode.messages == [{"role": "user", "content": f"{low}-{high}"}]
                higher, lower = await stepped(episode, str(low), str(high))
                assert (higher.messages[0]["content"], lower.messages[0]["content"]) == ("higher", "lower")
                await first.aclose()
                async with typescript(address):
                    (last,) = await stepped(episode, str(secret))
            assert (last.done, round(last.reward or 0, 3)) == (True, 0.667)
