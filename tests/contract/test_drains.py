"""Every service takes nothing new when it is asked to leave, says how much is left, and ends when that is done, or in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import structlog
from certificates import Authority
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from orchestrator_doubles import RolloutDouble
from simulated_clock import LIMIT_S, SimulatedClock
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from test_agents_service import AGENTS, Lender, lending
from test_external_episodes import EXTERNAL
from test_gateway_run import QUESTION, ToolReplica, opened
from test_orchestrator_run import make_scene
from test_served_environments import DIALOGUE, stub_of
from trainer_double import start_double
from trainer_stack import RUN, Stack, settings, tiny_model, trainer_config, weight_service

import agents_svc.app
import envserver_svc.app
import gateway_svc.app
import trainer_svc.app
import weightsync.app
from agents_svc.config import AgentsConfig
from envserver_svc.config import EnvServerConfig
from gateway_svc.config import CaptureConfig, GatewayConfig
from gateway_svc.recording import RecordedSessions
from sluice.checkpoint_files import complete_checkpoints
from sluice.client import TrainerClient
from sluice.config import CommonConfig, PeersConfig, SecurityConfig, ServerConfig, UnfinishedError
from sluice.openai.server import HttpServer
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.rpc.channel import wait_until_serving, waits_of
from sluice.rpc.drain import Drain
from sluice.rpc.server import free_ports
from sluice.v1 import (
    common_pb2,
    common_pb2_grpc,
    environment_pb2,
    tokens_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    training_pb2,
    training_pb2_grpc,
    weightsync_pb2,
    weightsync_pb2_grpc,
)
from trainer_svc.service.learner import Learner
from trainer_svc.tuner import app as tuner_app
from trainer_svc.tuner.config import TunerConfig
from trainer_svc.tuner.tuner import Tuner
from weightsync.config import WeightSyncConfig

NOBODY = SecurityConfig()
LONG_S = 600.0
"""A grace that no test waits for."""

DEADLINE_S = 120.0

GOODBYE_S = 25.0
"""Ten times the seconds after which a server of HTTP leaves idle clients, and less than a client with TLS could hold it up."""


class Asked:
    """What a service says that is asked to drain, with the first `begin` or `says`."""

    def __init__(self, channel: grpc.aio.Channel, grace_s: float | None = LONG_S) -> None:
        request = common_pb2.DrainServerRequest()
        if grace_s is not None:
            request.grace.FromNanoseconds(int(grace_s * 1e9))
        self._stub, self._request = common_pb2_grpc.ServerAdminServiceStub(channel), request
        self._call: Any = None

    def begin(self) -> None:
        self._call = self._stub.DrainServer(self._request, timeout=DEADLINE_S)

    async def says(self, **left: int) -> common_pb2.DrainServerResponse:
        """Wait until this is left; nothing: until it ends."""
        if self._call is None:
            self.begin()
        while True:
            answer = await self._call.read()
            assert isinstance(answer, common_pb2.DrainServerResponse), f"it ended, and {left} was to come"
            assert answer.left == sum(answer.left_by_kind.values())
            if dict(answer.left_by_kind) == left:
                return answer


@contextlib.asynccontextmanager
async def asked(target: str, grace_s: float | None = LONG_S) -> AsyncIterator[Asked]:
    async with connect(target, NOBODY, stream_deadline_s=DEADLINE_S) as channel:
        yield Asked(channel, grace_s)


async def ended(serving: asyncio.Task[None]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await serving


# The one mechanism, on a simulated clock.


async def test_a_drain_bounds_work_and_only_gets_shorter() -> None:
    clock = SimulatedClock()
    drain, work = Drain(clock), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(drain.within(work))
    await clock.advance(LONG_S)
    assert not waiting.done(), "nobody has asked"
    drain.begin(60.0)
    drain.begin(120.0)
    await clock.advance(50.0)
    assert (drain.left_s, waiting.done()) == (10.0, False)
    drain.begin(2.0)
    await clock.advance(2.0)
    assert await waiting is False
    assert not work.cancelled()
    work.set_result(None)
    assert await drain.within(work)


@contextlib.asynccontextmanager
async def counting(left: dict[str, int], clock: SimulatedClock) -> AsyncIterator[RpcServer]:
    server = RpcServer("envserver", ServerConfig(drain_s=30.0), NOBODY, clock=clock)
    server.count_left(lambda: {**server.calls_left(), **left})
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def test_a_service_ends_when_nothing_of_what_it_counts_is_left() -> None:
    clock, left = SimulatedClock(), {"episodes": 2, "steps": 0}
    async with counting(left, clock) as server, asked(server.target, None) as drain:
        with structlog.testing.capture_logs() as logged:
            serving = asyncio.create_task(server.serve_until_signal())
            answer = await drain.says(episodes=2)
            assert answer.grace_left.ToNanoseconds() == 30e9, "as server.drain_s says"
            await clock.advance(20.0)
            left["episodes"] = 1
            await drain.says(episodes=1)
            assert not serving.done()
            left["episodes"] = 0
            await drain.says()
            await clock.until(serving.done, step_s=0.1)
        assert 0.0 < await serving < 10.0, "what is left of the drain is for the rest of the service"
    said = [(each["left"], each["grace_left_s"]) for each in logged if each["event"] == "draining"]
    assert said[0] == ({"episodes": 2}, 30.0)


async def test_watches_are_not_waited_for() -> None:
    server, _ = await start_double()
    async with connect(server.target, NOBODY) as channel:
        watch = trainer_pb2_grpc.TrainerServiceStub(channel).WatchSteps(
            trainer_pb2.WatchStepsRequest(run="runs/wait", from_number=1)
        )
        await watch.read()
        assert server.left == {}
        server.begin_drain(LONG_S)
        await asyncio.wait_for(server.serve_until_signal(), LIMIT_S)


async def test_an_open_stream_of_reflection_is_not_waited_for() -> None:
    server, _ = await start_double()
    async with connect(server.target, NOBODY) as channel:
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await stream.read()
        assert server.left == {}
        server.begin_drain(LONG_S)
        await asyncio.wait_for(server.serve_until_signal(), LIMIT_S)


async def test_what_is_left_when_the_time_is_over_is_named_and_ended() -> None:
    clock = SimulatedClock()
    async with counting({"episodes": 2}, clock) as server:
        with structlog.testing.capture_logs() as logged:
            serving = asyncio.create_task(server.serve_until_signal())
            server.begin_drain(30.0)
            await clock.until(lambda: clock.waits)
            await clock.advance(29.0)
            assert not serving.done()
            await clock.advance(1.0)
            await asyncio.wait_for(serving, LIMIT_S)
    (line,) = [each for each in logged if each["log_level"] == "warning"]
    assert line["left"] == {"episodes": 2}


async def test_a_server_whose_port_stays_open_says_what_is_left_to_whoever_asks() -> None:
    clock, left = SimulatedClock(), {"episodes": 2}
    async with counting(left, clock) as server:

        async def finish(_grace_s: float) -> None:
            await server.until_nothing_is_left()

        serving = asyncio.create_task(server.serve_until_signal(finish=finish))
        server.begin_drain(30.0)
        await clock.until(lambda: clock.waits)
        assert (await waits_of(server.target, NOBODY))[-1] == "what is left: 2 episodes, at most 30 s"
        left.clear()
        await clock.until(serving.done, step_s=0.1)
        await serving


# Each service.


@contextlib.asynccontextmanager
async def gateway(directory: Path, orchestrator: str) -> AsyncIterator[tuple[asyncio.Task[None], str, str]]:
    """A gateway with its own default of `drain_s`: its task, gRPC target and URL."""
    common = CommonConfig(run="test", output_dir=directory, model="m", peers=PeersConfig(orchestrator=orchestrator))
    config = GatewayConfig(server=ServerConfig(http_port=0, drain_s=GatewayConfig().server.drain_s))
    listening: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        gateway_svc.app.serve(common, config, lambda *addresses: listening.set_result(addresses))
    )
    try:
        target, url = await listening
        yield serving, target, url
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def test_a_gateway_does_not_wait_for_those_that_wait_for_an_episode(tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    async with gateway(tmp_path, f"127.0.0.1:{nobody}") as (serving, target, url):
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
            idle = asyncio.create_task(http.post("/rl/sessions", json={"wait_s": 60}))
            async with connect(target, NOBODY) as channel:
                info = common_pb2_grpc.ServerInfoServiceStub(channel)
                await info.GetServerInfo(common_pb2.GetServerInfoRequest())  # the request has arrived by now
            async with asked(target, None) as drain:
                await drain.says()
            answer = await idle
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "DRAINING")
        await ended(serving)


async def test_a_request_that_comes_during_the_drain_does_not_wait_for_an_episode_either() -> None:
    async with connect("127.0.0.1:1", NOBODY) as channel:
        nothing: Any = None
        sessions = RecordedSessions(channel, nothing, CaptureConfig(), run="test", base_url=str, name="gateway")
        sessions.end_waits()
        with pytest.raises(SluiceError) as ended:
            await sessions.open("", 60.0)
        assert ended.value.reason == "DRAINING"
        await sessions.close()


async def test_an_idle_client_with_tls_does_not_hold_up_a_server_of_http(tmp_path: Path) -> None:
    """It keeps its connection open, and does not answer that the server closes it: asyncio would wait for half a minute."""
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("node", hosts=["localhost"])
    security = SecurityConfig(tls_cert=certificate, tls_key=key, tls_ca=authority.path, require_client_cert=False)
    server = HttpServer(Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))]), "127.0.0.1", 0, security)
    port = await server.start()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=ssl.create_default_context(cafile=str(authority.path)), server_hostname="localhost"
    )
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"hello")
    writer.transport.pause_reading()
    async with asyncio.timeout(GOODBYE_S):
        await server.stop(LONG_S)
    writer.transport.abort()


async def refused(url: str) -> None:
    """Connect until nobody listens. A connection that was accepted at that moment may be closed without an answer."""
    async with httpx.AsyncClient(base_url=url) as late:
        while True:
            with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
                await late.get("/health", headers={"connection": "close"})


@contextlib.asynccontextmanager
async def generating(tmp_path: Path) -> AsyncIterator[tuple[Any, ...]]:
    """A gateway with a request under way, whose replica waits for `gate`; its URL; and the run."""
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        replica = ToolReplica()
        scene = await make_scene(tmp_path, stack, [replica])
        running = scene.start(**EXTERNAL)
        serving, target, url = await stack.enter_async_context(gateway(tmp_path, scene.target))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE_S))
        session = await opened(http)
        replica.gate.clear()
        headers = {"authorization": f"Bearer {session['key']}"}
        body = {"model": "m", "messages": [QUESTION]}
        working = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
        await scene.until(lambda: len(replica.calls) == 1)
        yield serving, target, url, working, replica, running
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.slow
async def test_a_gateway_lets_generations_end_and_takes_no_further_ones(tmp_path: Path) -> None:
    async with generating(tmp_path) as (serving, target, url, working, replica, _running):
        async with asked(target, None) as drain:
            answer = await drain.says(**{"requests over HTTP": 1})
            assert answer.grace_left.ToNanoseconds() > 590e9, "minutes"
            with pytest.raises(httpx.ConnectError):
                await refused(url)
            assert not working.done()
            replica.gate.set()
            assert (await working).status_code == 200
            await drain.says()
        await ended(serving)


@pytest.mark.slow
async def test_a_gateway_ends_early_when_no_orchestrator_is_there_to_record(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gateway_svc.app, "AWAY_S", 1.0)
    async with generating(tmp_path) as (serving, target, _url, working, _replica, running):
        async with asked(target, None) as drain:
            await drain.says(**{"requests over HTTP": 1})
            running.cancel()
            await ended(serving)
        answer = await working
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "DRAINING")


@pytest.mark.slow
async def test_an_orchestrator_starts_nothing_more_and_leaves_what_is_under_way_in_the_journal(tmp_path: Path) -> None:
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        replica = RolloutDouble()
        scene = await make_scene(tmp_path, stack, [replica])
        replica.gate.clear()
        running = scene.start()
        await scene.until(lambda: replica.calls)
        with structlog.testing.capture_logs() as logged:
            async with asked(scene.target) as drain:
                await drain.says()
            with pytest.raises(UnfinishedError):
                await running
        (line,) = [each for each in logged if "starts no more groups" in each["event"]]
        assert line["groups_running"] >= 1
        replica.gate.set()
        await scene.start(max_steps=1)
    assert scene.report()["state"] == "succeeded"


@pytest.mark.slow
async def test_a_trainer_finishes_the_step_under_way_and_begins_no_other(tmp_path: Path, monkeypatch) -> None:
    begun, go_on, steps, apply = threading.Event(), threading.Event(), [], Learner.apply

    def slow(learner: Learner, batch: Any) -> Any:
        steps.append(batch)
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return apply(learner, batch)

    monkeypatch.setattr(Learner, "apply", slow)
    model, (port,) = tiny_model(tmp_path), free_ports(1)
    async with weight_service(settings(model, tmp_path)) as weights:
        common, target = settings(model, tmp_path, weights), f"127.0.0.1:{port}"
        serving = asyncio.create_task(
            trainer_svc.app.serve(common, trainer_config(server=ServerConfig(port=port), checkpoint={"every_steps": 1}))
        )
        async with TrainerClient(target) as client, asked(target) as drain:
            await wait_until_serving(target, NOBODY)
            await client.begin_epoch(RUN, 1)
            digest = (await client.state(RUN)).tokenizer_digest
            stack: Any = Stack(None, client, target, digest, tmp_path)
            await stack.submit(1)
            await stack.submit(2)
            assert await asyncio.to_thread(begun.wait, DEADLINE_S)
            await drain.says(steps=1)
            go_on.set()
            await drain.says()
        with pytest.raises(UnfinishedError, match="continues from the newest checkpoint"):
            await ended(serving)
    assert len(steps) == 1
    assert [each.checkpoint.name for each in complete_checkpoints(tmp_path / RUN / "checkpoints")] == ["step_1"], (
        "it was due"
    )


def saved_states(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.rglob("trainings/*/*"))


@pytest.mark.slow
async def test_a_tuner_lets_operations_end_that_it_has_accepted(tmp_path: Path, monkeypatch) -> None:
    begun, go_on, save = threading.Event(), threading.Event(), Tuner._save

    def slow(tuner: Tuner, *arguments: Any) -> str:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return save(tuner, *arguments)

    monkeypatch.setattr(Tuner, "_save", slow)
    (port,) = free_ports(1)
    target = f"127.0.0.1:{port}"
    common = CommonConfig(run=RUN, output_dir=tmp_path, model=str(tiny_model(tmp_path)))
    config = TunerConfig(device="cpu", threads=1, server=ServerConfig(port=port))
    serving = asyncio.create_task(tuner_app.serve(common, config))
    await wait_until_serving(target, NOBODY)
    async with connect(target, NOBODY) as channel, asked(target) as drain:
        stub = training_pb2_grpc.TrainingServiceStub(channel)
        created = await stub.CreateTraining(training_pb2.CreateTrainingRequest(run=f"runs/{RUN}", request_id="one"))
        for number in (1, 2):
            place = training_pb2.OperationPlace(training=created.training.name, sequence_no=number)
            await stub.SaveState(training_pb2.SaveStateRequest(place=place, state=f"s{number}"))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        await drain.says(operations=2)
        go_on.set()
        await drain.says()
    await ended(serving)
    assert saved_states(tmp_path) == ["s1", "s2"]


async def test_agents_say_how_many_episodes_are_left_and_give_them_back_in_time(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(AGENTS)
    (port,), lender = free_ports(1), Lender(2)
    async with lending(lender) as address:
        common = CommonConfig(run="test", output_dir=tmp_path, peers=PeersConfig(gateway=address))
        server = {"port": port, "drain_s": 0}
        config = AgentsConfig.model_validate({"agent": f"{tmp_path}/mine.py:Late", "at_a_time": 2, "server": server})
        serving = asyncio.create_task(agents_svc.app.serve(common, config))
        target = f"127.0.0.1:{port}"
        await wait_until_serving(target, NOBODY)
        while lender.lent < 2:  # noqa: ASYNC110 - the agents lease
            await asyncio.sleep(0.01)
        async with asked(target) as drain, asked(target, 0.0) as sooner:
            await drain.says(episodes=2)  # and not at once, as drain_s says
            sooner.begin()
            with pytest.raises(UnfinishedError):
                await ended(serving)
    assert lender.abandoned == dict.fromkeys(("1", "2"), ("its agent was stopped", True))


async def test_an_environment_server_lets_open_episodes_end_and_begins_no_other(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/environment"
    config = EnvServerConfig.model_validate(
        {"source": DIALOGUE, "server": {"host": address}, "environment_processes": {"count": 1}}
    )
    serving = asyncio.create_task(envserver_svc.app.serve(CommonConfig(), config))
    await wait_until_serving(address, NOBODY)
    async with stub_of(address) as stub, asked(address) as drain:
        task = {"task_id": "t"}
        await stub.Reset(environment_pb2.ResetRequest(episode_id="one", task=task))
        await drain.says(episodes=1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Reset(environment_pb2.ResetRequest(episode_id="two", task=task))
        assert SluiceError.from_rpc(refused.value).reason == "DRAINING"
        for turn in range(3):
            said = tokens_pb2.ChatMessage(role="assistant", content="x")
            step = await stub.Step(environment_pb2.StepRequest(episode_id="one", turn=turn, message=said))
        assert step.done
        assert not serving.done()
        await stub.CloseEpisode(environment_pb2.CloseEpisodeRequest(episode_id="one"))
        await drain.says()
    await ended(serving)


async def test_a_weight_service_waits_for_the_push_under_way(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    target = f"127.0.0.1:{port}"
    config = WeightSyncConfig(server=ServerConfig(port=port), min_free_bytes=0)
    serving = asyncio.create_task(weightsync.app.serve(CommonConfig(run="r1", output_dir=tmp_path), config))
    await wait_until_serving(target, NOBODY)
    async with connect(target, NOBODY, role="trainer") as channel, asked(target) as drain:
        push = weightsync_pb2_grpc.WeightSyncServiceStub(channel).PushWeights(timeout=DEADLINE_S)
        shard = weightsync_pb2.Shard(name="model", size_bytes=100)
        header = weightsync_pb2.PushHeader(run="runs/r1", version={"epoch": 1, "number": 1}, shard=shard)
        await push.write(weightsync_pb2.PushWeightsRequest(header=header))
        await drain.says(PushWeights=1)
        assert not serving.done()
        push.cancel()
        await drain.says()
    await ended(serving)


# As processes: SIGTERM.


@pytest.mark.slow
@pytest.mark.parametrize("service", ["gateway", "weightsync", "envserver"])
async def test_a_service_with_nothing_under_way_ends_at_once_on_sigterm(service: str, tmp_path: Path) -> None:
    words = {"gateway": ("--server.http-port", "0"), "envserver": ("--source", DIALOGUE)}.get(service, ())
    last = "url" if service == "gateway" else "target"  # of the line after which signals drain
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", service, *words),
        *("--output-dir", str(tmp_path), "--server.port", "0", "--server.drain-s", str(LONG_S)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert process.stdout is not None
            events: list[dict[str, Any]] = []
            while not any(last in each for each in events):
                line = await process.stdout.readline()
                assert line, events
                events += [json.loads(line)] if line.startswith(b"{") else []
            process.send_signal(signal.SIGTERM)
            rest, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    events = [json.loads(line) for line in rest.splitlines() if line.startswith(b"{")]
    assert process.returncode == 0, rest.decode()
    assert [each["left"] for each in events if each["event"] == "draining"] == [{}]
