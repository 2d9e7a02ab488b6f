"""Who has which external episodes: leases, and how sessions begin and end.

A state machine over the ledger: each decision takes effect by a fact that it records. It has no clock: callers pass the time in
monotonic seconds. Only deadlines are kept here, and not in the ledger: after a restart all leases and sessions have their full time again.

Send an answer to an agent only after the journal is durable, even when a repeated call gets an earlier answer.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TypeAlias

import grpc
from google.protobuf.duration_pb2 import Duration

from orchestrator_svc.config import ExternalConfig
from orchestrator_svc.journal.external import (
    GROUP_ENDED,
    SUBMITTED,
    TOKEN_BYTES,
    EndedSession,
    ExternalEpisodes,
    Lease,
    Session,
    Target,
    ended_session,
    group_of_lease,
    parse_session_name,
    session_name,
    submission_digest,
)
from orchestrator_svc.journal.facts import Stage
from orchestrator_svc.journal.ledger import Group
from orchestrator_svc.journal.store import Journal
from sluice.limits import MAX_REWARD, within
from sluice.rpc import SluiceError
from sluice.v1 import common_pb2, episode_pb2, orchestrator_pb2
from sluice.v1 import journal_pb2 as pb

RETRY_S = 1.0
"""Seconds after which an agent may ask again if nothing is on offer or a limit is reached."""

MAX_NAME = 128
"""Characters of a request_id, as the contracts say."""

IDLE = "IDLE"
ABANDONED = "ABANDONED"
LEASE_ENDED = "LEASE_ENDED"
EXPIRED = "EXPIRED"

SESSION_ENDED = "SESSION_ENDED"
"""Reason of calls for a session that has ended."""

Credential: TypeAlias = "common_pb2.Credential.ValueType"
"""The credential that let a caller settle a session; unspecified if a gateway of an earlier release asks."""

_SAMPLES_AT_MOST = frozenset({common_pb2.CREDENTIAL_SESSION_KEY, common_pb2.CREDENTIAL_NONE})
"""Credentials that the trained agent itself may hold."""


class Lending:
    """Lends the episodes of the groups that are on offer.

    Args:
        journal: The run's journal.
        limits: Times and bounds.
        now: Seconds. Leases and sessions of earlier processes have their full time from now on.
        most_reward: Largest absolute value of a reward.

    Attributes:
        refusals: Rewards that were refused.
    """

    def __init__(
        self, journal: Journal, limits: ExternalConfig, now: float, *, most_reward: float = MAX_REWARD
    ) -> None:
        self._journal, self._ledger, self._limits = journal, journal.ledger, limits
        self._most_reward, self.refusals = most_reward, Refusals()
        self._offered: dict[int, None] = {}  # an ordered set
        self._closed: set[int] = set()
        self._lease_ends: dict[str, float] = {}
        self._idle_ends: dict[str, float] = {}
        for external in self._running():
            self._lease_ends |= {name: now + each.seconds for name, each in external.leases.items()}
            self._idle_ends |= {each.name: now + limits.idle_s for each in external.sessions}

    # Offers.

    def offer(self, group: int) -> None:
        """Offer the episodes of a running group."""
        self._offered[group] = None

    def withdraw(self, group: int) -> None:
        """Stop offering the episodes of a group. Lent episodes stay lent while the group runs."""
        self._offered.pop(group, None)

    def close(self, group: int) -> None:
        """Accept nothing more for a group that is about to end: its open sessions count as given up."""
        self.withdraw(group)
        self._closed.add(group)

    def lease_left(self, lease: Lease, now: float) -> float:
        """Return for how many more seconds a lease lasts without a renewal."""
        return max(0.0, self._lease_ends.get(lease.lease_id, now) - now)

    def lease(self, principal: str, request: episode_pb2.LeaseTasksRequest, now: float) -> list[Lease]:
        """Lend episodes, the oldest groups first; none if nothing is on offer.

        The same request gets the same leases while one of them lasts.

        Raises:
            SluiceError: INVALID_ARGUMENT; RESOURCE_EXHAUSTED if the principal is at its limit.
        """
        check_name("request_id", request.request_id)
        if request.max_tasks < 1:
            raise SluiceError.invalid_argument("max_tasks", "is 0; give the number of tasks wanted, at least 1")
        leases = [each for external in self._running() for each in external.leases.values()]
        own = [each for each in leases if each.principal == principal]
        if known := [each for each in own if each.request_id == request.request_id]:
            return known
        room = self._limits.most_leased - sum(self._unsettled(each) for each in own)
        if room <= 0:
            raise SluiceError.resource_exhausted(
                "MOST_LEASED",
                f"principal {principal!r} has {self._limits.most_leased} episodes, the most that orchestrator.external.most_leased"
                " allows: submit or abandon some first",
                RETRY_S,
            )
        self._check_open()  # do not lend an episode that cannot be opened: others could not get it
        granted: list[Lease] = []
        for group in sorted(self._offered):
            if len(granted) >= request.max_tasks or room <= 0:
                break
            free = self._on_offer(group)[: min(request.max_episodes or room, room)]
            if free:
                granted.append(self._grant(group, principal, request.request_id, free, now))
                room -= len(free)
        return granted

    def _check_open(self) -> None:
        """Refuse to open another episode while the maximum number is open.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED.
        """
        sessions = (session for each in self._running() for session in each.sessions)
        if sum(each.submission is None for each in sessions) >= self._limits.most_sessions:
            raise SluiceError.resource_exhausted(
                "MOST_SESSIONS",
                f"{self._limits.most_sessions} episodes are open, the most that orchestrator.external.most_sessions allows",
                RETRY_S,
            )

    def _on_offer(self, number: int) -> list[int]:
        group = self._ledger.groups.get(number)
        if group is None or group.stage is not Stage.RUNNING:
            return []
        return self._external(number).on_offer

    def _grant(self, number: int, principal: str, request_id: str, episodes: list[int], now: float) -> Lease:
        name, duration = self._external(number).next_lease_id, Duration()
        duration.FromNanoseconds(int(self._limits.lease_s * 1e9))
        fact = pb.LeaseGranted(
            group=number, lease_id=name, principal=principal, request_id=request_id, episodes=episodes, lease=duration
        )
        self._journal.record_fact(pb.Fact(lease_granted=fact))
        lease = self._external(number).leases[name]
        self._lease_ends[name] = now + lease.seconds
        return lease

    def renew(self, principal: str, lease_id: str, now: float) -> Lease:
        """Prolong a lease by its full time, and the idle time of its sessions.

        Raises:
            SluiceError: NOT_FOUND.
        """
        external, lease = self._find_lease(principal, lease_id)
        self._lease_ends[lease_id] = now + lease.seconds
        for session in external.sessions:
            if session.lease_id == lease_id:
                self.touch(session, now)
        return lease

    def _lease(self, lease_id: str) -> tuple[ExternalEpisodes | None, Lease | None]:
        group = self._ledger.groups.get(group_of_lease(lease_id))
        external = group.external if group is not None else None
        return external, external.leases.get(lease_id) if external is not None else None

    def _find_lease(self, principal: str, lease_id: str) -> tuple[ExternalEpisodes, Lease]:
        external, lease = self._lease(lease_id)
        if external is None or lease is None or lease.principal != principal or lease.group in self._closed:
            raise SluiceError.not_found(
                "UNKNOWN_LEASE",
                f"principal {principal!r} has no lease {lease_id!r}: it ended, or its group did; call LeaseTasks again",
            )
        return external, lease

    # Sessions.

    def open(self, principal: str, request: episode_pb2.OpenEpisodeRequest, now: float) -> Session:
        """Begin the next episode of a lease; the same request gets the same session while it lasts.

        Raises:
            SluiceError: NOT_FOUND (the lease ended), FAILED_PRECONDITION (none is left), RESOURCE_EXHAUSTED (too many are open).
        """
        check_name("request_id", request.request_id)
        external, lease = self._find_lease(principal, request.lease_id)
        for session in external.sessions:
            if (session.lease_id, session.request_id) == (lease.lease_id, request.request_id):
                return session
        left = [each for each in sorted(lease.episodes) if external.slots[each].session is None]
        if not left:
            raise SluiceError.failed_precondition(
                "LEASE_USED_UP", f"all episodes of lease {lease.lease_id} are open or ended: call LeaseTasks for others"
            )
        self._check_open()
        fact = pb.EpisodeOpened(
            group=external.group,
            episode=left[0],
            attempt=external.slots[left[0]].attempt,
            lease_id=lease.lease_id,
            request_id=request.request_id,
            two_keys=True,
        )
        self._journal.record_fact(pb.Fact(episode_opened=fact))
        opened = self.open_session(principal, session_name(fact.group, fact.episode, fact.attempt))
        self.touch(opened, now)
        return opened

    def find(self, name: str) -> Session | EndedSession | None:
        """Return a session by its name; None if there is none, or its end was forgotten."""
        place = parse_session_name(name)
        if place is None:
            return None
        number, episode, attempt = place
        group = self._ledger.groups.get(number)
        external = group.external if group is not None else None
        live = external.session(episode, attempt) if external is not None else None
        if live is not None and live.submission is None and number in self._closed:
            return ended_session(live, GROUP_ENDED)
        return live or self._ledger.ended_sessions.get(name)

    def known(self, principal: str, name: str) -> Session | EndedSession:
        """Return a session of a principal.

        Raises:
            SluiceError: NOT_FOUND, also if the session belongs to another principal.
        """
        session = self.find(name)
        if session is None or session.principal != principal:
            raise SluiceError.not_found("UNKNOWN_EPISODE", f"principal {principal!r} has no episode {name!r}")
        return session

    def settling(self, principal: str, name: str, by: Credential) -> Session | EndedSession:
        """Return a session of a principal for a caller that wants to reward, end or renew it.

        A session from a release without settling keys needs none.

        Raises:
            SluiceError: NOT_FOUND; PERMISSION_DENIED (SETTLING_KEY_REQUIRED).
        """
        session = self.known(principal, name)
        if by not in _SAMPLES_AT_MOST or not session.two_keys or self._limits.one_key:
            return session
        sent = "the session key only samples" if by == common_pb2.CREDENTIAL_SESSION_KEY else "the call has no key"
        raise SluiceError(
            grpc.StatusCode.PERMISSION_DENIED,
            "SETTLING_KEY_REQUIRED",
            f"{sent}: reward, end and renew episode {name} with its `settling_key`, which the call that opened it returned (as the API key"
            " over HTTP, as metadata `session-key` over gRPC), or with the token of its principal. A client that knows of no such key needs an"
            " update, or orchestrator.external.one_key = true",
        )

    def open_session(self, principal: str, name: str) -> Session:
        """Return a session of a principal that may still be sampled.

        Raises:
            SluiceError: NOT_FOUND; FAILED_PRECONDITION (SESSION_ENDED).
        """
        session = self.known(principal, name)
        if isinstance(session, EndedSession):
            raise _ended(name, session.reason)
        if session.submission is not None:
            raise _ended(name, SUBMITTED)
        return session

    def group_of(self, session: Session) -> Group:
        """Return the group of a live session."""
        return self._ledger.groups[session.group]

    def touch(self, session: Session, now: float, until: float = 0.0) -> None:
        """Note a call for a session. `until` is when its work in progress is given up."""
        self._idle_ends[session.name] = max(now + self._limits.idle_s, until)

    def reward(
        self,
        principal: str,
        request: episode_pb2.RecordRewardRequest,
        now: float,
        by: Credential = common_pb2.CREDENTIAL_UNSPECIFIED,
    ) -> None:
        """Record a reward; the last one for each target counts.

        Raises:
            SluiceError: INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED (by who samples), FAILED_PRECONDITION (it comes too late).
        """
        self.refusals.check_sender(principal, now)
        target = Target(request.generation_id, request.branch)
        session = self.settling(principal, request.episode_id, by)
        self._check_reward(session, request.reward, now)
        if isinstance(session, EndedSession):
            if session.last_reward == (target, request.reward):
                return
            raise _ended(request.episode_id, session.reason)
        if not {*target} <= {"", *session.samples}:
            raise SluiceError.not_found(
                "UNKNOWN_GENERATION", f"episode {session.name} has no generation {''.join(target)!r}"
            )
        if session.submission is None:
            self.touch(session, now)
        if session.rewards.get(target) == request.reward:
            return
        if session.group in self._closed or self._external(session.group).complete:
            raise SluiceError.failed_precondition(
                "GROUP_COMPLETE",
                f"all episodes of the group of {session.name} have ended, so its rewards count already: submit with reward_follows"
                " where a reward comes later",
            )
        fact = pb.RewardRecorded(
            group=session.group, episode=session.episode, attempt=session.attempt, reward=request.reward, settled_by=by
        )
        if target.generation_id:
            fact.generation_id = target.generation_id
        elif target.branch:
            fact.branch = target.branch
        self._journal.record_fact(pb.Fact(reward_recorded=fact))

    def _check_reward(self, session: Session | EndedSession, reward: float, now: float) -> None:
        """Refuse a reward that cannot be trained, and count that against its sender.

        Raises:
            SluiceError: INVALID_ARGUMENT.
        """
        if within(reward, self._most_reward):
            return
        task_id = self.group_of(session).task_id if isinstance(session, Session) else ""
        self.refusals.note(session.principal, task_id, "REWARD_TOO_LARGE", now)
        problem = f"is {reward:g}; give a finite number from -{self._most_reward:g} to {self._most_reward:g} (orchestrator.max_reward)"
        raise SluiceError(
            grpc.StatusCode.INVALID_ARGUMENT, "REWARD_TOO_LARGE", f"reward: {problem}", violations={"reward": problem}
        )

    def submit(
        self,
        principal: str,
        request: episode_pb2.SubmitTrajectoryRequest,
        now: float,
        by: Credential = common_pb2.CREDENTIAL_UNSPECIFIED,
    ) -> tuple[str, ...]:
        """End a session with what was sampled; return the names of its trajectories.

        Raises:
            SluiceError: INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED (by who samples), FAILED_PRECONDITION (it ended otherwise, or
                nothing was sampled).
        """
        self.refusals.check_sender(principal, now)
        session = self.settling(principal, request.episode_id, by)
        if request.HasField("reward"):
            self._check_reward(session, request.reward, now)
        if isinstance(session, EndedSession) and session.reason != SUBMITTED:
            raise _ended(request.episode_id, session.reason)
        group, episode, attempt = parse_session_name(request.episode_id) or (
            0,
            0,
            0,
        )  # a session that is known has such a name
        fact = pb.EpisodeSubmitted(
            group=group,
            episode=episode,
            attempt=attempt,
            branches=request.branches,
            reward=request.reward if request.HasField("reward") else None,
            truncated=request.truncated,
            reward_follows=request.reward_follows,
            settled_by=by,
        )
        if isinstance(session, Session) and session.submission is None:
            _check_branches(session, request, self._limits.branches_mb)
            self._journal.record_fact(pb.Fact(episode_submitted=fact))
            self._idle_ends.pop(session.name, None)
        elif submission_digest(fact) != session.submission_digest:
            raise SluiceError.failed_precondition(
                "SUBMITTED_OTHERWISE",
                f"episode {request.episode_id} was submitted before with other branches, reward or flags, and that one counts; a later"
                " reward is given by RecordReward",
            )
        return session.trajectory_ids

    def abandon(
        self,
        principal: str,
        request: episode_pb2.AbandonEpisodeRequest,
        by: Credential = common_pb2.CREDENTIAL_UNSPECIFIED,
    ) -> None:
        """Give a session up.

        Raises:
            SluiceError: INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED (by who samples), FAILED_PRECONDITION (it was submitted).
        """
        if len(request.reason) > MAX_NAME:
            raise SluiceError.invalid_argument(
                "reason", f"has {len(request.reason)} characters; give at most {MAX_NAME}"
            )
        session = self.settling(principal, request.episode_id, by)
        ended = session.reason if isinstance(session, EndedSession) else SUBMITTED if session.submission else ""
        if ended == SUBMITTED:
            raise _ended(request.episode_id, SUBMITTED)
        if isinstance(session, Session):
            self._give_up(session, ABANDONED, request.reason, requeue=request.requeue, by=by)

    # Time.

    def next_deadline(self) -> float:
        """Return when `expire` is due next, in seconds; infinity if nothing can expire."""
        return min((*self._lease_ends.values(), *self._idle_ends.values()), default=math.inf)

    def expire(self, now: float) -> None:
        """End expired leases, and give up expired sessions."""
        self._closed &= self._ledger.groups.keys()
        for name in [name for name, end in self._idle_ends.items() if end <= now]:
            del self._idle_ends[name]
            session = self.find(name)
            if isinstance(session, Session) and session.submission is None:
                self._give_up(session, IDLE, f"no call for {self._limits.idle_s:g} s", requeue=True)
        for name in [name for name, end in self._lease_ends.items() if end <= now]:
            del self._lease_ends[name]
            external, lease = self._lease(name)
            if external is None or lease is None or lease.group in self._closed:
                continue
            if self._unsettled(lease):
                self._end_lease(external, lease)

    def _end_lease(self, external: ExternalEpisodes, lease: Lease) -> None:
        for session in list(external.sessions):
            if session.lease_id == lease.lease_id and session.submission is None:
                self._give_up(session, LEASE_ENDED, f"not renewed for {lease.seconds:g} s", requeue=True)
        ended = pb.LeaseEnded(group=external.group, lease_id=lease.lease_id, reason=EXPIRED)
        self._journal.record_fact(pb.Fact(lease_ended=ended))

    def _give_up(
        self,
        session: Session,
        reason: str,
        detail: str,
        *,
        requeue: bool,
        by: Credential = common_pb2.CREDENTIAL_UNSPECIFIED,
    ) -> None:
        fact = pb.EpisodeGivenUp(
            group=session.group,
            episode=session.episode,
            attempt=session.attempt,
            reason=reason,
            detail=detail,
            requeue=requeue and session.attempt + 1 < self._limits.attempts,
            settled_by=by,
        )
        self._journal.record_fact(pb.Fact(episode_given_up=fact))
        self._idle_ends.pop(session.name, None)

    def _running(self) -> Iterator[ExternalEpisodes]:
        return (each.external for each in self._ledger.groups.values() if each.external is not None)

    def _external(self, number: int) -> ExternalEpisodes:
        group = self._ledger.groups[number]
        return group.external or ExternalEpisodes.of(number, group.episodes)

    def _unsettled(self, lease: Lease) -> int:
        slots = self._external(lease.group).slots
        return sum(not slots[each].settled for each in lease.episodes)


def check_name(field: str, name: str) -> None:
    """Refuse a name that is empty or too long.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    if not 0 < len(name) <= MAX_NAME:
        raise SluiceError.invalid_argument(field, f"has {len(name)} characters; give 1 to {MAX_NAME}")


