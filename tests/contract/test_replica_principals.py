"""A replica's lease belongs to the principal that announced it: no other one renews, moves or ends it."""

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
            target = f"127.0.0.1:{scene.port}"
            async with connect(target, SecurityConfig(token_file=tmp_path / name)) as channel:
                stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
                try:
                    await getattr(stub, method)(request, timeout=10)
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
