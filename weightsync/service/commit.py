"""Makes a pushed version visible: verify, build its directory, publish, retain."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext

import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import ManifestError, check_adapter_config
from weightsync.metrics import COMMIT_SECONDS, COMMITTED_BYTES
from weightsync.service.chain import Form
from weightsync.service.errors import FAILURES, translated
from weightsync.service.ledger import RefusedError
from weightsync.service.run import Run
from weightsync.service.runs import Runs
from weightsync.service.store import is_loadable
from weightsync.service.stored import StoredVersion, form_of
from weightsync.service.upload import Upload
from weightsync.service.verify import complete_manifest

__all__ = ["commit_version"]

_USELESS_UPLOADS = {"BASE_UNKNOWN", "BASE_DAMAGED", "NON_FINITE", "DIGEST"}
"""Refusals after which nothing that was pushed of the version can be committed."""

log = structlog.get_logger(__name__)


async def commit_version(runs: Runs, run: Run, announced: pb.Manifest) -> pb.CommitVersionResponse:
    """Commit a version. If it is committed already, compare and say so.

    Raises:
        SluiceError: as the contract says of CommitVersion.
    """
    version = Version.from_proto(announced.version)
    async with run.commit_lock:
        known = run.versions.get(version)
        if known is not None:
            _compare(known, announced)
            return pb.CommitVersionResponse(manifest=known.manifest, duplicate=True)
        run.committing = version
        try:
            stored = await _commit_uploads(runs, run, version, announced)
        finally:
            run.committing = None
    runs.retention_due.set()
    runs.dense_forms.wake(run)
    return pb.CommitVersionResponse(manifest=stored.manifest)


def _compare(known: StoredVersion, announced: pb.Manifest) -> None:
    """Check that a repeated commit names the same content: the version's digest, else the digests of its shards."""
    if announced.digest:
        same = announced.digest in {known.manifest.digest, known.pushed.digest}
    else:
        digests = {shard.name: shard.digest for shard in known.pushed.shards}
        same = {shard.name: shard.digest or digests.get(shard.name) for shard in announced.shards} == digests
    if not same:
        raise SluiceError.already_exists(
            "OTHER_DIGEST",
            f"version {known.version} is committed with digest {known.manifest.digest}: a version never changes,"
            " commit the next number or begin a new epoch",
        )


async def _commit_uploads(runs: Runs, run: Run, version: Version, announced: pb.Manifest) -> StoredVersion:
    started = time.perf_counter()
    try:
        stored = await _verify_and_publish(runs, run, version, announced)
        await runs.drop_uploads(run, version)
    except FAILURES as error:
        failure = translated(error)
        if failure.reason in _USELESS_UPLOADS or isinstance(error, OSError):
            await runs.drop_uploads(run, version)
        raise failure from error
    seconds = time.perf_counter() - started
    COMMIT_SECONDS.observe(seconds)
    COMMITTED_BYTES.labels(run.name).inc(stored.manifest.size_bytes)
    log.info(
        "version committed",
        run=run.name,
        version=str(version),
        form=form_of(stored.manifest).value,
        bytes=stored.manifest.size_bytes,
        digest=stored.manifest.digest,
        seconds=round(seconds, 4),
    )
    return stored


async def _verify_and_publish(runs: Runs, run: Run, version: Version, announced: pb.Manifest) -> StoredVersion:
    """Verify what was pushed, build the version's directory, rename it into sight and tell the watchers."""
    uploads = run.uploads_of(version)
    base_version, holder = Version.from_proto(announced.base), object()
    started = time.perf_counter()
    run.ledger.check_push(version)
    base = _check_base(run, version, announced)
    if base_version in run.versions:
        run.ledger.hold(base_version, holder)
    try:
        manifest = await runs.in_thread(_verify, announced, uploads, base)
        assembled_bytes = 0 if is_loadable(manifest) else manifest.dense_bytes
        async with runs.room_for(run, assembled_bytes, evict=True) if assembled_bytes else nullcontext():
            stored = await runs.in_thread(run.store.commit, manifest, uploads, started)
            run.publish(stored)
    except RefusedError:  # its base was found damaged in the meantime; a restart must not bring it into sight
        await runs.in_thread(run.store.remove, version)
        raise
    finally:
        run.ledger.release(base_version, holder)
    return stored


def _check_base(run: Run, version: Version, announced: pb.Manifest) -> pb.Manifest | None:
    """Return the manifest of the version that a delta is based on; None for other kinds.

    Raises:
        RefusedError: BASE_UNKNOWN or BASE_DAMAGED.
        ManifestError: if the kind and the base do not go together.
    """
    base = Version.from_proto(announced.base)
    form = form_of(announced)
    if announced.HasField("base") == (form is Form.DENSE):
        raise ManifestError("an anchor stands alone, a delta or an adapter names its base: set base accordingly")
    if form is Form.ADAPTER:
        run.ledger.check_adapter(version, base)
    if form is not Form.DELTA:
        return None
    run.ledger.check_delta(version, base)
    return run.versions[base].manifest


def _verify(announced: pb.Manifest, uploads: Mapping[str, Upload], base: pb.Manifest | None) -> pb.Manifest:
    manifest = complete_manifest(announced, uploads, base)
    check_adapter_config(manifest)
    manifest.commit_time.GetCurrentTime()
    return manifest
