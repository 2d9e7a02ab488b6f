"""A replica that compares its live weights after each update, with an engine whose memory goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rollout_stack import until
from safetensors.torch import load_file
from small_models import CONTEXT, save_model
from weightsync_stack import RESOURCE, RUN, Stack, running_stack

from rollout_svc.config import RolloutConfig
from rollout_svc.engines.slots.engine import TransformersEngine
from rollout_svc.supervision import EngineSupervisor
from rollout_svc.weights import Weights
from sluice.config import CommonConfig, PeersConfig
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.staged import ApplyReport, StagedVersion

NORM = "model.norm.weight"


class Faulty(TransformersEngine):
    """Alters a live weight after so many updates to a version."""

    def __init__(self, model: str) -> None:
        super().__init__(model, device="cpu", max_model_len=CONTEXT, max_running=2, threads=1)
        self.faults: dict[Version, int] = {}
        self.applied: list[Version] = []

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        report = await super().apply(staged)
        self.applied.append(staged.version)
        if self.faults.get(staged.version, 0) > 0:
            self.faults[staged.version] -= 1
            self.alter()
        return report

    def alter(self) -> None:
        loop = self._loop
        live = loop._weights._live[NORM]
        loop.call(lambda: live.view(-1)[0].mul_(2.0)).result(timeout=30)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("verified")
    return [save_model(root / f"v{number}", number + 1) for number in range(3)]


@asynccontextmanager
async def replica(models: list[Path], directory: Path, extent: str) -> AsyncIterator[tuple[Faulty, Weights, Stack]]:
    engine = Faulty(str(models[0]))
    await engine.start()
    try:
        async with running_stack(directory / "outputs", model=str(models[0])) as sync:
            common = CommonConfig(run=RUN, model=str(models[0]), peers=PeersConfig(weightsync=sync.target))
            config = RolloutConfig(replica="one", stage_dir=directory / "stage", verify_after_apply=extent)
            weights = Weights(common, config, EngineSupervisor(engine, 0, lambda _serving: None))
            task = asyncio.create_task(weights.run_forever())
            try:
                yield engine, weights, sync
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await weights.close()
    finally:
        await engine.stop()


async def publish(sync: Stack, models: list[Path], number: int) -> Version:
    tensors = load_file(models[number] / "model.safetensors")
    await sync.publisher.push(Version(1, number), tensors, deadline_s=30)
    return Version(1, number)


async def error_at_service(sync: Stack) -> str:
    response = await sync.sync.ListVersions(pb.ListVersionsRequest(run=RESOURCE), timeout=30)
    return next((each.error for each in response.replicas if each.replica == "one"), "")


async def test_a_version_that_differs_once_is_loaded_again(models, tmp_path):
    async with replica(models, tmp_path, "full") as (engine, weights, sync):
        engine.faults = {Version(1, 1): 1}
        version = await publish(sync, models, 1)
        await until(lambda: weights.status().updates_applied == 1)
        assert engine.status().version == version
        assert engine.applied == [version, version]


async def test_a_version_that_goes_on_differing_is_reported_and_the_one_before_serves(models, tmp_path):
    async with replica(models, tmp_path, "full") as (engine, weights, sync):
        first = await publish(sync, models, 1)
        await until(lambda: weights.status().updates_applied == 1)
        engine.faults = {Version(1, 2): 1_000_000}
        second = await publish(sync, models, 2)
        await until(lambda: NORM in weights.status().last_error)
        assert engine.applied[:4] == [first, second, second, first]
        async with asyncio.timeout(30):
            while NORM not in (error := await error_at_service(sync)):  # noqa: ASYNC110 - known to another process
                await asyncio.sleep(0.01)
        assert "does not compute with version 1.2" in error


async def test_what_is_not_asked_for_is_not_compared(models, tmp_path):
    async with replica(models, tmp_path, "off") as (engine, weights, sync):
        engine.faults = {Version(1, 1): 1}
        version = await publish(sync, models, 1)
        await until(lambda: weights.status().updates_applied == 1)
        assert engine.applied == [version]
