"""The rollout replicas of a run: which ones are known, which of them get work, and when a replica is evicted.

A replica is evicted when its connection breaks or when it makes no progress (`progress`). Its calls are cancelled as soon as another
replica can take them. It gets work again when it answers and its engine steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import structlog

from sluice.clock import CLOCK, Clock
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError
from sluice.rpc.channel import token_file
from sluice.sampling.addresses import check_address, resolve_targets
from sluice.sampling.concurrency import ConcurrencyLimit
from sluice.sampling.config import ConcurrencyConfig, ReplicasConfig
from sluice.sampling.placement import Homes, place
from sluice.sampling.progress import ListeningClock, Loss
from sluice.sampling.replica import Replica, is_broken
from sluice.versions import Version

log = structlog.get_logger(__name__)

_TICK_S = 0.25
"""Seconds between two checks of which replicas make progress; less if `progress_s` is short."""


_AWAITING_POLL_S = 0.02
"""Minimum seconds between two status requests to a replica while a newer version is awaited. It answers them when it has the version."""

_AFFINITY_MARGIN = 0.25
"""How much busier the replica that has a request's prefix may be than the least busy one and still get the request; difference of `Load.share`."""

_COMPARED = 64
"""Number of replicas that are compared to choose the least loaded. In a larger fleet, compare the next ones in turn: one among this number has
little to do, and comparing thousands for each request took more time than the rest of a request."""


class _Fit(NamedTuple):
    """Number of replicas that get work, how many of them have been paused for long, and the samples that they are given at a time in total."""

    replicas: int
    paused: int
    samples: int


