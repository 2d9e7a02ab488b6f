"""Deltas at the service: committed against their base, given out by form, refused where no anchor leads to them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from delta_versions import DeltaSource, push_delta, update_path
from weightsync_stack import RESOURCE, ShardSource, Stack, error_of, read_source, running_stack, weights

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version

V1, V2, V3, V4 = (Version(1, number) for number in range(1, 5))


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path, heartbeat_s=0.1, dense_delay_s=3600) as running:
        yield running


def changed(seed: int, *names: str) -> dict[str, torch.Tensor]:
    """The weights of seed 0, of which the named tensors are those of another seed."""
    return {name: weights(seed if name in names else 0)[name] for name in weights()}


async def push_chain(stack: Stack) -> list[Mapping[str, torch.Tensor]]:
    contents = [weights(), changed(1, "model.scalar"), changed(2, "model.scalar", "model.half")]
    await stack.push(V1, contents[0], deadline_s=30)
    await push_delta(stack, V2, V1, contents[1], contents[0])
    await push_delta(stack, V3, V2, contents[2], contents[1])
    return contents


async def test_a_delta_is_visible_announced_and_pulled_byte_for_byte(stack: Stack) -> None:
    await stack.push(V1, weights(), deadline_s=30)
    source = DeltaSource("model", changed(1, "model.scalar"), weights())
    response = await push_delta(stack, V2, V1, changed(1, "model.scalar"), weights())
    assert await stack.visible() == [V2, V1]
    assert response.manifest.kind == pb.VERSION_KIND_DELTA
    assert response.manifest.size_bytes == source.size
    assert response.manifest.dense_bytes == sum(tensor.nbytes for tensor in weights().values())
    assert response.manifest.HasField("commit_time_taken")
    assert await stack.pull(V2, base=V1) == read_source(source, 0, source.size)
    watch = stack.delivery.WatchVersions(pb.WatchVersionsRequest(run=RESOURCE, replica="r"), timeout=30)
    assert (await watch.read()).manifest == response.manifest
    watch.cancel()


async def test_a_repeated_delta_is_found_and_other_content_is_refused(stack: Stack) -> None:
    await push_chain(stack)
    again = await push_delta(stack, V3, V2, changed(2, "model.scalar", "model.half"), changed(1, "model.scalar"))
    assert again.duplicate
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push_delta(stack, V3, V2, changed(9, "model.scalar"), changed(1, "model.scalar"))
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_the_way_to_a_version_depends_on_what_is_held(stack: Stack) -> None:
    await push_chain(stack)
    assert await update_path(stack, V3, V3) == []
    assert await update_path(stack, V3, V2) == [(V3, pb.VERSION_KIND_DELTA)]
    assert await update_path(stack, None, V1) == [(V2, pb.VERSION_KIND_DELTA), (V3, pb.VERSION_KIND_DELTA)]
    assert await update_path(stack, V2, None) == [(V1, pb.VERSION_KIND_ANCHOR), (V2, pb.VERSION_KIND_DELTA)]
    assert (await update_path(stack, V3, Version(7, 7)))[0] == (V1, pb.VERSION_KIND_ANCHOR)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await update_path(stack, Version(1, 9), None)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_way_names_the_files_of_this_host(stack: Stack) -> None:
    await push_chain(stack)
    request = pb.GetUpdatePathRequest(run=RESOURCE)
    async for step in stack.delivery.GetUpdatePath(request, timeout=30):
        assert [file.shard for file in step.files] == [shard.name for shard in step.manifest.shards]
        for file, shard in zip(step.files, step.manifest.shards, strict=True):
            status = os.stat(file.path)  # noqa: PTH116 - what the contract speaks of
            assert (status.st_dev, status.st_ino, status.st_size) == (file.device, file.inode, shard.size_bytes)


async def test_a_pull_names_the_form_that_it_wants(stack: Stack) -> None:
    await push_chain(stack)
    for base in (V1, Version(1, 9)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.pull(V3, base=base)
        assert error_of(caught.value).reason == "NO_DELTA"
    with pytest.raises(grpc.aio.AioRpcError) as dense:
        await stack.pull(V3)
    assert dense.value.code() is grpc.StatusCode.NOT_FOUND
    assert "GetUpdatePath" in str(dense.value.details())


async def test_a_delta_without_a_committed_base_asks_for_an_anchor(stack: Stack) -> None:
    for base in (V1, V2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await push_delta(stack, V2, base, weights(1), weights())
        assert error_of(caught.value).reason == "BASE_UNKNOWN"
        assert "push a dense version" in str(caught.value.details())
    assert await stack.visible() == []
    await stack.push(V2, weights(1), deadline_s=30)
    assert await stack.visible() == [V2]


@pytest.mark.parametrize("damage", ["missing", "other shape", "other digest", "not unchanged"])
async def test_a_delta_that_does_not_fit_its_base_is_refused(stack: Stack, damage: str) -> None:
    await stack.push(V1, weights(), deadline_s=30)
    source = DeltaSource("model", changed(1, "model.scalar"), weights())
    await stack.push_shard(source, V2)
    manifest = source.manifest(V2, V1)
    manifest.digest = ""
    tensors = manifest.shards[0].tensors
    unchanged = next(each for each in tensors if each.encoding == pb.TENSOR_ENCODING_UNCHANGED)
    if damage == "missing":
        del tensors[list(tensors).index(unchanged)]
    elif damage == "other shape":
        unchanged.global_shape.append(1)
    elif damage == "other digest":
        next(each for each in tensors if each.encoding == pb.TENSOR_ENCODING_DENSE).digest = "0" * 32
    else:
        unchanged.digest = "0" * 32
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.commit(manifest)
    assert caught.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS}
    assert await stack.visible() == [V1]


async def test_values_of_a_delta_that_are_not_finite_are_refused(stack: Stack) -> None:
    await stack.push(V1, weights(), deadline_s=30)
    poisoned = weights() | {"model.scalar": torch.tensor(float("nan"))}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push_delta(stack, V2, V1, poisoned, weights())
    assert error_of(caught.value).reason == "NON_FINITE"


async def test_a_restart_finds_deltas_and_drops_those_that_nothing_leads_to(tmp_path: Path) -> None:
    async with running_stack(tmp_path, dense_delay_s=3600) as stack:
        await push_chain(stack)
    async with running_stack(tmp_path, dense_delay_s=3600) as stack:
        assert await stack.visible() == [V3, V2, V1]
        assert len(await update_path(stack, V3, V1)) == 2
    (stack.directory / ".deltas" / "v1.2" / "manifest.json").unlink()
    async with running_stack(tmp_path, dense_delay_s=3600) as stack:
        assert await stack.visible() == [V1]
        assert not list((stack.directory / ".deltas").iterdir())


async def test_a_full_disk_refuses_the_delta_and_the_old_version_serves_on(tmp_path: Path) -> None:
    whole = ShardSource("model", weights())
    async with running_stack(tmp_path, dense_delay_s=3600, max_bytes=whole.size + 50) as stack:
        await stack.push(V1, weights(), deadline_s=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await push_delta(stack, V2, V1, changed(1, "model.scalar"), weights())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_of(caught.value).retry_after_s
        assert await stack.visible() == [V1]
        assert await stack.pull(V1) == read_source(whole, 0, whole.size)
