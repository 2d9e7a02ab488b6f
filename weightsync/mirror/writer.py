"""Copies the committed versions of each run to an object store, in the background: commits and pulls never wait for it.

There is no queue: after each commit, each new dense form and each pause, the copy of a run is compared with the service's
versions, and the next missing form is sent. The parts of its shards go first, its manifest last, so that readers see the form
whole or not at all. After an interruption, parts that are in the store already are not sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog
import xxhash
from google.protobuf import json_format

from sluice.backoff import Backoff
from sluice.v1 import checkpoint_pb2, mirror_pb2
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import ManifestError
from weightsync.metrics import MIRROR_BYTES, MIRROR_LAG
from weightsync.mirror.bucket import Bucket, BucketError
from weightsync.mirror.layout import (
    LARGEST_MANIFEST_BYTES,
    cut,
    describe,
    digest_of,
    manifest_name,
    manifests_folder,
    parse_manifest_name,
    parse_part_name,
    parse_pin_name,
    part_name,
    part_sizes,
    parts_folder,
    pins_folder,
    read_manifest,
    write_manifest,
)
from weightsync.mirror.plan import has, next_upload, surplus, without
from weightsync.service import chain
from weightsync.service.chain import Form, VersionForm
from weightsync.service.runs import Run, Runs
from weightsync.service.store import StoredForm

_STREAMS = 4
"""Number of parts that are sent, and are in memory, at a time."""

_LONGEST_PAUSE_S = 30.0
"""Longest pause between two attempts while the store cannot be reached."""

_LINGER_S = 300.0
"""Seconds for which a version stays after one of its parts was read, while there is room: as long as a request is retried."""

_SWEEP_S = 600.0
"""Seconds between two searches for parts that no manifest names, and for lost parts."""

_ORPHAN_AGE = timedelta(hours=1)
"""Parts without a manifest stay for this long, because their upload may be in progress."""

log = structlog.get_logger(__name__)


class ForeignVersionsError(Exception):
    """The store holds versions of another run of the same name; nothing is written beside them."""


class DamagedFileError(Exception):
    """A file on this service's disk is not the shard that its manifest describes."""


