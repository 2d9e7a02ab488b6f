"""The rollout replicas: what each one last said, which of them get work, and when one is given up.

`Replica` is one of them. `ReplicaPool` finds, polls, evicts and chooses them. A replica is evicted when its connection breaks or when
it makes no progress (`progress`); its calls are then cancelled as soon as another replica can take them, and it gets work again when
it answers and its engine steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import grpc
import structlog

from orchestrator_svc.addresses import check_address, is_fixed, resolve_targets
from orchestrator_svc.concurrency import ConcurrencyLimit, EngineLoad
from orchestrator_svc.config import ConcurrencyConfig, ReplicasConfig
from orchestrator_svc.placement import Homes, Load, place
from orchestrator_svc.progress import ListeningClock, Loss, ReplicaProgress, StreamProgress
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.v1 import orchestrator_pb2, rollout_pb2, rollout_pb2_grpc
from sluice.versions import BASE, Version

log = structlog.get_logger(__name__)

Call: TypeAlias = "grpc.aio.Call"

_FIRST_COOLDOWN_S = 0.2
_LONGEST_COOLDOWN_S = 10.0
"""Seconds without work after a failed request, doubled with each further failure: a replica may answer polls and still fail."""

_LONGEST_STALL_REST_S = 120.0
"""Most seconds without work after the engine stalled: each attempt with such an engine costs its requests `progress_s`."""

_READY = {rollout_pb2.REPLICA_STATE_SERVING, rollout_pb2.REPLICA_STATE_PAUSED}
"""A paused replica takes work too: a pause is short (an update) or an operator's wish, and requests queue there."""

_TICK_S = 0.25
"""Seconds between two looks at who makes progress; less if `progress_s` is short."""

_LEAST_SEARCH_S = 0.05
"""Least seconds between two looks at who is announced."""


REPLICA_LOST = "REPLICA_LOST"
"""Reason of the error of a call that the pool gave up."""


class Work:
    """A call under way at a replica.

    Attributes:
        samples: Samples that it counts as.
        lost: Why the pool cancelled it; empty if it did not.
    """

    def __init__(self, call: Call, samples: int, progress: StreamProgress | None) -> None:
        self.samples, self.progress = samples, progress
        self.lost = ""
        self._call = call

    def give_up(self, why: str) -> None:
        """Cancel the call; its caller makes it at another replica."""
        self.lost = self.lost or why
        self._call.cancel()


