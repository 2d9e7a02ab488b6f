"""Files are written and removed in threads: a large tree or file would stop every call of the service meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from loop_audit import file_changes_of_this_thread
from relay_stack import Engine, Node, push, running
from weightsync_stack import RUN, ShardSource, eventually, following, running_stack, weights

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.versions import Version
from weightsync.publisher import AdapterPublisher, WeightPublisher
from weightsync.receiver import ReceiverOptions, WeightReceiver
from weightsync.staged import ApplyReport, HeldVersions, StagedAdapter

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("local", [True, False])
async def test_a_trainer_and_its_weight_service_change_no_file_on_the_event_loop(tmp_path: Path, local: bool) -> None:
    tensors = weights()
    with file_changes_of_this_thread() as changes:
        async with running_stack(tmp_path, dense_delay_s=0, heartbeat_s=0.1, keep=1) as stack:
            publisher = WeightPublisher(stack.channel, RUN, local=local)
            reports = []
            for number in range(1, 4):
                reports.append(await publisher.update(Version(1, number), tensors, deadline_s=30))
                tensors["model.norm.weight"][number] += 1
            assert {report.kind for report in reports} == {"anchor", "delta"}
            await AdapterPublisher(stack.channel, RUN).push(
                Version(1, 4), {"a.lora_A.weight": torch.ones(2, 4)}, {"r": 2}, deadline_s=30
            )
            await stack.push_shard(ShardSource("model", weights(1)), Version(1, 5), until=2000)
            await stack.push_shard(ShardSource("model", weights(2)), Version(1, 5))
            await publisher.close()
            await eventually(lambda: not list(stack.directory.glob("**/v1.1")))
    assert changes == []


async def test_a_relay_changes_no_file_on_the_event_loop(tmp_path: Path) -> None:
    with file_changes_of_this_thread() as changes:
        async with (
            running(Node(tmp_path / "root")) as root,
            running(Node(tmp_path / "relay", upstream=root.target, keep=1, heartbeat_s=0.1)) as relay,
        ):
            for number in (1, 2):
                await push(root, Version(1, number), weights(number))
                async with asyncio.timeout(20):
                    await eventually(lambda number=number: relay.newest() == Version(1, number))  # type: ignore[misc]
            await eventually(lambda: not list(relay.directory.glob("v1.1")))
    assert changes == []


class AdapterEngine(Engine):
    """An engine that holds the newest adapter beside its weights."""

    serves_adapters = True
    adapter: Version | None = None

    def held(self) -> HeldVersions | None:
        adapters = frozenset() if self.adapter is None else frozenset({self.adapter})
        return HeldVersions(self.adapter or self.version, self.version, adapters)

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        assert (staged.path / "adapter_config.json").exists()
        self.adapter = staged.version
        return ApplyReport(staged.version, 0.0, 0.0)


@pytest.mark.parametrize("local", [True, False])
async def test_a_receiver_changes_no_file_on_the_event_loop(tmp_path: Path, local: bool) -> None:
    engine, tensors, stage_dir = AdapterEngine("replica"), weights(), tmp_path / "shm"
    async with running_stack(tmp_path / "outputs") as stack, connect(stack.target, SecurityConfig()) as channel:
        publisher = WeightPublisher(stack.channel, RUN)
        with file_changes_of_this_thread() as changes:
            options = ReceiverOptions(local_files=local)
            receiver = WeightReceiver(channel, RUN, engine.name, stage_dir, engine, options=options)
            async with following(receiver):
                for number in range(1, 4):  # a dense form, and deltas on it
                    await publisher.update(Version(1, number), tensors, deadline_s=30)
                    await eventually(lambda number=number: engine.version == Version(1, number))  # type: ignore[misc]
                    tensors["model.norm.weight"][number] += 1
                await eventually(lambda: len(list(stage_dir.glob("*/*"))) == 1)
                for number in (4, 5):
                    adapter = {"a.lora_A.weight": torch.full((2, 4), float(number))}
                    await AdapterPublisher(stack.channel, RUN, base=Version(1, 3)).push(
                        Version(1, number), adapter, {"r": 2}, deadline_s=30
                    )
                    await eventually(lambda number=number: engine.adapter == Version(1, number))  # type: ignore[misc]
                await eventually(lambda: len(list(stage_dir.glob("sluice_adapters-*/v*"))) == 1)
        assert changes == []