def _ended(name: str, reason: str) -> SluiceError:
    return SluiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        SESSION_ENDED,
        f"episode {name} has ended ({reason}): open another one",
        metadata={"ended": reason},
    )


def _check_branches(session: Session, request: episode_pb2.SubmitTrajectoryRequest, most_mb: int) -> None:
    """Refuse a submission of branches that the session does not have, or that are too large for a batch.

    Raises:
        SluiceError: INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION (it has no branches).
    """
    if not session.leaves():
        raise SluiceError.failed_precondition(
            "NO_GENERATIONS",
            f"nothing was sampled in episode {session.name}, or nothing of it was delivered: abandon it instead",
        )
    seen: set[tuple[str, ...]] = set()
    for index, branch in enumerate(request.branches):
        names = tuple(branch.generation_ids)
        for name in names:
            if name not in session.samples:
                raise SluiceError.not_found("UNKNOWN_GENERATION", f"episode {session.name} has no generation {name!r}")
        if not names or names != session.path(names[-1]) or names in seen:
            raise SluiceError.invalid_argument(
                f"branches[{index}]",
                "occurs twice"
                if names in seen
                else "does not name all generations from the root to its last one, in order",
            )
        seen.add(names)
    tokens = sum(session.samples[each[-1]].tokens for each in seen)
    if TOKEN_BYTES * tokens > max(most_mb << 20, TOKEN_BYTES * session.branch_tokens):
        raise SluiceError.invalid_argument(
            "branches",
            f"have {tokens} tokens, their prompts in each of them: in a batch that is {TOKEN_BYTES * tokens >> 20} MiB, more than the"
            f" {most_mb} of orchestrator.external.branches_mb. Name fewer, without those that others continue; or none, which means"
            " each sample that nothing continues",
        )