class Replica:
    """One rollout replica: its channel, its last status, and whether it gets work.

    Attributes:
        in_flight: Samples that this process has under way there.
        works: Calls that it has under way there.
        limit: How many samples it is given.
        loss: Why it was evicted; None while it is not.
        leaving: Whether its lease is over: it gets no new work.
        told: Version and fitness that its pool last told of.
    """

    def __init__(
        self,
        target: str,
        security: SecurityConfig,
        config: ReplicasConfig,
        limit: ConcurrencyLimit,
        clock: ListeningClock,
    ) -> None:
        self.target = target
        self.status = rollout_pb2.GetStatusResponse()
        self.model = rollout_pb2.GetModelResponse()
        self.version: Version = BASE
        self.in_flight = 0
        self.works: set[Work] = set()
        self.seen = False
        self.loss: Loss | None = None
        self.leaving = False
        self.limit = limit
        self._channel = connect(target, security)
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self.admin = rollout_pb2_grpc.RolloutAdminServiceStub(self._channel)
        self._config, self._clock = config, clock
        self.progress = ReplicaProgress(config.progress_s, clock.now, clock.now)
        self._others = 0
        self._paused_since: float | None = None
        self._failed_work = self._stalls = 0
        self._rest_until = 0.0
        self._last_error = "has not answered yet"
        self.told = (self.version, self.why_not())

    @property
    def name(self) -> str:
        """Its own name; its address until it answered once."""
        return self.status.replica or self.target

    @property
    def load(self) -> Load:
        """What it has to do: the samples of this process as they are now, and those of others when it was last polled."""
        return Load(self.target, self.in_flight + self._others, self.status.max_running)

    @property
    def engine_load(self) -> EngineLoad:
        """What its engine last reported."""
        status = self.status
        return EngineLoad(status.running, status.queued, status.kv_cache_usage, status.preemptions, status.max_running)

    @property
    def drains(self) -> bool:
        """Whether it says that it takes nothing new."""
        return self.status.state == rollout_pb2.REPLICA_STATE_DRAINING

    @property
    def paused_long(self) -> bool:
        """Whether it has been paused for longer than an update takes."""
        return self._paused_since is not None and self._clock.now - self._paused_since > self._config.progress_s

    async def poll(self) -> bool:
        """Ask for its status. Return whether another process answers now.

        Raises:
            SluiceError: if it does not answer.
        """
        deadline_s = self._config.progress_s
        try:
            status = await self.admin.GetStatus(rollout_pb2.GetStatusRequest(), timeout=deadline_s)
            is_another = self.seen and (status.start_time, status.replica) != (
                self.status.start_time,
                self.status.replica,
            )
            if is_another or not self.model.model:
                self.model = await self.rollout.GetModel(rollout_pb2.GetModelRequest(), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            failure = SluiceError.from_rpc(error)
            self._last_error = str(failure)
            raise failure from error
        if is_another:
            self._begin_anew()
        now = self._clock.now
        self.progress.polled(status, now)
        self.status, self.version, self.seen = status, Version.from_proto(status.policy_version), True
        self._others = max(0, status.running + status.queued - self.in_flight)
        if status.state != rollout_pb2.REPLICA_STATE_PAUSED:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = now
        if self.progress.hang(now) is None:
            self.loss = None
        return is_another

    def _begin_anew(self) -> None:
        """Forget what another process at this address said: it may have had another model, version and load."""
        for work in list(self.works):
            work.give_up("another process serves at its address")
        self.progress = ReplicaProgress(self._config.progress_s, self._clock.now, self._clock.now)
        self.limit = self.limit.anew()
        self._failed_work = self._stalls = 0
        self._rest_until = 0.0

    def lose(self, loss: Loss) -> None:
        """Give it no work until it answers and makes progress again."""
        self.loss = loss
        if loss is Loss.STALLED:
            # It may look well as soon as its requests are cancelled, and stall again with the next ones.
            rest = min(_LONGEST_STALL_REST_S, self._config.progress_s * 2**self._stalls)
            self._stalls += 1
            self._rest_until = time.monotonic() + rest
            self._last_error = "its engine stalled"

    def work_failed(self, error: SluiceError) -> None:
        """Record a failed request: the replica gets no work for a while."""
        self._last_error = str(error)
        rest = min(_LONGEST_COOLDOWN_S, _FIRST_COOLDOWN_S * 2**self._failed_work)
        self._failed_work += 1
        self._rest_until = max(self._rest_until, time.monotonic() + rest)

    def work_succeeded(self, version: Version) -> None:
        """Record a request that succeeded; `version` sampled its last token."""
        self._failed_work = self._stalls = 0
        self._rest_until = 0.0
        self.version = max(self.version, version)

    @contextlib.contextmanager
    def working(self, call: Call, samples: int, *, streams: bool) -> Iterator[Work]:
        """Count a call and its samples as under way while the block awaits it.

        Raises:
            SluiceError: what the replica answered, or UNAVAILABLE if the call was given up.
        """
        work = Work(call, samples, StreamProgress(self._clock.now) if streams else None)
        self.works.add(work)
        self.in_flight += samples
        try:
            yield work
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not work.lost or (task is not None and task.cancelling()):
                raise
            raise SluiceError.unavailable(REPLICA_LOST, f"replica {self.name} {work.lost}") from None
        finally:
            self.works.discard(work)
            self.in_flight -= samples
            call.cancel()  # if the block was left before its end

    def received(self, work: Work, chunk: rollout_pb2.StreamChunk) -> None:
        """Note a message of a stream."""
        now = self._clock.now
        self.progress.received(chunk, now)
        if work.progress is not None:
            work.progress.received(chunk.stage, now)

    def why_lost(self) -> str:
        """Return why it was evicted; empty if it was not."""
        match self.loss:
            case Loss.DEAD:
                return f"does not answer: {self._last_error}"
            case Loss.SILENT:
                return f"does not answer: it has sent nothing for {self._config.progress_s:g} s"
            case Loss.STALLED:
                return f"hangs: its engine has made no step for {self._config.progress_s:g} s"
        return ""

    def why_not(self, wanted: Version | None = None) -> str:
        """Return why it gets no work; empty if it does."""
        if not self.seen or self.loss is not None:
            return self.why_lost() or f"does not answer: {self._last_error}"
        if self.status.state not in _READY:
            return f"is {rollout_pb2.ReplicaState.Name(self.status.state).removeprefix('REPLICA_STATE_').lower()}"
        if self.leaving:
            return "leaves: its lease is over"
        if time.monotonic() < self._rest_until:
            return f"failed lately: {self._last_error}"
        if wanted is not None and self.version < wanted:
            return f"serves version {self.version}, wanted is {wanted} or newer"
        return ""

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
        )

    async def close(self) -> None:
        """Close its channel."""
        await self._channel.close()


