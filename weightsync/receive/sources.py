"""The sources of versions: the weight service (the root) and its relays, of which an engine uses the nearest.

`Sources` chooses one and takes the engine back to the root when it fails. `VersionWatch` receives the announcements of versions,
`Reporter` sends what the engine serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias
from weakref import WeakSet

import grpc
import structlog
import xxhash

from sluice.backoff import Backoff
from sluice.clock import CLOCK, Clock
from sluice.host_files import host_id
from sluice.rpc import SluiceError
from sluice.rpc.channel import TOO_OLD
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.metrics import APPLY_SECONDS, PAUSE_SECONDS, PULL_SECONDS, PULLED_BYTES, STAGE_SECONDS, UPDATE_SECONDS

Call: TypeAlias = Callable[..., Any]
"""A method, called with a request and a timeout. If it streams, it gives a call with `read` and `cancel`."""

REPORT_DEADLINE_S = 10.0
PATH_DEADLINE_S = 30.0

_SHARE_OF_LEASE = 1 / 3
"""A lease is renewed after a third of it, so that one lost report does not end it."""

_LONGEST_BAN_S = 300.0
"""Longest time in seconds for which a failed relay is not used."""

_SILENCE_S = 25.0
"""Silence in seconds after which a watch counts as dead; the contract promises a heartbeat every 10 s."""

_STREAM_S = 3600.0
"""Deadline of one watch in seconds; it is opened again after that."""

_NO_RUN_S = 0.5
"""Seconds between two questions about a run without a version. It bounds the delay of the run's first version."""

_REMEDY = "start it, or see peers.weightsync (of a relay: weightsync.upstream) and the tokens and certificates"

log = structlog.get_logger(__name__)


# --- the choice of a source -------------------------------------------------------------------------------------------

ROOT = ""
"""The address of the root among candidates: the service that the engine's settings name."""

MOST_BEHIND = 1
"""Most versions that a relay may lack: the version that it is pulling."""

_NEAR_S = 0.005
"""Answers within this time come from the same building; their differences are noise."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source that answered: its address (`ROOT` for the root), its host, and how good it is.

    Attributes:
        watchers: Number of its WatchVersions streams, the engine's own included.
        latency_s: Seconds that its last answer took.
    """

    address: str
    host: str
    watchers: int
    newest: Version | None
    latency_s: float


def behind(version: Version | None, newest: Version | None) -> float:
    """Return how many versions a source lacks; infinite where they cannot be counted."""
    if newest is None or (version is not None and version >= newest):
        return 0
    if version is None or version.epoch != newest.epoch:
        return math.inf
    return newest.number - version.number


def choose(candidates: Sequence[Candidate], current: str | None, *, host: str, replica: str, draw: float) -> str:
    """Return the address of the source to use from now on; `ROOT` where nothing else will do.

    A source on the engine's own host comes first, then any other relay, then the root. Among equals, choose the source with fewer
    watchers, then the one that answers faster. If they are still equal, choose by a hash that differs between engines, so that
    the engines of a fleet that start together do not all choose the same relay. A choice stays until another source is better
    by a margin.

    Args:
        candidates: The sources that answer.
        current: The source in use; None before the first choice.
        host: Identity of the engine's host.
        replica: The engine's name.
        draw: A random number in [0, 1): only some of many engines leave a crowded source at a time.
    """
    newest = max((each.newest for each in candidates if each.newest is not None), default=None)
    usable = [each for each in candidates if each.address == ROOT or behind(each.newest, newest) <= MOST_BEHIND]
    staying = next((each for each in usable if each.address == current), None)
    # An engine that changes its source knows the newest version already, so the next source must have it.
    open_to_us = [each for each in usable if current is None or behind(each.newest, newest) == 0 or each is staying]
    if not open_to_us:
        return ROOT
    best = min(_distance(each, host) for each in open_to_us)
    nearest = [each for each in open_to_us if _distance(each, host) == best]
    if staying is None or _distance(staying, host) > best:
        return _lightest(nearest, replica).address
    others = [each for each in nearest if each is not staying]
    if others:
        other = _lightest(others, replica)
        if staying.watchers >= 2 * (other.watchers + 1):
            surplus = (staying.watchers - other.watchers) / 2  # if this many leave, both sources have the same number
            if draw < surplus / staying.watchers:
                return other.address
    return staying.address


