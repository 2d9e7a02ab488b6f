"""Pushes one version: each rank's shard, as a file on the host or in chunks, then one commit. The same for every payload.

Ranks that push together exchange messages; if one rank fails, all ranks fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeAlias

import grpc
import numpy as np
import structlog
import torch
import torch.distributed as dist
import xxhash
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from sluice.rpc import SluiceError
from sluice.rpc.errors import CODES
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.format.chunks import push_request
from weightsync.format.manifest import manifest_digest
from weightsync.publish.shards import FileSource, KeptFile

_PASSING = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Transient failures: the push is retried until its deadline. A retry is harmless, because every step is idempotent."""

_PASSING_REASONS = {"SHARDS_MISSING", "SHARD_OFFSET"}
"""Transient refusals: the service was restarted between push and commit, or this process was paused."""

_ONCE = {grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED}
"""Codes of a broken connection that may also mean a defect: the push is retried, unless its previous attempt failed so, too."""

_ONCE_REASONS = {"SUPERSEDED"}
"""The same for refusals: a broken stream of this push may have arrived late, but two publishers must not displace each other forever."""

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
"""The first retry comes at once; the pauses before the next retries double from the first to the longest. All ranks pause alike."""

_MOST_ANSWER_BYTES = 256 << 20
"""Longest accepted answer: descriptions of about two million slices."""

_LATE = "PUSH_DEADLINE"
"""Reason of the error that ends a push at its deadline."""

_BASE_REASONS = {"BASE_UNKNOWN", "BASE_DAMAGED"}
"""Refusals of a delta after which the dense version is pushed."""

_RESERVE_S = 5.0
"""Seconds of the deadline that ranks reserve to report a failure to each other; at most a tenth of the deadline."""

