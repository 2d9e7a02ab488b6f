"""Takes a version from another service into this one's store, as a push and a commit would."""

from __future__ import annotations

import asyncio

import structlog

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.backoff import Backoff
from weightsync.format.chunks import RawChunk
from weightsync.format.manifest import ManifestError, check_manifest
from weightsync.format.safetensors import LayoutError
from weightsync.metrics import RELAYED_BYTES
from weightsync.receive.pull import PullCall, PullError, PullLimits, ShardRange, pull_range
from weightsync.service.commit import commit_version
from weightsync.service.errors import translated
from weightsync.service.run import Run
from weightsync.service.runs import Runs
from weightsync.service.upload import OffsetError, SupersededError, Upload

__all__ = ["FetchError", "fetch_version"]

_MOST_RESTARTS = 3
"""Times that a shard is pulled from its beginning because what came was not what its manifest announces."""

log = structlog.get_logger(__name__)


class FetchError(Exception):
    """The version could not be had."""


async def fetch_version(runs: Runs, run: Run, call: PullCall, manifest: pb.Manifest, limits: PullLimits) -> None:
    """Pull every shard of a form as it is stored and commit it; bytes that came in before are not pulled again.

    Args:
        runs: All runs of this service.
        run: The run.
        call: PullWeights of the service that has the version.
        manifest: The form: a dense one, a delta, or an adapter.
        limits: How long to wait.

    Raises:
        FetchError: if the other service does not give it, cannot be reached in so many attempts, or gives something else
            than the manifest says.
        SluiceError: as the contract says of CommitVersion, and for a full disk.
    """
    try:
        await runs.in_thread(check_manifest, manifest)  # before the names of its shards become those of files
    except ManifestError as error:
        raise FetchError(f"the manifest of {Version.from_proto(manifest.version)}: {error}") from error
    for shard in manifest.shards:
        await _fetch_shard(runs, run, call, manifest, shard, limits=limits)
    committing = asyncio.ensure_future(commit_version(runs, run, manifest))
    try:
        await asyncio.shield(committing)
    except asyncio.CancelledError:  # a commit under way comes to its end, so that it is whole or not there
        await asyncio.wait({committing})
        raise


async def _fetch_shard(
    runs: Runs, run: Run, call: PullCall, manifest: pb.Manifest, shard: pb.Shard, *, limits: PullLimits
) -> None:
    """Pull one shard; if it turns out to be another file than announced, begin it anew."""
    version = Version.from_proto(manifest.version)
    base = manifest.base if manifest.kind == pb.VERSION_KIND_DELTA else None
    wanted = ShardRange(manifest.run, manifest.version, shard.name, shard.size_bytes, base)
    backoff = Backoff(limits.first_pause_s)
    while True:
        upload = run.uploads.get((version, shard.name))
        if upload is None or upload.announced.digest != shard.digest:  # retention may have dropped it
            upload = await runs.begin_upload(run, version, shard)
        if upload.complete:
            return
        ticket, _ = await runs.in_thread(upload.take_over)
        try:
            await pull_range(call, wanted, _UploadSink(runs, run, upload, ticket), runs.threads, limits)
            await runs.in_thread(upload.finish, ticket)
            if shard.digest in {"", upload.digest}:
                return
            reason = f"the file has digest {upload.digest}, announced was {shard.digest}"
        except PullError as error:
            raise FetchError(str(error)) from error
        except (LayoutError, OffsetError, SupersededError) as error:
            reason = str(error)
        except OSError as error:
            await runs.discard_upload(run, upload, ticket)
            raise translated(error) from error
        await runs.discard_upload(run, upload, ticket)
        pause_s = backoff.fail()
        if backoff.failures > _MOST_RESTARTS:
            raise FetchError(f"shard {shard.name} came {backoff.failures} times, and never as announced: {reason}")
        log.warning("shard is pulled again", shard=shard.name, reason=reason)
        await asyncio.sleep(pause_s)


class _UploadSink:
    """Puts pulled chunks into an upload."""

    def __init__(self, runs: Runs, run: Run, upload: Upload, ticket: object) -> None:
        self._runs, self._upload, self._ticket = runs, upload, ticket
        self._pulled = RELAYED_BYTES.labels(run.name)

    @property
    def position(self) -> int:
        """The next byte that is wanted."""
        return self._upload.stored

    def feed(self, chunk: RawChunk) -> None:
        """Check and store the next bytes.

        Raises:
            ChunkError, ChunkSizeError: if they were damaged on their way.
            SupersededError, OffsetError, LayoutError, OSError: as `Upload.append`.
        """
        data = chunk.check()
        self._upload.append(self._ticket, chunk.offset, data)
        if chunk.crc32c is not None:
            self._upload.sums.note(chunk.offset, len(data), chunk.crc32c)
        self._upload.active_at = self._runs.clock()
        self._pulled.inc(len(data))