def _distance(candidate: Candidate, host: str) -> tuple[bool, bool]:
    return candidate.host != host, candidate.address == ROOT


def _lightest(candidates: Sequence[Candidate], replica: str) -> Candidate:
    """Return a candidate with few watchers. Counts within a factor of two are equal, since other engines choose at the same time."""
    least = min(each.watchers for each in candidates)
    light = [each for each in candidates if each.watchers <= 2 * least + 1]
    return min(
        light,
        key=lambda each: (
            math.ceil(math.log2(max(1.0, each.latency_s / _NEAR_S))),
            xxhash.xxh3_64_intdigest(f"{replica} {each.address}".encode()),
        ),
    )


# --- calls to the source in use ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """How long an engine waits for sources.

    Attributes:
        look_s: Seconds between two requests for the list of sources.
        answer_s: Deadline of a source's answer, in seconds.
        fallback_s: Seconds that the source in use may fail before the engine leaves it.
        retry_s: Seconds between questions to a source that fails.
        ban_s: Seconds for which a source that the engine left is not used again, the first time; doubled each time.
        stall_s: Seconds that a relay may lack a version without any progress.
        probes: Number of relays that are asked at a time: relays of this host, and those with the fewest watchers.
    """

    look_s: float = 10.0
    answer_s: float = 2.0
    fallback_s: float = 3.0
    retry_s: float = 0.5
    ban_s: float = 10.0
    stall_s: float = 30.0
    probes: int = 4


@dataclass(frozen=True, slots=True)
class _Source:
    """One service that serves versions, and the calls to it."""

    channel: grpc.aio.Channel
    delivery: weightsync_pb2_grpc.WeightDeliveryServiceAsyncStub
    pull: Call

    @classmethod
    def at(cls, channel: grpc.aio.Channel) -> _Source:
        return cls(channel, weightsync_pb2_grpc.WeightDeliveryServiceStub(channel), pull_call(channel))


class Sources:
    """The weight service and its relays. An engine uses one of them at a time.

    New calls go to the source in use. Calls in progress stay where they began, except watches.

    Args:
        root: To the service that the settings name.
        run: ``runs/{run}``.
        replica: The engine's name.
        connect: Opens a channel to a relay; None keeps the engine at the root.
        host: Identity of this host; None asks the kernel.
        clock: Decides when to look for sources, and when a source has failed for too long.

    Attributes:
        current: Address of the source in use, `ROOT` for the root.
        changed: Set when another source is in use.
    """

    def __init__(
        self,
        root: grpc.aio.Channel,
        run: str,
        replica: str,
        connect: Callable[[str], grpc.aio.Channel] | None = None,
        *,
        host: str | None = None,
        limits: SourceLimits | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self.current = ROOT
        self.changed = asyncio.Event()
        self._run, self._replica, self._connect = run, replica, connect
        self._host = host_id() if host is None else host
        self._limits, self._clock = limits or SourceLimits(), clock
        self._sources = {ROOT: _Source.at(root)}
        self._watches: WeakSet[_Stream] = WeakSet()
        self._listed: list[pb.WeightSource] = []
        self._settled = False
        self._failing_since: float | None = None
        self._bans: dict[str, tuple[float, float]] = {}
        self._progress: dict[str, tuple[Version | None, float]] = {}
        self._wake = asyncio.Event()

    # --- calls ----------------------------------------------------------------------------------------------------

    def pull(self, request: pb.PullWeightsRequest, *, timeout: float) -> _Stream:
        """Begin PullWeights; its responses stay serialised."""
        source = self._sources[self.current]
        return _Stream(self, source, source.pull(request, timeout=timeout))

    def watch(self, request: pb.WatchVersionsRequest, *, timeout: float) -> _Stream:
        """Begin WatchVersions; the stream ends when another source is chosen."""
        source = self._sources[self.current]
        stream = _Stream(self, source, source.delivery.WatchVersions(request, timeout=timeout))
        self._watches.add(stream)
        return stream

    async def update_path(self, request: pb.GetUpdatePathRequest) -> list[pb.GetUpdatePathResponse]:
        """Call GetUpdatePath."""
        source, path = self._sources[self.current], []
        stream = _Stream(self, source, source.delivery.GetUpdatePath(request, timeout=PATH_DEADLINE_S))
        while (response := await stream.read()) is not grpc.aio.EOF:
            path.append(response)
        return path

    async def report(self, request: pb.ReportVersionRequest) -> pb.ReportVersionResponse:
        """Call ReportVersion."""
        source = self._sources[self.current]
        response = await self.answer(source, source.delivery.ReportVersion(request, timeout=REPORT_DEADLINE_S))
        if not isinstance(response, pb.ReportVersionResponse):
            empty = grpc.aio.Metadata()
            details = "the source of versions was left during the call: ask again"
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, details=details)
        return response

    async def answer(self, source: _Source, answer: Awaitable[Any]) -> Any:  # noqa: ANN401 - any response
        """Wait for a source's answer. Return `grpc.aio.EOF` if the engine left the source meanwhile and its channel was closed.

        A relay that lacks what the engine wants is left at once. After another failure, it is asked soon whether it answers.
        """
        try:
            return await answer
        except grpc.aio.AioRpcError as error:
            if self.current != ROOT and source is self._sources[self.current]:
                if error.code() in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS}:
                    self.leave("it does not give the version that is wanted")
                elif error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    self._wake.set()
            raise
        except asyncio.CancelledError:
            # gRPC raises this also if a call's channel is closed; a task that did not catch it would end silently.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return grpc.aio.EOF

    # --- the choice -----------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Choose a source before the first call, so that it need not change. This takes seconds at most."""
        if self._connect is not None and not self._settled:
            await self._look()

    async def run_forever(self) -> None:
        """Look for a nearer source regularly, and at once when the one in use fails, until cancelled."""
        if self._connect is None:
            return
        while True:
            limits = self._limits
            pause_s = limits.look_s * random.uniform(0.5, 1.5)  # noqa: S311 - spreads the fleet, no secret
            if self._failing_since is not None:
                pause_s = limits.retry_s
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._look()

    def leave(self, reason: str) -> None:
        """Leave a relay for the root, and do not come back for a while. No effect at the root."""
        if self.current != ROOT:
            self._ban(self.current, reason)
            self._use(ROOT)

    async def close(self) -> None:
        """Close the channels that were opened here."""
        self._use(ROOT)
        for address in [address for address in self._sources if address != ROOT]:
            await self._sources.pop(address).channel.close()

    async def _look(self) -> None:
        answers = [await self._ask(ROOT), *await asyncio.gather(*map(self._ask, self._worth_asking()))]
        candidates = [each for each in answers if each is not None]
        now = self._clock()
        if self.current != ROOT and self.current not in {each.address for each in candidates}:
            self._failing_since = self._failing_since or now
            if now - self._failing_since < self._limits.fallback_s:
                return
            self._ban(self.current, "it does not answer")
        else:
            self._failing_since = None
        fit = [each for each in candidates if self._bans.get(each.address, (now, 0.0))[0] <= now]
        for each in self._stalled(fit, now):
            self._ban(each.address, "it gets no new versions")
            fit.remove(each)
        draw = random.random()  # noqa: S311 - spreads the fleet, no secret
        current = self.current if self._settled else None
        chosen = choose(fit, current, host=self._host, replica=self._replica, draw=draw)
        self._settled = True
        if chosen != self.current:
            log.info("source of versions changed", source=chosen or "root", before=self.current or "root")
            self._use(chosen)
        await self._close_unused()

    def _use(self, address: str) -> None:
        self._failing_since = None
        self.current = address
        self.changed.set()
        for watch in list(self._watches):
            watch.cancel()

    def _worth_asking(self) -> list[str]:
        """Return relays of this host, then those with few watchers, and always the relay in use."""
        ranked = sorted(self._listed, key=lambda each: (each.host != self._host, each.watchers))
        addresses = [each.address for each in ranked if each.address][: self._limits.probes]
        if self.current not in {ROOT, *addresses}:
            addresses.append(self.current)
        return addresses

    async def _ask(self, address: str) -> Candidate | None:
        """Ask a source for its state, and the root for its relays too. Return None if it does not answer."""
        if address not in self._sources and self._connect is not None:
            self._sources[address] = _Source.at(self._connect(address))
        started, request = self._clock(), pb.ListSourcesRequest(run=self._run)
        try:
            response = await self._sources[address].delivery.ListSources(request, timeout=self._limits.answer_s)
        except grpc.aio.AioRpcError as error:
            log.debug("source does not answer", source=address or "root", reason=str(SluiceError.from_rpc(error)))
            return None
        if not response.sources:
            return None
        source, *relays = response.sources
        if address == ROOT:
            self._listed = relays
        newest = Version.from_proto(source.newest) if source.HasField("newest") else None
        return Candidate(address, source.host, source.watchers, newest, self._clock() - started)

    def _stalled(self, candidates: list[Candidate], now: float) -> list[Candidate]:
        """Return relays that have lacked a version for too long without any progress."""
        newest = max((each.newest for each in candidates if each.newest is not None), default=None)
        found = []
        for each in candidates:
            version, since = self._progress.get(each.address, (None, now))
            if version != each.newest or not behind(each.newest, newest):
                since = now
            self._progress[each.address] = (each.newest, since)
            if each.address != ROOT and now - since > self._limits.stall_s:
                found.append(each)
        return found

    def _ban(self, address: str, reason: str) -> None:
        """Do not use a source for a time that doubles with each failure and varies randomly."""
        now = self._clock()
        ended, last_s = self._bans.get(address, (now, 0.0))
        again = now - ended < _LONGEST_BAN_S
        ban_s = min(_LONGEST_BAN_S, max(self._limits.ban_s, last_s * 2 if again else 0.0))
        until = now + ban_s * random.uniform(0.5, 1.5)  # noqa: S311 - jitter, not a secret
        self._bans[address] = (until, ban_s)
        self._progress.pop(address, None)
        log.warning("relay left", relay=address, reason=reason, seconds=round(ban_s))

    async def _close_unused(self) -> None:
        listed = {each.address for each in self._listed}
        for address in [each for each in self._sources if each not in {ROOT, self.current, *listed}]:
            await self._sources.pop(address).channel.close()
        for book in (self._bans, self._progress):
            for address in [each for each in book if each not in {ROOT, self.current, *listed}]:
                del book[address]


