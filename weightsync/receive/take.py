"""Takes versions, one after the other: pulls, verifies and stages them, has them applied, and tells everybody."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import BASE, Version
from weightsync.metrics import UPDATES
from weightsync.receive.adapters import AdapterStage
from weightsync.receive.apply import Applier
from weightsync.receive.copies import BehindError
from weightsync.receive.pull import PullError
from weightsync.receive.report import Reporter
from weightsync.receive.staged_copies import StagedCopies
from weightsync.receive.staging import StagingError
from weightsync.receive.update import UpdateTimings, observe_update
from weightsync.receive.watch import VersionWatch
from weightsync.staged import ApplyReport, StagedAdapter, StagedVersion

__all__ = ["VersionTaker", "as_sluice_error"]

log = structlog.get_logger(__name__)


class VersionTaker:
    """Brings one replica from version to version. `take` is called by one task at a time.

    Args:
        run: ``runs/{run}``.
        manifests: Says what a version is.
        watch: Knows what was announced.
        copies: Stages weights.
        applier: Brings them into the engine.
        reporter: Hears of each phase.
        adapters: Stages adapters; None where the engine serves none.
        observe: Called with the timings of each update that was applied.

    Attributes:
        staged: A version that is staged and not applied yet.
        last_update: What the last update cost.
    """

    def __init__(
        self,
        run: str,
        manifests: weightsync_pb2_grpc.WeightSyncServiceAsyncStub,
        watch: VersionWatch,
        copies: StagedCopies,
        applier: Applier,
        *,
        reporter: Reporter,
        adapters: AdapterStage | None,
        observe: Callable[[UpdateTimings], None] | None,
    ) -> None:
        self.staged: StagedVersion | None = None
        self.last_update: UpdateTimings | None = None
        self._run, self._manifests, self._watch = run, manifests, watch
        self._copies, self._applier, self._reporter = copies, applier, reporter
        self._adapters, self._observe = adapters, observe

    async def take(self, version: Version | None, *, or_newer: bool) -> ApplyReport:
        """Take a version; where other receivers of the host are ahead, first what they have, or that alone if it will do."""
        started = time.perf_counter()
        while True:
            try:
                return await self._take_at_once(version, started, or_newer=or_newer)
            except BehindError as behind:
                report = await self.take(behind.version, or_newer=or_newer)
                if or_newer and version is not None and report.version >= version:
                    return report

    async def _take_at_once(self, version: Version | None, started: float, *, or_newer: bool) -> ApplyReport:
        """Pull, verify, stage, apply, report.

        Raises:
            BehindError: if another version comes first.
            PullError, StagingError, ApplyError, OSError, SluiceError, grpc.aio.AioRpcError: if it could not be taken.
        """
        manifest = await self._manifest(version)
        wanted = Version.from_proto(manifest.version)
        if wanted == self._applier.serving:
            return ApplyReport(wanted, 0.0, 0.0)
        if manifest.kind == pb.VERSION_KIND_ADAPTER:
            return await self._take_adapter(manifest, started)
        current = self._applier.current
        if current is not None and (current.version, current.digest) == (wanted, manifest.digest):
            self._forget_staged()  # back from an adapter to the weights beneath
            return self._taken(await self._applier.apply(current), UpdateTimings(wanted), started)
        timings = UpdateTimings(wanted)
        if self.staged is None or (self.staged.version, self.staged.digest) != (wanted, manifest.digest):
            self._forget_staged()
            self.staged, timings = await self._copies.stage(manifest, current, or_newer=or_newer)
        self._reporter.tell(pb.REPLICA_PHASE_STAGED, wanted, timings=timings)
        report = await self._applier.apply(self.staged)
        self.staged = None
        return self._taken(report, timings, started)

    async def _take_adapter(self, manifest: pb.Manifest, started: float) -> ApplyReport:
        """Have an adapter loaded beside the weights that it belongs to, which are taken first where others are in."""
        version, base = Version.from_proto(manifest.version), Version.from_proto(manifest.base)
        adapters = self._adapters
        if adapters is None:
            raise StagingError(f"version {version} is an adapter: set rollout.lora.enabled = true and start again")
        if base != self._applier.weights:
            if base == BASE:
                raise StagingError(
                    f"adapter {version} belongs to the model on disk, the weights are {self._applier.weights}: call ReloadWeights"
                )
            await self.take(base, or_newer=False)

        async def load(staged: StagedAdapter, timings: UpdateTimings) -> ApplyReport:
            self._reporter.tell(pb.REPLICA_PHASE_STAGED, version, timings=timings)
            return await self._applier.apply_adapter(staged, adapters.use.apply)

        return self._taken(*await adapters.bring(manifest, load), started)

    async def with_adapter(self, version: Version, use: Callable[[StagedAdapter], Awaitable[ApplyReport]]) -> None:
        """Stage an adapter and have it used, beside what the policy serves.

        Raises:
            SluiceError: NOT_FOUND, or FAILED_PRECONDITION if the version is no adapter of the weights that are in.
            Exception: what `use` raises.
        """
        try:
            manifest = await self._manifest(version)
            base = Version.from_proto(manifest.base)
            if manifest.kind != pb.VERSION_KIND_ADAPTER or self._adapters is None:
                raise SluiceError.failed_precondition(
                    "NOT_AN_ADAPTER", f"version {version} holds whole weights: take it with UpdateWeights"
                )
            if base != self._applier.weights:
                raise SluiceError.failed_precondition(
                    "WRONG_BASE",
                    f"adapter {version} belongs to version {base}, the weights are {self._applier.weights}:"
                    " update to its base first",
                )
            await self._adapters.bring(manifest, lambda staged, _timings: use(staged))
        except (PullError, StagingError, OSError, grpc.aio.AioRpcError) as error:
            raise as_sluice_error(error) from error

    def _taken(self, report: ApplyReport, timings: UpdateTimings, started: float) -> ApplyReport:
        """Tell everybody that a version serves."""
        wanted = report.version
        total_s = time.perf_counter() - started
        timings = replace(timings, pause_s=report.pause_s, apply_s=report.apply_s, total_s=total_s)
        self.last_update = timings
        self._reporter.tell(pb.REPLICA_PHASE_SERVING, wanted, timings=timings)
        UPDATES.labels("applied").inc()
        observe_update(timings)
        log.info("version in service", **timings.for_log())
        if self._observe is not None:
            self._observe(timings)
        return report

    def _forget_staged(self) -> None:
        """Make room: a version that could not be applied and was overtaken is of no use."""
        if self.staged is not None:
            self._copies.release(self.staged)
            self.staged = None

    async def _manifest(self, version: Version | None) -> pb.Manifest:
        """From the last announcement if it is that version, else asked for."""
        announced = self._watch.newest
        if announced is not None and version == self._watch.newest_version:
            return announced
        request = pb.GetManifestRequest(run=self._run, version=None if version is None else version.to_proto())
        response = await self._manifests.GetManifest(request, timeout=30)
        return response.manifest


def as_sluice_error(error: Exception) -> SluiceError:
    """Why a version was not taken, as callers hear it."""
    if isinstance(error, SluiceError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return SluiceError.from_rpc(error)
    return SluiceError.unavailable("UPDATE_FAILED", f"{error}; the version before serves on")
