"""Takes the versions of each run from an object store: a relay whose upstream is a mirror at another site.

It lists the names of the manifests from time to time, takes the forms that lead to the newest version, and commits them as if
they had been pushed, so that its replicas see no difference. It only reads and lists the store, and never writes to it.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import grpc
import structlog

from sluice.backoff import Backoff
from sluice.rpc import SluiceError
from sluice.v1 import mirror_pb2
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.chunks import MAX_CHUNK_BYTES
from weightsync.format.manifest import ManifestError, parse_run
from weightsync.metrics import MIRROR_BYTES, MIRROR_DAMAGED, MIRROR_LAG
from weightsync.mirror.bucket import Bucket, BucketError, ObjectMissingError, ObjectTooLargeError
from weightsync.mirror.layout import (
    LARGEST_MANIFEST_BYTES,
    cut,
    describe,
    digest_of,
    manifest_name,
    manifests_folder,
    parse_manifest_name,
    part_name,
    read_manifest,
)
from weightsync.mirror.plan import next_downloads
from weightsync.receive.pull import ChunkSink
from weightsync.relay import FetchError, fetch_version
from weightsync.service.chain import Form, VersionForm
from weightsync.service.runs import Run, Runs

_STREAMS = 4
"""Number of parts that are fetched, and are in memory, at a time."""

_FETCHES = 3
"""How often to fetch an object whose bytes do not match its digest: a cache or proxy may have damaged them."""

_LONGEST_PAUSE = 10
"""Longest pause after failures, in pauses between two looks."""

_DAMAGED_S = 60.0
"""Seconds after which a damaged form is tried again, because the mirror's writer may have repaired it."""

log = structlog.get_logger(__name__)


class DamagedFormError(Exception):
    """A form in the store differs from its manifest, or a part of it is missing."""


class PrunedFormError(Exception):
    """A form was removed from the store while it was fetched."""


class MirrorReader:
    """The object store that a service takes its versions from."""

    continues_files = True

    def __init__(self, bucket: Bucket) -> None:
        self.target = f"the service that writes {bucket.url}"
        self._bucket = bucket
        self._followers: dict[str, _Reader] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run_forever(self) -> None:
        """Follow until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for reader in self._followers.values():
                    self._group.create_task(reader.run_forever())
                await asyncio.Event().wait()
        finally:
            self._group = None

    async def has(self, resource: str) -> bool:
        """Return whether the store has the run named ``runs/{run}``; raise SluiceError UNAVAILABLE if it cannot tell."""
        try:
            return bool(await self._bucket.list(manifests_folder(parse_run(resource))))
        except BucketError as error:
            raise SluiceError.unavailable("MIRROR_UNREACHABLE", str(error)) from error

    def follow(self, runs: Runs, run: Run) -> None:
        """From now on, copy the versions of the store into a run."""
        self._followers[run.name] = _Reader(runs, run, self._bucket)
        if self._group is not None:
            self._group.create_task(self._followers[run.name].run_forever())

    def report(self, run: Run, request: pb.ReportVersionRequest) -> None:
        """Do not forward a replica's report, because readers cannot write to the store."""

    def lease_s(self, run: Run) -> float:
        """Return infinity: the store grants no leases, so it sets no bound."""
        return math.inf

    def describe(self, run: Run) -> pb.MirrorState:
        """Return how far the run's versions have been copied."""
        return self._followers[run.name].describe()


