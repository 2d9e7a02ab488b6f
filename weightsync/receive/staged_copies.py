"""The staged versions that one receiver uses, on top of what its host shares."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.dtypes import DTYPES
from weightsync.format.manifest import box
from weightsync.receive.assembly import HeldVersion
from weightsync.receive.build import VersionBuilder
from weightsync.receive.copies import HostCopies
from weightsync.receive.patching import Digests, slice_digests
from weightsync.receive.pull import PullLimits
from weightsync.receive.report import UpdateTimings
from weightsync.receive.shared_area import SharedArea, SharedCopy
from weightsync.staged import StagedVersion, TensorSpec

__all__ = ["StagedCopies"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Used:
    copy: SharedCopy
    digests: Digests


class StagedCopies:
    """Stages versions and lets go of them.

    Args:
        stage_dir: Directory in shared memory.
        run: The run's name.
        builder: Makes files.
        threads: Where files are worked on.
        limits: How long to wait for other processes.
    """

    def __init__(
        self, stage_dir: Path, run: str, builder: VersionBuilder, threads: Executor, limits: PullLimits
    ) -> None:
        self._area = SharedArea(stage_dir, run)
        self._copies = HostCopies(self._area, threads, limits)
        self._builder = builder
        self._threads = threads
        self._used: dict[Path, _Used] = {}
        self._leaving: deque[SharedCopy] = deque()
        """Released, and perhaps still there."""

    async def stage(
        self, manifest: pb.Manifest, current: StagedVersion | None, *, or_newer: bool
    ) -> tuple[StagedVersion, UpdateTimings]:
        """Have a version staged, by this process or another one of the host.

        Args:
            manifest: The version as it was announced.
            current: The version that serves, on which a delta may be based.
            or_newer: Whether a newer version will do, if one is staged on this host.

        Returns:
            The version, and what pulling and staging cost.

        Raises:
            BehindError: if a version between the two has to be taken first, or a newer one in its place.
            PullError, StagingError, OSError: if it could not be had, or there is no room.
        """
        started = time.perf_counter()
        version = Version.from_proto(manifest.version)
        path = self._area.file(version, manifest.digest)
        held = self._held(current)
        build = partial(self._builder.build, manifest, held)
        base, needed = None if held is None else held.path, _dense_bytes(manifest)
        copy, cost = await self._copies.obtain(path, base, needed, build, or_newer=or_newer)
        self._used[path] = _Used(copy, slice_digests(manifest))
        staged = StagedVersion(version, path, _tensors(manifest), manifest.digest)
        now = time.perf_counter()
        if cost is None:
            return staged, UpdateTimings(version, stage_s=now - started)
        timings = UpdateTimings(
            version,
            pulled_bytes=cost.pulled_bytes,
            local_bytes=cost.local_bytes,
            pull_s=cost.last_byte_at - started,
            stage_s=now - cost.last_byte_at,
        )
        return staged, timings

    def release(self, staged: StagedVersion) -> None:
        """Use a version no more; its file goes with its last user.

        In a thread: to give the memory of a large file back takes a second, in which an event loop would hand no tokens out.
        """
        used = self._used.pop(staged.path, None)
        if used is not None:
            self._leaving.append(used.copy)
            self._threads.submit(self._let_go)

    def close(self) -> None:
        """Let go of everything; blocking, after the threads have ended."""
        while self._leaving:
            self._let_go()
        for used in self._used.values():
            used.copy.release()
        self._used.clear()
        self._area.close()

    def _let_go(self) -> None:
        copy = self._leaving.popleft()
        try:
            copy.release()
        except OSError as error:
            log.warning("a staged version was not removed", path=str(copy.path), error=str(error))

    def _held(self, current: StagedVersion | None) -> HeldVersion | None:
        used = None if current is None else self._used.get(current.path)
        if current is None or used is None:
            return None
        return HeldVersion(current.version, current.path, used.digests)


def _dense_bytes(manifest: pb.Manifest) -> int:
    """Bytes of all tensors, whatever the form that was announced."""
    return sum(
        box(each).volume * DTYPES[each.dtype].size
        for shard in manifest.shards
        for each in shard.tensors
        if each.dtype in DTYPES
    )


def _tensors(manifest: pb.Manifest) -> dict[str, TensorSpec]:
    return {
        each.name: TensorSpec(each.dtype, tuple(each.global_shape))
        for shard in manifest.shards
        for each in shard.tensors
    }
