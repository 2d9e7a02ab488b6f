"""What every server answers beside its own contracts, what it counts, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY
from trainer_double import SERVICE, start_double

from sluice.config import SecurityConfig, ServerConfig
from sluice.rpc import MAX_MESSAGE_BYTES, RpcServer, SluiceError, connect
from sluice.rpc import server as rpc_server
from sluice.rpc.server import free_ports
from sluice.v1 import common_pb2, common_pb2_grpc, episode_pb2, episode_pb2_grpc, trainer_pb2, trainer_pb2_grpc

pytestmark = pytest.mark.slow

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def served():
    server, double = await start_double(max_concurrent_rpcs=64)
    async with connect(server.target, SecurityConfig()) as channel:
        yield server, double, channel
    await server.stop(0)


async def health(channel, service: str = "") -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_is_known_as_a_whole_and_per_service(served):
    server, _, channel = served
    for name in ("", SERVICE, "sluice.v1.ServerInfoService"):
        assert await health(channel, name) == SERVING
    await server.set_serving(False)
    assert await health(channel, SERVICE) == NOT_SERVING
    await server.set_serving(True)
    assert await health(channel) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(channel, "sluice.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_probes_have_a_port_that_needs_neither_certificate_nor_token(tmp_path):
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("server")
    security = SecurityConfig(tls_cert=certificate, tls_key=key, tls_ca=authority.path, require_client_cert=True)
    (port,) = free_ports(1)
    server = RpcServer("trainer", ServerConfig(probe_port=port), security)
    server.set_serving(False)
    await server.start()
    async with connect(f"127.0.0.1:{port}", SecurityConfig()) as channel:
        assert await health(channel) == NOT_SERVING
        assert await health(channel, "sluice.v1.ServerInfoService") == SERVING  # it loads, and lives
        await server.set_serving(True)
        assert await health(channel) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await common_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(common_pb2.GetServerInfoRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await health(channel)
        assert gone.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_takes_the_name_of_its_run_not_its_resource_name():
    with pytest.raises(ValueError, match="name of a run"):
        RpcServer("trainer", ServerConfig(), SecurityConfig(), run="runs/r1")


async def test_reflection_lists_the_contracts(served):
    _, _, channel = served
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = await stub.ServerReflectionInfo(iter([request])).read()
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "sluice.v1.ServerInfoService", "grpc.health.v1.Health"} <= names


async def test_a_server_says_what_it_is_and_what_it_lacks(served):
    _, _, channel = served
    info = await common_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(common_pb2.GetServerInfoRequest())
    assert (info.service, info.run, list(info.features)) == ("trainer", "runs/r1", ["engine.double"])
    assert list(info.services) == ["sluice.v1.ServerAdminService", "sluice.v1.ServerInfoService", SERVICE]
    assert list(info.unimplemented_rpcs) == [f"{SERVICE}/KeepCheckpoint", f"{SERVICE}/ListCheckpoints"]
    assert (info.max_message_bytes, info.max_concurrent_rpcs) == (MAX_MESSAGE_BYTES, 64)
    assert info.contract_version >= 1


async def ending(channel, method: str, frames: list[bytes], *, half_close: bool = True) -> SluiceError:
    """The error that a call of raw bytes ends with."""
    call = channel.stream_stream(method)(timeout=20)
    for frame in frames:
        await call.write(frame)
    if half_close:
        await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return SluiceError.from_rpc(caught.value)


@pytest.mark.parametrize("method", ["GetTrainerState", "WatchSteps", "SubmitBatch"])
async def test_bytes_that_are_no_message_are_the_clients_fault(served, method):
    _, _, channel = served
    error = await ending(channel, f"/{SERVICE}/{method}", [b"\x0a\xff"])
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert method in error.message


@pytest.mark.parametrize("method", ["GetTrainerState", "WatchSteps"])
async def test_a_call_without_its_message_is_answered(served, method, monkeypatch):
    _, double, channel = served
    error = await ending(channel, f"/{SERVICE}/{method}", [])
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    monkeypatch.setattr(rpc_server, "REQUEST_S", 0.05)
    error = await ending(channel, f"/{SERVICE}/{method}", [], half_close=False)
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_DEADLINE")
    assert double.calls == 0


async def test_a_method_that_the_health_library_lacks_is_unimplemented(served):
    _, _, channel = served
    error = await ending(channel, "/grpc.health.v1.Health/List", [b""])
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED")


def total(method: str, code: str, service: str = SERVICE) -> float:
    labels = {"service": service, "method": method, "code": code}
    return REGISTRY.get_sample_value("sluice_rpc_total", labels) or 0


async def test_calls_of_every_arity_are_counted_by_code_and_timed(served):
    server, _, channel = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    reflection = "grpc.reflection.v1alpha.ServerReflection"
    watched = (
        ("GetTrainerState", "OK", SERVICE),
        ("SubmitBatch", "OK", SERVICE),
        ("WatchSteps", "NOT_FOUND", SERVICE),
        ("BeginEpoch", "NOT_FOUND", SERVICE),
        ("ServerReflectionInfo", "OK", reflection),
    )
    before = {row: total(*row) for row in watched}
    await stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest())
    await stub.SubmitBatch(iter([trainer_pb2.SubmitBatchRequest()]))
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.WatchSteps(trainer_pb2.WatchStepsRequest(run="fail")).read()
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.BeginEpoch(trainer_pb2.BeginEpochRequest(run="abort"))
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    async for _ in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests):
        pass
    await server.stop(10)  # a call is accounted for just after its last byte has left
    assert {row: total(*row) for row in watched} == {row: count + 1 for row, count in before.items()}
    labels = {"service": SERVICE, "method": "GetTrainerState"}
    assert REGISTRY.get_sample_value("sluice_rpc_seconds_count", labels) >= 1
    assert REGISTRY.get_sample_value("sluice_rpc_in_flight", labels) == 0


async def test_stopping_ends_watches_at_once_and_waits_for_work(served):
    server, double, channel = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    watch = stub.WatchSteps(trainer_pb2.WatchStepsRequest(run="wait", from_number=1))
    await watch.read()
    double.entered.clear()
    work = stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest())
    await asyncio.wait_for(double.entered.wait(), 10)
    stopping = asyncio.create_task(server.stop(60))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watch.read()
    error = SluiceError.from_rpc(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert not stopping.done()
    double.release.set()
    assert await work == trainer_pb2.SaveCheckpointResponse()
    await asyncio.wait_for(stopping, 30)


class Offers(episode_pb2_grpc.EpisodeServiceServicer):
    """Has nothing on offer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def LeaseTasks(self, request, context):  # noqa: N802
        self.asked.set()
        await asyncio.Event().wait()


