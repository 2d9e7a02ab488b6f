"""The engine's half of weight sync: it keeps one replica on the version that its policy asks for.

The life of a version here: prefetch while the engine generates -> verify -> stage in shared memory -> pause -> apply ->
resume -> report. `WeightReceiver._take` reads in that order. One task does all of it, so that commands and announcements
never interrupt each other. Until a version is applied, the previous one serves.

The engine alone knows what it serves: it may refuse a version, take an adapter away, or come back from a restart on the base
model. So the receiver asks it, before it decides and after every change (`Engine.held`). The engine also recovers from a
failed apply by itself; the receiver only tries the version again, after a pause. If the engine's first version does not fit its
model, the engine refuses it. No later version will fit either, so the receiver gives up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import structlog

from sluice.backoff import Backoff
from sluice.clock import CLOCK, Clock
from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import BASE, Version
from weightsync.format.manifest import run_resource
from weightsync.metrics import UPDATES
from weightsync.receive.pull import BaseFile, PullCost, PullError, PullLimits, VersionBuilder
from weightsync.receive.shared_area import (
    BehindError,
    SharedArea,
    SharedCopy,
    StagedAdapters,
    StagedFiles,
    remove_stale,
)
from weightsync.receive.sources import Reporter, SourceLimits, Sources, UpdateTimings, VersionWatch, observe_update
from weightsync.receive.version_file import StagingError, dense_bytes, tensor_specs
from weightsync.staged import (
    ApplyError,
    ApplyReport,
    Engine,
    HeldVersions,
    StagedAdapter,
    StagedVersion,
    VersionRefusedError,
)

__all__ = ["PolicyMode", "PullLimits", "ReceiverOptions", "ReceiverStatus", "WeightReceiver"]

# All names that a rollout service needs. Otherwise it imports only `weightsync.staged` from this package.
T = TypeVar("T")

_THREADS = 4
"""Threads for work on files: copying the base, applying a delta, and writing the chunks that arrive meanwhile."""

_IDLE_S = 30.0
"""Longest sleep. Anything that needs work earlier sets the wake-up event."""

_RETRY_FIRST_S = 0.5
_RETRY_LONGEST_S = 30.0
"""Pauses before a version that could not be taken is tried again, in seconds."""

_MANIFEST_DEADLINE_S = 30.0

_FAILURES = (PullError, StagingError, ApplyError, OSError, grpc.aio.AioRpcError, SluiceError)
"""Errors after which the previous version serves, and the next attempt may succeed."""

log = structlog.get_logger(__name__)


# --- which version to take --------------------------------------------------------------------------------------------


class PolicyMode(Enum):
    """How a replica chooses its version; the names are those of the contract."""

    FOLLOW = "follow"
    HOLD = "hold"
    TARGET = "target"


class PolicyError(SluiceError):
    """INVALID_ARGUMENT: the policy contradicts itself or the replica's state."""


class PolicyHeldError(SluiceError):
    """FAILED_PRECONDITION: another owner's policy is in force; the message names it and its end."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy in force; HOLD and TARGET have a version, an owner, and the second at which FOLLOW returns."""

    mode: PolicyMode = PolicyMode.FOLLOW
    version: Version | None = None
    owner: str = ""
    expires: float = math.inf


_FOLLOW = Policy()


