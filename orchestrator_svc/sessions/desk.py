"""The external episodes of a run: this joins the state machines with a clock, the journal's payloads and the waiting calls.

The workflow offers groups here and waits for their end; the servicers answer gateways. A fact of the journal wakes the calls that
wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from orchestrator_svc.config import ExternalConfig
from orchestrator_svc.journal.external import RecordedRequest, Session, parse_session_name
from orchestrator_svc.journal.facts import Stage
from orchestrator_svc.journal.ledger import Group
from orchestrator_svc.journal.store import GroupDamagedError, Journal
from orchestrator_svc.sessions.claims import Claims
from orchestrator_svc.sessions.lending import RETRY_S, Lending
from sluice.clock import CLOCK, Clock
from sluice.environments.base import Task
from sluice.limits import MAX_REWARD
from sluice.rpc import SluiceError
from sluice.rpc.access import SESSION_KEY, SETTLING_KEY
from sluice.rpc.principals import replace_private
from sluice.v1 import common_pb2, journal_pb2, session_pb2, tokens_pb2

log = structlog.get_logger(__name__)

_CACHE_BYTES = 256 << 20
"""Most bytes of the newest generations that are kept in memory; others are read from disk."""

OFFERS = "offers"
"""Key in `Waiting` for calls that want a lease."""

BACK_S = 1.0
"""Seconds within which a gateway whose stream broke must call again. Then only its connection broke, and its claims still hold."""

SECRET = "sessions.key"  # noqa: S105 - a file's name
_SECRET_BYTES = 32

_FREES = frozenset({"lease_ended", "episode_given_up"})
_SETTLES = frozenset(
    {"lease_granted", "lease_ended", "episode_given_up", "episode_submitted", "reward_recorded", "group_dropped"}
)


@dataclass(frozen=True, slots=True)
class Posed:
    """The task of a group, and how its episodes are sampled.

    Attributes:
        task: The task.
        sampling: How its generations are sampled if a request does not say otherwise.
        evaluation: Whether it is for evaluation and is not trained.
        chat_template_kwargs: Arguments of the chat template if a request does not set them.
    """

    task: Task
    sampling: tokens_pb2.SamplingParams
    evaluation: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class Waiting:
    """Wakes waiting calls when the journal gets a fact or a claim changes.

    Args:
        clock: Times the longest wait.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._waiters: dict[Hashable, set[asyncio.Event]] = {}

    def wake(self, key: Hashable) -> None:
        """Wake all calls that wait for `key`."""
        for event in self._waiters.get(key, ()):
            event.set()

    async def until(self, key: Hashable, seconds: float | None) -> None:
        """Wait until woken, at most `seconds`. Then check the condition again."""
        event = asyncio.Event()
        self._waiters.setdefault(key, set()).add(event)
        try:
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(seconds):
                    await event.wait()
        finally:
            self._waiters[key].discard(event)
            if not self._waiters[key]:
                del self._waiters[key]

    def follow(self, fact: journal_pb2.Fact) -> None:
        """Wake the calls that wait for a fact of the journal."""
        if not self._waiters:
            return
        kind = fact.WhichOneof("kind") or ""
        if kind in _FREES:
            self.wake(OFFERS)
        if kind in _SETTLES:
            self.wake(getattr(fact, kind).group)
        elif kind == "session_generation_recorded":
            each = fact.session_generation_recorded
            self.wake((each.group, each.episode, each.attempt))