class Lease(NamedTuple):
    """What a replica that announces itself is granted: used at this address until then, and by whom it was announced."""

    target: str
    expires: float
    owner: str


class ReplicaPool:
    """Finds, polls, evicts and chooses replicas; `run` does the first three.

    Args:
        addresses: Configured addresses. A name stands for all addresses that it resolves to, and is resolved again regularly.
        on_change: Called when a replica's version or fitness changed.
        concurrency: How many samples a replica is given at a time.
        group: Samples that are dispatched together.

    Attributes:
        counts: What happened at replicas, by name; `PolicyEngine` counts here too. Evictions are "evicted_dead",
            "evicted_silent" and "evicted_stalled".
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: SecurityConfig,
        config: ReplicasConfig,
        on_change: Callable[[Replica], None],
        *,
        concurrency: ConcurrencyConfig | None = None,
        group: int = 1,
    ) -> None:
        self._addresses = []
        for address in addresses:
            try:
                check_address(address)
            except ValueError as error:
                log.warning("a replica is left out (peers.rollout)", reason=str(error))
            else:
                self._addresses.append(address)
        self.counts: Counter[str] = Counter()
        self.config = config
        self._security, self._on_change = security, on_change
        self._limit = ConcurrencyLimit(concurrency or ConcurrencyConfig(), group)
        self._group = group
        self._tick_s = min(_TICK_S, config.progress_s / 10)
        self._clock = ListeningClock(self._tick_s, time.monotonic())
        self._replicas: dict[str, Replica] = {}
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._homes = Homes()
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()
        self._search = asyncio.Event()
        self._wanted: Version | None = None
        self._held_back = False
        self._leases: dict[str, Lease] = {}
        self._leased: set[str] = set()
        self._last_digest = self._last_dtype = ""

    @property
    def replicas(self) -> list[Replica]:
        """All known replicas."""
        return list(self._replicas.values())

    async def run(self) -> None:
        """Find, poll and watch replicas until cancelled, then close their channels.

        Raises:
            ExceptionGroup: with whatever the search for replicas or one of the polls raised.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._watch(), name="watch replicas")
                while True:
                    self._search.clear()
                    await self._follow_names()
                    ends = [lease.expires - self._clock.now for lease in self._leases.values()]
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(_LEAST_SEARCH_S, min([self.config.resolve_s, *ends]))):
                            await self._search.wait()
        finally:
            self._tasks = None
            for replica in self._replicas.values():
                await replica.close()

    async def _follow_names(self) -> None:
        now = self._clock.now
        self._leases = {name: lease for name, lease in self._leases.items() if lease.expires > now}
        leased = {lease.target for lease in self._leases.values()}
        targets = await resolve_targets([*self._addresses, *leased])
        for target in targets:
            self._join(target)
        for target in [each for each in self._replicas if each not in targets]:
            # It left the name service, or its lease is over. A name service may err: such a replica is kept while it works.
            # One that drains is shown until it has ended.
            replica = self._replicas[target]
            replica.leaving = target in self._leased
            if replica.seen and replica.loss is None and (replica.works or replica.drains or not replica.why_not()):
                continue
            poller = self._pollers.pop(target)
            del self._replicas[target]
            self._leased.discard(target)
            poller.cancel()
            await asyncio.gather(poller, return_exceptions=True)
            for work in list(replica.works):
                work.give_up("left")
            self._homes.forget(target)
            await replica.close()
            log.info("replica forgotten", replica=replica.name, target=target)

    def _join(self, target: str) -> None:
        if target in self._replicas:
            self._replicas[target].leaving = False
        elif self._tasks is not None:
            replica = Replica(target, self._security, self.config, self._limit.anew(), self._clock)
            self._replicas[target] = replica
            self._pollers[target] = self._tasks.create_task(self._poll(replica), name=f"poll {target}")

    async def _poll(self, replica: Replica) -> None:
        while True:
            try:
                if await replica.poll():
                    log.info(
                        "another process serves at a replica's address", replica=replica.name, target=replica.target
                    )
                    self._homes.forget(replica.target)
            except SluiceError as error:
                if is_broken(error):
                    self.evict(replica, Loss.DEAD)
            else:
                replica.limit.report(replica.engine_load, replica.in_flight, self._clock.now, held_back=self._held_back)
            if replica.model.tokenizer_digest:
                self._last_digest, self._last_dtype = replica.model.tokenizer_digest, self.sampler_dtype()
            self._tell_changes(replica)
            if replica.leaving and not replica.works:
                self._search.set()
            await self._pause(replica)

    def _tell_changes(self, replica: Replica) -> None:
        now = (replica.version, replica.why_not())
        if replica.told != now:
            replica.told = now
            log.debug("replica changed", replica=replica.name, version=str(replica.version), reason=now[1])
            self._on_change(replica)
            self._changed.set()

    async def _pause(self, replica: Replica) -> None:
        """Wait for the next poll: briefly while dispatch waits for a version that this replica does not serve yet."""
        if self._wanted is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.poll_s):
                    await self._hurry.wait()
        elif not replica.why_not() and replica.version < self._wanted:
            await asyncio.sleep(self.config.waiting_poll_s)
        else:
            await asyncio.sleep(self.config.poll_s)

    async def _watch(self) -> None:
        """Evict replicas that hang, and cancel the calls of lost ones that another replica can take."""
        while True:
            await asyncio.sleep(self._tick_s)
            now = self._clock.tick(time.monotonic())
            for replica in self.replicas:
                if (loss := replica.progress.hang(now)) is not None:
                    self.evict(replica, loss)
            for replica in self.replicas:
                self._move(replica, now)

    def _move(self, replica: Replica, now: float) -> None:
        """Cancel the calls of a replica that is lost, or at which they are stuck, if they can be made elsewhere."""
        others = [each for each in self._replicas.values() if each is not replica and not each.why_not()]
        if not others or not replica.works:
            return
        lost, config = replica.why_lost(), self.config
        paused_s = config.paused_s if any(not each.paused_long for each in others) else float("inf")
        for work in list(replica.works):
            stuck = work.progress.why_stuck(now, config.progress_s, paused_s) if work.progress is not None else ""
            if lost or stuck:
                work.give_up(lost or stuck)

    def evict(self, replica: Replica, loss: Loss) -> None:
        """Give a replica no work until it answers and makes progress again."""
        if replica.loss is not None or not replica.seen:
            return
        replica.lose(loss)
        self._homes.forget(replica.target)
        if not replica.works and (replica.leaving or replica.drains):
            log.info("replica left", replica=replica.name, target=replica.target)
            self._search.set()
        else:
            self.counts[f"evicted_{loss}"] += 1
            log.warning(
                "replica evicted; it gets work again when it answers and makes progress",
                replica=replica.name,
                target=replica.target,
                reason=replica.why_lost(),
                calls=len(replica.works),
            )
        self._tell_changes(replica)
        self._move(replica, self._clock.now)

    def register(self, name: str, target: str, owner: str = "") -> float:
        """Use a replica that announced itself, at once; return the seconds within which it has to send a heartbeat.

        Args:
            name: Its name.
            target: Its address.
            owner: Name of the principal that announces it.

        Raises:
            ValueError: if its address cannot be one.
        """
        check_address(target)
        before = self._leases.get(name)
        is_new = before is None or before.target != target
        self._leases[name] = Lease(target, self._clock.now + self.config.lease_s, owner)
        if is_new:
            self._leased.add(target)
            if is_fixed(target):
                self._join(target)
            self._search.set()  # for a name, and for the address that it had before
        return self.config.lease_s

    def heartbeat(self, name: str) -> float:
        """Renew a lease; return its seconds.

        Raises:
            KeyError: if the lease is unknown or over.
        """
        lease = self._leases[name]
        return self.register(name, lease.target, lease.owner)

    def owner(self, name: str) -> str | None:
        """Return the principal that announced a replica; None if it has no lease."""
        lease = self._leases.get(name)
        return None if lease is None else lease.owner

    def leave(self, name: str) -> None:
        """Give a replica that says that it leaves nothing new, from now on; what it has under way ends there or continues elsewhere."""
        self._leases.pop(name, None)
        for replica in self._replicas.values():
            if replica.name == name:
                replica.status.state = rollout_pb2.REPLICA_STATE_DRAINING  # as it says itself at the next poll
                self._homes.forget(replica.target)
                self._tell_changes(replica)
        self._search.set()

    def refused(self, replica: Replica) -> None:
        """Give a replica fewer samples at a time: its queue is full."""
        replica.limit.refused(replica.in_flight, self._clock.now)

    def wait_for(self, wanted: Version | None) -> None:
        """Poll often while dispatch waits for a version; None: it waits for none."""
        self._wanted = wanted
        if wanted is None:
            self._hurry.clear()
        else:
            self._hurry.set()

    def has_room(self, running_groups: int) -> bool:
        """Return whether the replicas can be given one more group beside those that run."""
        fit = [each.limit.samples for each in self._replicas.values() if not each.why_not()]
        self._held_back = bool(fit) and running_groups >= max(1, sum(fit) // self._group)
        return not self._held_back

    def pick(self, wanted: Version, avoid: str = "", keys: Sequence[str] = ()) -> Replica | None:
        """Return the replica for a request, of those that serve `wanted` or newer; None if there is none.

        Args:
            wanted: Oldest version that may sample.
            avoid: Target that is chosen only if there is no other.
            keys: Whose prefix the request begins with, the most specific first, such as its episode and its group.
        """
        fit = [each for each in self._replicas.values() if not each.why_not(wanted)]
        fit = [each for each in fit if each.target != avoid] or fit
        fit = [each for each in fit if not each.paused_long] or fit
        if not fit:
            return None
        home = self._homes.find(keys) if keys else ""
        return self._replicas[place([each.load for each in fit], home, self.config.affinity_margin)]

    async def choose(self, wanted: Version, avoid: str = "", keys: Sequence[str] = ()) -> Replica:
        """Wait until `pick` finds a replica, remember it for the keys and return it; the caller sets the deadline."""
        while (replica := self.pick(wanted, avoid, keys)) is None:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                # Cooldowns end without an announcement.
                async with asyncio.timeout(self.config.poll_s):
                    await self._changed.wait()
        self._homes.remember(keys, replica.target)
        return replica

    def none_for(self, waited_s: float, setting: str) -> SluiceError:
        """Return the error after `waited_s` seconds, the value of `setting`, without a replica that gets work."""
        reasons = "; ".join(f"{each.name} {each.why_not()}" for each in self.replicas) or "no address resolves"
        return SluiceError.unavailable(
            "NO_REPLICA",
            f"no rollout replica for {waited_s:g} s (orchestrator.deadlines.{setting}): {reasons}; start one at an address of"
            " peers.rollout, then start the run again: it continues",
        )

    def tokenizer_digest(self) -> str:
        """Return the digest of tokenizer and template that the replicas share; empty until one answered.

        While none answers it is the last one: what was sampled can be trained without them.

        Raises:
            SluiceError: FAILED_PRECONDITION if they differ.
        """
        models = [each for each in self.replicas if each.loss is None and each.model.tokenizer_digest]
        digests = {each.model.tokenizer_digest: each.name for each in models}
        if len(digests) > 1:
            raise SluiceError.failed_precondition(
                "TOKENIZERS_DIFFER",
                f"replicas {' and '.join(digests.values())} have different tokenizers or templates: give all the same --model",
            )
        return next(iter(digests), self._last_digest)

    def sampler_dtype(self) -> str:
        """Return the precision of the replicas' weights, such as ``bfloat16``; empty if it is not known or they differ.

        While none answers it is the last one.
        """
        models = [each.model for each in self.replicas if each.loss is None and each.model.tokenizer_digest]
        if not models:
            return self._last_dtype
        dtypes = {model.dtype for model in models if model.dtype}
        return dtypes.pop() if len(dtypes) == 1 else ""

    def update_metrics(self, newest: Version) -> dict[str, float]:
        """Return how long the slowest replica took for each part of its last update, and how many versions the last one lags."""
        ready = [each for each in self.replicas if not each.why_not()]
        timings = [each.status.last_update for each in ready if each.status.HasField("last_update")]
        if not timings:
            return {}
        behind = (newest.number - each.version.number for each in ready)
        return {"weights/replica_lag": float(max(0, *behind, 0))} | {
            f"weights/{part}_s": max(getattr(each, part).ToTimedelta().total_seconds() for each in timings)
            for part in ("pull", "stage", "pause", "apply", "total")
        }

    def generated_tokens(self) -> int:
        """Return the tokens that the replicas sampled since each of them started."""
        return sum(each.status.generated_tokens for each in self.replicas)


def evictions(counts: Mapping[str, int]) -> dict[str, int]:
    """Return how often a replica was evicted, by reason, from the counts of a pool."""
    return {str(loss): counts[f"evicted_{loss}"] for loss in Loss if counts.get(f"evicted_{loss}")}


def is_broken(error: SluiceError) -> bool:
    """Return whether a connection was refused or broke: the error comes from the transport, not from a server."""
    return error.code is grpc.StatusCode.UNAVAILABLE and error.reason == grpc.StatusCode.UNAVAILABLE.name
