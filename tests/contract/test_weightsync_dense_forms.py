"""The dense forms that the service makes of deltas: bit for bit, in the background, never half, gone when not needed."""

from __future__ import annotations

import gc
import shutil
import threading
from pathlib import Path

import grpc
import pytest
import torch
from delta_versions import DeltaSource, push_delta, update_path
from safetensors.torch import load_file
from weightsync_stack import RESOURCE, ShardSource, Stack, equal_bits, error_of, eventually, running_stack, weights

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.service import dense as dense_module

pytestmark = pytest.mark.slow


def version(number: int) -> Version:
    return Version(1, number)


def content(number: int) -> dict[str, torch.Tensor]:
    """Weights of which some values move from version to version; the last tensor never does."""
    tensors = weights()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() and name != "model.norm.weight":
            flat = tensor.contiguous().reshape(-1)
            flat[number % flat.numel()] += 0.25 * number
            tensors[name] = flat.reshape(tensor.shape)
    return tensors


async def push_deltas(stack: Stack, first: int, last: int) -> None:
    for number in range(first, last + 1):
        await push_delta(
            stack, version(number), version(number - 1), content(number), content(number - 1), encoded=True
        )


def dense_path(stack: Stack, number: int) -> Path:
    return stack.directory / f"v{version(number)}" / "model.safetensors"


def dense(stack: Stack) -> set[str]:
    return {path.name for path in stack.directory.glob("v*")}


async def test_the_newest_version_becomes_a_whole_directory(tmp_path: Path) -> None:
    async with running_stack(tmp_path, dense_delay_s=0, heartbeat_s=0.1) as stack:
        await stack.push(version(1), content(1), deadline_s=30)
        await push_deltas(stack, 2, 5)
        run = await stack.runs.open(RESOURCE)
        await eventually(lambda: run.ledger.committed[version(5)].dense_bytes is not None)  # given out from then on
        assert equal_bits(load_file(dense_path(stack, 5)), content(5))
        steps = stack.delivery.GetUpdatePath(pb.GetUpdatePathRequest(run=RESOURCE), timeout=30)
        manifest = (await steps.read()).manifest
        assert (manifest.kind, manifest.HasField("base")) == (pb.VERSION_KIND_ANCHOR, False)
        announced = await stack.sync.GetManifest(pb.GetManifestRequest(run=RESOURCE), timeout=30)
        assert (announced.manifest.kind, announced.manifest.digest) == (pb.VERSION_KIND_DELTA, manifest.digest)
        assert await stack.pull(version(5), manifest.shards[0].name) == dense_path(stack, 5).read_bytes()
        assert not list((stack.directory / ".building").iterdir())


async def test_cut_deltas_and_anchors_of_several_files_become_whole_tensors(tmp_path: Path) -> None:
    base, new = {"w": torch.randn(6, 8), "v": torch.randn(5)}, {"w": torch.randn(6, 8), "v": torch.randn(5)}
    async with running_stack(tmp_path, dense_delay_s=0) as stack:
        shards = [ShardSource(f"rank{index}", {name: base[name]}) for index, name in enumerate(base)]
        manifest = pb.Manifest(run=RESOURCE, version=version(1).to_proto(), kind=pb.VERSION_KIND_ANCHOR)
        for source in shards:
            await stack.push_shard(source, version(1))
            manifest.shards.append(source.describe())
        await stack.commit(manifest)
        left, right = (slice(None), slice(0, 3)), (slice(None), slice(3, 8))
        delta = pb.Manifest(
            run=RESOURCE, version=version(2).to_proto(), kind=pb.VERSION_KIND_DELTA, base=version(1).to_proto()
        )
        for index, region in enumerate((left, right)):
            own = {"v": new["v"]} if index else {}
            before = {"v": base["v"]} if index else {}
            source = DeltaSource(
                f"part{index}", {"w": new["w"][region], **own}, {"w": base["w"][region], **before}, encoded=True
            )
            tensor = next(each for each in source.shard.tensors if each.name == "w")
            tensor.global_shape[:] = (6, 8)
            tensor.offsets[:], tensor.sizes[:] = (0, 3 * index), new["w"][region].shape
            await stack.push_shard(source, version(2))
            delta.shards.append(source.shard)
        await stack.commit(delta)
        await eventually((stack.directory / "v1.2").exists)
        files = sorted((stack.directory / "v1.2").glob("*.safetensors"))
        assert len(files) == 2
        assert equal_bits(load_file(files[0]) | load_file(files[1]), new)


