"""A replica's lease belongs to the principal that announced it, and what a replica is sent opens nothing else."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from orchestrator_doubles import RolloutDouble
from test_orchestrator_run import make_scene

from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.rpc.principals import add_token
from sluice.v1 import orchestrator_pb2 as pb
from sluice.v1 import orchestrator_pb2_grpc

pytestmark = pytest.mark.slow


class Listener(grpc.GenericRpcHandler):
    """Answers no call, and keeps the authorization of each."""

    def __init__(self) -> None:
        self.heard: set[str] = set()
        self.methods: set[str] = set()

    def service(self, call: grpc.HandlerCallDetails) -> None:
        self.methods.add(call.method)
        self.heard |= {str(value) for key, value in call.invocation_metadata if key == "authorization"}


async def test_a_fake_replica_that_announces_itself_gets_a_token_that_opens_nothing(tmp_path) -> None:
    file = tmp_path / "principals.toml"
    names = {"orchestrator": "admin", "replica": "replica", "to-replicas": "dispatcher"}
    for name, role in names.items():
        (tmp_path / name).write_text(add_token(file, name, role))
    async with contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [RolloutDouble()])
        scene.trainer.automatic = False
        fake = Listener()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((fake,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        security = SecurityConfig(
            principals_file=file, token_file=tmp_path / "orchestrator", dispatcher_token_file=tmp_path / "to-replicas"
        )
        running = scene.start(common={"security": security})
        await scene.until(lambda: scene.trainer.waiting)
        orchestrator = scene.target
        async with connect(orchestrator, SecurityConfig(token_file=tmp_path / "replica")) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            for address in ("169.254.169.254:80", "0.0.0.0:80"):
                with pytest.raises(grpc.aio.AioRpcError, match="is no address of a replica"):
                    await stub.RegisterReplica(
                        pb.RegisterReplicaRequest(run="runs/test", replica="fake", address=address), timeout=60
                    )
            await stub.RegisterReplica(
                pb.RegisterReplicaRequest(run="runs/test", replica="fake", address=f"127.0.0.1:{port}"), timeout=60
            )
        await scene.until(lambda: fake.methods)
        assert fake.heard == {f"Bearer {(tmp_path / 'to-replicas').read_text()}"}

        async with connect(orchestrator, SecurityConfig(token_file=tmp_path / "to-replicas")) as channel:
            for method in pb.DESCRIPTOR.services_by_name["OrchestratorService"].methods:
                call = channel.unary_stream if method.server_streaming else channel.unary_unary
                answer = call(f"/{method.containing_service.full_name}/{method.name}")(b"", timeout=60)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await (answer.read() if method.server_streaming else answer)
                assert SluiceError.from_rpc(refused.value).reason == "ROLE_REQUIRED", method.name
        scene.trainer.run_freely()
        await asyncio.wait_for(running, 60)


async def test_only_who_announced_a_replica_speaks_for_it(tmp_path) -> None:
    file = tmp_path / "principals.toml"
    for name, role in (("one", "replica"), ("two", "replica"), ("op", "admin")):
        (tmp_path / name).write_text(add_token(file, name, role))
    async with contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [RolloutDouble()])
        scene.trainer.automatic = False
        running = scene.start(common={"security": SecurityConfig(principals_file=file)})
        await scene.until(lambda: scene.trainer.waiting)

        async def call(name: str, method: str, request: object) -> str:
            target = scene.target
            async with connect(target, SecurityConfig(token_file=tmp_path / name)) as channel:
                stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
                try:
                    await getattr(stub, method)(request, timeout=60)
                except grpc.aio.AioRpcError as error:
                    return SluiceError.from_rpc(error).reason
            return "OK"

        mine = pb.RegisterReplicaRequest(run="runs/test", replica="r", address="127.0.0.1:1")
        elsewhere = pb.RegisterReplicaRequest(run="runs/test", replica="r", address="127.0.0.1:2")
        beat = pb.HeartbeatRequest(run="runs/test", replica="r")
        leaving = pb.HeartbeatRequest(run="runs/test", replica="r", leaving=True)
        unannounced = pb.HeartbeatRequest(run="runs/test", replica="replica-0", leaving=True)
        assert await call("one", "Heartbeat", beat) == "UNKNOWN_REPLICA"
        assert await call("two", "Heartbeat", unannounced) == "UNKNOWN_REPLICA", "it is known by its address alone"
        assert await call("one", "RegisterReplica", mine) == "OK"
        assert await call("two", "RegisterReplica", elsewhere) == "OTHER_PRINCIPAL"
        assert await call("two", "Heartbeat", beat) == "OTHER_PRINCIPAL"
        assert await call("two", "Heartbeat", leaving) == "OTHER_PRINCIPAL"
        assert await call("one", "Heartbeat", beat) == "OK"
        assert await call("op", "Heartbeat", leaving) == "OK", "an admin may"
        assert await call("two", "GetRun", pb.GetRunRequest(run="runs/test")) == "ROLE_REQUIRED"
        scene.trainer.run_freely()
        await asyncio.wait_for(running, 60)
