"""Makes the file of a version: from a copy of its base and deltas, from its dense form, or from a dense form and deltas.

All of it happens while the engine generates. Forms are pulled and applied side by side, and every digest is verified. If one
way fails, the next is tried: files of this host, sockets, the dense form.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.metrics import FALLBACKS
from weightsync.receive.dense_file import DenseFile
from weightsync.receive.patched_file import DeltaShard, Digests, PatchedFile, copy_file, slice_digests
from weightsync.receive.pull import (
    PullCost,
    PullError,
    PullLimits,
    ShardPuller,
    StagingError,
    in_thread,
    is_on_this_host,
    pull_call,
)

__all__ = ["DeltaBase", "PathError", "PathStep", "VersionBuilder", "VersionFile", "check_path", "direct_step"]

_DEADLINE_S = 30.0

log = structlog.get_logger(__name__)


class PathError(Exception):
    """The steps do not lead to the version that is wanted."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One form to apply.

    Attributes:
        manifest: What to apply.
        files: Its shards as files of the service's host, by name; they may be of another host than this.
    """

    manifest: pb.Manifest
    files: Mapping[str, pb.LocalFile] = field(default_factory=dict)

    @property
    def is_delta(self) -> bool:
        """Whether it is based on the version before."""
        return self.manifest.kind == pb.VERSION_KIND_DELTA


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """A whole version on this host that a delta can be applied to.

    Attributes:
        version: The version.
        path: Its file; nobody changes it.
        digests: Of its slices, verified.
    """

    version: Version
    path: Path
    digests: Digests


class VersionBuilder:
    """Makes files for one run.

    Args:
        channel: To a service that gives the run's versions out.
        run: ``runs/{run}``.
        threads: Where files are read, decoded, checked and written.
        limits: How long pulls wait.
        local_files: Read files of this host in place of a transfer, where the service names any.
    """

    def __init__(
        self, channel: grpc.aio.Channel, run: str, threads: Executor, limits: PullLimits, *, local_files: bool
    ) -> None:
        self._delivery = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        self._puller = ShardPuller(pull_call(channel), threads, limits)
        self._run, self._threads, self._local_files = run, threads, local_files

    async def build(self, target: pb.Manifest, held: DeltaBase | None, descriptor: int) -> PullCost:
        """Fill a file with a version, verified.

        Args:
            target: The version as it was announced.
            held: The version that deltas may be based on.
            descriptor: The file, open to read and write.

        Raises:
            PullError: if every way to the version failed; the message says why the last one did.
            OSError: if there is no room.
        """
        cost = PullCost()
        failure: Exception | None = None
        for base in (held, None) if held is not None else (None,):
            try:
                steps = await self._path(target, base)
            except (PullError, PathError) as error:
                _raise_if_unreachable(error)
                failure = error
                continue
            start = base if steps[0].is_delta else None
            on_this_host = any(is_on_this_host(file) for step in steps for file in step.files.values())
            for way in (steps, [replace(step, files={}) for step in steps]) if on_this_host else (steps,):
                if failure is not None:
                    _note_fallback(target, failure, start, local=on_this_host and way is steps)
                try:
                    await VersionFile(self._puller, descriptor, cost).follow(way, start)
                    await in_thread(self._threads, partial(_check_against, descriptor, way[-1].manifest, target))
                except (PullError, StagingError) as error:
                    _raise_if_unreachable(error)
                    failure = error
                else:
                    return cost
            if start is None:
                break  # that was the dense form
        raise PullError(str(failure)) from failure

    async def _path(self, target: pb.Manifest, base: DeltaBase | None) -> list[PathStep]:
        """Return the forms to apply, in order and checked."""
        held = None if base is None else base.version
        direct = direct_step(target, held)
        if direct is not None and not self._local_files:
            return [direct]
        request = pb.GetUpdatePathRequest(
            run=self._run, version=target.version, held=None if held is None else held.to_proto()
        )
        try:
            steps = [
                PathStep(response.manifest, {file.shard: file for file in response.files if self._local_files})
                async for response in self._delivery.GetUpdatePath(request, timeout=_DEADLINE_S)
            ]
        except grpc.aio.AioRpcError as error:
            if direct is not None and error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return [direct]
            unreachable = error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            raise PullError(str(SluiceError.from_rpc(error)), unreachable=unreachable) from error
        check_path(steps, Version.from_proto(target.version), held)
        return steps


class VersionFile:
    """One attempt to fill a file.

    Args:
        puller: Where the forms come from.
        descriptor: The file, open to read and write; its content is replaced.
        cost: Grows by what came.
    """

    def __init__(self, puller: ShardPuller, descriptor: int, cost: PullCost) -> None:
        self._puller, self._descriptor, self._cost = puller, descriptor, cost

    async def follow(self, steps: Sequence[PathStep], base: DeltaBase | None) -> None:
        """Apply forms one after the other; the file is whole and verified when this returns.

        Args:
            steps: A path that passed `check_path`.
            base: What the first step is based on; None where it is a dense form.

        Raises:
            PullError, StagingError, OSError: if that fails; the file is of no use then.
        """
        if base is not None:
            limit = base.path.stat().st_size
            async with self._copying(base.path) as copied:
                await self._patch(steps, base.digests, limit, copied)
            return
        dense = steps[0]
        file = await in_thread(self._puller.threads, partial(DenseFile, dense.manifest, self._descriptor))
        sinks = {shard.name: file.sink(shard.name) for shard in dense.manifest.shards}
        await self._puller.pull(dense.manifest, dense.files, sinks, self._cost)
        await in_thread(self._puller.threads, file.finish)
        if steps[1:]:
            digests = slice_digests(dense.manifest)
            await self._patch(steps[1:], digests, dense.manifest.size_bytes)

    @contextlib.asynccontextmanager
    async def _copying(self, source: Path) -> AsyncIterator[asyncio.Future[None]]:
        """Copy a file while the block runs, and end the copy where the block is left early."""
        stop = threading.Event()

        def copy() -> None:
            os.ftruncate(self._descriptor, 0)
            copy_file(source, self._descriptor, stop)

        copied = asyncio.get_running_loop().run_in_executor(self._puller.threads, copy)
        try:
            yield copied
        finally:
            stop.set()
            await asyncio.gather(copied, return_exceptions=True)

    async def _patch(
        self,
        deltas: Sequence[PathStep],
        digests: Digests,
        limit: int,
        copied: asyncio.Future[None] | None = None,
    ) -> None:
        """Apply a chain. The next delta comes in while one is applied, so at most two are in memory.

        Args:
            deltas: At least one.
            digests: Digests that the file's content is known to have.
            limit: Most bytes that a delta may have.
            copied: Done when the file has that content; None if it has it now.
        """
        pulling = asyncio.create_task(self._pull_delta(deltas[0], limit))
        patched: PatchedFile | None = None
        try:
            for index, step in enumerate(deltas):
                shards = await pulling
                following = deltas[index + 1 : index + 2]
                if following:
                    pulling = asyncio.create_task(self._pull_delta(following[0], limit))
                if patched is None:
                    if copied is not None:
                        await asyncio.shield(copied)
                    patched = await in_thread(self._puller.threads, partial(PatchedFile, self._descriptor, digests))
                apply = partial(patched.apply, step.manifest, shards, verify=not following)
                await in_thread(self._puller.threads, apply)
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            if patched is not None:  # to unmap a large file takes long
                await in_thread(self._puller.threads, patched.close)

    async def _pull_delta(self, step: PathStep, limit: int) -> list[DeltaShard]:
        shards = step.manifest.shards
        size = sum(shard.size_bytes for shard in shards)
        if size > limit:
            version = Version.from_proto(step.manifest.version)
            raise StagingError(f"the delta to {version} has {size} bytes, its base {limit}: a dense form is smaller")
        sinks = {shard.name: DeltaShard(shard) for shard in shards}
        await self._puller.pull(step.manifest, step.files, sinks, self._cost)
        for sink in sinks.values():
            await in_thread(self._puller.threads, sink.finish)
        return list(sinks.values())


def _check_against(descriptor: int, built: pb.Manifest, target: pb.Manifest) -> None:
    """Verify the announced digests too, if the file was made from another form than the announced one."""
    if built.digest == target.digest:
        return
    patched = PatchedFile(descriptor, slice_digests(built))
    try:
        patched.verify(target)
    finally:
        patched.close()


def _raise_if_unreachable(error: Exception) -> None:
    if isinstance(error, PullError) and error.unreachable:
        raise error


def _note_fallback(target: pb.Manifest, failure: Exception, start: DeltaBase | None, *, local: bool) -> None:
    way = "dense" if start is None else "delta"
    FALLBACKS.labels(way).inc()
    version = str(Version.from_proto(target.version))
    log.warning("trying another way to a version", version=version, way=way, local=local, error=str(failure))


def direct_step(announced: pb.Manifest, held: Version | None) -> PathStep | None:
    """Return the announced form if it is all that is needed to get to its version."""
    is_delta = announced.kind == pb.VERSION_KIND_DELTA
    if is_delta and (held is None or Version.from_proto(announced.base) != held):
        return None
    return PathStep(announced)


def check_path(steps: Sequence[PathStep], wanted: Version, held: Version | None) -> None:
    """Check that each step follows from the one before, the first from what is held, and the last is what is wanted.

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
        elif step is not steps[0] or not _may_be_first(step, alone=len(steps) == 1):
            raise PathError(f"version {version} is not weights of the model, or a dense form behind others")
        current = version
    if current != wanted:
        raise PathError(f"the update path ends at version {current}, wanted was {wanted}")


def _may_be_first(step: PathStep, *, alone: bool) -> bool:
    """Whether a path may begin with it. An adapter stands alone: no delta is based on one."""
    return step.manifest.kind == pb.VERSION_KIND_ANCHOR or (step.manifest.kind == pb.VERSION_KIND_ADAPTER and alone)