class _Reader:
    """The versions of one run."""

    def __init__(self, runs: Runs, run: Run, bucket: Bucket) -> None:
        self._runs, self._run, self._bucket = runs, run, bucket
        self._there: dict[VersionForm, mirror_pb2.MirroredForm] = {}
        self._last_name: str | None = None
        self._damaged: dict[VersionForm, float] = {}
        """Forms that could not be used, and when they are tried again."""
        self._error = ""
        self._received = {form: MIRROR_BYTES.labels(run.name, "received", form.value) for form in Form}
        self._received_bytes = dict.fromkeys(Form, 0)

    async def run_forever(self) -> None:
        """Follow until cancelled."""
        poll_s = self._runs.config.mirror_poll_s
        backoff = Backoff(poll_s, _LONGEST_PAUSE * poll_s)
        while True:
            try:
                await self._catch_up()
            except (BucketError, FetchError, SluiceError, OSError, ManifestError) as error:
                self._error = str(error)
                pause_s = backoff.fail()
                log.warning(
                    "mirror not followed, the older versions are given out",
                    run=self._run.name,
                    behind=self._behind(),
                    reason=self._error,
                    retry_s=round(pause_s, 1),
                )
            else:
                self._error = ""
                backoff.succeed()
                pause_s = poll_s
            for upload in self._run.uploads.values():
                upload.active_at = self._runs.clock()  # retention keeps the upload until the link is back
            self._measure_lag()
            await asyncio.sleep(pause_s)

    def describe(self) -> pb.MirrorState:
        """Return how far the versions have been copied."""
        newest = max((step.version for step in self._there), default=None)
        return pb.MirrorState(
            url=self._bucket.url,
            use=pb.MIRROR_USE_READ,
            newest=None if newest is None else newest.to_proto(),
            versions_behind=self._behind(),
            error=self._error,
            dense_bytes=self._received_bytes[Form.DENSE] + self._received_bytes[Form.ADAPTER],
            delta_bytes=self._received_bytes[Form.DELTA],
        )

    def _behind(self) -> int:
        newest = self._run.ledger.newest
        return len({step.version for step in self._there if newest is None or step.version > newest})

    def _measure_lag(self) -> None:
        MIRROR_LAG.labels(self._run.name, "received").set(self._behind())

    async def _catch_up(self) -> None:
        """Take the forms that lead to the newest version.

        Raises:
            FetchError: if no forms in the store lead there.
            BucketError, SluiceError, OSError: if the store cannot be read, or the version cannot be committed.
        """
        await self._look(everything=self._behind() > 0)
        while (path := self._plan()) is not None and path:
            self._measure_lag()
            try:
                await self._take(path)
            except PrunedFormError as error:
                log.info("beginning again with what the mirror has now", run=self._run.name, reason=str(error))
                await self._look(everything=True)
        if path is None:
            raise FetchError(
                f"nothing in {self._bucket.url} leads from version {self._run.ledger.newest or 'none'} to a newer one"
                f" ({self._why_not()}): the next dense version in the mirror does; to have one now, push a dense version there"
            )

    def _plan(self) -> list[VersionForm] | None:
        now = self._runs.clock()
        self._damaged = {step: until for step, until in self._damaged.items() if until > now}
        manifests = {step: mirrored.manifest for step, mirrored in self._there.items()}
        return next_downloads(describe(manifests), self._run.ledger.committed, self._damaged)

    def _why_not(self) -> str:
        damaged = ", ".join(f"{step.form.value} {step.version}" for step in sorted(self._damaged))
        return f"damaged there: {damaged}" if damaged else "deltas of it are missing"

    async def _look(self, *, everything: bool = False) -> None:
        """List the names after the last known one. If there are any, or with `everything`, list all names and read the new manifests."""
        folder = manifests_folder(self._run.name)
        news = await self._bucket.list(folder, after=None if everything else self._last_name)
        if not (news or everything):
            return
        names = news if self._last_name is None or everything else await self._bucket.list(folder)
        found: dict[VersionForm, mirror_pb2.MirroredForm] = {}
        for each in names:
            step = parse_manifest_name(self._run.name, each.name)
            if step is not None and (mirrored := self._there.get(step) or await self._read_manifest(step)):
                found[step] = mirrored
        self._there = found
        unread = self._damaged.keys() - found.keys()
        self._last_name = None if unread else max((each.name for each in names), default=None)

    async def _read_manifest(self, step: VersionForm) -> mirror_pb2.MirroredForm | None:
        """Return a form's manifest; None if it was pruned, or is damaged."""
        if step in self._damaged:
            return None
        name, reason = manifest_name(self._run.name, step), ""
        for _ in range(_FETCHES):
            try:
                data = await self._bucket.read(name, LARGEST_MANIFEST_BYTES)
                return await self._runs.in_thread(read_manifest, self._run.name, step, bytes(data))
            except ObjectMissingError:
                return None
            except (ManifestError, ObjectTooLargeError) as error:
                reason = str(error)
                MIRROR_DAMAGED.labels(self._run.name).inc()
        self._mark_damaged(step, f"{self._bucket.url}/{name} came {_FETCHES} times, and is damaged: {reason}")
        return None

    def _mark_damaged(self, step: VersionForm, reason: str) -> None:
        self._damaged[step] = self._runs.clock() + _DAMAGED_S
        log.error(
            "a version in the mirror cannot be used, another way is taken",
            run=self._run.name,
            version=str(step.version),
            form=step.form.value,
            reason=reason,
            remedy="remove that object from the store: the service that writes it sends it again within ten minutes, or a"
            " dense version replaces it",
        )

    # --- taking -------------------------------------------------------------------------------------------------------

    async def _take(self, path: Sequence[VersionForm]) -> None:
        """Take and commit the forms of a path; return early if one is damaged, so that another path is chosen.

        Raises:
            PrunedFormError: if a form was removed meanwhile.
            FetchError, BucketError, SluiceError, OSError: if a form cannot be fetched now.
        """
        for step in path:
            mirrored = self._there[step]
            self._check_base(step)
            try:
                await fetch_version(self._runs, self._run, mirrored.manifest, partial(self._pull, step, mirrored))
            except DamagedFormError as error:
                self._mark_damaged(step, str(error))
                return
            except (FetchError, SluiceError) as error:
                if isinstance(error, SluiceError) and not _is_damage(error):
                    raise
                self._mark_damaged(step, str(error))
                return
            log.info(
                "version taken from the mirror",
                run=self._run.name,
                version=str(step.version),
                form=step.form.value,
                bytes=mirrored.manifest.size_bytes,
                dense_bytes=mirrored.manifest.dense_bytes,
                behind=self._behind(),
            )
        await self._runs.in_thread(self._run.store.drop_interrupted)

    def _check_base(self, step: VersionForm) -> None:
        """Check that a delta's base here equals the base in the mirror.

        Raises:
            FetchError: if they differ, because the directory or the store belongs to another run of the same name.
        """
        if step.form is not Form.DELTA:
            return
        base = Version.from_proto(self._there[step].manifest.base)
        ours = self._run.versions.get(base)
        for form, stored in (ours.forms if ours is not None else {}).items():
            theirs = self._there.get(VersionForm(base, form))
            if theirs is not None and theirs.manifest.digest != stored.manifest.digest:
                raise FetchError(
                    f"{form.value} {base} has digest {stored.manifest.digest} here and {theirs.manifest.digest} in"
                    f" {self._bucket.url}: they belong to different runs of the same name; give this service an empty"
                    " weightsync.directory, or the mirror another prefix"
                )

    async def _pull(
        self, step: VersionForm, mirrored: mirror_pb2.MirroredForm, _: pb.Manifest, shard: pb.Shard, sink: ChunkSink
    ) -> None:
        """Fill a sink with a shard, part by part; parts that it has are not fetched again.

        Raises:
            DamagedFormError, PrunedFormError, BucketError: as `_part`.
        """
        digests = next(each.parts for each in mirrored.shards if each.name == shard.name)
        ranges = cut(shard.size_bytes, mirrored.part_bytes)
        files = await self._runs.in_thread(self._run.store.interrupted, step.version, shard.name)
        waiting: deque[asyncio.Task[memoryview]] = deque()
        first = sink.position // mirrored.part_bytes
        ahead = iter(list(zip(ranges, digests, strict=True))[first:])
        try:
            for begin, _end in ranges[first:]:
                while len(waiting) < _STREAMS and (following := next(ahead, None)) is not None:
                    waiting.append(asyncio.create_task(self._part(step, *following, files)))
                data = await waiting.popleft()
                await self._runs.in_thread(_feed, sink, begin, data)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _part(self, step: VersionForm, where: tuple[int, int], digest: str, files: Sequence[Path]) -> memoryview:
        """Return a part whose bytes match its digest, from an interrupted file or from the store.

        Raises:
            DamagedFormError: if the bytes did not match in several attempts, or the part is missing.
            PrunedFormError: if its form was removed meanwhile.
            BucketError: if the store cannot be read.
        """
        begin, end = where
        name = part_name(self._run.name, step, digest)
        for path in files:
            known = await self._runs.in_thread(_read_range, path, begin, end)
            if digest_of(known) == digest:
                return memoryview(known)
        for _ in range(_FETCHES):
            try:
                data = await self._bucket.read(name, end - begin)
            except ObjectMissingError as error:
                raise await self._missing(step, name) from error
            except ObjectTooLargeError as error:
                raise DamagedFormError(str(error)) from error
            self._received[step.form].inc(len(data))
            self._received_bytes[step.form] += len(data)
            found = await self._runs.in_thread(digest_of, data)
            if found == digest:
                return data
            MIRROR_DAMAGED.labels(self._run.name).inc()
            log.warning("a part came damaged and is fetched again", name=name, digest=found, expected=digest)
        raise DamagedFormError(
            f"{self._bucket.url}/{name} came {_FETCHES} times with other bytes than its name says: it is damaged there"
        )

    async def _missing(self, step: VersionForm, name: str) -> Exception:
        """Return why a part is missing: its form was pruned, or the part was lost."""
        names = [each.name for each in await self._bucket.list(manifests_folder(self._run.name))]
        what = f"{step.form.value} {step.version}"
        if manifest_name(self._run.name, step) in names:
            return DamagedFormError(f"{self._bucket.url}/{name} is missing, and {what} needs it")
        return PrunedFormError(f"{what} was pruned from {self._bucket.url} while it was taken")


def _is_damage(error: SluiceError) -> bool:
    """Return whether a commit failed because the mirror's form is damaged."""
    return error.code in {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INVALID_ARGUMENT} or error.reason in {
        "NON_FINITE",
        "SHARDS_MISSING",
    }


def _read_range(path: Path, begin: int, end: int) -> bytes:
    """Return bytes of a file, fewer if it ends early or cannot be read. Blocking."""
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), end - begin, begin)
    except OSError:
        return b""


def _feed(sink: ChunkSink, begin: int, data: memoryview) -> None:
    """Feed a part in pieces that stay in the processor's cache. Skip the bytes that the sink has already. Blocking."""
    end = begin + len(data)
    while (position := sink.position) < end:
        sink.feed(position, data[position - begin : min(position + MAX_CHUNK_BYTES, end) - begin])
