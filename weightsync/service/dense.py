"""Makes the dense form of each run's newest version in the background, one at a time, beside commits and pulls.

A dense form is made by copying an older one and applying deltas tensor by tensor. It needs room on the disk for a second copy of
the model, which is reserved first. Memory holds no more than the current slice; the kernel writes the rest out. Each tensor is
hashed while it is in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from sluice.clock import CLOCK, Clock
from sluice.rpc import SluiceError
from sluice.tasks import run_to_end
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.codec.slices import apply_slice, check_slice
from weightsync.codec.streams import CodecError
from weightsync.format.manifest import entry_name, is_whole
from weightsync.format.safetensors import LayoutError, read_layout
from weightsync.metrics import DENSE_SECONDS
from weightsync.service.chain import VersionForm, next_dense
from weightsync.service.store import StoredForm
from weightsync.service.upload import allocate, describe_dense, with_shards

if TYPE_CHECKING:
    from weightsync.service.runs import Run

_MOST_FILES = 256
"""Delta files that are mapped at once; a longer chain is taken in several passes. Far below the usual limit of 1024."""

_STOP_S = 30.0
"""Seconds to wait for a build to stop. It checks after each tensor, so if this takes longer, the disk does not respond."""

_NICENESS = 10
"""Niceness of the thread, so that serving threads have priority."""

Bytes = npt.NDArray[np.uint8]

log = structlog.get_logger(__name__)


class DamagedDeltaError(Exception):
    """The delta that leads to `version` gives other bytes than announced."""

    def __init__(self, version: Version, message: str) -> None:
        super().__init__(message)
        self.version = version


class StoppedError(Exception):
    """The work was stopped because its caller asked for that."""


class DenseForms:
    """The work for all runs of a service; one thread does it.

    Args:
        reserve: Reserves room on the disk, in bytes, for as long as a block lasts; raises `SluiceError` if the disk is full.
        ended: Called after each attempt, because versions that the attempt held may be removed now.
        delay_s: Seconds from a commit until its dense form is begun.
        retry_s: Seconds after which a failed attempt is repeated.
        clock: Decides when these seconds are over.
    """

    def __init__(
        self,
        reserve: Callable[[Run, int], AbstractAsyncContextManager[None]],
        ended: Callable[[], None],
        *,
        delay_s: float,
        retry_s: float,
        clock: Clock = CLOCK,
    ) -> None:
        self._reserve = reserve
        self._ended = ended
        self._delay_s = delay_s
        self._retry_s = retry_s
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._builds: dict[str, _Build] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weightsync-dense", initializer=_give_way)

    def wake(self, run: Run) -> None:
        """Start making a dense form of the run's newest version, unless it has one."""
        if run.name not in self._tasks and next_dense(run.ledger.committed) is not None:
            self._tasks[run.name] = asyncio.create_task(self._follow(run))

    async def stop_builds(self) -> bool:
        """Stop the dense forms under construction, so that their room is free. They are tried again later.

        Return whether there were any, and all ended in time.
        """
        builds = [build for build in self._builds.values() if build.has_room]
        for build in builds:
            build.stop.set()
        try:
            async with asyncio.timeout(_STOP_S):
                for build in builds:
                    await build.ended.wait()
        except TimeoutError:
            log.warning("a dense form under construction did not end in time", deadline_s=_STOP_S)
            return False
        return bool(builds)

    async def close(self) -> None:
        """End all work."""
        for build in self._builds.values():
            build.stop.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.to_thread(self._thread.shutdown)

    async def _follow(self, run: Run) -> None:
        """Make dense forms until the newest version that can be reached has one."""
        try:
            await self._clock.sleep(self._delay_s)
            while (path := next_dense(run.ledger.committed)) is not None:
                settled = await self._make(run, path)
                await self._clock.sleep(self._delay_s if settled else self._retry_s)
        finally:
            del self._tasks[run.name]

    async def _make(self, run: Run, path: list[VersionForm]) -> bool:
        """Make one dense form. Return whether the attempt is finished: the form was made, or a damaged delta makes that impossible."""
        forms = [run.versions[step.version].forms[step.form] for step in path]
        source, deltas = forms[0], _limited(forms[1:])
        build = self._builds[run.name] = _Build(source, deltas)
        for step in path:
            run.ledger.hold(step.version, build)
        try:
            return await self._attempt(run, build, path[len(deltas)])
        finally:
            for step in path:
                run.ledger.release(step.version, build)
            del self._builds[run.name]
            build.ended.set()
            self._ended()

    async def _attempt(self, run: Run, build: _Build, target: VersionForm) -> bool:
        version, started = target.version, time.perf_counter()

        def work() -> StoredForm:
            building = run.store.build_dense(version)
            try:
                return run.store.install_dense(apply_deltas(build.source, build.deltas, building, build.stop), building)
            finally:
                run.store.drop_building(version)

        try:
            async with self._reserve(run, build.source.manifest.size_bytes):
                build.has_room = True
                working = asyncio.get_running_loop().run_in_executor(self._thread, work)
                run.add_dense(version, await run_to_end(working, on_cancel=build.stop.set))
        except DamagedDeltaError as error:
            run.ledger.mark_damaged(error.version)
            log.error(  # noqa: TRY400 - the version helps, a traceback does not
                "a delta gives other bytes than announced, or NaN; replicas fall back to an older version",
                run=run.name,
                version=str(error.version),
                error=str(error),
                remedy="the trainer's next delta is refused and comes as a dense version; or push a dense version now",
            )
            return True
        except StoppedError:
            return False
        except (OSError, SluiceError, LayoutError) as error:
            log.warning(
                "no dense form could be made; deltas are still served",
                run=run.name,
                version=str(version),
                error=str(error),
                retry_s=self._retry_s,
                remedy="make room, or raise weightsync.max_bytes to three dense copies",
            )
            return False
        seconds = time.perf_counter() - started
        DENSE_SECONDS.observe(seconds)
        log.info(
            "dense form made", run=run.name, version=str(version), deltas=len(build.deltas), seconds=round(seconds, 3)
        )
        return True


