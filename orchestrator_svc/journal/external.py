"""The external episodes of one group as they follow from the facts: leases, sessions with their generations, rewards.

    on offer -> LeaseGranted -> EpisodeOpened -> SessionGenerationRecorded ... -> EpisodeSubmitted -> settled
       ^                            |                                    |
       +---- LeaseEnded, or EpisodeGivenUp with requeue: next attempt ---+-> EpisodeGivenUp -> settled

A session is one attempt at an episode. It is a tree of samples: the parent of a sample is the one whose tokens its prompt continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from orchestrator_svc.journal.facts import LedgerError, Place
from sluice.v1 import journal_pb2 as pb

SUBMITTED = "SUBMITTED"
"""End of a session that was submitted. Other sessions have the reason from EpisodeGivenUp."""

GROUP_ENDED = "GROUP_ENDED"
"""End of a session that was not submitted before its group was dropped."""


class Sample(NamedTuple):
    """One sample of a session.

    Attributes:
        generation_id: Its name, unique within the session.
        parent: Sample whose tokens its prompt continues; empty if it continues none.
        key: Key of the conversation, this sample's message included.
        tokens: Tokens of prompt and reply together.
        ids_digest: xxh3-128 of their ids.
    """

    generation_id: str
    parent: str
    key: bytes
    tokens: int
    ids_digest: bytes


class RecordedRequest(NamedTuple):
    """One request of a session, and the place of the samples for it."""

    request_id: str
    body_digest: bytes
    samples: tuple[Sample, ...]
    place: Place
    payload_bytes: int


class Target(NamedTuple):
    """What a reward belongs to: a sample's turn, or the branch that ends with a sample; both empty: the whole episode."""

    generation_id: str = ""
    branch: str = ""


EPISODE = Target()

TOKEN_BYTES = 4
"""Bytes that each token of a branch counts in a batch. With a vocabulary below 2^28 no token takes more."""

_DIGITS = 18
"""Most digits of a number in a name."""


class EndedSession(NamedTuple):
    """What is kept of a session that ended, so that repeated calls are answered as the first one was.

    Attributes:
        reason: `SUBMITTED`, or why it was given up.
        trajectory_ids: Its trajectories, if it was submitted.
        last_reward: The last reward that was recorded for it.
        submission_digest: xxh3-64 of how it was submitted; empty if it was not.
        two_keys: As in `Session`.
    """

    principal: str
    reason: str
    trajectory_ids: tuple[str, ...]
    last_reward: tuple[Target, float] | None
    submission_digest: bytes = b""
    two_keys: bool = False


