"""A weight service in this process, with what its tests push into it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch
import xxhash

from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, SecurityConfig, ServerConfig
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import BASE, Version
from weightsync.app import build_runs
from weightsync.config import WeightSyncConfig
from weightsync.format.chunks import fill_chunk
from weightsync.format.manifest import manifest_digest
from weightsync.format.safetensors import DTYPES, place, render_header
from weightsync.publish.push import PushReport
from weightsync.publish.shards import FileSource, local_slices, tensor_bytes
from weightsync.publisher import WeightPublisher
from weightsync.receiver import WeightReceiver
from weightsync.service.runs import Runs
from weightsync.service.servicer import WeightDeliveryServicer, WeightSyncServicer
from weightsync.staged import ApplyError, ApplyReport, HeldVersions, StagedAdapter, StagedVersion

RUN = "test-run"
RESOURCE = f"runs/{RUN}"

CORE = "Internal error from Core"
"""What gRPC's client says of a write that meets a refusal, in place of the refusal."""


class ShardSource(FileSource):
    """One shard of whole CPU tensors by name, wide elements first, as a trainer lays it out."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        held = sorted(local_slices(tensors), key=lambda row: (-DTYPES[row[0].dtype].size, row[0].name))
        self.slices = [each for each, _ in held]
        self.entries = place([(each.name, each.dtype, tuple(each.global_shape)) for each in self.slices])
        header = render_header(self.entries, {"format": "pt"})
        super().__init__(name, [memoryview(header), *(tensor_bytes(tensor).data for _, tensor in held)])

    def tensor_digests(self) -> dict[str, str]:
        digests = (str(xxhash.xxh3_128(part).hexdigest()) for part in self._parts[1:])
        return {entry.name: digest for entry, digest in zip(self.entries, digests, strict=True)}

    def describe(self, digests: Mapping[str, str] | None = None) -> pb.Shard:
        """The shard as the contract describes it, with the tensors' digests if they are given."""
        shard = pb.Shard(name=self.name, size_bytes=self.size, tensors=self.slices)
        for tensor in shard.tensors:
            tensor.encoding = pb.TENSOR_ENCODING_DENSE
            tensor.digest = digests[tensor.name] if digests else ""
        return shard


@dataclass
class Stack:
    """A running service and ways to it."""

    target: str
    directory: Path
    runs: Runs
    channel: grpc.aio.Channel
    sync: weightsync_pb2_grpc.WeightSyncServiceAsyncStub
    delivery: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub
    publisher: WeightPublisher
    dense_publisher: WeightPublisher

    async def push(self, version: Version, tensors: Mapping[str, torch.Tensor], *, deadline_s: float) -> PushReport:
        """Push whole tensors, by a publisher that never compares."""
        return await self.dense_publisher.update(version, tensors, deadline_s=deadline_s)

    async def push_shard(
        self,
        source: ShardSource,
        version: Version,
        *,
        offset: int = 0,
        until: int | None = None,
        digest: str = "",
        damage: Callable[[pb.Chunk], None] | None = None,
        chunk_bytes: int = 1000,
    ) -> pb.PushWeightsResponse:
        """Push by hand, possibly a part, possibly damaged."""

        async def requests() -> AsyncIterator[pb.PushWeightsRequest]:
            shard = source.describe()
            shard.digest = digest
            header = pb.PushHeader(run=RESOURCE, version=version.to_proto(), shard=shard, resume_offset=offset)
            yield pb.PushWeightsRequest(header=header)
            for begin, end in source.spans(offset, chunk_bytes):
                if until is not None and end > until:
                    return
                chunk = make_chunk(begin, read_source(source, begin, end))
                if damage is not None:
                    damage(chunk)
                yield pb.PushWeightsRequest(chunk=chunk)

        for _ in range(50):
            try:
                return await self.sync.PushWeights(requests(), timeout=60)
            except grpc.aio.AioRpcError as error:
                if error.details() != CORE:
                    raise
        raise AssertionError("no push was answered")

    async def commit(self, manifest: pb.Manifest) -> pb.CommitVersionResponse:
        return await self.sync.CommitVersion(pb.CommitVersionRequest(manifest=manifest), timeout=60)

    async def visible(self) -> list[Version]:
        response = await self.sync.ListVersions(pb.ListVersionsRequest(run=RESOURCE), timeout=60)
        return [Version.from_proto(manifest.version) for manifest in response.versions]

    async def pull(
        self, version: Version, shard: str = "model", offset: int = 0, length: int = 0, base: Version | None = None
    ) -> bytes:
        request = pb.PullWeightsRequest(
            run=RESOURCE,
            version=version.to_proto(),
            shard=shard,
            offset=offset,
            length=length,
            base=None if base is None else base.to_proto(),
        )
        received = b""
        async for response in self.delivery.PullWeights(request, timeout=60):
            assert response.chunk.offset == offset + len(received)
            received += response.chunk.data
        return received