Answer: TypeAlias = bytes | SluiceError
"""A rank's answer: a message, or why it cannot continue."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PushReport:
    """The cost of publishing a version. With several ranks: the sums of their bytes, and the seconds of the slowest.

    Attributes:
        bytes_sent: Bytes of the shards that were handed over, retries included; 0 if the service had the version.
        push_s: Seconds until the service held every byte on disk.
        commit_s: Seconds that the commit took.
        duplicate: Whether the version was committed before.
        kind: The contract's name of the form that travelled.
        dense_bytes: Bytes of a dense copy.
        diff_s: Seconds of comparing and encoding.
        changed_fraction: Fraction of the compared values that differ from the previous version; 1 if none were compared.
    """

    bytes_sent: int
    push_s: float
    commit_s: float
    digest: str
    duplicate: bool
    kind: Literal["anchor", "delta"] = "anchor"
    dense_bytes: int = 0
    diff_s: float = 0.0
    changed_fraction: float = 1.0


@dataclass(frozen=True, slots=True)
class Destination:
    """A version at a service. Everything ends at `deadline`, a time of `time.monotonic`."""

    channel: grpc.aio.Channel
    run: str
    version: Version
    deadline: float

    @property
    def stub(self) -> weightsync_pb2_grpc.WeightSyncServiceAsyncStub:
        """Return the service."""
        return weightsync_pb2_grpc.WeightSyncServiceStub(self.channel)

    @property
    def left_s(self) -> float:
        """Seconds that are left; below 0 after the deadline."""
        return self.deadline - time.monotonic()

    def remaining(self) -> float:
        """Return the seconds that are left; raise SluiceError DEADLINE_EXCEEDED if there are none."""
        remaining = self.left_s
        if remaining <= 0:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                _LATE,
                f"version {self.version} was not published in time; the version before is still served: push again,"
                " or allow more time",
            )
        return remaining

    async def committed(self) -> bool:
        """Return whether the version is there already."""
        request = pb.GetManifestRequest(run=self.run, version=self.version.to_proto())
        try:
            await self.stub.GetManifest(request, timeout=self.remaining(), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False
            raise
        return True


@dataclass(frozen=True, slots=True)
class Payload:
    """What is pushed: a dense version, a delta, or an adapter.

    Attributes:
        manifest: Its manifest without the shards: kind, base, labels, adapter_config, push_timings.
        make: Makes this rank's shard: the bytes to send, and their description with digests. Called in a thread. The memory
            that the shard refers to must not change until the push has ended. None: this rank has no shard.
        local: A file in shared memory that holds the shard's bytes; None: there is none yet.
    """

    manifest: pb.Manifest
    make: Callable[[], tuple[FileSource, pb.Shard]] | None
    local: pb.LocalFile | None = None


class VersionPush:
    """Pushes one version.

    Args:
        to: The version at its service.
        payloads: Payloads to try in order: the next one if the service lacks the base of the previous one. All ranks pass
            payloads of the same kinds.
        exchange: The ranks that publish it together; None: this process is alone.
        chunk_bytes: Bytes per chunk.
        directory: Shared memory in which the service may find files; None: send chunks.
        given_up: Asked before each attempt: whether to end the push on all ranks instead.

    Attributes:
        handed_over: Whether the service took a file of this host; None if none was tried.
    """

    def __init__(
        self,
        to: Destination,
        payloads: Sequence[Payload],
        exchange: RankExchange | None,
        *,
        chunk_bytes: int,
        directory: Path | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        reserve = min(_RESERVE_S, (to.deadline - time.monotonic()) / 10) if exchange is not None else 0.0
        self._to = Destination(to.channel, to.run, to.version, to.deadline - reserve)
        self._deadline = to.deadline
        self._payloads, self._exchange = list(payloads), exchange
        self._chunk_bytes, self._directory = chunk_bytes, directory
        self._bytes_sent = 0
        self._given_up = given_up
        self.handed_over: bool | None = None

    async def run(self) -> PushReport:
        """Push and commit. After a transient failure, retry from where the push broke off, until the deadline.

        If the base of a delta is missing, push dense.

        Only this method retries a push. If one rank fails, all ranks fail, so that all of them retry, pause and end alike.

        Raises:
            SluiceError: the failure of any rank, the same on all ranks. At the deadline, the failure of the attempts before.
        """
        resume, failures = False, 0
        failure: SluiceError | None = None
        before: SluiceError | None = None
        while True:
            try:
                return await self._attempt(self._payloads[0], resume=resume)
            except SluiceError as error:
                if error.reason == _LATE and failure is not None:
                    raise failure from error
                pause_s = 0.0
                if len(self._payloads) > 1 and error.reason in _BASE_REASONS:
                    del self._payloads[0]
                    resume = False
                elif _may_pass(error, before):
                    if failure is None or error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:  # it says least
                        failure = error
                    if failures:
                        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failures - 1))
                    failures += 1
                    resume = True
                else:
                    raise
                before = error
                log.warning("push failed, retrying", version=str(self._to.version), error=str(error), pause_s=pause_s)
            await asyncio.sleep(min(pause_s, max(0.0, self._to.left_s)))

    async def _attempt(self, payload: Payload, *, resume: bool) -> PushReport:
        """Send every rank's shard, have rank 0 commit them, and tell all ranks the outcome."""
        sent = await self._share("shards", await self._send(payload, resume=resume))
        pushed = time.perf_counter()
        parts = [pb.Manifest.FromString(each) for each in sent]
        leads = self._exchange is None or self._exchange.rank == 0
        outcome = await self._share("outcome", await self._commit(payload, parts) if leads else b"")
        response = pb.CommitVersionResponse.FromString(outcome[0])
        delta = payload.manifest.kind == pb.VERSION_KIND_DELTA
        return PushReport(
            bytes_sent=sum(part.size_bytes for part in parts),
            push_s=max(part.push_timings.push.ToNanoseconds() for part in parts) / 1e9,
            commit_s=time.perf_counter() - pushed,
            digest=response.manifest.digest,
            duplicate=response.duplicate,
            kind="delta" if delta else "anchor",
        )

    async def _send(self, payload: Payload, *, resume: bool) -> Answer:
        """Send this rank's shard; return its description, or why it could not be sent."""
        started = time.perf_counter_ns()
        part = pb.Manifest()
        try:
            shard = await self._send_shard(payload, resume=resume)
        except Exception as error:  # noqa: BLE001  after any error the other ranks wait for this one's message
            return _typed(error)
        if shard is not None:
            part.shards.append(shard)
        part.size_bytes = self._bytes_sent
        part.push_timings.push.FromNanoseconds(time.perf_counter_ns() - started)
        return part.SerializeToString()

    async def _send_shard(self, payload: Payload, *, resume: bool) -> pb.Shard | None:
        self._to.remaining()
        if self._given_up():
            raise SluiceError.failed_precondition(
                "OVERTAKEN", f"the push of version {self._to.version} was given up: nobody waits for it any more"
            )
        if payload.make is None:
            return None
        source, shard = await asyncio.to_thread(payload.make)
        transfer = _ShardTransfer(self._to, source, shard, self._chunk_bytes)
        try:
            if await self._to.committed():
                return shard
            refused = resume and self.handed_over is False  # chunks were sent then, and are continued
            if self._directory is not None and not refused:
                self.handed_over = await transfer.hand_over(self._directory, payload.local)
                if self.handed_over:
                    return shard
            await transfer.send_chunks(resume=resume)
        finally:
            self._bytes_sent += transfer.bytes_sent
        return shard

    async def _commit(self, payload: Payload, parts: Sequence[pb.Manifest]) -> Answer:
        manifest = pb.Manifest(
            run=self._to.run,
            version=self._to.version.to_proto(),
            shards=[each for part in parts for each in part.shards],
        )
        manifest.MergeFrom(payload.manifest)
        slowest = max((part.push_timings.push for part in parts), key=Duration.ToNanoseconds)
        manifest.push_timings.push.CopyFrom(slowest)
        manifest.digest = manifest_digest(manifest)
        try:
            request = pb.CommitVersionRequest(manifest=manifest)
            response = await self._to.stub.CommitVersion(request, timeout=self._to.remaining())
        except (grpc.aio.AioRpcError, SluiceError) as error:
            return _typed(error)
        digest = pb.Manifest(digest=response.manifest.digest)
        return pb.CommitVersionResponse(manifest=digest, duplicate=response.duplicate).SerializeToString()

    async def _share(self, what: str, answer: Answer) -> list[bytes]:
        """Return every rank's message; raise the failure if any rank failed."""
        if self._exchange is not None:
            step = f"{what} {self._to.version}"
            return await asyncio.to_thread(self._exchange.all_gather, step, answer, self._deadline)
        if isinstance(answer, SluiceError):
            raise answer
        return [answer]