class Desk:
    """Where external episodes are offered, and gateways served.

    Args:
        journal: The run's journal.
        limits: Times and bounds.
        waiting: Follows the facts of the journal.
        secret: Session keys are derived with it.
        posed: Returns the `Posed` of a group; None if its task is gone.
        environments: Names of the environments whose episodes external agents run.
        most_reward: Largest absolute value of a reward.
        clock: The time of leases, sessions and claims.

    Attributes:
        lending: Decides who has which episode.
        claims: Decides who samples which request.
        openings: Messages and tools that each offered group begins with.
        missing: Says which environments wait for agents.
        ended: Whether the run has ended, so that nothing will be on offer.
        cached_bytes: Size of the generations that are kept in memory.
    """

    def __init__(
        self,
        journal: Journal,
        limits: ExternalConfig,
        waiting: Waiting,
        secret: bytes,
        *,
        posed: Callable[[Group], Posed | None],
        environments: Collection[str] = (),
        most_reward: float = MAX_REWARD,
        clock: Clock = CLOCK,
    ) -> None:
        self._posed = posed
        self.journal, self.limits, self.clock, self.waiting = journal, limits, clock, waiting
        self.lending = Lending(journal, limits, clock(), most_reward=most_reward)
        self.claims = Claims(journal, self.lending, limits)
        self.openings: dict[int, tokens_pb2.Conversation] = {}
        self.missing = MissingAgents(environments, limits.notice_s)
        self._put_off: set[int] = set()
        self.ended = False
        self._secret = secret
        self._cache: OrderedDict[tuple[str, str], session_pb2.RecordedGeneration] = OrderedDict()
        self.cached_bytes = 0
        self._gateways: Counter[str] = Counter()
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """End expired leases, sessions and claims, until cancelled.

        Raises:
            JournalError: if an end cannot be written.
        """
        while True:
            now = self.clock()
            self.expire(now)
            # Leases, sessions and claims that begin meanwhile expire no earlier than this.
            least = min(self.limits.lease_s, self.limits.idle_s)
            await self.clock.sleep(max(0.0, min(self.lending.next_deadline() - now, least)))

    def expire(self, now: float) -> None:
        """End what has expired, and forget the generations of ended sessions, which nothing reads again."""
        self.lending.expire(now)
        self.claims.expire(now)
        live = {name: isinstance(self.lending.find(name), Session) for name in {name for name, _ in self._cache}}
        for key in [key for key in self._cache if not live[key[0]]]:
            self.cached_bytes -= self._cache.pop(key).ByteSize()

    def end(self) -> None:
        """Wake the calls that wait for an offer: there will be none."""
        self.ended = True
        self.waiting.wake(OFFERS)

    # Gateways.

    @contextlib.contextmanager
    def connected(self, gateway: str) -> Iterator[None]:
        """Count a gateway as alive while the block runs. If it does not connect again soon afterwards, its claims end."""
        self._gateways[gateway] += 1
        self.claims.away.discard(gateway)
        try:
            yield
        finally:
            self._gateways[gateway] -= 1
            if gateway and not self._gateways[gateway]:
                self.claims.away.add(gateway)
                ending = asyncio.create_task(self._end_claims(gateway), name=f"claims of {gateway}")
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    async def _end_claims(self, gateway: str) -> None:
        """End the claims of a gateway that is not back in time."""
        await self.clock.sleep(BACK_S)
        if self._gateways[gateway]:
            return
        del self._gateways[gateway]
        sessions = self.claims.end_all_of(gateway, self.clock())
        if sessions:
            log.warning(
                "a gateway is gone; its requests may be sampled by others", gateway=gateway, sessions=len(sessions)
            )
        for name in sessions:
            self.waiting.wake(parse_session_name(name))

    # Offers.

    def offer(self, group: int, opening: tokens_pb2.Conversation) -> None:
        """Offer the episodes of a running group."""
        self.openings[group] = opening
        self.lending.offer(group)
        self.waiting.wake(OFFERS)

    def withdraw(self, group: int) -> None:
        """Stop offering the episodes of a group."""
        self.openings.pop(group, None)
        self.lending.withdraw(group)
        self._put_off.discard(group)

    def put_off(self, group: int) -> None:
        """Let a group end that no agent has. An agent that comes before the end keeps it."""
        if group in self.openings:
            self._put_off.add(group)
            self.waiting.wake(group)

    def take_put_off(self, group: int) -> bool:
        """Return whether a group was put off since the last call."""
        was_put_off = group in self._put_off
        self._put_off.discard(group)
        return was_put_off

    def posed(self, group: Group) -> Posed:
        """Return the task of a group, and how its episodes are sampled.

        Raises:
            SluiceError: UNAVAILABLE if its task is gone: the run drops the group when it resumes it.
        """
        found = self._posed(group)
        if found is None:
            raise self.starting(group)
        return found

    def starting(self, group: Group) -> SluiceError:
        """Return the error of a call for a group that this process has not resumed yet."""
        return SluiceError.unavailable(
            "STARTING", f"the run takes up group {group.name} again; repeat the call", RETRY_S
        )

    # Keys.

    def session_key(self, session: str) -> str:
        """Return the secret that only permits sampling a session. It is the same in each process."""
        return f"{SESSION_KEY}{session}.{self._code_of(session)}"

    def settling_key(self, session: str) -> str:
        """Return the secret that only permits rewarding, ending and renewing a session. It is the same in each process."""
        return f"{SETTLING_KEY}{session}.{self._code_of(f'settle {session}')}"

    def session_of_key(self, key: str) -> tuple[str, common_pb2.Credential.ValueType]:
        """Return the session of a key and which of its keys it is; an empty name if the key is not from this run."""
        settles = key.startswith(SETTLING_KEY)
        name = key.removeprefix(SETTLING_KEY if settles else SESSION_KEY).rpartition(".")[0]
        right = self.settling_key(name) if settles else self.session_key(name)
        if not hmac.compare_digest(right.encode(), key.encode()):
            return "", common_pb2.CREDENTIAL_UNSPECIFIED
        return name, common_pb2.CREDENTIAL_SETTLING_KEY if settles else common_pb2.CREDENTIAL_SESSION_KEY

    def _code_of(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    # Payloads.

    def remember(self, session: Session, made: session_pb2.RecordedGeneration) -> None:
        """Keep a generation in memory: its session will soon continue it."""
        size, bound = made.ByteSize(), _CACHE_BYTES
        if (session.name, made.request_id) in self._cache or size > bound:
            return
        self._cache[session.name, made.request_id] = made
        self.cached_bytes += size
        while self.cached_bytes > bound:
            self.cached_bytes -= self._cache.popitem(last=False)[1].ByteSize()

    async def generation(self, session: Session, request: RecordedRequest) -> session_pb2.RecordedGeneration:
        """Return what was sampled for a request.

        Raises:
            SluiceError: DATA_LOSS if the disk damaged it.
            JournalError: if nothing can be read now.
        """
        key = (session.name, request.request_id)
        if (found := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return found
        try:
            (made,) = await self.journal.read([request.place], session_pb2.RecordedGeneration)
        except GroupDamagedError as error:
            log.warning("a damaged generation of a session", session=session.name, error=str(error))
            raise SluiceError.data_loss(
                "GENERATION_DAMAGED",
                f"what was sampled for request {request.request_id!r} of episode {session.name} cannot be read any more: sample it"
                " again, or begin another episode",
            ) from error
        self.remember(session, made)
        return made


def run_secret(run_dir: Path) -> bytes:
    """Return the secret of a run. It is made at the first start; only its owner can read it."""
    path = run_dir / SECRET
    if not path.exists():
        replace_private(path, secrets.token_bytes(_SECRET_BYTES))
    return path.read_bytes()


class NoAgentError(Exception):
    """A group was put off, because no agent came for it."""


class MissingAgents:
    """Watches the groups of external environments, and says how long an environment has had no agent.

    Args:
        environments: Names of the environments whose episodes agents outside run.
        notice_s: Seconds without an agent after which the operator should know.

    Attributes:
        groups: Offered groups of each environment that has had no agent for `notice_s`.
        away: Environments whose groups are put off.
    """

    def __init__(self, environments: Collection[str], notice_s: float) -> None:
        self._environments, self._notice_s = environments, notice_s
        self._since: dict[str, float] = {}
        self.groups: dict[str, int] = {}
        self.away: set[str] = set()

    def asked(self) -> None:
        """Note an agent that found nothing on offer: everything is offered again."""
        self.away.clear()
        self._since, self.groups = {}, {}

    def put_off(self, groups: Iterable[Group], *, others_can: Callable[[Collection[str]], bool]) -> list[int]:
        """Return the groups to put off, because their environments have no agents and other environments can be played.

        Args:
            groups: The live groups.
            others_can: Whether an environment other than these can deliver groups.
        """
        for name in sorted(self.groups.keys() - self.away):
            if others_can({*self.away, name}):
                self.away.add(name)
        if not self.away:
            return []
        return [
            each.number
            for each in groups
            if each.stage is Stage.RUNNING and each.environment in self.away and may_be_put_off(each)
        ]

    def look(self, groups: Iterable[Group], now: float) -> list[str]:
        """Check the live groups; return the environments that have been without agents for too long from now on."""
        if not self._environments:
            return []
        running = [each for each in groups if each.stage is Stage.RUNNING and each.environment in self._environments]
        served = {each.environment for each in running if each.external is not None and each.external.leases}
        self.away -= served
        waiting = Counter(each.environment for each in running if each.environment not in served)
        # An environment that is away has no group on offer.
        self._since = {name: self._since.get(name, now) for name in waiting.keys() | self.away}
        before = self.groups
        self.groups = {name: count for name, count in waiting.items() if now - self._since[name] >= self._notice_s}
        return [name for name in self.groups if name not in before and name not in self.away]

    def longest(self, now: float) -> tuple[str, float]:
        """Return the environment that has had no agent for the longest time, and the seconds; "" and 0 if none lacks agents."""
        name = min(self._since, key=self._since.__getitem__, default="")
        return (name, now - self._since[name]) if name else ("", 0.0)


def may_be_put_off(group: Group) -> bool:
    """Return whether an external group waits for its first agent, or all its agents have left without a result."""
    return group.external is None or group.external.abandoned
