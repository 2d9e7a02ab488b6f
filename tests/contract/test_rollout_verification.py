"""`sluice weights verify --replica`: the live weights of a replica against the files of their version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from rollout_stack import refused, until
from safetensors.torch import load_file
from small_models import CONTEXT, save_model
from weightsync_stack import RUN, Stack, running_stack

from rollout_svc.admin import RolloutAdminServicer
from rollout_svc.config import LimitsConfig, RolloutConfig
from rollout_svc.engines.base import EngineError, EngineTimeoutError, UncheckedWeights
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.replica import EngineSupervisor, ReplicaWeights
from rollout_svc.servicer import RolloutServicer
from rollout_svc.tokenizer import ModelTokenizer
from sluice.config import CommonConfig, ConfigError, PeersConfig, SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, connect
from sluice.rpc.drain import Drain
from sluice.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.versions import Version
from weightsync.inspect.weights_command import COMMAND

NORM = "model.norm.weight"


@dataclass
class Replica:
    """A replica that follows a weight service, whose memory can go wrong."""

    engine: TransformersEngine
    sync: Stack
    target: str
    models: list[Path]

    def alter(self) -> None:
        """Change one live weight behind the engine's back."""
        loop = self.engine._loop
        live = loop._weights._live[NORM]
        loop.call(lambda: live.view(-1)[0].mul_(2.0)).result(timeout=30)

    async def publish(self, number: int) -> None:
        tensors = load_file(self.models[number] / "model.safetensors")
        await self.sync.push(Version(1, number), tensors, deadline_s=30)
        await until(lambda: self.engine.status().version == Version(1, number))

    async def verify(self, *words: str) -> int:
        return await asyncio.to_thread(COMMAND.run, ["verify", *words, "--replica", self.target])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("verified")
    return [save_model(root / f"v{number}", number + 1) for number in range(3)]


@pytest.fixture
async def replica(models: list[Path], tmp_path: Path) -> AsyncIterator[Replica]:
    engine = TransformersEngine(str(models[0]), SlotOptions(device="cpu", max_model_len=CONTEXT, threads=1))
    await engine.start()
    try:
        async with running_stack(tmp_path / "outputs", model=str(models[0])) as sync:
            common = CommonConfig(run=RUN, model=str(models[0]), peers=PeersConfig(weightsync=sync.target))
            supervisor = EngineSupervisor(engine, 0, lambda _serving: None)
            weights = ReplicaWeights(common, RolloutConfig(replica="one", stage_dir=tmp_path / "stage"), supervisor)
            drain = Drain()
            requests = RolloutServicer(
                f"runs/{RUN}", supervisor, ModelTokenizer(None), LimitsConfig(), request_s=60.0, drain=drain
            )
            admin = RolloutAdminServicer("one", supervisor, weights, requests, drain=drain, drain_s=5.0)
            server = RpcServer("rollout", ServerConfig(port=0), SecurityConfig())
            name = "sluice.v1.RolloutAdminService"
            server.add(rollout_pb2_grpc.add_RolloutAdminServiceServicer_to_server, admin, name)
            await server.start()
            task = asyncio.create_task(weights.run_forever())
            try:
                yield Replica(engine, sync, server.target, models)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await weights.close()
                await server.stop(0)
    finally:
        await engine.stop()


async def test_a_replica_that_computes_with_its_version_is_found_right(replica, capsys):
    assert await replica.verify() == 0, "the base model"
    assert "computes with version 0.0" in capsys.readouterr().out
    await replica.publish(1)
    assert await replica.verify() == 0
    assert "computes with version 1.1" in capsys.readouterr().out


async def test_a_live_weight_that_differs_is_named_and_loaded_anew_by_the_next_update(replica, capsys):
    await replica.publish(1)
    replica.alter()
    assert await replica.verify() == 1
    assert f"DIFFERENT: 1 tensors of replica {replica.target} are not those of version 1.1: {NORM}" in (
        capsys.readouterr().out
    )
    await replica.publish(2)
    assert await replica.verify() == 0


async def test_a_replica_verifies_the_version_that_it_holds_and_no_other(replica):
    with pytest.raises(ConfigError, match="leave the version out"):
        await replica.verify("1.1")


async def test_weights_that_cannot_be_compared_are_named(replica, capsys, monkeypatch):
    status = replace(replica.engine.status(), unchecked=(UncheckedWeights("Experts (Packed)", 24, "experts.0.weight"),))
    monkeypatch.setattr(replica.engine, "status", lambda: status)
    assert await replica.verify() == 0
    lines = capsys.readouterr().out.splitlines()  # between lines of the services' logs, which are in this process
    assert any(
        line.startswith("NOT COMPARED: 24 tensors in layers of kind Experts (Packed), such as experts.0.weight: ")
        for line in lines
    )
    assert f"replica {replica.target} computes with version 0.0: every other live tensor equals its file" in lines


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
async def test_a_fraction_is_above_zero_and_at_most_one(replica, fraction):
    async with connect(replica.target, SecurityConfig()) as channel:
        stub = rollout_pb2_grpc.RolloutAdminServiceStub(channel)
        error = await refused(stub.VerifyWeights(rollout_pb2.VerifyWeightsRequest(fraction=fraction), timeout=30))
    assert list(error.violations) == ["fraction"]


@pytest.mark.parametrize(
    ("failure", "healthy", "code"),
    [
        (EngineTimeoutError("not within 1200 s"), True, grpc.StatusCode.DEADLINE_EXCEEDED),
        (EngineError("the file cannot be read"), True, grpc.StatusCode.FAILED_PRECONDITION),
        (EngineError("the engine's process died"), False, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_comparison_that_fails_is_named_by_its_kind_and_not_repeated(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, failure: EngineError, healthy: bool, code: grpc.StatusCode
) -> None:
    asked = 0
    status = replica.engine.status()

    async def fail(*_: object) -> list[str]:
        nonlocal asked
        asked += 1
        if not healthy:
            monkeypatch.setattr(replica.engine, "status", lambda: replace(status, healthy=False))
        raise failure

    monkeypatch.setattr(replica.engine, "verify_weights", fail)
    async with connect(replica.target, SecurityConfig()) as channel:
        stub = rollout_pb2_grpc.RolloutAdminServiceStub(channel)
        error = await refused(stub.VerifyWeights(rollout_pb2.VerifyWeightsRequest(), timeout=30))
    assert (error.code, asked) == (code, 1)
