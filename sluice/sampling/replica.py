"""One rollout replica: its last report, its load, and whether it gets work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TypeAlias

import grpc

from sluice.clock import CLOCK, Clock
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.sampling.concurrency import ConcurrencyLimit, EngineLoad
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.placement import Load
from sluice.sampling.progress import ListeningClock, Loss, Patience, ReplicaProgress, StreamProgress
from sluice.v1 import orchestrator_pb2, rollout_pb2, rollout_pb2_grpc
from sluice.versions import BASE, Version

Call: TypeAlias = "grpc.aio.Call"

_LONGEST_WAIT_S = 60.0
"""Maximum seconds that a status request may wait for a version, as the contract says."""

_FIRST_COOLDOWN_S = 0.2
_LONGEST_COOLDOWN_S = 10.0
"""Seconds without work after a failed request, doubled with each further failure up to the longest. A replica may answer polls and still fail."""

_MOST_DOUBLINGS = 30
"""Maximum number of times that the time for a step is doubled, so that no float overflows."""

_LONGEST_STALL_REST_S = 120.0
"""Maximum seconds without work after the engine stalled. Each attempt with such an engine costs its requests `progress_s`."""

_WAITS = {rollout_pb2.REPLICA_STATE_PAUSED, rollout_pb2.REPLICA_STATE_SWITCHING}
_READY = {rollout_pb2.REPLICA_STATE_SERVING, *_WAITS}
"""States of a replica that takes work. This includes pauses and switches: they are mostly short, and requests queue there."""

REPLICA_LOST = "REPLICA_LOST"
"""Reason of the error of a call that the pool gave up because the replica was lost, or its stream was silent."""

REPLICA_STALLED = "REPLICA_STALLED"
"""Reason of the error of a call that the pool gave up because a step of the engine took too long."""

REPLICA_WAITS = "REPLICA_WAITS"
"""Reason of the error of a call that the pool gave up because the replica has been paused, or switching to other weights, for long."""


class Work:
    """A call in progress at a replica.

    Attributes:
        samples: Number of samples that it counts as.
        stalls: How often in a row an engine stalled with it before; 0 from its first token on.
        given_up: Why the pool cancelled it; None if it did not.
    """

    def __init__(self, call: Call, samples: int, stalls: int, progress: StreamProgress | None) -> None:
        self.samples, self.stalls, self.progress = samples, stalls, progress
        self.given_up: SluiceError | None = None
        self._call = call

    def give_up(self, why: str, reason: str = REPLICA_LOST) -> None:
        """Cancel the call. Its caller makes it at another replica."""
        self.given_up = self.given_up or SluiceError.unavailable(reason, why)
        self._call.cancel()


class Replica:
    """One rollout replica: its channel, its last status, and whether it gets work.

    Attributes:
        in_flight: Samples of this process in progress there.
        works: Calls of this process in progress there.
        limit: How many samples it is given at a time.
        loss: Why it was evicted; None if it is not evicted.
        announced_as: Name that it must report, because it was announced or listed with it; empty if any name will do. None if its
            address is configured.
        leaving: Whether its lease is over, or it is no longer listed: it gets no new work.
        left: Whether it reported that it leaves.
        told: Version and fitness that its pool last passed to `on_change`.
    """

    def __init__(
        self,
        target: str,
        security: SecurityConfig,
        config: ReplicasConfig,
        limit: ConcurrencyLimit,
        listening: ListeningClock,
        *,
        clock: Clock = CLOCK,
    ) -> None:
        self.target = target
        self.status = rollout_pb2.GetStatusResponse()
        self.model = rollout_pb2.GetModelResponse()
        self.version: Version = BASE
        self.in_flight = 0
        self._sample_s, self._counted_at = 0.0, clock()
        self.works: set[Work] = set()
        self.seen = False
        self.loss: Loss | None = None
        self.announced_as: str | None = None
        self.leaving = self.left = False
        self.limit = limit
        self._channel = connect(target, security, role="dispatcher")
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self.admin = rollout_pb2_grpc.RolloutAdminServiceStub(self._channel)
        self._config, self._listening, self._clock = config, listening, clock
        self._patience = Patience(config.progress_s, config.switch_s, config.paused_s)
        self.progress = ReplicaProgress(listening.now, listening.now)
        self._others = 0
        self._paused_since: float | None = None
        self._failed_work = self._stalls = 0
        self._rest_until = 0.0
        self._last_error, self._poll_error = "has not answered yet", ""
        self.told = (self.version, self.why_not())

    @property
    def name(self) -> str:
        """The name that it reports; its address until it has answered once."""
        return self.status.replica or self.target

    @property
    def load(self) -> Load:
        """Its load: the samples of this process now, and the samples of others at the last poll."""
        places = self.limit.samples if self.limit.adapts else self.status.max_running
        return Load(self.target, self.in_flight + self._others, places)

    @property
    def engine_load(self) -> EngineLoad:
        """The last report of its engine."""
        status = self.status
        return EngineLoad(status.running, status.queued, status.kv_cache_usage, status.preemptions, status.max_running)

    @property
    def drains(self) -> bool:
        """Whether it reported that it takes no new work."""
        return self.left or self.status.state == rollout_pb2.REPLICA_STATE_DRAINING

    @property
    def paused_long(self) -> bool:
        """Whether it has been paused, or has switched to other weights, for longer than an update takes."""
        return self._paused_since is not None and self._listening.now - self._paused_since > self._config.progress_s

    async def poll(self, awaited: Version | None = None) -> bool:
        """Ask for its status. Return whether another process answers now.

        Args:
            awaited: Have it answer when it serves this version, or after `poll_s`. None: at once.

        Raises:
            SluiceError: if it does not answer.
        """
        deadline_s = self._config.progress_s
        try:
            request = rollout_pb2.GetStatusRequest()
            if awaited is not None:
                request.awaited_version.CopyFrom(awaited.to_proto())
                request.wait.FromMilliseconds(int(min(self._config.poll_s, _LONGEST_WAIT_S) * 1000))
            status = await self.admin.GetStatus(request, timeout=deadline_s)
            is_another = self.seen and (status.start_time, status.replica) != (
                self.status.start_time,
                self.status.replica,
            )
            if is_another or not self.model.model:
                self.model = await self.rollout.GetModel(rollout_pb2.GetModelRequest(), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            self._last_error = self._poll_error = str(failure)
            raise failure from error
        self._poll_error = ""
        if is_another:
            self._begin_anew()
        now = self._listening.now
        self.progress.polled(status, now)
        self.status, self.version, self.seen = status, Version.from_proto(status.policy_version), True
        self._others = max(0, status.running + status.queued - self.in_flight)
        if status.state not in _WAITS:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = now
        if self.hang(now) is None:
            self.loss = None
        return is_another

    @property
    def step_s(self) -> float:
        """Seconds that one step of its engine may take. They double with each time that an engine stalled with one of its present requests."""
        stalls = max((work.stalls for work in self.works), default=0)
        progress_s = self._config.progress_s
        return max(progress_s, min(self._config.longest_step_s, progress_s * 2.0 ** min(stalls, _MOST_DOUBLINGS)))

    def hang(self, now: float) -> Loss | None:
        """Return the way in which it hangs; None if it does not hang."""
        loss = self.progress.hang(now, self._patience, self._config.progress_s)
        return loss if loss is not Loss.STALLED else self.progress.hang(now, self._patience, self.step_s)

    def give_up_stuck(self, now: float, *, others_paused: bool) -> None:
        """Cancel the streams that have been silent for too long, and the streams that have waited too long for the end of a pause."""
        patience = self._patience
        if others_paused:  # the requests would wait there, too
            patience = patience._replace(paused_s=float("inf"))
        for work in list(self.works):
            if work.progress is None:
                continue
            if work.progress.silent(now, patience):
                work.give_up(f"replica {self.name} sent nothing on this stream for {patience.progress_s:g} s")
            elif work.progress.waits(now, patience):
                work.give_up(f"replica {self.name} has been paused, or switching weights, for long", REPLICA_WAITS)

    def give_up_all(self, why: str) -> None:
        """Cancel its calls. Their callers make them at other replicas."""
        reason = REPLICA_STALLED if self.loss is Loss.STALLED else REPLICA_LOST
        for work in list(self.works):
            work.give_up(f"replica {self.name} {why}", reason)

    def _begin_anew(self) -> None:
        """Forget the reports of an earlier process at this address. It may have had another model, version and load."""
        self.give_up_all("was replaced by another process at its address")
        self.progress = ReplicaProgress(self._listening.now, self._listening.now)
        self.left = False
        self.limit = self.limit.anew()
        self._failed_work = self._stalls = 0
        self._rest_until = 0.0

    def rest(self) -> None:
        """Give it no work for a while after its engine stalled and its requests went elsewhere.

        It may look healthy as soon as its requests are cancelled, and stall again with the next ones.
        """
        rest = min(_LONGEST_STALL_REST_S, self._config.progress_s * 2**self._stalls)
        self._stalls += 1
        self._rest_until = self._clock() + rest
        self._last_error = "its engine stalled"

    def work_failed(self, error: SluiceError) -> None:
        """Record a failed request: the replica gets no work for a while. Further failures in this time do not count."""
        self._last_error = str(error)
        now = self._clock()
        if now < self._rest_until:
            return
        self._rest_until = now + min(_LONGEST_COOLDOWN_S, _FIRST_COOLDOWN_S * 2 ** min(self._failed_work, 10))
        self._failed_work += 1

    def work_forgiven(self) -> None:
        """Do not count a failed request, because other replicas failed at it, too: the next failure must not cost more time for it."""
        self._failed_work = max(0, self._failed_work - 1)

    def work_succeeded(self, version: Version) -> None:
        """Record a request that succeeded; `version` sampled its last token."""
        self._failed_work = self._stalls = 0
        self._rest_until = 0.0
        self.version = max(self.version, version)

    @contextlib.contextmanager
    def working(self, call: Call, samples: int, *, streams: bool, stalls: int = 0) -> Iterator[Work]:
        """Count a call and its samples as in progress while the block awaits it.

        Args:
            call: The call.
            samples: Number of samples that it counts as.
            streams: Whether it is a stream, whose messages arrive regularly.
            stalls: How often in a row an engine stalled with it before.

        Raises:
            SluiceError: what the replica answered, or UNAVAILABLE if the call was given up.
        """
        work = Work(call, samples, stalls, StreamProgress(self._listening.now) if streams else None)
        self.works.add(work)
        self._count(samples)
        try:
            yield work
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if work.given_up is None or (task is not None and task.cancelling()):
                raise
            raise work.given_up from None
        finally:
            self.works.discard(work)
            self._count(-samples)
            call.cancel()  # if the block was left before the call ended

    def _count(self, samples: int) -> float:
        """Add `samples` to those in progress. Return the seconds in progress until now, summed over samples."""
        now = self._clock()
        self._sample_s += self.in_flight * (now - self._counted_at)
        self._counted_at = now
        self.in_flight += samples
        return self._sample_s

    def received(self, work: Work, chunk: rollout_pb2.StreamChunk) -> None:
        """Note a message of a stream."""
        now = self._listening.now
        self.progress.received(chunk, now)
        if chunk.deltas:
            work.stalls = 0
        if work.progress is not None:
            work.progress.received(chunk.stage, now)

    def why_lost(self) -> str:
        """Return why it was evicted; empty if it was not."""
        match self.loss:
            case Loss.DEAD:
                return f"does not answer: {self._last_error}"
            case Loss.SILENT:
                why = f" ({self._poll_error})" if self._poll_error else ""
                return f"does not answer: it has sent nothing for {self._config.progress_s:g} s{why}"
            case Loss.STALLED:
                return f"hangs: its engine has made no step for more than {self._config.progress_s:g} s"
            case Loss.SWITCHING:
                return f"hangs: it has been switching to other weights for more than {self._config.switch_s:g} s"
        return ""

    def why_not(self, wanted: Version | None = None) -> str:
        """Return why it gets no work; empty if it does."""
        if not self.seen or self.loss is not None:
            return self.why_lost() or f"does not answer: {self._last_error}"
        if reason := self.why_out() or self._why_not_ready():
            return reason
        if self._clock() < self._rest_until:
            return f"failed lately: {self._last_error}"
        if wanted is not None and self.version < wanted:
            return f"serves version {self.version}, wanted is {wanted} or newer"
        return ""

    def why_out(self) -> str:
        """Return why it will get no more work, whatever its engine does; empty if it may."""
        if self.drains:
            return "is draining"
        if self.leaving:
            return "leaves: its lease is over, or it is no longer listed"
        if self.seen and self.announced_as and self.announced_as != self.status.replica:
            return f"says that its name is {self.status.replica!r}, but was announced as {self.announced_as!r}"
        return ""

    def _why_not_ready(self) -> str:
        state = self.status.state
        return (
            ""
            if state in _READY
            else f"is {rollout_pb2.ReplicaState.Name(state).removeprefix('REPLICA_STATE_').lower()}"
        )

    def describe(self) -> orchestrator_pb2.Replica:
        """Describe it for operators."""
        reason = self.why_not()
        return orchestrator_pb2.Replica(
            replica=self.name,
            address=self.target,
            policy_version=self.version.to_proto(),
            eligible=not reason,
            reason=reason,
            running=self.in_flight,
            generated_tokens=self.status.generated_tokens,
            sample_seconds=self._count(0),
        )

    async def close(self) -> None:
        """Close its channel."""
        await self._channel.close()


def is_broken(error: SluiceError) -> bool:
    """Return whether a connection was refused or broke: the error comes from the transport, not from a server."""
    return error.code is grpc.StatusCode.UNAVAILABLE and error.reason == grpc.StatusCode.UNAVAILABLE.name
