"""One shard on its way to the service: by a file of the host where it sees one, otherwise in chunks, resumable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import grpc
import numpy as np

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.publish.kept_file import KeptFile
from weightsync.publish.shard_source import FileSource

__all__ = ["REPEATABLE", "REPEATABLE_REASONS", "Destination", "ShardTransfer", "wire_chunk"]

REPEATABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
}
"""How a broken connection or a damaged transfer shows; a repeat is harmless, because every step is idempotent."""

REPEATABLE_REASONS = {"SHARDS_MISSING", "PUSH_IDLE", "SHARD_OFFSET"}
"""Refusals that a repeat answers: the service was restarted between push and commit, or this process stood still."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A version at a service.

    Attributes:
        channel: To the weight service.
        run: `runs/{run}`.
        version: Which one.
        deadline: Time of `time.monotonic` at which everything ends.
    """

    channel: grpc.aio.Channel
    run: str
    version: Version
    deadline: float

    @property
    def stub(self) -> weightsync_pb2_grpc.WeightSyncServiceAsyncStub:
        """The service."""
        return weightsync_pb2_grpc.WeightSyncServiceStub(self.channel)

    def remaining(self) -> float:
        """Seconds that are left.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if there are none.
        """
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "PUSH_DEADLINE",
                f"version {self.version} was not published in time; the version before serves on: push again, or allow more",
            )
        return remaining

    async def committed(self) -> bool:
        """Whether the version is there already."""
        request = pb.GetManifestRequest(run=self.run, version=self.version.to_proto())
        try:
            await self.stub.GetManifest(request, timeout=self.remaining(), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False
            raise
        return True


class ShardTransfer:
    """Sends one shard.

    Args:
        to: The version that it belongs to.
        source: Its bytes.
        shard: Its description.
        chunk_bytes: Bytes per chunk.
        kept: A file in shared memory that holds the same bytes; None: there is none yet.
        directory: Shared memory in which the service may find a file; None: send chunks at once.
    """

    def __init__(
        self,
        to: Destination,
        source: FileSource,
        shard: pb.Shard,
        *,
        chunk_bytes: int,
        kept: pb.LocalFile | None = None,
        directory: Path | None = None,
    ) -> None:
        self._to, self._source, self._shard = to, source, shard
        self._chunk_bytes = chunk_bytes
        self._kept, self._directory = kept, directory
        # Messages are serialised here: the stub would build a protobuf object, which copies its bytes twice more.
        self._push = to.channel.stream_unary(
            "/sluice.v1.WeightSyncService/PushWeights",
            request_serializer=_as_is,
            response_deserializer=pb.PushWeightsResponse.FromString,
        )
        self.bytes_sent = 0
        self.refused_file = False
        """Whether the service did not see the file that it was offered."""

    async def send(self, *, resume: bool) -> None:
        """Send what the service lacks; nothing if the version is committed.

        Args:
            resume: Whether to go on behind what the service holds of an earlier attempt.

        Raises:
            grpc.aio.AioRpcError, SluiceError: as the contract says of PushWeights.
        """
        if await self._to.committed():
            return
        if self._directory is not None:
            if await self._hand_over(self._directory):
                return
            self.refused_file = True
        offset = await self._ask_offset() if resume else 0
        if offset < self._source.size:
            await self._call(self._requests(offset))

    async def _hand_over(self, directory: Path) -> bool:
        """Offer the shard as a file; false where the service does not see it."""
        if self._kept is not None:
            return await self._offer(self._kept)
        written = await asyncio.to_thread(_write, self._source, directory)
        try:
            local = written.local(self._source.name)
            return local is not None and await self._offer(local)
        finally:
            await asyncio.to_thread(written.close)  # to give back shared memory takes as long as to fill it

    async def _offer(self, local: pb.LocalFile) -> bool:
        try:
            response = await self._call(_once(self._header(0, local)))
        except grpc.aio.AioRpcError as error:
            if SluiceError.from_rpc(error).reason == "NO_LOCAL_FILE":
                return False
            raise
        if response.stored_bytes != self._source.size:  # a service that does not know of local files
            return False
        self.bytes_sent += self._source.size
        return True

    async def _ask_offset(self) -> int:
        """Where to go on: announces to go on at the end, which the service corrects unless it has everything."""
        try:
            await self._call(_once(self._header(self._source.size)))
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            if failure.reason != "SHARD_OFFSET":
                raise
            return int(failure.metadata["stored_bytes"])
        return self._source.size

    async def _call(self, requests: AsyncIterator[bytes]) -> pb.PushWeightsResponse:
        response: pb.PushWeightsResponse = await self._push(requests, timeout=self._to.remaining())
        return response

    def _header(self, offset: int, local: pb.LocalFile | None = None) -> bytes:
        header = pb.PushHeader(
            run=self._to.run,
            version=self._to.version.to_proto(),
            shard=self._shard,
            resume_offset=offset,
            local=local,
        )
        return pb.PushWeightsRequest(header=header).SerializeToString()

    async def _requests(self, offset: int) -> AsyncIterator[bytes]:
        yield self._header(offset)
        for begin, end in self._source.spans(offset, self._chunk_bytes):
            # Here and not in a thread: the way there and back takes longer than a chunk's sum and copy (0.15 ms).
            yield wire_chunk(begin, self._source.pieces(begin, end))
            self.bytes_sent += end - begin


def wire_chunk(offset: int, pieces: Sequence[memoryview]) -> bytes:
    """A PushWeightsRequest with a chunk, serialised: its bytes are copied once.

    Fields in the order of their numbers, as protobuf writes them: chunk = 2 {offset = 1, data = 2, crc32c = 3}.
    """
    checksum = 0
    for piece in pieces:
        checksum = google_crc32c.extend(checksum, np.frombuffer(piece, dtype=np.uint8))
    head = (b"\x08" + _varint(offset) if offset else b"") + b"\x12" + _varint(sum(map(len, pieces)))
    tail = b"\x1d" + checksum.to_bytes(4, "little") if checksum else b""
    size = len(head) + sum(map(len, pieces)) + len(tail)
    return b"".join((b"\x12", _varint(size), head, *pieces, tail))


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _write(source: FileSource, directory: Path) -> KeptFile:
    file = KeptFile(source.size, directory)
    if file.path is not None:
        position = 0
        for piece in source.pieces(0, source.size):
            file.bytes[position : position + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            position += len(piece)
    return file


async def _once(message: bytes) -> AsyncIterator[bytes]:
    yield message


def _as_is(message: bytes) -> bytes:
    return message
