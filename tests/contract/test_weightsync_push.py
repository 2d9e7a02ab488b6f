"""PushWeights and CommitVersion: a version is whole or not there, whatever is done to it on the way."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from simulated_clock import SimulatedClock
from weightsync_stack import (
    RESOURCE,
    ShardSource,
    Stack,
    equal_bits,
    error_of,
    eventually,
    make_chunk,
    manifest_of,
    read_source,
    running_stack,
    weights,
)

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.service.upload import Upload

V1 = Version(1, 1)
DEADLINE_S = 60
IDLE_S = 30.0


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path, chunk_idle_s=DEADLINE_S) as running:
        yield running


def on_disk(stack: Stack, version: Version) -> dict[str, torch.Tensor]:
    return load_file(stack.directory / f"v{version}" / "model.safetensors")


async def test_a_pushed_version_is_stored_bit_for_bit(stack: Stack) -> None:
    report = await stack.push(V1, weights(), deadline_s=DEADLINE_S)
    assert equal_bits(on_disk(stack, V1), weights())
    assert await stack.visible() == [V1]
    assert report.bytes_sent == (stack.directory / "v1.1" / "model.safetensors").stat().st_size
    assert not list((stack.directory / ".incoming").iterdir())


async def test_publishing_the_same_version_again_sends_nothing(stack: Stack) -> None:
    first = await stack.push(V1, weights(), deadline_s=DEADLINE_S)
    again = await stack.push(V1, weights(), deadline_s=DEADLINE_S)
    assert (again.bytes_sent, again.duplicate, again.digest) == (0, True, first.digest)


async def test_a_committed_version_never_changes(stack: Stack) -> None:
    await stack.push(V1, weights(1), deadline_s=DEADLINE_S)
    with pytest.raises(SluiceError) as caught:
        await stack.push(V1, weights(2), deadline_s=DEADLINE_S)
    assert caught.value.code is grpc.StatusCode.ALREADY_EXISTS
    other = ShardSource("model", weights(2))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stack.push_shard(other, V1, digest=other.digest())
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert equal_bits(on_disk(stack, V1), weights(1))


async def test_a_shard_of_a_committed_version_with_the_same_digest_is_accepted_unread(stack: Stack) -> None:
    await stack.push(V1, weights(), deadline_s=DEADLINE_S)
    source = ShardSource("model", weights())
    response = await stack.push_shard(source, V1, until=0, digest=source.digest())
    assert response.stored_bytes == source.size


async def test_a_push_goes_on_where_it_broke(stack: Stack) -> None:
    source = ShardSource("model", weights())
    partial = await stack.push_shard(source, V1, until=3000)
    assert partial.stored_bytes == 3000
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.push_shard(source, V1, offset=2000)
    error = error_of(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SHARD_OFFSET")
    whole = await stack.push_shard(source, V1, offset=int(error.metadata["stored_bytes"]))
    assert whole.digest == source.digest()
    await stack.commit(manifest_of(V1, source))
    assert equal_bits(on_disk(stack, V1), weights())


async def test_resuming_an_unknown_shard_is_sent_back_to_its_beginning(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.push_shard(ShardSource("model", weights()), V1, offset=1000)
    assert error_of(caught.value).metadata["stored_bytes"] == "0"


async def test_a_push_begun_anew_replaces_what_came_in_before(stack: Stack) -> None:
    await stack.push_shard(ShardSource("model", weights(1)), V1, until=2000)
    source = ShardSource("model", weights(2))
    await stack.push_shard(source, V1)
    await stack.commit(manifest_of(V1, source))
    assert equal_bits(on_disk(stack, V1), weights(2))


def flip_first_bit(chunk: pb.Chunk) -> None:
    chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]


async def test_a_damaged_chunk_is_data_loss_and_leaves_nothing(stack: Stack) -> None:
    source = ShardSource("model", weights())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.push_shard(source, V1, damage=flip_first_bit)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await stack.commit(manifest_of(V1, source))
    assert error_of(missing.value).reason == "SHARDS_MISSING"
    assert await stack.visible() == []


async def test_a_shard_that_differs_from_its_announced_digest_is_discarded(stack: Stack) -> None:
    source = ShardSource("model", weights())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.push_shard(source, V1, digest="0" * 32)
    assert error_of(caught.value).reason == "SHARD_DIGEST"


def too_large(chunk: pb.Chunk) -> None:
    chunk.data = bytes((1 << 20) + 1)


def overlapping(chunk: pb.Chunk) -> None:
    chunk.offset = 0


@pytest.mark.parametrize("damage", [too_large, overlapping])
async def test_chunks_against_the_contract_are_refused(stack: Stack, damage: object) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.push_shard(ShardSource("model", weights()), V1, damage=damage)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "", "x" * 129])
async def test_shard_names_that_could_leave_the_directory_are_refused(stack: Stack, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.push_shard(ShardSource(name, weights()), V1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("run", ["runs/../etc", "runs/", "nowhere", "runs/Upper", "runs/a/b"])
async def test_run_names_that_could_leave_the_directory_are_refused(stack: Stack, run: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.sync.ListVersions(pb.ListVersionsRequest(run=run), timeout=DEADLINE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_that_was_superseded_takes_nothing_from_the_one_that_goes_on(stack: Stack) -> None:
    source = ShardSource("model", weights())

    def begin(offset: int) -> pb.PushWeightsRequest:
        header = pb.PushHeader(run=RESOURCE, version=V1.to_proto(), shard=source.describe(), resume_offset=offset)
        return pb.PushWeightsRequest(header=header)

    def chunk(start: int, end: int) -> pb.PushWeightsRequest:
        return pb.PushWeightsRequest(chunk=make_chunk(start, read_source(source, start, end)))

    run = await stack.runs.open(RESOURCE)
    older = stack.sync.PushWeights(timeout=DEADLINE_S)
    await older.write(begin(0))
    await older.write(chunk(0, 1000))
    await eventually(lambda: [each.stored for each in run.uploads.values()] == [1000])
    newer = stack.sync.PushWeights(timeout=DEADLINE_S)
    await newer.write(begin(1000))
    await newer.write(chunk(1000, 2000))
    await eventually(lambda: [each.stored for each in run.uploads.values()] == [2000])
    damaged = chunk(1000, 2000)
    flip_first_bit(damaged.chunk)
    await older.write(damaged)
    await older.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await older
    assert caught.value.code() in {grpc.StatusCode.ABORTED, grpc.StatusCode.DATA_LOSS}
    await newer.write(chunk(2000, source.size))
    await newer.done_writing()
    assert (await newer).digest == source.digest()
    await stack.commit(manifest_of(V1, source))
    assert equal_bits(on_disk(stack, V1), weights())


def test_an_upload_that_ends_while_the_disk_begins_to_write_is_no_failure(tmp_path: Path) -> None:
    source = ShardSource("model", weights())
    upload = Upload(tmp_path / "shard", source.describe(), 0.0)
    ticket, _ = upload.take_over()
    upload.append(ticket, 0, read_source(source, 0, 100))
    upload.close()  # as the end of the service does
    upload.flush()
    upload.discard()
    upload.flush()
    assert not list(tmp_path.iterdir())


async def test_bytes_that_are_no_safetensors_file_are_refused(stack: Stack) -> None:
    async def requests() -> AsyncIterator[pb.PushWeightsRequest]:
        shard = pb.Shard(name="model", size_bytes=100)
        yield pb.PushWeightsRequest(header=pb.PushHeader(run=RESOURCE, version=V1.to_proto(), shard=shard))
        yield pb.PushWeightsRequest(chunk=make_chunk(0, b"\xff" * 100))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.sync.PushWeights(requests(), timeout=DEADLINE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_idle_push_fails_and_can_be_resumed(tmp_path: Path) -> None:
    clock, source = SimulatedClock(), ShardSource("model", weights())
    async with running_stack(tmp_path, clock=clock, chunk_idle_s=IDLE_S) as stack:
        run = await stack.runs.open(RESOURCE)
        call = stack.sync.PushWeights(timeout=DEADLINE_S)
        header = pb.PushHeader(run=RESOURCE, version=V1.to_proto(), shard=source.describe())
        await call.write(pb.PushWeightsRequest(header=header))
        for begin in (0, 1000):
            chunk = make_chunk(begin, read_source(source, begin, begin + 1000))
            await call.write(pb.PushWeightsRequest(chunk=chunk))
            await clock.until(lambda end=begin + 1000: [each.stored for each in run.uploads.values()] == [end])
            await clock.advance(IDLE_S * 0.9)  # each chunk gives the push as much time again
        await clock.advance(IDLE_S * 0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert error_of(caught.value).reason == "PUSH_IDLE"
        assert (await stack.push_shard(source, V1, offset=2000)).digest == source.digest()
        await stack.push(V1, weights(), deadline_s=DEADLINE_S)
        assert await stack.visible() == [V1]


async def test_a_commit_names_the_shards_that_are_missing(stack: Stack) -> None:
    tensors = weights()
    names = sorted(tensors)
    first = ShardSource("rank0", {name: tensors[name] for name in names[:3]})
    second = ShardSource("rank1", {name: tensors[name] for name in names[3:]})
    await stack.push_shard(first, V1)
    await stack.push_shard(second, V1, until=200, chunk_bytes=100)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.commit(manifest_of(V1, first, second))
    assert "rank1" in str(caught.value.details())
    assert await stack.visible() == []
    await stack.push_shard(second, V1, offset=200)
    await stack.commit(manifest_of(V1, first, second))
    files = sorted((stack.directory / "v1.1").glob("*.safetensors"))
    assert equal_bits(load_file(files[0]) | load_file(files[1]), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
async def test_values_that_are_not_finite_never_become_a_version(
    stack: Stack, dtype: torch.dtype, value: float
) -> None:
    poisoned = weights()
    poisoned["model.poisoned"] = torch.zeros(999, dtype=dtype)
    poisoned["model.poisoned"][731] = value
    with pytest.raises(SluiceError) as caught:
        await stack.push(V1, poisoned, deadline_s=DEADLINE_S)
    assert caught.value.reason == "NON_FINITE"
    assert "model.poisoned" in caught.value.message
    await stack.push(V1, weights(), deadline_s=DEADLINE_S)


async def test_an_older_start_of_the_trainer_is_refused(stack: Stack) -> None:
    await stack.push(Version(2, 0), weights(), deadline_s=DEADLINE_S)
    with pytest.raises(SluiceError) as caught:
        await stack.push(Version(1, 7), weights(), deadline_s=DEADLINE_S)
    assert caught.value.reason == "OLDER_EPOCH"


async def test_a_digest_that_differs_at_commit_is_data_loss(stack: Stack) -> None:
    source = ShardSource("model", weights())
    await stack.push_shard(source, V1)
    manifest = manifest_of(V1, source)
    manifest.shards[0].tensors[0].digest = "0" * 32
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.commit(manifest)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert await stack.visible() == []


async def test_slices_of_ranks_are_assembled_into_whole_tensors(stack: Stack) -> None:
    whole = torch.randn(6, 8)
    parts = {"rank0": (whole[:3], (0, 0)), "rank1": (whole[3:, :5], (3, 0)), "rank2": (whole[3:, 5:], (3, 5))}
    manifest = pb.Manifest(run=RESOURCE, version=V1.to_proto(), kind=pb.VERSION_KIND_ANCHOR)
    for name, (part, offsets) in parts.items():
        source = ShardSource(name, {"w": part, f"own.{name}": torch.ones(3)})
        await stack.push_shard(source, V1)
        shard = source.describe(source.tensor_digests())
        for tensor in shard.tensors:
            if tensor.name == "w":
                tensor.global_shape[:], tensor.offsets[:], tensor.sizes[:] = whole.shape, offsets, part.shape
        manifest.shards.append(shard)
    response = await stack.commit(manifest)
    stored = on_disk(stack, V1)
    assert equal_bits({"w": stored["w"]}, {"w": whole})
    assert [shard.name for shard in response.manifest.shards] == ["model"]
    assert (await stack.commit(manifest)).duplicate
    gap = pb.Manifest()
    gap.CopyFrom(manifest)
    gap.version.number = 9
    del gap.shards[1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.commit(gap)
    assert "cover" in str(caught.value.details())


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    directory = tmp_path / "shared"
    directory.mkdir()
    return directory


async def push_local(stack: Stack, path: Path, *, size: int | None = None, inode: int = 0) -> pb.PushWeightsResponse:
    """Name the file at the path, followed through links, as a shard."""
    status = os.stat(path)  # noqa: PTH116 - what the contract speaks of
    local = pb.LocalFile(shard="model", path=str(path), device=status.st_dev, inode=inode or status.st_ino)
    shard = pb.Shard(name="model", size_bytes=size or status.st_size)
    header = pb.PushHeader(run=RESOURCE, version=V1.to_proto(), shard=shard, local=local)

    async def requests() -> AsyncIterator[pb.PushWeightsRequest]:
        yield pb.PushWeightsRequest(header=header)

    return await stack.sync.PushWeights(requests(), timeout=DEADLINE_S)


async def test_a_shard_is_copied_from_a_file_of_the_same_host(tmp_path: Path, shared: Path) -> None:
    source = ShardSource("model", weights())
    (shared / "shard").write_bytes(read_source(source, 0, source.size))
    async with running_stack(tmp_path, local_dir=shared) as stack:
        response = await push_local(stack, shared / "shard")
        assert (response.stored_bytes, response.digest) == (source.size, source.digest())
        await stack.commit(manifest_of(V1, source))
        (shared / "shard").write_bytes(b"something else")
        assert equal_bits(on_disk(stack, V1), weights())


async def test_a_file_that_is_not_a_shard_is_refused(tmp_path: Path, shared: Path) -> None:
    (shared / "shard").write_bytes(b"x" * 100)
    async with running_stack(tmp_path, local_dir=shared) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await push_local(stack, shared / "shard")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("trick", ["outside", "link", "linked directory", "inode", "size", "pipe", "off"])
async def test_files_that_the_service_may_not_read_are_left_alone(tmp_path: Path, shared: Path, trick: str) -> None:
    source = ShardSource("model", weights())
    secret, offered = tmp_path / "secret", shared / "shard"
    for path in (secret, offered):
        path.write_bytes(read_source(source, 0, source.size))
    facts: dict[str, int] = {}
    if trick == "outside":
        offered = shared / ".." / "secret"
    elif trick == "link":
        offered = shared / "link"
        offered.symlink_to(secret)
    elif trick == "linked directory":
        (shared / "up").symlink_to(tmp_path)
        offered = shared / "up" / "secret"
    elif trick == "inode":
        facts = {"inode": 1}
    elif trick == "size":
        facts = {"size": source.size + 1}
    elif trick == "pipe":
        offered = shared / "pipe"
        os.mkfifo(offered)
        facts = {"size": source.size}
    async with running_stack(tmp_path, local_dir=None if trick == "off" else shared) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await push_local(stack, offered, **facts)
        assert error_of(caught.value).reason == "NO_LOCAL_FILE"
        await stack.push_shard(source, V1)
