"""An encoded version on its way out: what kind it is, each rank's shard, one commit. The same steps for one rank or many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import manifest_digest
from weightsync.publish.baseline import Baseline, Diff
from weightsync.publish.group_commit import Frame, Ranks, first_failure
from weightsync.publish.push_report import PushReport
from weightsync.publish.transfer import REPEATABLE, REPEATABLE_REASONS, Destination, ShardTransfer

__all__ = ["Agreement", "Update", "VersionPush", "agree"]

_BASE_REASONS = {"BASE_UNKNOWN", "BASE_DAMAGED"}
"""Refusals of a delta that a dense push of the same version answers."""

_RESERVE_S = 5.0
"""Longest part of the deadline that ranks keep back for telling each other of a failure; a tenth of short ones."""

Kind = Literal["anchor", "delta"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """An encoded version, ready to be published as long as the kept copy holds it.

    Attributes:
        version: Which one.
        base: Version that it was compared with; None if it was not compared.
        diff: What the comparison found.
        serial: Tells whether the kept copy still holds it.
    """

    version: Version
    base: Version | None
    diff: Diff
    serial: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know of a version before its bytes travel.

    Attributes:
        kind: How it travels.
        compared: Whether every rank compared its shard with the version before.
        dense_bytes: Size of a dense copy, over all ranks.
        diff_s: Seconds of the slowest rank's comparison.
        changed_fraction: Values that differ, of all; 1 if nothing was compared.
    """

    kind: Kind
    compared: bool
    dense_bytes: int
    diff_s: float
    changed_fraction: float


def agree(offers: Sequence[pb.Manifest]) -> Agreement:
    """Decide from every rank's offer; all ranks come to the same. Pure.

    A delta is pushed if every rank has one based on the same version, and they have at most half the bytes of a dense copy.

    Raises:
        SluiceError: FAILED_PRECONDITION if the ranks publish different versions.
    """
    versions = {Version.from_proto(offer.version) for offer in offers}
    if len(versions) > 1:
        raise SluiceError.failed_precondition(
            "RANKS_DIFFER",
            f"the ranks publish different versions ({', '.join(map(str, sorted(versions)))}): begin a new epoch on all of them",
        )
    dense = sum(offer.dense_bytes for offer in offers)
    bases = {Version.from_proto(offer.base) for offer in offers if offer.HasField("base")}
    compared = len(bases) == 1 and all(offer.HasField("base") for offer in offers)
    small = 2 * sum(offer.size_bytes for offer in offers) <= dense
    whole = all(offer.kind == pb.VERSION_KIND_DELTA for offer in offers)
    weighted = sum(offer.push_timings.changed_fraction * offer.dense_bytes for offer in offers)
    return Agreement(
        kind="delta" if compared and whole and small else "anchor",
        compared=compared,
        dense_bytes=dense,
        diff_s=max(offer.push_timings.diff.ToNanoseconds() for offer in offers) / 1e9,
        changed_fraction=weighted / dense if dense else float(not compared),
    )