class _ShardTransfer:
    """Sends one shard: as a file on this host, or in chunks. `bytes_sent` counts the bytes that the service took."""

    def __init__(self, to: Destination, source: FileSource, shard: pb.Shard, chunk_bytes: int) -> None:
        self._to, self._source, self._shard, self._chunk_bytes = to, source, shard, chunk_bytes
        # Messages are serialised here: the stub would build a protobuf object, which copies its bytes twice more.
        self._push = to.channel.stream_unary(
            "/sluice.v1.WeightSyncService/PushWeights",
            request_serializer=bytes,  # messages are bytes already; this copies nothing
            response_deserializer=pb.PushWeightsResponse.FromString,
        )
        self.bytes_sent = 0

    async def hand_over(self, directory: Path, local: pb.LocalFile | None) -> bool:
        """Tell the service the name of a file on this host that holds the shard. Return whether the service took the file.

        The file is `local`, or a new one in the directory of shared memory.
        """
        if local is not None:
            return await self._hand_over_file(local)
        written = await asyncio.to_thread(_write, self._source, directory)
        try:
            local = written.local(self._source.name)
            return local is not None and await self._hand_over_file(local)
        finally:
            await asyncio.to_thread(written.close)  # freeing shared memory takes as long as filling it

    async def send_chunks(self, *, resume: bool) -> None:
        """Send the shard; with `resume`, only the bytes that the service still lacks after an earlier attempt."""
        offset = await self._ask_offset() if resume else 0
        if offset < self._source.size:
            await self._call(self._requests(offset))

    async def _hand_over_file(self, local: pb.LocalFile) -> bool:
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
        """Return where to continue. The service refuses a header with any other byte than the next one, and names that byte."""
        try:
            await self._call(_once(self._header(self._source.size)))
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            if failure.reason != "SHARD_OFFSET":
                raise
            return int(failure.metadata["stored_bytes"])
        return self._source.size

    async def _call(self, requests: AsyncIterator[bytes]) -> pb.PushWeightsResponse:
        return await self._push(requests, timeout=self._to.remaining())

    def _header(self, offset: int, local: pb.LocalFile | None = None) -> bytes:
        header = pb.PushHeader(
            run=self._to.run, version=self._to.version.to_proto(), shard=self._shard, resume_offset=offset, local=local
        )
        return pb.PushWeightsRequest(header=header).SerializeToString()

    async def _requests(self, offset: int) -> AsyncIterator[bytes]:
        yield self._header(offset)
        for begin, end in self._source.spans(offset, self._chunk_bytes):
            # Not in a thread: switching to it and back takes longer than a chunk's checksum and copy (0.15 ms).
            yield push_request(begin, self._source.views(begin, end))
            self.bytes_sent += end - begin


def _may_pass(error: SluiceError, before: SluiceError | None) -> bool:
    """Return whether another attempt may succeed after `error`. `before` is the failure of the previous attempt, if it failed."""
    if _passes_once(error):
        return before is None or not _passes_once(before)
    return error.reason != _LATE and (error.code in _PASSING or error.reason in _PASSING_REASONS)


def _passes_once(error: SluiceError) -> bool:
    return error.code in _ONCE or error.reason in _ONCE_REASONS


