"""The engine's half: watches, prefetches while tokens are produced, verifies, stages, has the version applied, reports.

Whatever happens on the way, the version that serves goes on serving. One task does all that touches versions, so that
commands and announcements never meet half-way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import BASE, Version
from weightsync.format.names import run_resource
from weightsync.metrics import UPDATES
from weightsync.receive.adapters import AdapterStage, AdapterUse
from weightsync.receive.apply import Applier, ApplyError
from weightsync.receive.build import VersionBuilder
from weightsync.receive.policy import Policy, PolicyError, PolicyHeldError, PolicyMode, WeightPolicy
from weightsync.receive.pull import PullError, PullLimits
from weightsync.receive.report import Reporter
from weightsync.receive.sources import SourceLimits, Sources
from weightsync.receive.staged_copies import StagedCopies
from weightsync.receive.staging import StagingError
from weightsync.receive.take import VersionTaker, as_sluice_error
from weightsync.receive.update import ReceiverStatus, UpdateRequest, UpdateTimings
from weightsync.receive.watch import VersionWatch
from weightsync.staged import ApplyReport, StagedAdapter, StagedVersion

# All that a rollout service needs: it imports nothing else of this package.
__all__ = [
    "AdapterUse",
    "ApplyReport",
    "Policy",
    "PolicyError",
    "PolicyHeldError",
    "PolicyMode",
    "PullLimits",
    "ReceiverStatus",
    "StagedAdapter",
    "StagedVersion",
    "UpdateTimings",
    "WeightReceiver",
]

_THREADS = 4
"""Work on files at a time: a copy of the base, a delta that is applied, and what comes in meanwhile."""

_LONGEST_PAUSE_S = 30.0
"""Longest pause before a version that could not be taken is tried again."""

log = structlog.get_logger(__name__)


class WeightReceiver:
    """Keeps one replica on the version that it should serve.

    Args:
        channel: To the weight service, with the agent role; `update_to` and TARGET need the admin role, which may read manifests.
        run: The run's name.
        replica: This replica's name, unique in the run.
        stage_dir: Directory in shared memory, such as ``/dev/shm``; receivers of one run and host share what they stage in
            it, and remove what dead ones left.
        apply: Brings a staged version into the engine: pause, copy, resume. Raises if the engine does not serve it.
        recover: Brings the engine back to some version after `apply` failed for the new and for the old one, and says which;
            None leaves the engine as it is.
        serving: The version that the engine serves at the start.
        apply_deadline_s: Seconds that one `apply` or `recover` may take.
        limits: How long pulls wait.
        failures: What `apply` and `recover` may raise.
        observe: Called with the timings of each update that was applied.
        local_files: Read the service's files where this process sees them, in place of a transfer.
        connect_to: Opens a channel to a relay's address, with the agent role; None keeps the replica at `channel`.
        source_limits: How long sources are waited for.
        adapters: What the engine does with LoRA adapters; None where it serves none, and versions of that kind are refused.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        run: str,
        replica: str,
        stage_dir: Path,
        apply: Callable[[StagedVersion], Awaitable[ApplyReport]],
        *,
        recover: Callable[[], Awaitable[Version]] | None = None,
        serving: Version = BASE,
        apply_deadline_s: float = 120.0,
        limits: PullLimits | None = None,
        failures: tuple[type[Exception], ...] = (Exception,),
        observe: Callable[[UpdateTimings], None] | None = None,
        local_files: bool = True,
        connect_to: Callable[[str], grpc.aio.Channel] | None = None,
        source_limits: SourceLimits | None = None,
        adapters: AdapterUse | None = None,
    ) -> None:
        self._run = run_resource(run)
        self._sources = Sources(channel, self._run, replica, connect_to, limits=source_limits)
        if connect_to is not None:
            channel = self._sources.channel
        self._delivery = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        limits = limits or PullLimits()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weightsync-stage")
        building = partial(VersionBuilder, channel, self._run, self._threads, limits, local_files=local_files)
        self._adapters = None if adapters is None else AdapterStage(stage_dir, run, building(), adapters)
        self._copies = StagedCopies(stage_dir, run, building(), self._threads, limits)
        self._applier = Applier(apply, recover, serving, apply_deadline_s, failures, release=self._copies.release)
        self._policy = WeightPolicy()
        self._wake = asyncio.Event()
        self._watch = VersionWatch(self._delivery, self._run, replica, self._wake.set)
        self._sources.switched = self._watch.hurry
        self._reporter = Reporter(self._delivery, self._run, replica, self._applier)
        self._requests: list[UpdateRequest] = []
        self._taker = VersionTaker(
            self._run,
            weightsync_pb2_grpc.WeightSyncServiceStub(channel),
            self._watch,
            self._copies,
            self._applier,
            reporter=self._reporter,
            adapters=self._adapters,
            observe=observe,
        )
        self._error = ""
        self._failures = 0

    async def run_forever(self) -> None:
        """Follow the policy until cancelled. A weight service that cannot be reached is tried again for ever."""
        await self._sources.settle()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sources.run_forever())
            tasks.create_task(self._watch.run_forever())
            tasks.create_task(self._reporter.run_forever())
            tasks.create_task(self._sync_forever())

    async def close(self) -> None:
        """Remove what is staged; call it when the engine reads it no more."""
        await self._sources.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._copies.close)
        if self._adapters is not None:
            await asyncio.to_thread(self._adapters.close)

    def set_policy(
        self, mode: PolicyMode, version: Version | None = None, *, owner: str = "", ttl_s: float | None = None
    ) -> Policy:
        """Say which versions the replica takes; see `WeightPolicy.set` for the meaning and the errors."""
        policy = self._policy.set(
            mode, version, owner=owner, ttl_s=ttl_s, serving=self._applier.serving, now=time.monotonic()
        )
        self._wake.set()
        return policy

    async def update_to(self, version: Version | None, deadline_s: float, *, owner: str = "") -> ApplyReport:
        """Take a version now, and return when it serves. What serves afterwards is again up to the policy.

        Args:
            version: Which one; None means the newest committed one.
            deadline_s: Seconds to wait.
            owner: Who asks; matters while a policy is held.

        Returns:
            The cost; zero seconds if the version served already.

        Raises:
            PolicyHeldError: if another owner's policy is in force.
            SluiceError: NOT_FOUND, DEADLINE_EXCEEDED, or UNAVAILABLE if the version could not be pulled or applied; the old one
                serves on.
        """
        self._policy.check_owner(owner, time.monotonic())
        request = UpdateRequest(version)
        self._requests.append(request)
        self._wake.set()
        try:
            async with asyncio.timeout(deadline_s):
                return await request.done
        except TimeoutError as error:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "UPDATE_DEADLINE",
                f"version {version or 'newest'} was not in service within {deadline_s:g} s; {self._applier.serving} serves"
                f" on: allow more time, or see the last error: {self._error or 'none'}",
            ) from error
        finally:
            request.done.cancel()

    async def run_exclusive(self, action: Callable[[], Awaitable[Version]]) -> Version:
        """Change what the engine serves by other means, such as a reload of the base model, while no version is applied.

        Args:
            action: Does it, and says which version serves afterwards.
        """
        version = await self._applier.run_exclusive(action)
        self._reporter.tell(pb.REPLICA_PHASE_SERVING, version)
        self._wake.set()
        return version

    async def with_adapter(
        self, version: Version, use: Callable[[StagedAdapter], Awaitable[ApplyReport]], deadline_s: float
    ) -> None:
        """Stage an adapter and have it used, beside what the policy serves.

        Raises:
            SluiceError: NOT_FOUND, DEADLINE_EXCEEDED, or FAILED_PRECONDITION if the version is no adapter of the weights
                that are in.
            Exception: what `use` raises.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._taker.with_adapter(version, use)
        except TimeoutError as error:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "ADAPTER_DEADLINE",
                f"adapter {version} was not loaded within {deadline_s:g} s: allow more time, or look at the weight service",
            ) from error

    def status(self) -> ReceiverStatus:
        """Where the replica stands."""
        policy = self._policy.current(time.monotonic())
        return ReceiverStatus(
            serving=self._applier.serving,
            staged_version=None if self._taker.staged is None else self._taker.staged.version,
            newest=self._watch.newest_version,
            connected=self._watch.connected,
            policy=policy,
            last_error=self._error,
            last_report=self._applier.last_report,
            last_update=self._taker.last_update,
        )

    async def _sync_forever(self) -> None:
        while True:
            self._wake.clear()
            request = self._next_request()
            if request is not None:
                await self._serve(request)
                continue
            wanted = self._policy.wanted(self._applier.serving, self._watch.newest_version, time.monotonic())
            if wanted is not None and await self._try(wanted):
                continue
            await self._sleep(wanted is not None)

    async def _sleep(self, failed: bool) -> None:
        """Until something changes, the policy runs out, or a failed version is due again."""
        pause_s = min(_LONGEST_PAUSE_S, 0.25 * 2**self._failures) if failed else _LONGEST_PAUSE_S
        try:
            async with asyncio.timeout(min(pause_s, max(0.01, self._policy.expires_in(time.monotonic())))):
                await self._wake.wait()
        except TimeoutError:
            return

    def _next_request(self) -> UpdateRequest | None:
        self._requests = [request for request in self._requests if not request.done.done()]
        return self._requests.pop(0) if self._requests else None

    async def _serve(self, request: UpdateRequest) -> None:
        """Carry one command out; a caller who left gets what it asked for all the same."""
        try:
            report = await self._taker.take(request.version, or_newer=request.version is None)
        except (PullError, StagingError, ApplyError, OSError, grpc.aio.AioRpcError, SluiceError) as error:
            self._note_failure(request.version, error)
            request.fail(as_sluice_error(error))
        else:
            self._error = ""
            request.succeed(report)

    async def _try(self, version: Version) -> bool:
        """Take a version that the policy wants; False if that failed, which the next round repeats after a pause."""
        try:
            await self._taker.take(version, or_newer=self._policy.current(time.monotonic()).mode is PolicyMode.FOLLOW)
        except (PullError, StagingError, ApplyError, OSError, grpc.aio.AioRpcError, SluiceError) as error:
            self._note_failure(version, error)
            return False
        self._error, self._failures = "", 0
        return True

    def _note_failure(self, version: Version | None, error: Exception) -> None:
        self._failures = min(self._failures + 1, 8)
        self._error = f"version {version or 'newest'}: {error}"
        UPDATES.labels("failed").inc()
        if isinstance(error, PullError | StagingError):
            self._sources.leave("what it gives could not be taken")
        log.warning("version not taken", version=str(version), serving=str(self._applier.serving), error=str(error))
        self._reporter.tell(pb.REPLICA_PHASE_FAILED, version or self._applier.serving, self._error)