class WeightPolicy:
    """The policy of one replica. Times are seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._policy = _FOLLOW

    def current(self, now: float) -> Policy:
        """Return the policy in force."""
        if now >= self._policy.expires:
            self._policy = _FOLLOW
        return self._policy

    def set(
        self,
        mode: PolicyMode,
        version: Version | None = None,
        *,
        owner: str = "",
        ttl_s: float | None = None,
        serving: Version,
        now: float,
    ) -> Policy:
        """Change the policy. Only the owner of the policy in force may; while FOLLOW is in force, anybody may.

        Args:
            mode: The new mode; FOLLOW ends the owner's policy.
            version: For HOLD and TARGET; None with HOLD means the version that serves.
            owner: Who asks; needed for HOLD and TARGET.
            ttl_s: Seconds after which FOLLOW returns; needed for HOLD and TARGET.
            serving: The version that serves.
            now: Second of the clock.

        Raises:
            PolicyHeldError: if another owner's policy is in force.
            PolicyError: if owner, time to live or version are missing or wrong.
        """
        self.check_owner(owner, now)
        if mode is PolicyMode.FOLLOW:
            self._policy = _FOLLOW
            return self._policy
        if not owner:
            raise PolicyError.invalid_argument(
                "owner", f"{mode.name} needs one: set the name of the caller who may end it"
            )
        if ttl_s is None or not 0 < ttl_s < math.inf:
            raise PolicyError.invalid_argument(
                "ttl", f"{mode.name} needs one above 0 seconds: no policy holds for ever"
            )
        if mode is PolicyMode.TARGET and version is None:
            raise PolicyError.invalid_argument("version", "TARGET needs one: set the version to serve")
        if mode is PolicyMode.HOLD and version not in {None, serving}:
            raise PolicyError.invalid_argument(
                "version", f"HOLD keeps {serving}, which serves; set TARGET for {version}"
            )
        self._policy = Policy(mode, serving if version is None else version, owner, now + ttl_s)
        return self._policy

    def check_owner(self, owner: str, now: float) -> None:
        """Check that `owner` may change what serves.

        Raises:
            PolicyHeldError: if another owner's policy is in force.
        """
        policy = self.current(now)
        if policy.mode is not PolicyMode.FOLLOW and policy.owner != owner:
            raise PolicyHeldError.failed_precondition(
                "POLICY_HELD",
                f"{policy.owner} has set {policy.mode.name} {policy.version} for another"
                f" {policy.expires - now:.1f} s: wait, or let it set FOLLOW",
            )

    def wanted(self, serving: Version, newest: Version | None, now: float) -> Version | None:
        """Return the version to take now; None if the one that serves is right."""
        policy = self.current(now)
        if policy.mode is PolicyMode.FOLLOW:
            return newest if newest is not None and newest > serving else None
        return policy.version if policy.version != serving else None

    def expires_in(self, now: float) -> float:
        """Return the seconds until the policy ends by itself; infinite for FOLLOW."""
        return self.current(now).expires - now


# --- the receiver -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """How a receiver reaches versions, and how long it waits.

    Attributes:
        local_files: Read the service's files where this process sees them, in place of a transfer.
        connect_to: Opens a channel to a relay's address, with the agent role; None uses no relays.
    """

    apply_deadline_s: float = 120.0
    pull: PullLimits = field(default_factory=PullLimits)
    local_files: bool = True
    connect_to: Callable[[str], grpc.aio.Channel] | None = None
    sources: SourceLimits = field(default_factory=SourceLimits)


@dataclass(frozen=True, slots=True)
class ReceiverStatus:
    """The state of a receiver; the defaults are those of a replica that follows no weight service.

    Attributes:
        staged_version: Version that is staged and not applied yet.
        newest: Newest version that was announced.
        connected: Whether the weight service answers.
        updates: Versions that were applied since the start.
        last_error: Empty if the last update succeeded.
    """

    serving: Version = BASE
    staged_version: Version | None = None
    newest: Version | None = None
    connected: bool = False
    policy: Policy = _FOLLOW
    updates: int = 0
    last_error: str = ""
    last_update: UpdateTimings | None = None


@dataclass(frozen=True, slots=True)
class _UpdateRequest:
    """A command to take a version. If its caller leaves, which may be at any time, `done` is cancelled."""

    version: Version | None
    done: asyncio.Future[ApplyReport]


@dataclass(frozen=True, slots=True)
class _StagedWeights:
    """A version whose file this receiver uses."""

    staged: StagedVersion
    manifest: pb.Manifest
    copy: SharedCopy


class WeightReceiver:
    """Keeps one replica on the version that it should serve.

    Args:
        channel: To the weight service, with the agent role; `update_to` and TARGET need the admin role, which may read manifests.
        run: The run's name.
        replica: This replica's name, unique in the run.
        stage_dir: Directory in shared memory, such as ``/dev/shm``; receivers of one run and host share what they stage in
            it, and remove what dead ones left.
        engine: Applies what is staged, and says what it holds.
        clock: Decides when policies, deadlines and pauses end.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        run: str,
        replica: str,
        stage_dir: Path,
        engine: Engine,
        *,
        options: ReceiverOptions | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._run, self._engine, self._options = run_resource(run), engine, options or ReceiverOptions()
        self._clock = clock
        self._wake = asyncio.Event()
        limits = self._options.pull
        self._sources = Sources(
            channel, self._run, replica, self._options.connect_to, limits=self._options.sources, clock=clock
        )
        self._manifests = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
        self._watch = VersionWatch(
            self._sources.watch, self._run, replica, self._wake.set, hurry=self._sources.changed, clock=clock
        )
        self._reporter = Reporter(self._sources.report, self._run, replica, self._serving, clock=clock)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weightsync-stage")
        self._builder = VersionBuilder(
            self._sources, self._run, self._threads, limits, local_files=self._options.local_files
        )
        self._area = SharedArea(stage_dir, run)
        self._files = StagedFiles(self._area, self._threads, limits)
        self._adapters = StagedAdapters(stage_dir, run, self._builder, self._threads)
        self._policy = WeightPolicy()
        self._requests: list[_UpdateRequest] = []
        self._changing = asyncio.Lock()
        """Held while the engine's weights change."""
        self._last_held = engine.held() or HeldVersions(BASE, BASE)
        self._current: _StagedWeights | None = None
        """Where the engine's weights came from; None if they were not staged here."""
        self._staged: _StagedWeights | None = None
        """Staged and not applied yet."""
        self._backoff = Backoff(_RETRY_FIRST_S, _RETRY_LONGEST_S)
        self._updates, self._error = 0, ""
        self._refused: VersionRefusedError | None = None
        """Why the last tried version does not fit the engine. None if it fits, or failed for another reason."""
        self._last_update: UpdateTimings | None = None

    async def run_forever(self) -> None:
        """Follow the policy until cancelled. A weight service that cannot be reached is tried again and again.

        Raises:
            VersionRefusedError: if the engine refused the first version that it was to follow.
        """
        await asyncio.to_thread(remove_stale, self._area.parent)
        await self._sources.settle()
        refused: VersionRefusedError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sources.run_forever())
                tasks.create_task(self._watch.run_forever())
                tasks.create_task(self._reporter.run_forever())
                tasks.create_task(self._follow_forever())
        except* VersionRefusedError as group:
            (refused,) = (each for each in group.exceptions if isinstance(each, VersionRefusedError))
        if refused is not None:
            raise refused

    async def close(self) -> None:
        """Remove the staged files. Call it when the engine no longer reads them."""
        await self._sources.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._files.close)
        await asyncio.to_thread(self._adapters.close)

    # --- commands -------------------------------------------------------------------------------------------------

    def set_policy(
        self, mode: PolicyMode, version: Version | None = None, *, owner: str = "", ttl_s: float | None = None
    ) -> Policy:
        """Set which versions the replica takes; see `WeightPolicy.set` for the meaning and the errors."""
        policy = self._policy.set(mode, version, owner=owner, ttl_s=ttl_s, serving=self._serving(), now=self._clock())
        self._wake.set()
        return policy

    async def update_to(self, version: Version | None, deadline_s: float, *, owner: str = "") -> ApplyReport:
        """Take a version now, and return when it serves. After that the policy decides again.

        Args:
            version: The version; None means the newest committed one.
            deadline_s: Seconds to wait.
            owner: The caller; matters while a policy is held.

        Returns:
            The cost; zero seconds if the version served already.

        Raises:
            PolicyHeldError: if another owner's policy is in force.
            SluiceError: NOT_FOUND, DEADLINE_EXCEEDED, FAILED_PRECONDITION if the version does not fit the engine, or UNAVAILABLE
                if it could not be pulled or applied; the message says what serves.
        """
        self._policy.check_owner(owner, self._clock())
        request = _UpdateRequest(version, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._wake.set()
        try:
            async with self._clock.timeout(deadline_s):
                return await request.done
        except TimeoutError as error:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "UPDATE_DEADLINE",
                f"version {version or 'newest'} was not in service within {deadline_s:g} s; {self._serving()} serves:"
                f" allow more time, or see the last error: {self._error or 'none'}",
            ) from error
        finally:
            request.done.cancel()

    async def run_exclusive(self, action: Callable[[], Awaitable[T]]) -> T:
        """Run an action that changes the engine's weights in another way, such as a reload of the base. No version is applied meanwhile."""
        try:
            async with self._changing:
                try:
                    return await action()
                finally:
                    self._keep_what_is_held()
        finally:
            self._reporter.tell(pb.REPLICA_PHASE_SERVING)
            self._wake.set()

    async def verify(self, compare: Callable[[StagedVersion | None], Awaitable[T]]) -> tuple[Version, T]:
        """Compare the engine's live weights with the files that they came from, while no version is applied.

        Args:
            compare: Makes the comparison, and gets the staged version, or None for the base model.

        Returns:
            The version of the weights, and what `compare` returned.

        Raises:
            SluiceError: FAILED_PRECONDITION if the files of these weights are not staged here.
        """
        async with self._changing:
            weights = self._keep_what_is_held().weights
            if self._current is None and weights != BASE:
                raise SluiceError.failed_precondition(
                    "NOT_STAGED",
                    f"the files of version {weights} are not on this host: update to another version first",
                )
            return weights, await compare(None if self._current is None else self._current.staged)

    async def with_adapter(
        self, version: Version, use: Callable[[StagedAdapter], Awaitable[object]], deadline_s: float
    ) -> None:
        """Stage an adapter and pass it to `use`, beside the version that the policy asks for.

        Raises:
            SluiceError: NOT_FOUND, DEADLINE_EXCEEDED, or FAILED_PRECONDITION if the version is not an adapter of the
                engine's weights.
            Exception: what `use` raises.
        """
        try:
            async with self._clock.timeout(deadline_s):
                manifest = await self._manifest(version)
                base, weights = Version.from_proto(manifest.base), (await self._look()).weights
                if manifest.kind != pb.VERSION_KIND_ADAPTER or not self._engine.serves_adapters:
                    raise SluiceError.failed_precondition(
                        "NOT_AN_ADAPTER", f"version {version} holds whole weights: take it with UpdateWeights"
                    )
                if base != weights:
                    raise SluiceError.failed_precondition(
                        "WRONG_BASE",
                        f"adapter {version} belongs to version {base}, the weights are {weights}: update to its base"
                        " first",
                    )
                async with self._adapters.staged(manifest, self._engine.held) as (staged, _):
                    await use(staged)
        except TimeoutError as error:
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "ADAPTER_DEADLINE",
                f"adapter {version} was not loaded within {deadline_s:g} s: allow more time, or look at the weight service",
            ) from error
        except (PullError, StagingError, OSError, grpc.aio.AioRpcError) as error:
            raise self._as_sluice_error(error) from error

    def status(self) -> ReceiverStatus:
        """Return the state of the receiver."""
        return ReceiverStatus(
            serving=self._serving(),
            staged_version=None if self._staged is None else self._staged.staged.version,
            newest=self._watch.newest_version,
            connected=self._watch.connected,
            policy=self._policy.current(self._clock()),
            updates=self._updates,
            last_error=self._error,
            last_update=self._last_update,
        )

    # --- the main loop --------------------------------------------------------------------------------------------

    async def _follow_forever(self) -> None:
        while True:
            self._wake.clear()
            request = self._next_request()
            if request is not None:
                await self._try(request.version, or_newer=request.version is None, done=request.done)
                continue
            held, now = await self._look(), self._clock()
            wanted = self._policy.wanted(held.serving, self._watch.newest_version, now)
            if wanted is None:
                await self._sleep(_IDLE_S)
                continue
            follows = self._policy.current(now).mode is PolicyMode.FOLLOW
            if not await self._try(wanted, or_newer=follows):
                if follows and self._refused is not None and not self._updates:
                    raise self._refused
                await self._sleep(self._backoff.fail())

    async def _take(self, version: Version | None, *, or_newer: bool) -> ApplyReport:
        """Bring the engine to a version: pull, verify, stage, apply, report.

        Args:
            version: The version; None means the newest committed one.
            or_newer: Whether to accept a newer version that another receiver of this host has staged.

        Raises:
            PullError, StagingError, ApplyError, OSError, SluiceError, grpc.aio.AioRpcError: if it could not be taken.
        """
        started = time.perf_counter()
        manifest = await self._manifest(version)
        wanted = Version.from_proto(manifest.version)
        if wanted == (await self._look()).serving:
            return ApplyReport(wanted, 0.0, 0.0)
        if manifest.kind == pb.VERSION_KIND_ADAPTER:
            return await self._take_adapter(manifest, started)
        while True:
            try:
                staged, cost = await self._stage(manifest, or_newer=or_newer)
                break
            except BehindError as behind:  # receivers of one host take the same versions in the same order
                report = await self._take(behind.version, or_newer=or_newer)
                if or_newer and report.version >= wanted:
                    return report
        timings = _timings(wanted, cost, started)
        self._reporter.tell(pb.REPLICA_PHASE_STAGED, wanted, timings=timings)
        report = await self._apply(staged)
        return self._in_service(report, timings, started)

    async def _stage(self, manifest: pb.Manifest, *, or_newer: bool) -> tuple[StagedVersion, PullCost | None]:
        """Pull a version into shared memory and verify it, unless it is there. The engine generates meanwhile.

        Returns:
            The version, and the cost of pulling it, which is None if its file was there.
        """
        version = Version.from_proto(manifest.version)
        for known in (self._staged, self._current):  # from an earlier attempt, or the base of an adapter
            if known is not None and (known.staged.version, known.staged.digest) == (version, manifest.digest):
                return known.staged, None
        if self._staged is not None:  # make room: it could not be applied, and a newer version replaces it
            self._files.release(self._staged.copy)
            self._staged = None
        path, current = self._area.file(version, manifest.digest), self._current
        base = None if current is None else BaseFile(current.manifest, current.staged.path)
        build = partial(self._builder.build, manifest, base)
        held = None if base is None else base.path
        copy, cost = await self._files.obtain(path, held, dense_bytes(manifest), build, or_newer=or_newer)
        staged = StagedVersion(version, path, tensor_specs(manifest), manifest.digest)
        self._staged = _StagedWeights(staged, manifest, copy)
        return staged, cost

    async def _apply(self, staged: StagedVersion) -> ApplyReport:
        """Have the engine pause, copy and resume. Then keep only the file that the engine reports to hold.

        Raises:
            ApplyError: if the version does not serve.
        """
        async with self._changing:
            try:
                return await self._bounded(staged.version, self._engine.apply(staged))
            finally:
                self._keep_what_is_held()

    async def _take_adapter(self, manifest: pb.Manifest, started: float) -> ApplyReport:
        """Let an adapter serve beside its base weights. If the engine holds other weights, take the base first."""
        version, base = Version.from_proto(manifest.version), Version.from_proto(manifest.base)
        if not self._engine.serves_adapters:
            raise VersionRefusedError(
                f"version {version} is an adapter: set rollout.lora.enabled = true and start again"
            )
        weights = (await self._look()).weights
        if base != weights:
            if base == BASE:
                raise StagingError(
                    f"adapter {version} belongs to the model on disk, the weights are {weights}: call ReloadWeights"
                )
            await self._take(base, or_newer=False)
        async with self._adapters.staged(manifest, self._engine.held) as (staged, cost):
            timings = _timings(version, cost, started)
            self._reporter.tell(pb.REPLICA_PHASE_STAGED, version, timings=timings)
            async with self._changing:
                report = await self._bounded(version, self._engine.apply_adapter(staged))
        return self._in_service(report, timings, started)

    async def _bounded(self, version: Version, work: Awaitable[ApplyReport]) -> ApplyReport:
        deadline_s = self._options.apply_deadline_s
        try:
            async with self._clock.timeout(deadline_s):
                return await work
        except TimeoutError as error:
            raise ApplyError(f"version {version} was not applied within {deadline_s:g} s") from error

    def _in_service(self, report: ApplyReport, timings: UpdateTimings, started: float) -> ApplyReport:
        """Report that a version serves, and what it cost."""
        total_s = time.perf_counter() - started
        timings = replace(timings, pause_s=report.pause_s, apply_s=report.apply_s, total_s=total_s)
        self._last_update = timings
        self._updates += 1
        self._reporter.tell(pb.REPLICA_PHASE_SERVING, report.version, timings=timings)
        UPDATES.labels("applied").inc()
        observe_update(timings)
        log.info("version in service", **timings.for_log())
        return report

    # --- what the engine holds ------------------------------------------------------------------------------------

    def _serving(self) -> Version:
        """Return the version that the engine says it serves; while it restarts, the last one that it named."""
        return (self._engine.held() or self._last_held).serving

    async def _look(self) -> HeldVersions:
        """Ask the engine what it holds, between two changes of its weights."""
        async with self._changing:
            return self._keep_what_is_held()

    def _keep_what_is_held(self) -> HeldVersions:
        """Ask the engine what it holds, and keep only the file of its weights. Call it with the lock held.

        After a failed apply the engine may hold the previous version or the base. An apply that timed out may have finished since.
        """
        held = self._engine.held()
        if held is None:
            return self._last_held
        self._last_held = held
        before = self._current
        if self._staged is not None and self._staged.staged.version == held.weights:
            self._current, self._staged = self._staged, None
        elif before is not None and before.staged.version != held.weights:
            self._current = None
        if before is not None and self._current is not before:
            self._files.release(before.copy)
        return held

    # --- parts of the loop ----------------------------------------------------------------------------------------

    def _next_request(self) -> _UpdateRequest | None:
        self._requests = [request for request in self._requests if not request.done.done()]
        return self._requests.pop(0) if self._requests else None

    async def _try(
        self, version: Version | None, *, or_newer: bool, done: asyncio.Future[ApplyReport] | None = None
    ) -> bool:
        """Take a version, and set the outcome of `done` unless its caller has left. Return False if that failed."""
        try:
            report = await self._take(version, or_newer=or_newer)
        except _FAILURES as error:
            self._note_failure(version, error)
            if done is not None and not done.done():
                done.set_exception(self._as_sluice_error(error))
            return False
        self._error, self._refused = "", None
        self._backoff.succeed()
        if done is not None and not done.done():
            done.set_result(report)
        return True

    def _note_failure(self, version: Version | None, error: Exception) -> None:
        self._error = f"version {version or 'newest'}: {error}"
        self._refused = error if isinstance(error, VersionRefusedError) else None
        UPDATES.labels("failed").inc()
        if isinstance(error, PullError | StagingError):
            self._sources.leave("what it gives could not be taken")
        log.warning("version not taken", version=str(version), serving=str(self._serving()), error=str(error))
        self._reporter.tell(pb.REPLICA_PHASE_FAILED, version, self._error)

    def _as_sluice_error(self, error: Exception) -> SluiceError:
        """Return why a version was not taken, in the terms of the contract."""
        if isinstance(error, SluiceError):
            return error
        if isinstance(error, grpc.aio.AioRpcError):
            return SluiceError.from_rpc(error)
        message = f"{error}; version {self._serving()} serves"
        if isinstance(error, VersionRefusedError):
            return SluiceError.failed_precondition("UPDATE_FAILED", message)
        return SluiceError.unavailable("UPDATE_FAILED", message)

    async def _sleep(self, pause_s: float) -> None:
        """Wait until something changes, the policy runs out, or the pause is over."""
        try:
            async with self._clock.timeout(min(pause_s, max(0.01, self._policy.expires_in(self._clock())))):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _manifest(self, version: Version | None) -> pb.Manifest:
        """Return the announced manifest if it describes that version, else ask the service."""
        announced = self._watch.newest
        if announced is not None and version == self._watch.newest_version:
            return announced
        request = pb.GetManifestRequest(run=self._run, version=None if version is None else version.to_proto())
        response = await self._manifests.GetManifest(request, timeout=_MANIFEST_DEADLINE_S)
        return response.manifest


def _timings(version: Version, cost: PullCost | None, started: float) -> UpdateTimings:
    """Return the timings of a version that was just staged, begun at `time.perf_counter` `started`."""
    now = time.perf_counter()
    if cost is None:
        return UpdateTimings(version, stage_s=now - started)
    return UpdateTimings(
        version, cost.pulled_bytes, cost.local_bytes, cost.last_byte_at - started, now - cost.last_byte_at
    )
