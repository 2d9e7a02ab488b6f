"""Readiness of real servers and services: each reports what it waits for, separately from liveness and from whether it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY
from small_models import save_model
from trainer_stack import settings, trainer_config, weight_service
from weightsync_stack import running_stack

import gateway_svc.app
import trainer_svc.app
from gateway_svc.config import GatewayConfig
from sluice.cli.main import main
from sluice.config import CommonConfig, PeersConfig, SecurityConfig, ServerConfig, UnfinishedError
from sluice.peers import missing_peers_reported
from sluice.rpc import RpcServer, connect
from sluice.rpc.channel import health_status, wait_until_serving, waits_of
from sluice.rpc.readiness import READY_SERVICE
from sluice.rpc.server import free_ports
from sluice.v1 import common_pb2, common_pb2_grpc

pytestmark = pytest.mark.slow

NOBODY = SecurityConfig()
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LIVES = "sluice.v1.ServerInfoService"


async def statuses(target: str) -> tuple[int, int, int]:
    """Return what the server answers about its life, itself, and its readiness."""
    return tuple([await health_status(target, NOBODY, name) for name in (LIVES, "", READY_SERVICE)])  # type: ignore[return-value]


@asynccontextmanager
async def server(**options: object) -> AsyncIterator[RpcServer]:
    made = RpcServer("toy", ServerConfig.model_validate(options), NOBODY)
    await made.start()
    try:
        yield made
    finally:
        await made.stop(0)


async def test_a_server_that_waits_serves_and_lives_and_says_what_it_waits_for() -> None:
    waits = ["replicas: none is known yet"]
    async with server() as toy:
        assert await statuses(toy.target) == (SERVING, SERVING, SERVING)
        toy.readiness.add(lambda: waits)
        assert await statuses(toy.target) == (SERVING, SERVING, NOT_SERVING)
        assert REGISTRY.get_sample_value("sluice_ready") == 0
        assert await waits_of(toy.target, NOBODY) == waits
        waits.clear()
        assert await statuses(toy.target) == (SERVING, SERVING, SERVING)
        assert REGISTRY.get_sample_value("sluice_ready") == 1
        assert await waits_of(toy.target, NOBODY) == []
        toy.set_serving(False, "its model, which it loads")
        assert await statuses(toy.target) == (SERVING, NOT_SERVING, NOT_SERVING)
        assert await waits_of(toy.target, NOBODY) == ["its model, which it loads"]


async def test_watchers_learn_of_it_without_a_call() -> None:
    waits = ["something"]
    async with server() as toy, connect(toy.target, NOBODY) as channel:
        toy.readiness.add(lambda: waits)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READY_SERVICE))
        seen = [(await watch.read()).status]
        while seen[-1] != NOT_SERVING:
            seen.append((await watch.read()).status)
        waits.clear()
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_the_port_of_probes_has_the_same_three_answers() -> None:
    (port,) = free_ports(1)
    async with server(probe_port=port) as toy:
        toy.readiness.add(lambda: ["something"])
        assert await statuses(f"127.0.0.1:{port}") == (SERVING, SERVING, NOT_SERVING)


def shown(capsys: pytest.CaptureFixture[str], target: str) -> str:
    """Return what the command printed, without the log of the server in the same process."""
    lines = capsys.readouterr().out.splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(target))


async def test_the_command_prints_what_a_server_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    waits = ["replicas: none is known yet"]
    async with server() as toy:
        toy.readiness.add(lambda: waits)
        assert await asyncio.to_thread(main, ["health", toy.target]) == 0
        text = f"{toy.target}: waits for replicas: none is known yet\n"
        assert shown(capsys, toy.target) == f"{toy.target}: SERVING\n{text}"
        assert await asyncio.to_thread(main, ["health", "--ready", toy.target]) == 1
        assert shown(capsys, toy.target) == f"{toy.target}: NOT_SERVING\n{text}"
        waits.clear()
        assert await asyncio.to_thread(main, ["health", "--ready", toy.target]) == 0
        assert shown(capsys, toy.target) == f"{toy.target}: SERVING\n"


async def test_a_service_waits_for_its_peers_until_each_has_served_once(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    common = CommonConfig(run="r1", output_dir=tmp_path)
    async with server() as toy, missing_peers_reported({"weightsync": f"127.0.0.1:{port}"}, common, toy):
        assert toy.readiness.waits_for() == ["weightsync: it has not served yet"]
        async with server(port=port):
            while toy.readiness.waits_for():  # noqa: ASYNC110 - the peer is looked for in real time
                await asyncio.sleep(0.02)


async def test_a_trainer_waits_for_its_model_and_then_for_an_epoch(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", 0)
    (port,) = free_ports(1)
    async with weight_service(settings(model, tmp_path)) as weights:
        common = settings(model, tmp_path, weights)
        config = trainer_config(server=ServerConfig(port=port))
        serving = asyncio.create_task(trainer_svc.app.serve(common, config))
        target = f"127.0.0.1:{port}"
        try:
            await wait_until_serving(target, NOBODY)
            assert await statuses(target) == (SERVING, SERVING, NOT_SERVING)
            while "weightsync: it has not served yet" in (waits := await waits_of(target, NOBODY)):
                pass
            assert waits == ["an orchestrator that begins an epoch"]
        finally:
            async with connect(target, NOBODY) as channel:
                stub = common_pb2_grpc.ServerAdminServiceStub(channel)
                _ = [left async for left in stub.DrainServer(common_pb2.DrainServerRequest())]
            with pytest.raises(UnfinishedError):
                await serving


async def test_a_gateway_waits_for_orchestrator_and_replicas_and_its_http_port_says_so(tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    common = CommonConfig(run="r1", output_dir=tmp_path, peers=PeersConfig(orchestrator=f"127.0.0.1:{nobody}"))
    listening: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    config = GatewayConfig(server=ServerConfig(http_port=0))
    serving = asyncio.create_task(
        gateway_svc.app.serve(common, config, lambda target, url: listening.set_result((target, url)))
    )
    waits = ["replicas: the orchestrator lists none", "orchestrator: it has not served yet"]
    try:
        target, url = await listening
        assert await statuses(target) == (SERVING, SERVING, NOT_SERVING)
        while (found := await waits_of(target, NOBODY)) != waits:  # the second one comes a moment after the ports
            assert found == waits[:1]
        async with httpx.AsyncClient(base_url=url) as client:
            answer = await client.get("/ready")
            assert (answer.status_code, answer.json()) == (503, {"ready": False, "waits_for": waits})
            assert (await client.get("/health")).status_code == 200
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def test_a_weight_service_waits_for_storage_that_has_room(tmp_path: Path) -> None:
    async with running_stack(tmp_path, min_free_bytes=1 << 62, heartbeat_s=1.0) as stack:
        while not (waits := list(stack.runs.waits_for())):
            stack.runs.retention_due.set()
            await asyncio.sleep(0)
        assert "bytes short" in waits[0]
    async with running_stack(tmp_path) as stack:
        stack.runs.retention_due.set()
        while stack.runs.retention_due.is_set():  # noqa: ASYNC110 - the duty looks when it gets to it
            await asyncio.sleep(0)
        assert list(stack.runs.waits_for()) == []
