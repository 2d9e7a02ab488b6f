"""Pull a version into a file: over sockets, or from files of this host.

A version is made from a copy of its base and deltas, from its dense form, or from a dense form and deltas, while the engine
generates. If one way fails, the next is tried: files of this host, sockets, the dense form. A broken stream continues at the
last good byte. Threads check and write each chunk while the next one arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from sluice.backoff import Backoff
from sluice.host_files import PeerFileError, open_peer_file
from sluice.rpc import SluiceError
from sluice.tasks import run_to_end, settle
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.chunks import ChunkError, ChunkSizeError, read_pull_response
from weightsync.metrics import FALLBACKS
from weightsync.receive.sources import Call, Sources
from weightsync.receive.version_file import (
    DeltaShard,
    DenseFile,
    PatchedFile,
    StagingError,
    copy_file,
    verify_other_form,
)

T = TypeVar("T")

_FINAL = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DATA_LOSS,
}
"""Codes of errors that retrying does not fix."""

_LOCAL_BYTES = 64 << 20
"""Bytes of a local file that a thread reads in one go. A cancelled pull ends after at most this many bytes."""

_BLOCK_BYTES = 1 << 20
"""Bytes read at a time; they stay in the processor's cache while they are hashed and written."""

log = structlog.get_logger(__name__)