@dataclass(eq=False, slots=True)
class _Build:
    """One dense form under construction: an older dense form, the deltas to apply to it, and the progress."""

    source: StoredForm
    deltas: list[StoredForm]
    has_room: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def _limited(deltas: list[StoredForm]) -> list[StoredForm]:
    """Return the first deltas, as many as may be open at once, but at least one."""
    files, count = 0, 0
    for delta in deltas:
        files += len(delta.files)
        if count and files > _MOST_FILES:
            break
        count += 1
    return deltas[:count]


def _give_way() -> None:
    with contextlib.suppress(OSError):  # sandboxes forbid it, and a failing initializer would disable this pool
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def apply_deltas(
    source: StoredForm, deltas: Sequence[StoredForm], building: Path, stop: threading.Event
) -> pb.Manifest:
    """Write the files of a dense form: copy an older one and apply deltas, tensor by tensor. Return its manifest.

    Args:
        source: The dense form to start from.
        deltas: The deltas to apply, oldest first; at least one.
        building: An empty directory; its files are on the disk when this returns.
        stop: Ends the work early, by StoppedError.

    Raises:
        DamagedDeltaError: if the bytes differ from a delta's manifest, or a value is not finite.
    """
    patches = _read_patches(deltas)
    files = source.files
    for shard in source.manifest.shards:
        allocate(building / files[shard.name].name, shard.size_bytes)
    shards = [_advance_file(name, path, building / path.name, patches, stop) for name, path in files.items()]
    manifest = with_shards(deltas[-1].manifest, shards)
    manifest.kind = pb.VERSION_KIND_ANCHOR
    manifest.ClearField("base")
    return manifest


@dataclass(frozen=True, slots=True)
class _Patch:
    """One slice in the delta to `version`: its encoded bytes, or None if the slice is unchanged."""

    version: Version
    slice: pb.TensorSlice
    data: Bytes | None


def _read_patches(deltas: Sequence[StoredForm]) -> Mapping[str, list[_Patch]]:
    """Return the patches that the deltas apply to each tensor, in order."""
    patches: defaultdict[str, list[_Patch]] = defaultdict(list)
    for delta in deltas:
        version, files = Version.from_proto(delta.manifest.version), delta.files
        for shard in delta.manifest.shards:
            try:
                data = dict(_mapped_entries(files[shard.name]))
                for tensor in shard.tensors:
                    unchanged = tensor.encoding == pb.TENSOR_ENCODING_UNCHANGED
                    found = None if unchanged else data[entry_name(tensor)]
                    patches[tensor.name].append(_Patch(version, tensor, found))
            except (LayoutError, KeyError) as error:
                raise DamagedDeltaError(version, f"shard {shard.name} is damaged on disk: {error}") from error
    return dict(patches)


def _mapped_entries(path: Path) -> Iterator[tuple[str, Bytes]]:
    """Yield the entries of a safetensors file by name, mapped into memory."""
    with path.open("rb") as file:
        layout = read_layout(file.fileno())
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    for entry in layout.entries.values():
        yield entry.name, mapped[layout.data_begin + entry.begin : layout.data_begin + entry.end]


def _advance_file(
    name: str, source_path: Path, target_path: Path, patches: Mapping[str, list[_Patch]], stop: threading.Event
) -> pb.Shard:
    source = np.memmap(source_path, dtype=np.uint8, mode="r")
    target = np.memmap(target_path, dtype=np.uint8, mode="r+")
    with source_path.open("rb") as file:
        layout = read_layout(file.fileno())
    data_begin = layout.data_begin
    shard = pb.Shard(name=name, size_bytes=source.size)
    target[:data_begin] = source[:data_begin]
    whole = xxhash.xxh3_128(target[:data_begin].data)
    for entry in layout.entries.values():  # in the order of the file, so that its digest is computed in the same pass
        if stop.is_set():
            raise StoppedError
        position = slice(data_begin + entry.begin, data_begin + entry.end)
        tensor = target[position]
        tensor[:] = source[position]
        digest = _advance_tensor(tensor, patches[entry.name])
        whole.update(tensor.data)
        describe_dense(shard, entry, digest)
    shard.digest = whole.hexdigest()
    target.flush()
    with target_path.open("rb") as file:
        os.fsync(file.fileno())
    return shard


def _advance_tensor(tensor: Bytes, patches: Sequence[_Patch]) -> str:
    """Apply all deltas to one tensor; return its xxh3-128, hexadecimal.

    Verify every slice that a delta changed, and all slices of the last delta.
    """
    newest = patches[-1].version
    for patch in patches:
        if patch.data is None and patch.version != newest:
            continue
        data = memoryview(b"") if patch.data is None else patch.data.data
        try:
            check_slice(patch.slice, apply_slice(tensor, patch.slice, data))
        except CodecError as error:
            raise DamagedDeltaError(patch.version, f"{patch.slice.name}: {error}") from error
        if is_whole(patch.slice) and patch.version == newest:
            return patch.slice.digest
    return str(xxhash.xxh3_128(tensor.data).hexdigest())