@asynccontextmanager
async def running_stack(
    output_dir: Path,
    *,
    port: int = 0,
    model: str = "",
    chat_template: Path | None = None,
    clock: Clock = CLOCK,
    **settings: object,
) -> AsyncIterator[Stack]:
    """Serve on loopback until the block ends."""
    common = CommonConfig(output_dir=output_dir, run=RUN, model=model, chat_template=chat_template)
    config = WeightSyncConfig.model_validate({"server": ServerConfig(port=port), "min_free_bytes": 0, **settings})
    runs = build_runs(common, config, clock=clock)
    ingest, delivery = WeightSyncServicer(runs), WeightDeliveryServicer(runs)
    server = RpcServer("weightsync", config.server, SecurityConfig())
    server.add(weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server, ingest, "sluice.v1.WeightSyncService")
    server.add(
        weightsync_pb2_grpc.add_WeightDeliveryServiceServicer_to_server, delivery, "sluice.v1.WeightDeliveryService"
    )
    with contextlib.suppress(SluiceError):  # as the service does; a test may check its answers after that
        await runs.open(RESOURCE)
    target = f"127.0.0.1:{await server.start()}"
    channel = connect(target, SecurityConfig())
    retention = asyncio.create_task(runs.retain_forever())
    try:
        yield Stack(
            target,
            output_dir / RUN / "weights",
            runs,
            channel,
            weightsync_pb2_grpc.WeightSyncServiceStub(channel),
            weightsync_pb2_grpc.WeightDeliveryServiceStub(channel),
            WeightPublisher(channel, RUN, chunk_bytes=1000),
            WeightPublisher(channel, RUN, chunk_bytes=1000, encoding="dense"),
        )
    finally:
        await channel.close()
        await server.stop(0)
        retention.cancel()
        await asyncio.wait({retention})
        await runs.close()


class EngineDouble:
    """An engine without adapters, as its receiver sees one: it serves what it was given last. Subclasses say how it applies."""

    serves_adapters = False

    def __init__(self) -> None:
        self.version = BASE

    def held(self) -> HeldVersions | None:
        return HeldVersions(self.version, self.version)

    async def apply(self, staged: StagedVersion) -> ApplyReport:
        self.version = staged.version
        return ApplyReport(staged.version, 0.002, 0.001)

    async def apply_adapter(self, staged: StagedAdapter) -> ApplyReport:
        raise ApplyError(f"{staged.version} is an adapter")


@asynccontextmanager
async def following(receiver: WeightReceiver) -> AsyncIterator[None]:
    """Let a receiver follow until the block ends."""
    task = asyncio.create_task(receiver.run_forever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        await receiver.close()


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes, a scalar and an empty one among them."""
    random = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(64, 16, generator=random),
        "model.norm.weight": torch.randn(16, generator=random).bfloat16(),
        "model.half": torch.randn(7, 3, generator=random).half(),
        "model.transposed": torch.randn(5, 9, generator=random).t(),
        "model.scalar": torch.tensor(0.5 + seed),
        "model.empty": torch.zeros(0, 4),
        "model.steps": torch.tensor([seed, 2**40]),
    }


def read_source(source: FileSource, begin: int, end: int) -> bytes:
    """Return the bytes of a shard's file from `begin` to before `end`."""
    return b"".join(source.views(begin, end))


def manifest_of(version: Version, *sources: ShardSource) -> pb.Manifest:
    """The manifest of a version whose shards hold whole tensors."""
    shards = [source.describe(source.tensor_digests()) for source in sources]
    manifest = pb.Manifest(run=RESOURCE, version=version.to_proto(), kind=pb.VERSION_KIND_ANCHOR, shards=shards)
    manifest.digest = manifest_digest(manifest)
    return manifest


def make_chunk(offset: int, data: bytes) -> pb.Chunk:
    """A chunk with its checksum."""
    chunk = pb.Chunk()
    fill_chunk(chunk, offset, data)
    return chunk


def equal_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and found[name].contiguous().flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))
        for name, tensor in expected.items()
    )


def error_of(caught: grpc.aio.AioRpcError) -> SluiceError:
    return SluiceError.from_rpc(caught)


async def eventually(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Return when the condition holds; fail after the deadline."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - any condition, of any process
            await asyncio.sleep(0.005)