class PullError(Exception):
    """A version or shard could not be pulled.

    If nobody answered (`unreachable`), asking the same service for other bytes is useless.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


@dataclass(frozen=True, slots=True)
class PullLimits:
    """How long a pull waits, and how much it does at a time.

    Attributes:
        deadline_s: Seconds that one stream may last.
        idle_s: Seconds that a stream may stay without a chunk.
        attempts: Number of streams in a row that may fail without a single chunk.
        first_pause_s: Pause before the second attempt; it doubles from attempt to attempt, up to five seconds. Ten attempts
            bridge half a minute without the service, such as a restart, and nothing is pulled twice.
        streams: Number of shards that are pulled at a time.
        copy_wait_s: Seconds to wait while another process of the host stages the same version.
        room_wait_s: Seconds to wait until receivers of the host have let go of older versions, so that memory holds only the base and
            one staged copy. After that, use the memory that is free.
    """

    deadline_s: float = 3600.0
    idle_s: float = 30.0
    attempts: int = 10
    first_pause_s: float = 0.1
    streams: int = 4
    copy_wait_s: float = 600.0
    room_wait_s: float = 10.0


@dataclass(slots=True)
class PullCost:
    """The bytes of one version that came over sockets and from files of this host, and when the last came (`time.perf_counter`)."""

    pulled_bytes: int = 0
    local_bytes: int = 0
    last_byte_at: float = field(default_factory=time.perf_counter)


class PathError(Exception):
    """The steps do not lead to the wanted version."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One dense form, delta or adapter to take, and the files of its shards on the service's host, by name. That may be another host."""

    manifest: pb.Manifest
    files: Mapping[str, pb.LocalFile] = field(default_factory=dict)

    @property
    def is_delta(self) -> bool:
        """Return whether the step is a delta on the previous version."""
        return self.manifest.kind == pb.VERSION_KIND_DELTA


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A whole, verified version in a file of this host, which nobody changes. Deltas are applied to a copy of it."""

    manifest: pb.Manifest
    path: Path


def direct_step(announced: pb.Manifest, held: Version | None) -> PathStep | None:
    """Return the announced form if it alone leads from `held` to its version."""
    is_delta = announced.kind == pb.VERSION_KIND_DELTA
    if is_delta and (held is None or Version.from_proto(announced.base) != held):
        return None
    return PathStep(announced)


def check_path(steps: Sequence[PathStep], wanted: Version, held: Version | None) -> None:
    """Check that the first step starts from `held`, each step follows the one before, and the last one ends at `wanted`.

    Raises:
        PathError: if not.
    """
    if not steps:
        raise PathError(f"the service named no way to version {wanted}")
    current = held
    for step in steps:
        version = Version.from_proto(step.manifest.version)
        if step.is_delta:
            base = Version.from_proto(step.manifest.base)
            if base != current:
                raise PathError(f"the delta to {version} is based on {base}, held is {current or 'nothing'}")
        elif step is not steps[0] or not (
            step.manifest.kind == pb.VERSION_KIND_ANCHOR
            or (step.manifest.kind == pb.VERSION_KIND_ADAPTER and len(steps) == 1)  # no delta is based on an adapter
        ):
            raise PathError(f"version {version} is not weights of the model, or a dense form behind others")
        current = version
    if current != wanted:
        raise PathError(f"the update path ends at version {current}, wanted was {wanted}")


class VersionBuilder:
    """Fills files with the versions of one run (``runs/{run}``), in threads.

    With `local_files` it reads files of this host in place of a transfer, where the service names any.
    """

    def __init__(self, sources: Sources, run: str, threads: Executor, limits: PullLimits, *, local_files: bool) -> None:
        self._sources, self._run, self._threads, self._limits = sources, run, threads, limits
        self._local_files = local_files

    async def build(self, target: pb.Manifest, base: BaseFile | None, descriptor: int) -> PullCost:
        """Fill a file with a version, verified.

        Args:
            target: The version as it was announced.
            base: The version that deltas may be based on.
            descriptor: The file, open to read and write; its content is replaced.

        Raises:
            PullError: if every way to the version failed; the message says why the last one did.
            OSError: if there is no room.
        """
        cost = PullCost()
        failure: Exception | None = None
        for held in (base, None) if base is not None else (None,):
            try:
                steps = await self._path(target, None if held is None else Version.from_proto(held.manifest.version))
            except (PullError, PathError) as error:
                failure = _unless_unreachable(error)
                continue
            start = held if steps[0].is_delta else None
            on_this_host = any(is_on_this_host(file) for step in steps for file in step.files.values())
            for way in (steps, [replace(step, files={}) for step in steps]) if on_this_host else (steps,):
                if failure is not None:
                    _note_fallback(target, failure, start, local=on_this_host and way is steps)
                try:
                    await self._follow(way, start, descriptor, cost)
                    await in_thread(self._threads, partial(verify_other_form, descriptor, way[-1].manifest, target))
                except (PullError, StagingError) as error:
                    failure = _unless_unreachable(error)
                else:
                    return cost
            if start is None:
                break  # that was the dense form
        raise PullError(str(failure)) from failure

    async def _path(self, target: pb.Manifest, held: Version | None) -> list[PathStep]:
        """Ask for the steps from `held` to a version, in order and checked."""
        direct = direct_step(target, held)
        if direct is not None and not self._local_files:
            return [direct]
        request = pb.GetUpdatePathRequest(
            run=self._run, version=target.version, held=None if held is None else held.to_proto()
        )
        try:
            steps = [
                PathStep(response.manifest, {file.shard: file for file in response.files if self._local_files})
                for response in await self._sources.update_path(request)
            ]
        except grpc.aio.AioRpcError as error:
            if direct is not None and error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return [direct]
            unreachable = error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            raise PullError(str(SluiceError.from_rpc(error)), unreachable=unreachable) from error
        check_path(steps, Version.from_proto(target.version), held)
        return steps

    async def _follow(self, steps: Sequence[PathStep], base: BaseFile | None, descriptor: int, cost: PullCost) -> None:
        """Take the steps of a checked path: a dense form, or a copy of `base`, and then the deltas.

        Raises:
            PullError, StagingError, OSError: if that fails; the file is useless then.
        """
        if base is not None:
            limit = base.path.stat().st_size
            async with self._copying(base.path, descriptor) as copied:
                await self._patch(steps, base.manifest, descriptor, cost, limit=limit, copied=copied)
            return
        dense = steps[0].manifest
        file = await in_thread(self._threads, partial(DenseFile, dense, descriptor))
        await self._pull(steps[0], file.sinks, cost)
        await in_thread(self._threads, file.finish)
        if steps[1:]:
            await self._patch(steps[1:], dense, descriptor, cost, limit=dense.size_bytes)

    @contextlib.asynccontextmanager
    async def _copying(self, source: Path, descriptor: int) -> AsyncIterator[asyncio.Future[None]]:
        """Copy a file while the block runs. If the block ends early, stop the copy."""
        stop = threading.Event()
        copied = asyncio.get_running_loop().run_in_executor(self._threads, copy_file, source, descriptor, stop)
        try:
            yield copied
        finally:
            stop.set()
            await asyncio.gather(copied, return_exceptions=True)

    async def _patch(
        self,
        deltas: Sequence[PathStep],
        base: pb.Manifest,
        descriptor: int,
        cost: PullCost,
        *,
        limit: int,
        copied: asyncio.Future[None] | None = None,
    ) -> None:
        """Apply a chain of deltas. The next delta is pulled while one is applied, so at most two are in memory.

        Args:
            deltas: At least one.
            base: Describes the file's content.
            descriptor: The file.
            cost: The pulled bytes are added to it.
            limit: Most bytes that a delta may have.
            copied: Done when the file has the content of the base; None if it has that content already.
        """
        pulling = asyncio.create_task(self._pull_delta(deltas[0], limit, cost))
        patched: PatchedFile | None = None
        try:
            for index, step in enumerate(deltas):
                shards = await pulling
                following = deltas[index + 1 : index + 2]
                if following:
                    pulling = asyncio.create_task(self._pull_delta(following[0], limit, cost))
                if patched is None:
                    if copied is not None:
                        await asyncio.shield(copied)
                    patched = await in_thread(self._threads, partial(PatchedFile, descriptor, base))
                await in_thread(self._threads, partial(patched.apply, step.manifest, shards, verify=not following))
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            if patched is not None:  # unmapping a large file takes long
                await in_thread(self._threads, patched.close)

    async def _pull_delta(self, step: PathStep, limit: int, cost: PullCost) -> list[DeltaShard]:
        shards = step.manifest.shards
        size = sum(shard.size_bytes for shard in shards)
        if size > limit:
            version = Version.from_proto(step.manifest.version)
            raise StagingError(f"the delta to {version} has {size} bytes, its base {limit}: a dense form is smaller")
        sinks = {shard.name: DeltaShard(shard) for shard in shards}
        await self._pull(step, sinks, cost)
        for sink in sinks.values():
            await in_thread(self._threads, sink.finish)
        return list(sinks.values())

    async def _pull(self, step: PathStep, sinks: Mapping[str, ChunkSink], cost: PullCost) -> None:
        """Fill the sinks of all shards of a step, several at a time. Add the bytes that came to `cost`, also on failure.

        Raises:
            PullError, StagingError, OSError: as `pull_shard` and `read_local`.
        """
        manifest, slots = step.manifest, asyncio.Semaphore(self._limits.streams)

        async def pull(shard: pb.Shard) -> None:
            async with slots:
                file, sink, size = step.files.get(shard.name), sinks[shard.name], shard.size_bytes
                if file is not None and is_on_this_host(file):
                    while sink.position < size:
                        end = min(size, sink.position + _LOCAL_BYTES)
                        await in_thread(self._threads, partial(read_local, file, size, sink, end))
                    cost.local_bytes += sink.position
                    return
                try:
                    await pull_shard(
                        self._sources.pull, manifest, shard, sink, threads=self._threads, limits=self._limits
                    )
                finally:
                    cost.pulled_bytes += sink.position

        tasks = [asyncio.create_task(pull(shard)) for shard in manifest.shards]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            cost.last_byte_at = time.perf_counter()


def _unless_unreachable(error: Exception) -> Exception:
    """Return the error if another way may succeed. Raise it if nobody answered, because no other way would help."""
    if isinstance(error, PullError) and error.unreachable:
        raise error
    return error


def _note_fallback(target: pb.Manifest, failure: Exception, start: BaseFile | None, *, local: bool) -> None:
    way = "dense" if start is None else "delta"
    FALLBACKS.labels(way).inc()
    version = str(Version.from_proto(target.version))
    log.warning("trying another way to a version", version=version, way=way, local=local, error=str(failure))


# --- one shard --------------------------------------------------------------------------------------------------------


class ChunkSink(Protocol):
    """Takes the bytes of one shard in order."""

    @property
    def position(self) -> int:
        """The next missing byte; all bytes before it are checked and kept."""
        ...

    def feed(self, offset: int, data: memoryview) -> None:
        """Keep the bytes at `offset`, which must be the next ones. Blocking; called in a thread, one call at a time.

        Raises:
            StagingError: if they differ from the announced bytes.
            OSError: if there is no room.
        """
        ...


async def pull_shard(
    call: Call, manifest: pb.Manifest, shard: pb.Shard, sink: ChunkSink, *, threads: Executor, limits: PullLimits
) -> None:
    """Fill a sink with a shard of a version over sockets. Bytes that it has are not pulled again.

    Raises:
        PullError: if the service does not give the bytes, or cannot be reached in `limits.attempts` attempts.
        StagingError: if the bytes differ from the announced version.
        OSError: if shared memory is full.
    """
    base = manifest.base if manifest.kind == pb.VERSION_KIND_DELTA else None
    backoff = Backoff(limits.first_pause_s)
    while (begin := sink.position) < shard.size_bytes:
        request = pb.PullWeightsRequest(run=manifest.run, version=manifest.version, shard=shard.name, base=base)
        request.offset, request.length = begin, shard.size_bytes - begin
        try:
            await _feed_all(call(request, timeout=limits.deadline_s), sink, threads, limits.idle_s)
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            if failure.code in _FINAL:
                raise PullError(str(failure)) from error
            reason = str(failure)
        except TimeoutError:
            reason = f"no chunk came for {limits.idle_s:g} s"
        except (ChunkError, ChunkSizeError) as error:
            reason = str(error)
        else:
            reason = "the stream ended early"
        if sink.position >= shard.size_bytes:
            break
        if sink.position > begin:
            backoff.succeed()
        elif backoff.failures + 1 >= limits.attempts:
            raise PullError(
                f"shard {shard.name} could not be pulled in {limits.attempts} attempts: {reason}", unreachable=True
            )
        log.info("pull broke; continuing", shard=shard.name, offset=sink.position, reason=reason)
        await asyncio.sleep(backoff.fail())


async def _feed_all(stream: Any, sink: ChunkSink, threads: Executor, idle_s: float) -> None:  # noqa: ANN401 - gRPC's
    """Feed a stream to a sink until it ends. No thread works on the sink when this returns."""
    loop = asyncio.get_running_loop()
    feeding: asyncio.Future[None] | None = None
    try:
        while True:
            async with asyncio.timeout(idle_s):
                message = await stream.read()
            if feeding is not None:
                await asyncio.shield(feeding)
            if not isinstance(message, bytes):  # the end of the stream
                return
            feeding = loop.run_in_executor(threads, _feed, sink, message)
    finally:
        stream.cancel()
        if feeding is not None:
            await settle(feeding)  # the next attempt meets its failure again, or the stream raises its own


def _feed(sink: ChunkSink, message: bytes) -> None:
    sink.feed(*read_pull_response(message))


def is_on_this_host(file: pb.LocalFile) -> bool:
    """Return whether the path leads to exactly that file. On another host, or in another container, it does not."""
    try:
        status = Path(file.path).lstat()
    except (OSError, ValueError):
        return False
    return bool(file.path) and (status.st_dev, status.st_ino) == (file.device, file.inode)


def read_local(file: pb.LocalFile, size: int, sink: ChunkSink, end: int) -> None:
    """Fill a sink up to byte `end` from a file of this host that has `size` bytes. Blocking. Digests reveal wrong bytes.

    The file is read and not mapped: if it is truncated meanwhile, that is an error and not a signal.

    Raises:
        PullError: if it cannot be read, is another file, or has another size.
        StagingError: if its bytes differ from the announced version.
        OSError: if there is no room for its bytes.
    """
    try:
        descriptor = open_peer_file(file.path, file.device, file.inode, size)
    except PeerFileError as error:
        raise PullError(str(error)) from error
    try:
        block = memoryview(bytearray(min(_BLOCK_BYTES, size)))
        while sink.position < end:
            begin = sink.position
            try:
                count = os.preadv(descriptor, [block[: end - begin]], begin)
            except OSError as error:
                raise PullError(f"{file.path} cannot be read: {error}") from error
            if not count:
                raise PullError(f"{file.path} ends at byte {begin}, expected {size}: it was truncated")
            sink.feed(begin, block[:count])
    finally:
        os.close(descriptor)


async def in_thread(threads: Executor, work: Callable[[], T]) -> T:
    """Run in a thread. A cancelled caller still waits for the thread, which may use a file that the caller removes next."""
    return await run_to_end(asyncio.get_running_loop().run_in_executor(threads, work))