async def test_stopping_ends_calls_that_wait_for_an_offer_at_once():
    server, offers = RpcServer("gateway", ServerConfig(port=0), SecurityConfig(), run="r1"), Offers()
    server.add(episode_pb2_grpc.add_EpisodeServiceServicer_to_server, offers, "sluice.v1.EpisodeService")
    await server.start()
    async with grpc.aio.insecure_channel(server.target, [("grpc.enable_retries", 0)]) as channel:
        waiting = episode_pb2_grpc.EpisodeServiceStub(channel).LeaseTasks(episode_pb2.LeaseTasksRequest(), timeout=60)
        await asyncio.wait_for(offers.asked.wait(), 10)
        await asyncio.wait_for(server.stop(60), 30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await waiting
    error = SluiceError.from_rpc(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


@pytest.mark.parametrize("grace_s", [0.0, 0.1])
async def test_work_that_outlasts_the_grace_is_cancelled_and_may_be_repeated(served, grace_s):
    server, double, channel = served
    work = trainer_pb2_grpc.TrainerServiceStub(channel).SaveCheckpoint(trainer_pb2.SaveCheckpointRequest())
    await asyncio.wait_for(double.entered.wait(), 10)
    await asyncio.wait_for(server.stop(grace_s), 30)
    assert double.cancelled.is_set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    assert SluiceError.from_rpc(caught.value).code is grpc.StatusCode.UNAVAILABLE, caught.value.code()


def test_a_call_that_reached_a_server_as_it_stopped_may_be_repeated():
    # gRPC resets a call that came too late to be served, which the client sees as CANCELLED.
    ended = grpc.aio.AioRpcError(
        grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), details="CANCELLED"
    )
    error = SluiceError.from_rpc(ended)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")


async def test_serving_ends_when_the_service_itself_is_done(served):
    server, _, _ = served
    done = asyncio.Event()
    serving = asyncio.create_task(server.serve_until_signal(done))
    done.set()
    await asyncio.wait_for(serving, 30)


async def test_an_admin_drains_a_server_and_hears_how_much_is_left(served):
    server, double, channel = served
    serving = asyncio.create_task(server.serve_until_signal())
    work = trainer_pb2_grpc.TrainerServiceStub(channel).SaveCheckpoint(trainer_pb2.SaveCheckpointRequest())
    await asyncio.wait_for(double.entered.wait(), 10)
    admin = common_pb2_grpc.ServerAdminServiceStub(channel)
    drain = admin.DrainServer(common_pb2.DrainServerRequest(grace={"seconds": 60}), timeout=30)
    first = await drain.read()
    assert first.left == 1
    assert 0 < first.grace_left.ToNanoseconds() <= 60e9

    async def call_until_refused() -> None:
        while True:  # who asked hears of the drain before the port is closed
            async with grpc.aio.insecure_channel(server.target, [("grpc.enable_retries", 0)]) as fresh:
                stub = trainer_pb2_grpc.TrainerServiceStub(fresh)
                await stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest())

    with pytest.raises(grpc.aio.AioRpcError):
        await asyncio.wait_for(call_until_refused(), 60)
    double.release.set()
    assert await work == trainer_pb2.SaveCheckpointResponse()
    assert (await drain.read()).left == 0
    assert await drain.read() is grpc.aio.EOF
    await asyncio.wait_for(serving, 30)