MOST_KNOWN = 100
"""How many of the last combinations of sender, task and reason are counted."""

MOST_PER_MINUTE = 60
"""Most refusals of one principal within a minute. Beyond that it has to wait until the first of them is a minute old."""

_MINUTE_S = 60.0


class Refusals:
    """Counts refused input, by principal and task. A sender with too many refusals has to wait.

    A refusal is the sender's fault, so it never counts towards a pause of the run.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        self._recent: dict[str, deque[float]] = {}

    def check_sender(self, principal: str, now: float) -> None:
        """Raise an error if too much input of a principal was refused just now.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED with the time after which it may continue.
        """
        recent = self._recent.get(principal)
        if recent is None or len(recent) < MOST_PER_MINUTE:
            return
        wait_s = recent[0] + _MINUTE_S - now
        if wait_s > 0:
            raise SluiceError.resource_exhausted(
                "REFUSED_TOO_OFTEN",
                f"{MOST_PER_MINUTE} rewards of principal {principal!r} were refused within a minute: correct them first",
                wait_s,
            )

    def note(self, principal: str, task_id: str, reason: str, now: float) -> None:
        """Count a refusal."""
        key = (principal, task_id, reason)
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > MOST_KNOWN:
            self._counts.popitem(last=False)
        self._recent[principal] = recent = self._recent.pop(principal, deque(maxlen=MOST_PER_MINUTE))
        recent.append(now)
        if len(self._recent) > MOST_KNOWN:
            del self._recent[next(iter(self._recent))]

    def describe(self) -> list[orchestrator_pb2.RefusedInput]:
        """Describe the refusals, the oldest first."""
        return [
            orchestrator_pb2.RefusedInput(principal=principal, task_id=task_id, reason=reason, count=count)
            for (principal, task_id, reason), count in self._counts.items()
        ]