class ReplicaPool:
    """Finds, polls, evicts and chooses replicas. `run` finds, polls and evicts.

    Args:
        addresses: Configured addresses. A name stands for all addresses that it resolves to; it is resolved again regularly.
        on_change: Called when a replica's version or fitness changed.
        concurrency: How many samples a replica is given at a time.
        group: Samples that are dispatched together.
        holds_back: Whether new requests wait here, first in, first out, while no replica may be given more samples. If false, callers
            ask `has_room` before they make a request.
        clock: Time of waits and limits.

    Attributes:
        clock: Time of waits and limits, also for the engines that sample through this pool.
        counts: Counts of events at replicas, by name of the event; `PolicyEngine` counts here, too. Evictions are "evicted_" and a `Loss`.
        sample_rate: Tokens per second of one sample, a moving average that `PolicyEngine` keeps.

    Raises:
        ConfigError: if this process has tokens but none for replicas.
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
        holds_back: bool = False,
        clock: Clock = CLOCK,
    ) -> None:
        token_file(security, "dispatcher")
        self._addresses = []
        for address in addresses:
            try:
                check_address(address)
            except ValueError as error:
                log.warning("a replica is left out (peers.rollout)", reason=str(error))
            else:
                self._addresses.append(address)
        self.counts: Counter[str] = Counter()
        self.sample_rate = 0.0
        self.config, self.clock = config, clock
        self._security, self._on_change = security, on_change
        self._limit = ConcurrencyLimit(concurrency or ConcurrencyConfig(), group)
        self._group = group
        self._tick_s = min(_TICK_S, config.progress_s / 10)
        self._listening = ListeningClock(self._tick_s, clock())
        self._replicas: dict[str, Replica] = {}
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._homes = Homes()
        self._order: list[Replica] = []
        self._order_is_old = False
        self._turn = 0
        self._counted: _Fit | None = None
        self._changed = asyncio.Event()
        self._wants_another = asyncio.Event()
        self._search = asyncio.Event()
        self._wanted: Version | None = None
        self._held_back = False
        self._used: dict[str, str] = {}
        self._holds_back = holds_back
        self._line: deque[asyncio.Future[None]] = deque()
        self._let_go = 0
        """Requests that left the line and have not begun yet."""
        self._last_digest = self._last_dtype = ""
        self._waited_for: set[Version] = set()
        """Versions for which the log says that calls wait."""

    @property
    def replicas(self) -> list[Replica]:
        """All known replicas."""
        return list(self._replicas.values())

    @property
    def waiting(self) -> int:
        """Requests that wait in line for a replica."""
        return len(self._line)

    @property
    def calls(self) -> int:
        """Calls of this process in progress at all replicas."""
        return sum(len(each.works) for each in self._replicas.values())

    async def run(self) -> None:
        """Find, poll and watch replicas until cancelled, then close their channels.

        Raises:
            ExceptionGroup: with the errors of the search for replicas and of the polls.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._watch(), name="watch replicas")
                while True:
                    self._search.clear()
                    await self._follow_names()
                    with contextlib.suppress(TimeoutError):
                        async with self.clock.timeout(self.config.resolve_s):
                            await self._search.wait()
        finally:
            self._tasks = None
            for replica in self._replicas.values():
                await replica.close()

    async def _follow_names(self) -> None:
        """Add the replicas that are configured or given by `use`, and forget others that have ended."""
        configured = await resolve_targets(self._addresses)
        targets: dict[str, str | None] = dict.fromkeys(configured)
        for target, name in self._used.items():
            targets.setdefault(target, name)
        for target, announced_as in targets.items():
            self._join(target, announced_as)
        for target in [each for each in self._replicas if each not in targets]:
            # It left the name service, or `use` no longer names it. A name service may err, so keep a replica that still works.
            # Keep one that leaves until it has ended, so that it is still shown.
            replica = self._replicas[target]
            replica.leaving = replica.announced_as is not None
            shown = replica.works or not replica.why_not() or (replica.leaving and replica.drains)
            if replica.seen and replica.loss is None and shown:
                continue
            poller = self._pollers.pop(target)
            del self._replicas[target]
            self._order_is_old = True
            poller.cancel()
            await asyncio.gather(poller, return_exceptions=True)
            replica.give_up_all("left")
            self._homes.forget(target)
            await replica.close()
            self._wake()
            log.info("replica forgotten", replica=replica.name, target=target)

    def _join(self, target: str, announced_as: str | None) -> None:
        replica = self._replicas.get(target)
        if replica is None and self._tasks is not None:
            replica = Replica(
                target, self._security, self.config, self._limit.anew(), self._listening, clock=self.clock
            )
            self._replicas[target] = replica
            self._order_is_old = True
            self._pollers[target] = self._tasks.create_task(self._poll(replica), name=f"poll {target}")
            self._wake()
        if replica is not None:
            replica.announced_as, replica.leaving = announced_as, False

    async def _poll(self, replica: Replica) -> None:
        while True:
            awaited, began = self._awaited_of(replica), self.clock()
            known, was_lost = replica.model, replica.loss is not None
            try:
                if await replica.poll(awaited):
                    log.info(
                        "another process serves at a replica's address", replica=replica.name, target=replica.target
                    )
                    self._homes.forget(replica.target)
            except SluiceError as error:
                if is_broken(error):
                    self.evict(replica, Loss.DEAD)
            else:
                replica.limit.report(
                    replica.engine_load, replica.in_flight, self._listening.now, held_back=self._held_back
                )
            if replica.model.tokenizer_digest and (was_lost or replica.model is not known):
                # Not at each poll: `sampler_dtype` reads all replicas, and each of thousands is polled twice a second.
                self._last_digest, self._last_dtype = replica.model.tokenizer_digest, self.sampler_dtype()
            self._tell_changes(replica)
            self.let_in()
            if replica.leaving and not replica.works:
                self._search.set()
            await self._pause(replica, 0.0 if awaited is None else self.clock() - began)

    def _tell_changes(self, replica: Replica) -> None:
        now = (replica.version, replica.why_not())
        if replica.told != now:
            replica.told = now
            log.debug("replica changed", replica=replica.name, version=str(replica.version), reason=now[1])
            self._on_change(replica)
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self) -> None:
        """Wait until a replica comes or goes, or its version or fitness changes."""
        await self._changed.wait()

    def _awaited_of(self, replica: Replica) -> Version | None:
        """Return the version that dispatch waits for, if this replica is fit and does not serve that version yet."""
        wanted = self._wanted
        return wanted if wanted is not None and not replica.why_not() and replica.version < wanted else None

    async def _pause(self, replica: Replica, waited_s: float) -> None:
        """Wait for the next poll. Poll at once if dispatch waits for a version that this replica does not serve yet.

        The replica answers such a poll when it has the version. It may answer
        earlier, after `waited_s`. Then wait until `_AWAITING_POLL_S` have passed since the last poll.
        """
        if self._awaited_of(replica) is not None:
            if waited_s:
                await self.clock.sleep(max(0.0, _AWAITING_POLL_S - waited_s))
            return
        with contextlib.suppress(TimeoutError):
            async with self.clock.timeout(self.config.poll_s):
                await self._wants_another.wait()

    async def _watch(self) -> None:
        """Evict replicas that hang. Cancel calls at lost replicas if another replica can take them."""
        while True:
            await self.clock.sleep(self._tick_s)
            now = self._listening.tick(self.clock())
            for replica in self.replicas:
                if (loss := replica.hang(now)) is not None:
                    self.evict(replica, loss)
            fit = self._counted = self._fit()
            for replica in self.replicas:
                self._move(replica, fit, now)
            self.let_in()  # cooldowns end without an event

    def _fit(self) -> _Fit:
        """Count the replicas that get work. `_watch` counts once per tick, not once per replica, since a fleet may have thousands."""
        fit = [each for each in self._replicas.values() if not each.why_not()]
        return _Fit(len(fit), sum(each.paused_long for each in fit), sum(each.limit.samples for each in fit))

    def _move(self, replica: Replica, fit: _Fit, now: float) -> None:
        """If other replicas get work, cancel all calls of a lost replica, and the stuck calls of any other."""
        if not replica.works:
            return
        gets_work = not replica.why_not()
        others = fit.replicas - gets_work
        if not others:
            return
        if replica.loss is None:
            paused = fit.paused - (gets_work and replica.paused_long)
            replica.give_up_stuck(now, others_paused=paused == others)
            return
        if replica.loss is Loss.STALLED and not all(work.given_up for work in replica.works):
            replica.rest()
        replica.give_up_all(replica.why_lost())

    def evict(self, replica: Replica, loss: Loss) -> None:
        """Give a replica no work until it answers and makes progress again."""
        if replica.loss is not None or not replica.seen:
            return
        replica.loss = loss
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
        self._move(replica, self._fit(), self._listening.now)

    @property
    def now(self) -> float:
        """Clock for the silence of replicas: seconds in which this process listened, without its own pauses."""
        return self._listening.now

    def use(self, replicas: Mapping[str, str]) -> None:
        """Use these replicas and those at configured addresses from now on. Drop those of the previous call.

        A replica that is left out finishes its work and gets no new work.

        Args:
            replicas: Expected names by target; an empty name accepts any. A replica that reports another name gets no work.
        """
        for target, name in replicas.items():
            known = self._replicas.get(target)
            if known is not None and self._used.get(target) != name:
                known.left = False  # it is back
            self._join(target, name if known is None or known.announced_as is not None else None)
        self._used = dict(replicas)
        self._search.set()

    def retire(self, target: str, name: str) -> None:
        """Give no new work to a replica that says it leaves. Its calls in progress end there or continue elsewhere."""
        replica = self._replicas.get(target)
        if replica is not None and name in (replica.name, replica.announced_as):
            replica.left = True
            self._homes.forget(target)
            self._tell_changes(replica)

    def refused(self, replica: Replica) -> None:
        """Give a replica fewer samples at a time, because its queue is full."""
        replica.limit.refused(replica.in_flight, self._listening.now)

    def forgive(self, target: str) -> None:
        """Do not count a failed request against a replica, because other replicas failed at it, too."""
        if (replica := self._replicas.get(target)) is not None:
            replica.work_forgiven()

    def wait_for(self, wanted: Version | None) -> None:
        """Poll often while dispatch waits for `wanted`; None: it waits for no version."""
        if wanted is not None and wanted != self._wanted:
            self._wants_another.set()
            self._wants_another = asyncio.Event()
        self._wanted = wanted

    def has_room(self, running_groups: int) -> bool:
        """Return whether the replicas can be given one more group in addition to the running ones."""
        fit = self._counted
        if fit is None or len(self._replicas) <= _COMPARED:  # in a larger fleet, use the count of the last tick
            fit = self._fit()
        self._held_back = bool(fit.replicas) and running_groups >= max(1, fit.samples // self._group)
        return not self._held_back

    async def room(self) -> None:
        """Wait in line until a replica has room for a new request. If requests are not held back, return at once.

        The pool does not limit the length of the line; its callers do.
        """
        if not self._holds_back or (not self._line and self._places_left() > 0):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        self._held_back = True
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(ValueError):  # it may have left the line since
                    self._line.remove(turn)
            else:
                self._let_go -= 1
                self.let_in()
            raise
        self._let_go -= 1

    def let_in(self) -> None:
        """Take requests from the line while the replicas have room. Call it when a request has ended."""
        if not self._line:
            return
        left = self._places_left()
        while self._line and left > 0:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                self._let_go += 1
                left -= 1
        self._held_back = bool(self._line)

    def _places_left(self) -> int:
        """Return how many more samples the replicas can be given."""
        fit = (each for each in self._replicas.values() if not each.why_not())
        return sum(max(0, each.limit.samples - each.in_flight) for each in fit) - self._let_go

    def pick(self, wanted: Version, avoid: Collection[str] = (), keys: Sequence[str] = ()) -> Replica | None:
        """Return the replica for a request, among those that serve `wanted` or newer; None if no such replica gets work.

        Args:
            wanted: Oldest version that may sample.
            avoid: Targets to choose only if there is no other.
            keys: Keys of the prefixes that the request begins with, the most specific first, such as its episode and its group.
        """
        home = self._homes.find(keys) if keys else ""
        fit: list[Replica] = []
        best: list[Replica] = []
        for replica in self._in_turn(home):
            if not replica.why_not(wanted):
                fit.append(replica)
                if replica.target not in avoid and not replica.paused_long:
                    best.append(replica)
                    if len(best) == _COMPARED:
                        break
        if not best:
            best = [each for each in fit if each.target not in avoid] or fit
            best = [each for each in best if not each.paused_long] or best
        if not best:
            return None
        return self._replicas[place([each.load for each in best], home, _AFFINITY_MARGIN)]

    def _in_turn(self, home: str) -> Iterator[Replica]:
        """Yield all replicas. If there are more than `_COMPARED`, yield `home` first, then the others in turn: each call begins one further."""
        if len(self._replicas) <= _COMPARED:
            yield from self._replicas.values()
            return
        if len(self._order) != len(self._replicas) or self._order_is_old:
            self._order, self._order_is_old = list(self._replicas.values()), False
        at_home = self._replicas.get(home)
        if at_home is not None:
            yield at_home
        first = self._turn = (self._turn + 1) % len(self._order)
        yield from (each for each in self._order[first:] + self._order[:first] if each is not at_home)

    async def choose(self, wanted: Version, avoid: Collection[str] = (), keys: Sequence[str] = ()) -> Replica:
        """Wait until `pick` finds a replica. Remember it for the keys and return it. The caller sets the deadline."""
        while (replica := self.pick(wanted, avoid, keys)) is None:
            self._tell_wait(wanted)
            with contextlib.suppress(TimeoutError):
                # Cooldowns end without an event.
                async with self.clock.timeout(self.config.poll_s):
                    await self.changed()
        if self._waited_for:
            self._waited_for = {each for each in self._waited_for if each > wanted}
        self._homes.remember(keys, replica.target)
        return replica

    def _tell_wait(self, wanted: Version) -> None:
        """Log that calls wait for a replica, and why. Log it again only after a call for this version, or a newer one, has found a replica."""
        if wanted not in self._waited_for:
            self._waited_for.add(wanted)
            log.info("calls wait for a replica", wanted=str(wanted), reason=self._why_none(wanted))

    def _why_none(self, wanted: Version) -> str:
        whys = "; ".join(f"{each.name} {each.why_not(wanted) or 'is busy'}" for each in self.replicas)
        return whys or "none is known: look at peers.rollout"

    def none_for(self, waited_s: float, setting: str) -> SluiceError:
        """Return the error for a request that found no usable replica for `waited_s` seconds. `setting` names the setting of that limit."""
        reasons = "; ".join(f"{each.name} {each.why_not()}" for each in self.replicas) or "no address resolves"
        return SluiceError.unavailable(
            "NO_REPLICA",
            f"no rollout replica for {waited_s:g} s ({setting}): {reasons}; start one at an address of peers.rollout, then try"
            " again: the run continues",
        )

    def none_at(self, wanted: Version, waited_s: float, setting: str) -> SluiceError:
        """Return the error for a request that found no replica with `wanted` or newer for `waited_s` seconds. `setting` names that limit."""
        serve = self._why_none(wanted)
        return SluiceError.unavailable(
            "NO_REPLICA",
            f"no rollout replica has taken version {wanted} or a newer one for {waited_s:g} s ({setting}): {serve}. See `version not"
            " taken` in their logs: they may not reach weightsync, or have no room in rollout.stage_dir. Then try again: the run continues",
        )

    def tokenizer_digest(self) -> str:
        """Return the digest of tokenizer and template that the replicas share; empty until a replica answered.

        While none answers, return the last known digest, so that samples can be trained without the replicas.

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
        """Return the precision of the replicas' weights, such as ``bfloat16``; empty if it is unknown or they differ.

        While none answers, return the last known precision.
        """
        models = [each.model for each in self.replicas if each.loss is None and each.model.tokenizer_digest]
        if not models:
            return self._last_dtype
        dtypes = {model.dtype for model in models if model.dtype}
        return dtypes.pop() if len(dtypes) == 1 else ""

    def update_metrics(self, newest: Version) -> dict[str, float]:
        """Return how long the slowest replica took for each part of its last update, and by how many versions the oldest replica lags."""
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