def _write(source: FileSource, directory: Path) -> KeptFile:
    file = KeptFile(source.size, directory)
    if file.path is not None:
        position = 0
        for view in source.views(0, source.size):
            file.bytes[position : position + len(view)] = np.frombuffer(view, dtype=np.uint8)
            position += len(view)
    return file


def _typed(error: Exception) -> SluiceError:
    if isinstance(error, grpc.aio.AioRpcError):
        return SluiceError.from_rpc(error)
    if isinstance(error, SluiceError):
        return error
    return SluiceError(grpc.StatusCode.INTERNAL, "PUSH_FAILED", f"{type(error).__name__}: {error}")


async def _once(message: bytes) -> AsyncIterator[bytes]:
    yield message


# --- several ranks ----------------------------------------------------------------------------------------------------


def to_wire(answer: Answer) -> tuple[int, bytes]:
    """Return a status code (0 is OK) and bytes."""
    if isinstance(answer, bytes):
        return 0, answer
    return answer.code.value[0], answer.to_status().SerializeToString()


def from_wire(code: int, data: bytes) -> Answer:
    """Rebuild what `to_wire` returned."""
    if not code:
        return data
    status = Status()
    try:
        status.ParseFromString(data)
    except DecodeError:
        status.message = "a rank failed and sent no readable reason"
    return SluiceError.from_status(status, CODES.get(code, grpc.StatusCode.UNKNOWN))


class RankExchange:
    """Exchanges messages among the ranks that publish one model together.

    Every exchange is a collective operation: all ranks call it, in the same order, and if one fails, all fail. Nothing is
    pickled; answers are protobuf messages in uint8 tensors.

    Args:
        group: A process group of CPU tensors (gloo) that nothing else uses, since operations of two threads on one group
            would cross.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._out_of_step = False
        self.rank = dist.get_rank(group)

    def all_gather(self, step: str, answer: Answer, deadline: float) -> list[bytes]:
        """Send an answer to all ranks; return every rank's message, in the order of the ranks. Blocking.

        Args:
            step: What the exchange is about. Ranks at different steps (one was interrupted) must not mistake each other's
                answers.
            answer: This rank's message, or its failure.
            deadline: Time of `time.monotonic` at which to give up.

        Raises:
            SluiceError: the failure of the lowest rank that failed; FAILED_PRECONDITION RANK_LOST if a rank is gone, silent
                beyond the deadline or at another step. The group cannot be used after that.
        """
        if self._out_of_step:
            raise _gone("an earlier exchange was not finished")
        self._out_of_step = True
        code, data = to_wire(answer)
        mark = xxhash.xxh3_64_intdigest(step.encode()) >> 1  # into the range of int64
        lengths = self._gather(torch.tensor([code, len(data), mark], dtype=torch.int64), deadline)
        if any(int(each[2]) != mark for each in lengths):
            raise _gone(f"they are at different steps, this one at {step!r}")
        sizes = [int(each[1]) for each in lengths]
        longest = max(sizes)
        if longest > _MOST_ANSWER_BYTES:
            raise SluiceError.invalid_argument("tensors", f"a rank describes its slices in {longest} bytes: too many")
        padded = torch.zeros(max(1, longest), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        received = self._gather(padded, deadline)
        self._out_of_step = False
        return messages(
            [
                from_wire(int(length[0]), each[:size].numpy().tobytes())
                for length, size, each in zip(lengths, sizes, received, strict=True)
            ]
        )

    def _gather(self, tensor: torch.Tensor, deadline: float) -> list[torch.Tensor]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise _gone("no time is left")
        received = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._group))]
        try:
            work = dist.all_gather(received, tensor, group=self._group, async_op=True)
            work.wait(timedelta(seconds=remaining))
        except RuntimeError as error:  # what torch.distributed raises for a lost peer and for a timeout
            raise _gone(str(error).partition("\n")[0]) from error
        return received


def messages(answers: Sequence[Answer]) -> list[bytes]:
    """Return the ranks' messages; raise the failure of the lowest rank that failed."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, SluiceError):
            raise SluiceError(
                answer.code,
                answer.reason,
                f"rank {rank}: {answer.message}",
                retry_after_s=answer.retry_after_s,
                metadata=answer.metadata,
            )
    return [answer for answer in answers if isinstance(answer, bytes)]


def _gone(why: str) -> SluiceError:
    return SluiceError.failed_precondition(
        "RANK_LOST",
        f"the trainer's ranks cannot agree on a version ({why}); nothing was committed by this rank:"
        " start the ranks again with a new process group",
    )