class _Stream:
    """A call to a source with a stream of responses. Its failure is noted."""

    def __init__(self, sources: Sources, source: _Source, call: Any) -> None:  # noqa: ANN401 - a call of gRPC
        self._sources, self._source, self._call = sources, source, call

    async def read(self) -> Any:  # noqa: ANN401 - any response
        """Return the next response, or `grpc.aio.EOF` at the end, also if the source is left."""
        return await self._sources.answer(self._source, self._call.read())

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()


def pull_call(channel: grpc.aio.Channel) -> Call:
    """Return PullWeights of a channel, whose responses stay serialised."""
    call: Call = channel.unary_stream(
        "/sluice.v1.WeightDeliveryService/PullWeights",
        request_serializer=pb.PullWeightsRequest.SerializeToString,
        response_deserializer=None,
    )
    return call


# --- announcements and reports ----------------------------------------------------------------------------------------


class VersionWatch:
    """Receives the announcements of one run's versions.

    Args:
        call: WatchVersions of the service.
        run: ``runs/{run}``.
        replica: Name of the watching replica or relay.
        changed: Called after each announcement.
        hurry: Set when calls go to another source: ends the pause between attempts. None: the source never changes.
        backoff: The pauses between attempts; None takes those of `Backoff`.
        clock: Decides when a silent stream is dead, and when to try again.

    Attributes:
        newest: Manifest of the newest version that was announced.
        connected: Whether the service answers: the stream is alive, or nothing was pushed to the run yet.
    """

    def __init__(
        self,
        call: Call,
        run: str,
        replica: str,
        changed: Callable[[], None],
        *,
        hurry: asyncio.Event | None = None,
        backoff: Backoff | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._backoff, self._clock = backoff or Backoff(), clock
        self.newest: pb.Manifest | None = None
        self.connected = False
        self._warned = False
        self._call, self._run, self._replica, self._changed = call, run, replica, changed
        self._hurry = hurry or asyncio.Event()

    @property
    def newest_version(self) -> Version | None:
        """Return the newest version that was announced, None if there was none."""
        return None if self.newest is None else Version.from_proto(self.newest.version)

    async def run_forever(self) -> None:
        """Watch until cancelled, and open the stream again whenever it breaks.

        NO_SUCH_RUN means that nothing was pushed to the run yet: the service works, and is asked again soon.
        """
        while True:
            try:
                await self._watch_once()
                pause_s = self._lost("the stream ended")
            except grpc.aio.AioRpcError as error:
                failure = SluiceError.from_rpc(error)
                if failure.reason == TOO_OLD:
                    continue
                pause_s = self._no_version() if failure.reason == "NO_SUCH_RUN" else self._lost(str(failure))
            except TimeoutError:
                pause_s = self._lost(f"no sign of life for {_SILENCE_S:g} s")
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(pause_s):
                    await self._hurry.wait()
                    self._backoff.succeed()
            self._hurry.clear()

    def _no_version(self) -> float:
        """Note that the service answers but does not know the run yet. Return the pause before the next attempt, in seconds."""
        if not self.connected:
            log.info("weight service reached; waiting for the trainer's first version", run=self._run)
        self._backoff.succeed()
        self._warned, self.connected = False, True
        return _NO_RUN_S

    def _lost(self, reason: str) -> float:
        """Note that the stream ended or did not begin. Return the pause before the next attempt, in seconds."""
        if self.connected:
            self._backoff.succeed()
            self._warned = False
            if not self._hurry.is_set():
                log.info("weight service unreachable; the version in service stays", reason=reason)
        elif self._backoff.at_longest and not self._warned:
            self._warned = True
            log.warning("weight service unreachable; retrying", run=self._run, reason=reason, remedy=_REMEDY)
        self.connected = False
        return self._backoff.fail()

    async def _watch_once(self) -> None:
        known = self.newest_version
        request = pb.WatchVersionsRequest(
            run=self._run, replica=self._replica, known=None if known is None else known.to_proto()
        )
        call = self._call(request, timeout=_STREAM_S)
        try:
            while True:
                async with self._clock.timeout(_SILENCE_S):
                    response = await call.read()
                if not isinstance(response, pb.WatchVersionsResponse):  # the end of the stream
                    return
                self.connected = True
                if response.HasField("manifest"):
                    self.newest = response.manifest
                    self._changed()
        finally:
            call.cancel()


@dataclass(frozen=True, slots=True)
class UpdateTimings:
    """The cost of one update.

    Attributes:
        version: The version that serves now.
        pulled_bytes: Bytes that came over sockets; 0 if another process of the host had staged the version.
        local_bytes: Bytes that were read from files of this host instead.
        pull_s: Seconds from the decision to take it to the last byte; the engine generates meanwhile.
        stage_s: Seconds from the last byte to a verified file in shared memory; the engine generates meanwhile.
        pause_s: Seconds during which no token was sampled.
        apply_s: Seconds of the copy alone.
        total_s: Seconds from the decision to service.
    """

    version: Version
    pulled_bytes: int = 0
    local_bytes: int = 0
    pull_s: float = 0.0
    stage_s: float = 0.0
    pause_s: float = 0.0
    apply_s: float = 0.0
    total_s: float = 0.0

    def to_proto(self) -> pb.UpdateTimings:
        """Return the message that reports it."""
        message = pb.UpdateTimings(pulled_bytes=self.pulled_bytes)
        parts = {"pull": self.pull_s, "stage": self.stage_s, "pause": self.pause_s, "apply": self.apply_s}
        for name, seconds in {**parts, "total": self.total_s}.items():
            getattr(message, name).FromNanoseconds(int(seconds * 1e9))
        return message

    def for_log(self) -> dict[str, str | int | float]:
        """Return the fields of a log line."""
        numbers = {name: round(value, 4) for name, value in asdict(self).items() if name != "version"}
        return {"version": str(self.version), **numbers}


def observe_update(timings: UpdateTimings) -> None:
    """Count an update in the metrics."""
    PULL_SECONDS.observe(timings.pull_s)
    STAGE_SECONDS.observe(timings.stage_s)
    PAUSE_SECONDS.observe(timings.pause_s)
    APPLY_SECONDS.observe(timings.apply_s)
    UPDATE_SECONDS.observe(timings.total_s)
    PULLED_BYTES.labels("socket").inc(timings.pulled_bytes)
    PULLED_BYTES.labels("file").inc(timings.local_bytes)


class Reporter:
    """Reports for one replica. Only the last report matters: the next one replaces a report that was not sent yet."""

    def __init__(
        self,
        call: Callable[[pb.ReportVersionRequest], Awaitable[pb.ReportVersionResponse]],
        run: str,
        replica: str,
        serving: Callable[[], Version],
        *,
        clock: Clock = CLOCK,
    ) -> None:
        self._clock = clock
        self._call, self._run, self._replica, self._serving = call, run, replica, serving
        self._last = pb.ReportVersionRequest(run=run, replica=replica, phase=pb.REPLICA_PHASE_SERVING)
        self._news = asyncio.Event()
        self._renew_s = 10.0

    def tell(
        self,
        phase: pb.ReplicaPhase.ValueType,
        version: Version | None = None,
        error: str = "",
        timings: UpdateTimings | None = None,
    ) -> None:
        """Send a report soon, without waiting. `version` is the version that the phase is about; None means the version that serves."""
        self._last = report = pb.ReportVersionRequest(run=self._run, replica=self._replica, phase=phase, error=error)
        if version is not None:
            report.version.CopyFrom(version.to_proto())
        if timings is not None:
            report.timings.CopyFrom(timings.to_proto())
            report.stage_time.FromNanoseconds(int((timings.pull_s + timings.stage_s) * 1e9))
            report.pause_time.CopyFrom(report.timings.pause)
        self._news.set()

    async def run_forever(self) -> None:
        """Send reports until cancelled. A report that failed is sent again at the next renewal."""
        while True:
            self._news.clear()
            try:
                await self._send()
            except grpc.aio.AioRpcError as error:
                log.debug("report not sent", code=error.code().name)
            try:
                async with self._clock.timeout(self._renew_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _send(self) -> None:
        self._last.serving.CopyFrom(self._serving().to_proto())
        request = self._last
        if not request.HasField("version"):
            request = pb.ReportVersionRequest()
            request.CopyFrom(self._last)
            request.version.CopyFrom(request.serving)
        response = await self._call(request)
        self._renew_s = renewal_s(response.lease.ToTimedelta().total_seconds())


def renewal_s(lease_s: float) -> float:
    """Return the seconds after which a lease is renewed."""
    return max(0.1, lease_s * _SHARE_OF_LEASE)