async def test_a_second_drain_shortens_the_grace(served):
    server, double, channel = served
    serving = asyncio.create_task(server.serve_until_signal())
    work = trainer_pb2_grpc.TrainerServiceStub(channel).SaveCheckpoint(trainer_pb2.SaveCheckpointRequest())
    await asyncio.wait_for(double.entered.wait(), 10)
    admin = common_pb2_grpc.ServerAdminServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await admin.DrainServer(common_pb2.DrainServerRequest(grace={"seconds": -1}), timeout=30).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    drain = admin.DrainServer(common_pb2.DrainServerRequest(grace={"seconds": 600}), timeout=30)
    assert (await drain.read()).left == 1
    server.begin_drain(0.0)
    await asyncio.wait_for(serving, 30)
    assert double.cancelled.is_set()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await work


PROGRAM = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from trainer_double import start_double

async def main():
    server, double = await start_double(drain_s=float(sys.argv[2]))
    print(server.target, flush=True)
    asyncio.get_running_loop().add_reader(sys.stdin, lambda: (sys.stdin.readline(), double.release.set()))
    await server.serve_until_signal()
    print("put away", flush=True)

asyncio.run(main())
"""


async def start_program(drain_s: float) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", PROGRAM, str(Path(__file__).parent), str(drain_s)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    lines: list[str] = []
    async with asyncio.timeout(60):
        while not (lines and lines[-1].startswith("127.0.0.1:")):
            line = await process.stdout.readline()
            assert line, "the server ended before it listened"
            lines.append(line.decode().strip())
    return process, lines[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_calls_in_progress_and_ends_with_code_zero(number):
    process, target = await start_program(60)
    async with connect(target, SecurityConfig()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        watch = stub.WatchSteps(trainer_pb2.WatchStepsRequest(run="wait", from_number=1))
        await watch.read()
        work = stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(), timeout=60)
        await stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest())  # so that the work before it has begun
        process.send_signal(number)
        with pytest.raises(grpc.aio.AioRpcError):
            await watch.read()  # the drain has begun
        process.stdin.write(b"release\n")
        assert await work == trainer_pb2.SaveCheckpointResponse()
    rest, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert rest.decode().endswith("put away\n")


async def test_a_second_signal_does_not_wait_for_the_drain():
    process, target = await start_program(600)
    async with connect(target, SecurityConfig()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        watch = stub.WatchSteps(trainer_pb2.WatchStepsRequest(run="wait", from_number=1))
        await watch.read()
        work = stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(), timeout=60)
        await stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest())
        process.terminate()
        with pytest.raises(grpc.aio.AioRpcError):
            await watch.read()
        process.terminate()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await work
    await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0


def test_free_ports_are_none_that_an_outgoing_connection_may_take(monkeypatch, tmp_path):
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < lowest
    for broken in ("", "1024 65535\n"):  # unknown, or none left below
        (tmp_path / "range").write_text(broken)
        monkeypatch.setattr(rpc_server, "_OUTGOING_PORTS", tmp_path / "range")
        assert len(set(free_ports(50))) == 50