@dataclass(slots=True)
class Session:
    """One attempt at an episode.

    Attributes:
        lease_id: Lease that it was opened by.
        request_id: Request of OpenEpisode that it answers.
        two_keys: Whether its caller was given a settling key, so that the session key does not settle it.
        requests: What was sampled, by request, in order.
        undelivered: Requests whose reply no client has.
        given: For each request that got the reply of an earlier one: that earlier one.
        left: Requests, of both kinds, whose client left before it had read the reply.
        samples: The samples of all requests by name, in order.
        rewards: The last reward for each target.
        continued: The samples that a request continues: they end no branch.
        branch_tokens: Tokens of its branches, one per sample that none continues, each with its prompts whole.
        submission: How it was submitted; None while it is not.
        awaited: Whether a submitted session waits for its reward.
    """

    group: int
    episode: int
    attempt: int
    principal: str
    lease_id: str
    request_id: str
    two_keys: bool = False
    requests: dict[str, RecordedRequest] = field(default_factory=dict)
    undelivered: set[str] = field(default_factory=set)
    given: dict[str, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    samples: dict[str, Sample] = field(default_factory=dict)
    continued: set[str] = field(default_factory=set)
    branch_tokens: int = 0
    rewards: dict[Target, float] = field(default_factory=dict)
    last_reward: tuple[Target, float] | None = None
    submission: pb.EpisodeSubmitted | None = None
    awaited: bool = False
    payload_bytes: int = 0

    @property
    def name(self) -> str:
        """The name that it has in calls."""
        return session_name(self.group, self.episode, self.attempt)

    @property
    def settled(self) -> bool:
        """Whether nothing more is expected for it."""
        return self.submission is not None and not self.awaited

    def branch_tokens_with(self, parent: str, tokens: Iterable[int]) -> int:
        """Return what `branch_tokens` is after adding samples that continue `parent`. `tokens` has the size of each, prompt included."""
        ended = parent in self.samples and parent not in self.continued
        return self.branch_tokens + sum(tokens) - (self.samples[parent].tokens if ended else 0)

    def path(self, generation_id: str) -> tuple[str, ...]:
        """Return the samples from the root to this one."""
        path = [generation_id]
        while parent := self.samples[path[-1]].parent:
            path.append(parent)
        return tuple(reversed(path))

    def leaves(self) -> list[str]:
        """Return the samples that none continues, in order. Ignore samples that no client has and that none continues."""
        parents, found = set[str](), list[str]()
        for name, sample in reversed(self.samples.items()):  # what continues a sample comes after it
            if name not in parents:
                if name.rpartition("/")[0] in self.undelivered:
                    continue
                found.append(name)
            parents.add(sample.parent)
        return found[::-1]

    def branches(self, named: Sequence[Sequence[str]] = ()) -> list[tuple[str, ...]]:
        """Return the samples of each branch from root to leaf: those that a submission names, else one per leaf."""
        return [tuple(each) for each in named] or [self.path(each) for each in self.leaves()]

    @property
    def submission_digest(self) -> bytes:
        """The xxh3-64 of its submission; empty while there is none."""
        return b"" if self.submission is None else submission_digest(self.submission)

    @property
    def submitted_branches(self) -> list[tuple[str, ...]]:
        """Submitted branches. Empty until the episode is submitted."""
        if self.submission is None:
            return []
        return self.branches([each.generation_ids for each in self.submission.branches])

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        """The names of the trajectories that the submission makes."""
        return trajectory_ids(self.group, self.episode, len(self.submitted_branches))

    def has_reward(self) -> bool:
        """Return whether the whole episode has a reward, or each branch of the submission."""
        branches = self.submitted_branches
        return EPISODE in self.rewards or (
            bool(branches) and all(Target(branch=each[-1]) in self.rewards for each in branches)
        )


def session_name(group: int, episode: int, attempt: int) -> str:
    """Return the name of one attempt at an episode."""
    return f"g{group}-{episode}-{attempt}"


def group_of_lease(lease_id: str) -> int:
    """Return the group that the name of a lease begins with; 0, which is no group, if the name has another form."""
    number = lease_id.removeprefix("g").partition("-")[0]
    return int(number) if number.isascii() and number.isdecimal() and len(number) <= _DIGITS else 0


def parse_session_name(name: str) -> tuple[int, int, int] | None:
    """Return group, episode and attempt of a session; None if no session has such a name."""
    parts = name.removeprefix("g").split("-")
    if len(parts) != 3 or not all(each.isascii() and each.isdecimal() and len(each) <= _DIGITS for each in parts):
        return None
    group, episode, attempt = map(int, parts)
    return (group, episode, attempt) if session_name(group, episode, attempt) == name else None


def submission_digest(fact: pb.EpisodeSubmitted) -> bytes:
    """Return the xxh3-64 of the content of a submission. It does not depend on the caller."""
    said = pb.EpisodeSubmitted()
    said.CopyFrom(fact)
    said.ClearField("settled_by")
    return xxhash.xxh3_64_digest(said.SerializeToString(deterministic=True))


def trajectory_ids(group: int, episode: int, branches: int) -> tuple[str, ...]:
    """Return the names of an episode's trajectories: the episode's own, if it has a single branch."""
    name = f"g{group}-{episode}"
    return (name,) if branches == 1 else tuple(f"{name}.{branch}" for branch in range(branches))


@dataclass(slots=True)
class Lease:
    """Episodes that are lent to a principal.

    Attributes:
        request_id: Request of LeaseTasks that it answers.
        lent: Episodes that it was granted for.
        episodes: Episodes that it still has, without those that were given up meanwhile.
        seconds: Time that it lasts without a renewal.
    """

    group: int
    lease_id: str
    principal: str
    request_id: str
    lent: tuple[int, ...]
    episodes: set[int]
    seconds: float


@dataclass(slots=True)
class Slot:
    """One episode of the group.

    Attributes:
        attempt: How often it was given up.
        lease_id: Lease that has it; empty if none does.
        session: The present attempt, once it was opened.
        over: Whether it was given up for good.
    """

    attempt: int = 0
    lease_id: str = ""
    session: Session | None = None
    over: bool = False

    @property
    def settled(self) -> bool:
        """Whether nothing more is expected for the episode."""
        return self.over or (self.session is not None and self.session.settled)


@dataclass(slots=True)
class ExternalEpisodes:
    """The episodes of one running group that external agents run.

    Attributes:
        granted: Leases that were granted so far.
    """

    group: int
    slots: list[Slot]
    leases: dict[str, Lease] = field(default_factory=dict)
    granted: int = 0

    @classmethod
    def of(cls, group: int, episodes: int) -> ExternalEpisodes:
        """Return a group none of whose episodes was lent yet."""
        return cls(group, [Slot() for _ in range(episodes)])

    @property
    def complete(self) -> bool:
        """Whether nothing more is expected for any episode. From then on no reward counts."""
        return all(each.settled for each in self.slots)

    @property
    def abandoned(self) -> bool:
        """Whether no agent has an episode of it, and none has submitted one: there is nothing to lose."""
        return not self.leases and not any(self.sessions)

    @property
    def on_offer(self) -> list[int]:
        """Episodes that may be lent."""
        return [index for index, each in enumerate(self.slots) if not each.lease_id and not each.over]

    @property
    def sessions(self) -> Iterator[Session]:
        """The sessions that were neither given up nor forgotten."""
        return (each.session for each in self.slots if each.session is not None)

    @property
    def requests(self) -> Iterator[RecordedRequest]:
        """All recorded requests of these sessions."""
        return (request for session in self.sessions for request in session.requests.values())

    @property
    def next_lease_id(self) -> str:
        """The name of the next lease."""
        return f"g{self.group}-lease-{self.granted + 1}"  # `group_of_lease` reads it

    def session(self, episode: int, attempt: int) -> Session | None:
        """Return a session; None if it was given up, or never opened."""
        if not 0 <= episode < len(self.slots):
            return None
        found = self.slots[episode].session
        return found if found is not None and found.attempt == attempt else None

    def retired(self) -> dict[str, EndedSession]:
        """Return what is kept of all sessions when the group ends."""
        return {each.name: ended_session(each, GROUP_ENDED) for each in self.sessions}

    # The facts.

    def lease_granted(self, fact: pb.LeaseGranted) -> None:
        """Lend episodes."""
        if fact.lease_id != self.next_lease_id or not set(fact.episodes) <= set(self.on_offer) or not fact.episodes:
            raise LedgerError(f"lease {fact.lease_id} names episodes that are not on offer, or is not the next one")
        lent = tuple(fact.episodes)
        seconds = fact.lease.ToTimedelta().total_seconds()
        self.leases[fact.lease_id] = Lease(
            self.group, fact.lease_id, fact.principal, fact.request_id, lent, set(lent), seconds
        )
        self.granted += 1
        for each in lent:
            self.slots[each].lease_id = fact.lease_id

    def lease_ended(self, fact: pb.LeaseEnded) -> None:
        """Take back the episodes that nobody opened."""
        lease = self._lease(fact.lease_id)
        slots = [self.slots[each] for each in lease.episodes]
        if any(each.session is not None and each.session.submission is None for each in slots):
            raise LedgerError(f"lease {fact.lease_id} ends with an episode that is neither submitted nor given up")
        del self.leases[fact.lease_id]
        for each in slots:
            if each.session is None:
                each.lease_id = ""
            else:
                each.session.awaited = False

    def episode_opened(self, fact: pb.EpisodeOpened) -> None:
        """Begin a session."""
        lease, slot = self._lease(fact.lease_id), self._slot(fact.episode)
        if fact.episode not in lease.episodes or slot.session is not None or fact.attempt != slot.attempt:
            raise LedgerError(f"episode {fact.episode} of group {self.group} cannot be opened by {fact.lease_id}")
        slot.session = Session(
            self.group, fact.episode, fact.attempt, lease.principal, lease.lease_id, fact.request_id, fact.two_keys
        )

    def session_generation_recorded(self, fact: pb.SessionGenerationRecorded) -> None:
        """Add the samples of one request to the tree."""
        session = self._open(fact.episode, fact.attempt)
        if fact.request_id in session.requests or (fact.parent and fact.parent not in session.samples):
            raise LedgerError(f"request {fact.request_id} of session {session.name} was recorded, or continues nothing")
        samples = tuple(
            Sample(f"{fact.request_id}/{index}", fact.parent, each.key, each.tokens, each.ids_digest)
            for index, each in enumerate(fact.samples)
        )
        session.requests[fact.request_id] = RecordedRequest(
            fact.request_id, fact.body_digest, samples, Place.from_proto(fact.place), fact.payload_bytes
        )
        session.branch_tokens = session.branch_tokens_with(fact.parent, (each.tokens for each in samples))
        session.samples |= {each.generation_id: each for each in samples}
        session.continued |= {fact.parent} - {""}
        if fact.undelivered:
            session.undelivered.add(fact.request_id)
            session.left.add(fact.request_id)
        session.payload_bytes += fact.payload_bytes

    def session_generation_delivered(self, fact: pb.SessionGenerationDelivered) -> None:
        """Note that a client has a reply, or left before it had read it."""
        session, name = self._open(fact.episode, fact.attempt), fact.request_id
        if fact.to:
            session.given[fact.to] = name
        (session.left.add if fact.unread else session.left.discard)(fact.to or name)
        had_it = {name, *(each for each, reply in session.given.items() if reply == name)}
        (session.undelivered.add if had_it <= session.left else session.undelivered.discard)(name)

    def reward_recorded(self, fact: pb.RewardRecorded) -> None:
        """Take a reward."""
        session = self.session(fact.episode, fact.attempt)
        target = Target(fact.generation_id, fact.branch)
        if session is None or not {*target} <= {"", *session.samples}:
            raise LedgerError(f"a reward names what episode {fact.episode} of group {self.group} does not have")
        session.rewards[target] = fact.reward
        session.last_reward = (target, fact.reward)
        session.awaited = session.awaited and not session.has_reward()

    def episode_submitted(self, fact: pb.EpisodeSubmitted) -> None:
        """End a session: its branches become trajectories."""
        session = self._open(fact.episode, fact.attempt)
        if not {name for each in fact.branches for name in each.generation_ids} <= session.samples.keys():
            raise LedgerError(f"the submission of session {session.name} names samples that it does not have")
        session.submission = fact
        if fact.HasField("reward"):
            session.rewards[EPISODE] = fact.reward
        session.awaited = fact.reward_follows and not session.has_reward()

    def episode_given_up(self, fact: pb.EpisodeGivenUp) -> Mapping[str, EndedSession]:
        """End a session without a submission; return what is kept of it."""
        session = self._open(fact.episode, fact.attempt)
        slot = self.slots[fact.episode]
        self.leases[slot.lease_id].episodes.discard(fact.episode)
        slot.session, slot.lease_id, slot.over = None, "", not fact.requeue
        slot.attempt += 1
        return {session.name: ended_session(session, fact.reason)}

    def _lease(self, lease_id: str) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise LedgerError(f"there is no lease {lease_id}")
        return lease

    def _slot(self, episode: int) -> Slot:
        if not 0 <= episode < len(self.slots):
            raise LedgerError(f"group {self.group} has no episode {episode}")
        return self.slots[episode]

    def _open(self, episode: int, attempt: int) -> Session:
        session = self.session(episode, attempt)
        if session is None or session.submission is not None:
            raise LedgerError(f"attempt {attempt} at episode {episode} of group {self.group} is not open")
        return session


def ended_session(session: Session, reason: str) -> EndedSession:
    """Return what is kept of a session; the reason is why it ended, unless it was submitted."""
    submitted = session.submission is not None
    return EndedSession(
        session.principal,
        SUBMITTED if submitted else reason,
        session.trajectory_ids,
        session.last_reward,
        session.submission_digest,
        session.two_keys,
    )