class VersionPush:
    """Publishes one update.

    Args:
        to: The version at its service.
        ranks: Who publishes it.
        baseline: The kept copy; nothing writes to it before `run` has ended.
        update: What it holds.
        chunk_bytes: Bytes per chunk.
        directory: Shared memory in which the service may find files; None: send chunks.
        labels: Free facts for the manifest.
    """

    def __init__(
        self,
        to: Destination,
        ranks: Ranks,
        baseline: Baseline,
        update: Update,
        *,
        chunk_bytes: int,
        directory: Path | None,
        labels: Mapping[str, str],
    ) -> None:
        reserve = min(_RESERVE_S, (to.deadline - time.monotonic()) / 10) if ranks.count > 1 else 0.0
        self._to = Destination(to.channel, to.run, to.version, to.deadline - reserve)
        self._deadline = to.deadline
        self._ranks, self._baseline, self._update = ranks, baseline, update
        self._chunk_bytes, self._directory, self._labels = chunk_bytes, directory, labels
        self._kind: Kind = "anchor"
        self._bytes_sent = 0
        self.sees_files = directory is not None
        """Whether the service took every file that it was offered."""

    async def agree(self) -> Agreement:
        """Hear what every rank has, and settle the kind.

        Raises:
            SluiceError: what any rank failed with.
        """
        update = self._update
        offer = pb.Manifest(
            version=update.version.to_proto(),
            kind=pb.VERSION_KIND_DELTA if update.diff.compared else pb.VERSION_KIND_ANCHOR,
            base=update.base.to_proto() if update.base is not None else None,
            size_bytes=update.diff.encoded_bytes,
            dense_bytes=self._baseline.dense_bytes,
            push_timings=pb.PushTimings(
                diff=_duration(update.diff.seconds), changed_fraction=update.diff.changed_fraction
            ),
        )
        frames = await self._exchange("offer", Frame(offer.SerializeToString()))
        self._agreement = agree([pb.Manifest.FromString(frame.payload) for frame in frames])
        self._kind = self._agreement.kind
        return self._agreement

    async def run(self) -> PushReport:
        """Push and commit, after `agree`; a broken transfer is repeated once, a delta without its base goes dense.

        Raises:
            SluiceError: what any rank failed with; the same on all of them.
        """
        resume, repeated = False, False
        while True:
            try:
                return await self._attempt(resume=resume)
            except SluiceError as error:
                if self._kind == "delta" and error.reason in _BASE_REASONS:
                    self._kind, resume = "anchor", False
                elif not repeated and (error.code in REPEATABLE or error.reason in REPEATABLE_REASONS):
                    resume = repeated = True
                else:
                    raise
                log.warning("push goes on", version=str(self._to.version), kind=self._kind, error=str(error))

    async def _attempt(self, *, resume: bool) -> PushReport:
        frames = await self._exchange("shards", await self._send(resume=resume))
        pushed = time.perf_counter()
        parts = [pb.Manifest.FromString(frame.payload) for frame in frames]
        outcome = await self._commit(parts) if self._ranks.rank == 0 else Frame()
        answers = await self._exchange("outcome", outcome)
        response = pb.CommitVersionResponse.FromString(answers[0].payload)
        return PushReport(
            bytes_sent=sum(part.size_bytes for part in parts),
            push_s=max(part.push_timings.push.ToNanoseconds() for part in parts) / 1e9,
            commit_s=time.perf_counter() - pushed,
            digest=response.manifest.digest,
            duplicate=response.duplicate,
            kind=self._kind,
            dense_bytes=self._agreement.dense_bytes,
            diff_s=self._agreement.diff_s,
            changed_fraction=self._agreement.changed_fraction,
        )

    async def _send(self, *, resume: bool) -> Frame:
        """This rank's shard; a rank without slices has none."""
        started = time.perf_counter()
        part = pb.Manifest()
        if self._baseline.rows:
            try:
                part.shards.append(await self._send_shard(resume=resume))
            except Exception as error:  # noqa: BLE001  whatever it is: the other ranks wait for this one's word
                return Frame(failure=_typed(error))
            part.size_bytes = self._bytes_sent
        part.push_timings.push.CopyFrom(_duration(time.perf_counter() - started))
        return Frame(part.SerializeToString())

    async def _send_shard(self, *, resume: bool) -> pb.Shard:
        make = self._baseline.delta if self._kind == "delta" else self._baseline.anchor
        source, shard = await asyncio.to_thread(make, self._update.diff)
        transfer = ShardTransfer(
            self._to,
            source,
            shard,
            chunk_bytes=self._chunk_bytes,
            kept=self._baseline.local if self._kind == "anchor" else None,
            directory=self._directory,
        )
        try:
            await transfer.send(resume=resume)
        finally:
            self._bytes_sent += transfer.bytes_sent
        self.sees_files = self.sees_files and not transfer.refused_file
        return shard

    async def _commit(self, parts: Sequence[pb.Manifest]) -> Frame:
        agreement, update = self._agreement, self._update
        delta = self._kind == "delta"
        manifest = pb.Manifest(
            run=self._to.run,
            version=self._to.version.to_proto(),
            kind=pb.VERSION_KIND_DELTA if delta else pb.VERSION_KIND_ANCHOR,
            base=update.base.to_proto() if delta and update.base is not None else None,
            shards=[shard for part in parts for shard in part.shards],
            labels=dict(self._labels),
            push_timings=pb.PushTimings(
                diff=_duration(agreement.diff_s),
                push=max((part.push_timings.push for part in parts), key=Duration.ToNanoseconds),
                changed_fraction=agreement.changed_fraction if delta else 1.0,
            ),
        )
        manifest.digest = manifest_digest(manifest)
        request = pb.CommitVersionRequest(manifest=manifest)
        try:
            response = await self._to.stub.CommitVersion(request, timeout=self._to.remaining())
        except (grpc.aio.AioRpcError, SluiceError) as error:
            return Frame(failure=_typed(error))
        digest = pb.Manifest(digest=response.manifest.digest)
        return Frame(pb.CommitVersionResponse(manifest=digest, duplicate=response.duplicate).SerializeToString())

    async def _exchange(self, what: str, frame: Frame) -> list[Frame]:
        step = f"{what} {self._to.version}"
        frames = await asyncio.to_thread(self._ranks.exchange, step, frame, self._deadline)
        failure = first_failure(frames)
        if failure is not None:
            raise failure
        return frames


def _typed(error: Exception) -> SluiceError:
    if isinstance(error, grpc.aio.AioRpcError):
        return SluiceError.from_rpc(error)
    if isinstance(error, SluiceError):
        return error
    return SluiceError(grpc.StatusCode.INTERNAL, "PUSH_FAILED", f"{type(error).__name__}: {error}")


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