async def test_a_delta_that_gives_other_bytes_is_found_and_the_next_anchor_heals_it(tmp_path: Path) -> None:
    async with running_stack(tmp_path, dense_delay_s=0) as stack:
        await stack.push(version(1), content(1), deadline_s=30)
        source = DeltaSource("model", content(2), content(9), encoded=True)  # of another base than it says
        await stack.push_shard(source, version(2))
        await stack.commit(source.manifest(version(2), version(1)))
        run = await stack.runs.open(RESOURCE)
        await eventually(lambda: run.ledger.committed[version(2)].damaged)
        with pytest.raises(grpc.aio.AioRpcError) as path:
            await update_path(stack, None, version(1))
        assert path.value.code() is grpc.StatusCode.DATA_LOSS
        assert "push a dense version" in str(path.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await push_deltas(stack, 3, 3)
        assert error_of(refused.value).reason == "BASE_DAMAGED"
        await stack.push(version(3), content(3), deadline_s=30)
        await push_deltas(stack, 4, 4)
        await eventually(lambda: dense_path(stack, 4).exists())
        assert equal_bits(load_file(dense_path(stack, 4)), content(4))


async def test_values_that_become_infinite_by_a_delta_are_found(tmp_path: Path) -> None:
    async with running_stack(tmp_path, dense_delay_s=0) as stack:
        await stack.push(version(1), content(1), deadline_s=30)
        poisoned = content(1)
        poisoned["model.embed.weight"][40, 3] = float("inf")
        await push_delta(stack, version(2), version(1), poisoned, content(1), encoded=True)
        run = await stack.runs.open(RESOURCE)
        await eventually(lambda: run.ledger.committed[version(2)].damaged)
        assert dense(stack) == {"v1.1"}


async def test_dense_forms_that_nobody_needs_go_and_the_chain_to_a_slow_replica_stays(tmp_path: Path) -> None:
    async with running_stack(tmp_path, dense_delay_s=0, keep=1, heartbeat_s=0.05, linger_s=0) as stack:
        await stack.push(version(1), content(1), deadline_s=30)
        for number in range(2, 7):
            await push_deltas(stack, number, number)
            if number == 3:
                await stack.delivery.ReportVersion(
                    pb.ReportVersionRequest(
                        run=RESOURCE, replica="slow", version=version(3).to_proto(), phase=pb.REPLICA_PHASE_SERVING
                    ),
                    timeout=30,
                )
            await eventually(lambda number=number: dense_path(stack, number).exists())
        await eventually(lambda: len(dense(stack)) == 2)
        assert [each.number for each in await stack.visible()][-1] <= 3
        assert await update_path(stack, None, version(3)) == [
            (version(number), pb.VERSION_KIND_DELTA) for number in (4, 5, 6)
        ]
        assert (await update_path(stack, version(3), None))[-1][0] == version(3)


async def test_a_dense_form_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with running_stack(tmp_path, dense_delay_s=3600) as stack:
        await stack.push(version(1), content(1), deadline_s=30)
        await push_deltas(stack, 2, 3)
        half = stack.directory / ".building" / "v1.3"
        half.mkdir(parents=True)
        shutil.copy(dense_path(stack, 1), half)
    async with running_stack(tmp_path, dense_delay_s=0) as stack:
        await stack.visible()
        await eventually(lambda: dense_path(stack, 3).exists())
        assert equal_bits(load_file(dense_path(stack, 3)), content(3))
        assert not half.exists()


async def test_a_service_that_stops_ends_a_dense_form_under_construction_and_reports_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began, advance_file = threading.Event(), dense_module._advance_file

    def until_told_to_stop(*arguments: object) -> pb.Shard:
        began.set()
        assert arguments[-1].wait(20)
        return advance_file(*arguments)

    monkeypatch.setattr(dense_module, "_advance_file", until_told_to_stop)
    async with running_stack(tmp_path, dense_delay_s=0) as stack:
        await stack.push(version(1), content(1), deadline_s=30)
        await push_deltas(stack, 2, 2)
        await eventually(began.is_set)
    assert dense(stack) == {"v1.1"}
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_without_room_deltas_are_committed_and_the_dense_form_waits(tmp_path: Path) -> None:
    size = ShardSource("model", content(1)).size
    async with running_stack(tmp_path, dense_delay_s=0, heartbeat_s=0.05, max_bytes=int(1.9 * size)) as stack:
        await stack.push(version(1), content(1), deadline_s=30)
        await push_deltas(stack, 2, 4)
        assert await stack.visible() == [version(number) for number in (4, 3, 2, 1)]
        assert dense(stack) == {"v1.1"}
        assert len(await update_path(stack, None, None)) == 4
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.push_shard(ShardSource("model", content(5)), version(5))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await push_deltas(stack, 5, 5)
    async with running_stack(tmp_path, dense_delay_s=0, max_bytes=3 * size) as stack:
        await stack.visible()
        await eventually(lambda: dense_path(stack, 5).exists())
        assert equal_bits(load_file(dense_path(stack, 5)), content(5))