class Mirror:
    """The object store that a service writes its versions to.

    Args:
        bucket: The store.
        checkpoints_of: Returns where a run's checkpoints lie; their versions are not pruned.
        part_bytes: Bytes of a part.
        sweep_s: Seconds between two searches for lost parts and for parts that no manifest names.
    """

    def __init__(
        self, bucket: Bucket, checkpoints_of: Callable[[str], Path], *, part_bytes: int, sweep_s: float = _SWEEP_S
    ) -> None:
        self._bucket, self._checkpoints_of = bucket, checkpoints_of
        self._part_bytes, self._sweep_s = part_bytes, sweep_s
        self._writers: dict[str, _Writer] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run_forever(self) -> None:
        """Copy until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for writer in self._writers.values():
                    self._group.create_task(writer.run_forever())
                await asyncio.Event().wait()
        finally:
            self._group = None

    def follow(self, runs: Runs, run: Run) -> None:
        """Copy the versions of a run from now on."""
        writer = _Writer(
            runs, run, self._bucket, self._checkpoints_of(run.name), part_bytes=self._part_bytes, sweep_s=self._sweep_s
        )
        self._writers[run.name] = writer
        if self._group is not None:
            self._group.create_task(writer.run_forever())

    def describe(self, run: Run) -> pb.MirrorState:
        """Return the progress of the copy of a run."""
        return self._writers[run.name].describe()


class _Writer:
    """The copy of one run."""

    def __init__(
        self, runs: Runs, run: Run, bucket: Bucket, checkpoints: Path, *, part_bytes: int, sweep_s: float
    ) -> None:
        self._runs, self._run, self._bucket, self._checkpoints = runs, run, bucket, checkpoints
        self._part_bytes, self._sweep_s = part_bytes, sweep_s
        self._there: dict[VersionForm, mirror_pb2.MirroredForm] | None = None
        self._swept_at = float("-inf")
        self._damaged: set[VersionForm] = set()
        """Forms on this service's disk that cannot be sent."""
        self._error = ""
        self._sent = {form: MIRROR_BYTES.labels(run.name, "sent", form.value) for form in Form}
        self._sent_bytes = dict.fromkeys(Form, 0)

    async def run_forever(self) -> None:
        """Copy until cancelled, or until the store turns out to hold another run's versions."""
        backoff = Backoff(longest_s=_LONGEST_PAUSE_S)
        while True:
            changed = self._run.changed
            pause_s = self._runs.config.heartbeat_s
            try:
                await self._catch_up()
            except ForeignVersionsError as error:
                self._error = str(error)
                log.error(  # noqa: TRY400 - where it was found says nothing
                    "this run is not mirrored any more", run=self._run.name, url=self._bucket.url, reason=self._error
                )
                return
            except (BucketError, ManifestError, OSError) as error:
                self._error = str(error)
                if isinstance(error, ManifestError):
                    self._there = None  # the next look removes the manifest
                pause_s = backoff.fail()
                log.warning(
                    "the mirror is behind; commits and pulls go on",
                    run=self._run.name,
                    behind=self._behind(),
                    reason=self._error,
                    retry_s=round(pause_s, 1),
                )
            else:
                self._error = ""
                backoff.succeed()
            MIRROR_LAG.labels(self._run.name, "sent").set(self._behind())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await changed.wait()

    def describe(self) -> pb.MirrorState:
        """Return the progress of the copy."""
        newest = self._newest()
        return pb.MirrorState(
            url=self._bucket.url,
            use=pb.MIRROR_USE_WRITE,
            newest=None if newest is None else newest.to_proto(),
            versions_behind=self._behind(),
            error=self._error,
            dense_bytes=self._sent_bytes[Form.DENSE] + self._sent_bytes[Form.ADAPTER],
            delta_bytes=self._sent_bytes[Form.DELTA],
        )

    def _newest(self) -> Version | None:
        return max((step.version for step in self._there or {}), default=None)

    def _behind(self) -> int:
        newest = self._newest()
        return sum(newest is None or version > newest for version in self._run.versions)

    def _manifests(self) -> dict[VersionForm, pb.Manifest]:
        return {step: mirrored.manifest for step, mirrored in (self._there or {}).items()}

    async def _catch_up(self) -> None:
        """Send the forms that the store lacks, and remove those that it no longer needs.

        Raises:
            ForeignVersionsError: if it holds another run's versions.
            BucketError, OSError: if it cannot be reached, or the disk cannot be read.
        """
        if not self._run.versions:
            return
        if self._there is None:
            self._there = await self._look()
            self._check_own()
            self._note_newest()
        while step := self._next():
            try:
                await self._send(step, self._run.versions[step.version].forms[step.form])
            except DamagedFileError as error:
                self._damaged.add(step)
                log.error(  # noqa: TRY400 - where it was found says nothing
                    "a damaged version is not mirrored",
                    run=self._run.name,
                    version=str(step.version),
                    reason=str(error),
                )
                continue
            self._note_newest()
            await self._prune()
        if self._runs.clock() - self._swept_at > self._sweep_s:
            await self._prune()
            await self._sweep()
            self._swept_at = self._runs.clock()

    def _next(self) -> VersionForm | None:
        """Return the form to send next."""
        self._damaged = {step for step in self._damaged if step.version in self._run.versions}
        local = without(self._run.ledger.committed, self._damaged)
        return next_upload(local, describe(self._manifests()), self._anchor_every)

    @property
    def _anchor_every(self) -> int:
        return self._runs.config.anchor_every

    def _note_newest(self) -> None:
        """Tell retention from which version on the mirror needs deltas."""
        self._run.ledger.mirrored = chain.newest_model(describe(self._manifests()))
        MIRROR_LAG.labels(self._run.name, "sent").set(self._behind())

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _look(self) -> dict[VersionForm, mirror_pb2.MirroredForm]:
        """Read the manifests that are in the store; a damaged one counts as absent, and is removed so that it can be written again."""
        found = {}
        for each in await self._bucket.list(manifests_folder(self._run.name)):
            step = parse_manifest_name(self._run.name, each.name)
            if step is None:
                continue
            known = (self._there or {}).get(step)
            if known is None:
                try:
                    known = await self._read_manifest(step)
                except ManifestError as error:
                    log.warning("removing a damaged manifest from the mirror", name=each.name, reason=str(error))
                    await self._bucket.delete([each.name])
                    continue
            found[step] = known
        return found

    async def _read_manifest(self, step: VersionForm) -> mirror_pb2.MirroredForm:
        data = await self._bucket.read(manifest_name(self._run.name, step), LARGEST_MANIFEST_BYTES)
        return await self._runs.in_thread(read_manifest, self._run.name, step, bytes(data))

    def _check_own(self) -> None:
        """Check that the store may belong to this run: same digests, and no version newer than the service's newest."""
        for step, manifest in self._manifests().items():
            stored = self._run.versions.get(step.version)
            form = None if stored is None else stored.forms.get(step.form)
            if form is not None and form.manifest.digest != manifest.digest:
                raise self._foreign(f"{step.form.value} {step.version} there has digest {manifest.digest}")
        newest, own = self._newest(), self._run.ledger.newest
        if newest is not None and own is not None and newest > own:
            raise self._foreign(f"the newest version there is {newest}, here {own}")

    def _foreign(self, what: str) -> ForeignVersionsError:
        return ForeignVersionsError(
            f"{self._bucket.url} holds versions of another run named {self._run.name} ({what}): set weightsync.mirror to another"
            f" prefix, name the run otherwise, or remove {self._run.name}/ there; then restart this service"
        )

    # --- sending ------------------------------------------------------------------------------------------------------

    async def _send(self, step: VersionForm, stored: StoredForm) -> None:
        """Send one form: the missing parts, then its manifest."""
        started = time.perf_counter()
        folder = parts_folder(self._run.name, step)
        there = {each.name.removeprefix(folder): each.size for each in await self._bucket.list(folder)}
        mirrored = mirror_pb2.MirroredForm(manifest=stored.manifest, part_bytes=self._part_bytes)
        sent = 0
        for shard in stored.manifest.shards:
            parts, shard_bytes = await self._send_shard(step, shard, stored.files[shard.name], there)
            mirrored.shards.add(name=shard.name, parts=parts)
            sent += shard_bytes
        await self._create_manifest(step, mirrored)
        log.info(
            "version mirrored",
            run=self._run.name,
            version=str(step.version),
            form=step.form.value,
            bytes=stored.manifest.size_bytes,
            sent_bytes=sent,
            dense_bytes=stored.manifest.dense_bytes,
            behind=self._behind(),
            seconds=round(time.perf_counter() - started, 3),
        )

    async def _send_shard(
        self, step: VersionForm, shard: pb.Shard, path: Path, there: Mapping[str, int]
    ) -> tuple[list[str], int]:
        """Send the missing parts of a shard; return the digests of all its parts, and the bytes sent.

        Raises:
            DamagedFileError: if the file on disk is not the shard that its manifest describes.
            BucketError, OSError: if the store or the disk fails.
        """
        whole, digests, sent = xxhash.xxh3_128(), [], 0
        slots = asyncio.Semaphore(_STREAMS)
        try:
            async with asyncio.TaskGroup() as sending:
                for begin, end in cut(shard.size_bytes, self._part_bytes):
                    await slots.acquire()
                    self._run.ledger.linger(step.version, self._runs.clock() + _LINGER_S)
                    data, digest = await self._runs.in_thread(_read_part, path, begin, end, whole)
                    digests.append(digest)
                    if there.get(digest) == len(data):
                        slots.release()
                        continue
                    task = sending.create_task(self._send_part(step, digest, data))
                    task.add_done_callback(lambda _: slots.release())
                    sent += len(data)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if whole.hexdigest() != shard.digest:
            raise DamagedFileError(
                f"{path} has digest {whole.hexdigest()}, its manifest says {shard.digest}: test the disk; the mirror goes on with"
                " the next dense version"
            )
        return digests, sent

    async def _send_part(self, step: VersionForm, digest: str, data: bytes) -> None:
        await self._bucket.write(part_name(self._run.name, step, digest), data)
        self._sent[step.form].inc(len(data))
        self._sent_bytes[step.form] += len(data)

    async def _create_manifest(self, step: VersionForm, mirrored: mirror_pb2.MirroredForm) -> None:
        """Make a form visible, unless another writer did. Raises ForeignVersionsError if that writer's version has other bytes."""
        assert self._there is not None  # noqa: S101 - `_catch_up` looked
        content = await self._runs.in_thread(write_manifest, mirrored)
        if not await self._bucket.create(manifest_name(self._run.name, step), content):
            theirs = await self._read_manifest(step)
            if theirs.manifest.digest != mirrored.manifest.digest:
                raise self._foreign(
                    f"another writer mirrored {step.form.value} {step.version} with digest {theirs.manifest.digest}"
                )
            mirrored = theirs
        self._there[step] = mirrored

    # --- removing -----------------------------------------------------------------------------------------------------

    async def _prune(self) -> None:
        """Remove the forms that are not needed: first the manifest, so that no reader begins to fetch them, then the parts."""
        there = self._there or {}
        pins = await self._pins()
        for step in surplus(describe(self._manifests()), self._runs.config.mirror_keep, self._anchor_every, pins):
            await self._bucket.delete([manifest_name(self._run.name, step)])
            mirrored = there.pop(step)
            await self._bucket.delete([part_name(self._run.name, step, each) for each in part_sizes(mirrored)])
            log.info(
                "version pruned from the mirror",
                run=self._run.name,
                version=str(step.version),
                form=step.form.value,
                bytes=mirrored.manifest.size_bytes,
            )

    async def _pins(self) -> set[Version]:
        """Return the versions that checkpoints on this host or objects in the store pin."""
        named = await self._bucket.list(pins_folder(self._run.name))
        pins = {parse_pin_name(self._run.name, each.name) for each in named} - {None}
        pins |= await self._runs.in_thread(checkpoint_versions, self._checkpoints)
        return {version for version in pins if version is not None}

    async def _sweep(self) -> None:
        """Send lost parts again, and remove parts that no manifest names and that are too old to be part of an upload."""
        self._there = await self._look()
        wanted = {step: part_sizes(mirrored) for step, mirrored in self._there.items()}
        newest, now = self._newest(), datetime.now(UTC)
        orphans = []
        for each in await self._bucket.list(parts_folder(self._run.name)):
            if (found := parse_part_name(self._run.name, each.name)) is None:
                continue
            step, digest = found
            if wanted.get(step, {}).get(digest) == each.size:
                del wanted[step][digest]
            elif step not in wanted and now - each.modified > _ORPHAN_AGE and newest and step.version <= newest:
                orphans.append(each.name)
        if orphans:
            log.info("parts without a manifest removed from the mirror", run=self._run.name, parts=len(orphans))
            await self._bucket.delete(orphans)
        for step in [step for step, lost in wanted.items() if lost]:
            await self._repair(step, wanted[step])

    async def _repair(self, step: VersionForm, lost: Mapping[str, int]) -> None:
        """Send lost parts again from the service's own files, if it still has them."""
        if not has(self._run.ledger.committed, step):
            log.warning(
                "the mirror lost parts of a version that this service no longer has",
                run=self._run.name,
                version=str(step.version),
                form=step.form.value,
                parts=len(lost),
                remedy="readers take another way, at the latest with the next dense version",
            )
            return
        stored = self._run.versions[step.version].forms[step.form]
        folder = parts_folder(self._run.name, step)
        there = {each.name.removeprefix(folder): each.size for each in await self._bucket.list(folder)}
        try:
            for shard in stored.manifest.shards:
                await self._send_shard(step, shard, stored.files[shard.name], there)
        except DamagedFileError as error:
            log.error("the mirror cannot be repaired", run=self._run.name, reason=str(error))  # noqa: TRY400
            return
        log.info("lost parts sent again", run=self._run.name, version=str(step.version), parts=len(lost))


def _read_part(path: Path, begin: int, end: int, whole: xxhash.xxh3_128) -> tuple[bytes, str]:
    """Return a part of a file and its digest, and add it to the digest of the whole. Raises OSError if the file is too short."""
    with path.open("rb") as file:
        data = os.pread(file.fileno(), end - begin, begin)
    if len(data) < end - begin:
        raise OSError(f"{path} ends at byte {begin + len(data)}, expected {end}")
    whole.update(data)
    return data, digest_of(data)


def checkpoint_versions(checkpoints: Path) -> set[Version]:
    """Return the versions that the checkpoints in a directory name; empty if the directory is not on this host. Blocking."""
    versions = set()
    for path in checkpoints.glob("step_*/manifest.json"):
        with contextlib.suppress(OSError, json_format.ParseError, UnicodeDecodeError):  # being removed, or not whole
            manifest = json_format.Parse(
                path.read_text(), checkpoint_pb2.CheckpointManifest(), ignore_unknown_fields=True
            )
            versions.add(Version.from_proto(manifest.checkpoint.policy_version))
    return versions
