"""What gives way when a service's room runs out, and that its bound holds for every copy that it makes."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import torch
from weightsync_stack import RESOURCE, RUN, ShardSource, Stack, error_of, running_stack, weights

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.publisher import WeightPublisher

ELEMENTS = 1 << 16
SIZE = 4 * ELEMENTS
"""Bytes of the model; the headers of its files are some hundred bytes more."""


async def push_ranks(stack: Stack, version: Version) -> pb.CommitVersionResponse:
    """Push one tensor as two ranks hold it: half of its rows each."""
    manifest = pb.Manifest(run=RESOURCE, version=version.to_proto(), kind=pb.VERSION_KIND_ANCHOR)
    for rank in range(2):
        source = ShardSource(f"rank{rank}", {"w": torch.full((ELEMENTS // 2,), float(version.number))})
        await stack.push_shard(source, version, chunk_bytes=1 << 16)
        shard = source.describe(source.tensor_digests())
        shard.tensors[0].global_shape[:] = [ELEMENTS]
        shard.tensors[0].offsets[:] = [rank * ELEMENTS // 2]
        shard.tensors[0].sizes[:] = [ELEMENTS // 2]
        manifest.shards.append(shard)
    return await stack.commit(manifest)


async def test_old_versions_give_way_to_the_copy_that_slices_of_ranks_are_assembled_into(tmp_path: Path) -> None:
    async with running_stack(tmp_path, keep=5, max_bytes=int(3.5 * SIZE)) as stack:
        for number in (1, 2, 3):
            await push_ranks(stack, Version(1, number))
        # The third needs room for its shards and for the file of whole tensors beside the two before: four copies.
        assert await stack.visible() == [Version(1, 3), Version(1, 2)]


async def test_slices_of_ranks_are_refused_where_their_copy_does_not_fit_and_can_be_committed_later(
    tmp_path: Path,
) -> None:
    async with running_stack(tmp_path, keep=5, max_bytes=int(2.5 * SIZE)) as stack:
        await push_ranks(stack, Version(1, 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await push_ranks(stack, Version(1, 2))
        error = error_of(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DISK_FULL")
        assert error.retry_after_s
        assert await stack.visible() == [Version(1, 1)]
        assert not list(stack.directory.glob("v1.2*"))
        stack.runs.config.max_bytes = 4 * SIZE
        assert not (await push_ranks(stack, Version(1, 2))).duplicate
        assert await stack.visible() == [Version(1, 2), Version(1, 1)]


async def test_a_run_that_holds_many_versions_gives_way_to_another_that_pushes_its_first(tmp_path: Path) -> None:
    size = ShardSource("model", weights()).size
    async with running_stack(tmp_path, keep=5, max_bytes=int(3.5 * size)) as stack:
        for number in (1, 2, 3):
            await stack.push(Version(1, number), weights(number), deadline_s=30)
        other = WeightPublisher(stack.channel, "other", encoding="dense")
        await other.update(Version(1, 1), weights(), deadline_s=30)
        assert await stack.visible() == [Version(1, 3), Version(1, 2)]
        # The oldest version of all that nobody needs goes first: of this run, whose other versions are older.
        await other.update(Version(1, 2), weights(1), deadline_s=30)
        assert await stack.visible() == [Version(1, 3)]
        # Each run keeps its newest version, whoever pushes.
        await other.update(Version(1, 3), weights(2), deadline_s=30)
        assert await stack.visible() == [Version(1, 3)]
        listed = await stack.sync.ListVersions(pb.ListVersionsRequest(run="runs/other"), timeout=30)
        assert [each.version.number for each in listed.versions] == [3, 2]
        assert {run.name for run in stack.runs} == {RUN, "other"}
