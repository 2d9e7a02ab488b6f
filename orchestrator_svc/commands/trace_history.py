"""The sessions of external agents as the facts of a run tell them: who was lent what, what was sampled when, what became of it.

Pure: facts in, `TracedSession` out. Samples are payloads that facts name. `following` says how a request continues earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from orchestrator_svc.journal.external import GROUP_ENDED, SUBMITTED, ExternalEpisodes, RecordedRequest, Session, Target
from orchestrator_svc.journal.facts import LedgerError
from orchestrator_svc.sessions.claims import as_ids
from sluice.v1 import common_pb2, session_pb2, tokens_pb2
from sluice.v1 import journal_pb2 as pb
from sluice.versions import Version


class Event(NamedTuple):
    """One thing that happened in a session.

    Attributes:
        time: When the journal took it, in UTC.
        request: The request, if the event is one; else None.
        text: The event in words, if nothing was sampled.
    """

    time: datetime
    request: RecordedRequest | None
    text: str


@dataclass(slots=True)
class TracedSession:
    """One attempt at an episode, from its opening to what became of it.

    Attributes:
        session: Its tree.
        environment: Name of the environment within the run.
        task_id: Its task.
        opened: When it was opened, in UTC.
        events: What happened since, in order.
        end: `SUBMITTED`, `GROUP_ENDED`, or why it was given up; empty while it is open.
    """

    session: Session
    environment: str
    task_id: str
    opened: datetime
    events: list[Event] = field(default_factory=list)
    end: str = ""


@dataclass(slots=True)
class _Group:
    environment: str
    task_id: str
    episodes: int
    external: ExternalEpisodes | None = None
    open: dict[int, TracedSession] = field(default_factory=dict)
    """The present attempt at each episode."""


class Trace:
    """The sessions of a run.

    Attributes:
        sessions: By name, in the order in which they were opened.
        outcomes: What became of each trajectory of a session, by its name.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, TracedSession] = {}
        self.outcomes: dict[str, str] = {}
        self._groups: dict[int, _Group] = {}
        self._batches: dict[int, list[str]] = {}
        self._trained: dict[str, Version] = {}
        self._kinds: dict[str, Callable[[datetime, Any], None]] = {
            "task_drawn": self._task_drawn,
            "episode_opened": self._episode_opened,
            "session_generation_recorded": self._generation_recorded,
            "session_generation_delivered": self._generation_delivered,
            "reward_recorded": self._reward_recorded,
            "episode_submitted": self._episode_submitted,
            "episode_given_up": self._episode_given_up,
            "episodes_ended": self._episodes_ended,
            "group_dropped": self._group_dropped,
            "trajectories_set_aside": self._set_aside,
            "batch_made": self._batch_made,
            "batch_applied": self._batch_applied,
            "batch_unmade": self._batch_unmade,
            "epoch_begun": self._epoch_begun,
        }

    @classmethod
    def of(cls, facts: Iterable[tuple[int, pb.Fact]]) -> Trace:
        """Return the sessions of a run's facts.

        Raises:
            LedgerError: if the facts do not fit together.
        """
        trace = cls()
        for _, fact in facts:
            trace.take_fact(fact)
        return trace

    def take_fact(self, fact: pb.Fact) -> None:
        """Take the next fact.

        Raises:
            LedgerError: if it does not fit those before it.
        """
        kind = fact.WhichOneof("kind") or ""
        said: Any = getattr(fact, kind, None)
        if hasattr(ExternalEpisodes, kind):
            group = self._groups.get(said.group)
            if group is None:
                raise LedgerError(f"the facts name a session of group {said.group}, for which no task was drawn")
            group.external = group.external or ExternalEpisodes.of(said.group, group.episodes)
            getattr(group.external, kind)(said)
        if take := self._kinds.get(kind):
            take(fact.time.ToDatetime(UTC), said)

    # Sessions.

    def _task_drawn(self, _: datetime, fact: pb.TaskDrawn) -> None:
        before = self._groups.get(fact.group)
        if before is None:
            self._groups[fact.group] = _Group(fact.environment, fact.task_id, fact.episodes)

    def _episode_opened(self, time: datetime, fact: pb.EpisodeOpened) -> None:
        group = self._groups[fact.group]
        session = group.external.session(fact.episode, fact.attempt) if group.external else None
        if session is None:
            raise LedgerError(f"episode {fact.episode} of group {fact.group} was opened, and is not there")
        traced = TracedSession(session, group.environment, group.task_id, time)
        self.sessions[session.name] = group.open[fact.episode] = traced

    def _generation_recorded(self, time: datetime, fact: pb.SessionGenerationRecorded) -> None:
        traced = self._groups[fact.group].open[fact.episode]
        traced.events.append(Event(time, traced.session.requests[fact.request_id], ""))

    def _generation_delivered(self, time: datetime, fact: pb.SessionGenerationDelivered) -> None:
        traced = self._groups[fact.group].open[fact.episode]
        number = list(traced.session.requests).index(fact.request_id) + 1
        said = (
            f"the client of #{number} left before it had read it"
            if fact.unread
            else f"a client asked again, and got #{number}"
        )
        traced.events.append(Event(time, None, said))

    def _reward_recorded(self, time: datetime, fact: pb.RewardRecorded) -> None:
        traced = self._groups[fact.group].open[fact.episode]
        of = _of(traced.session, Target(fact.generation_id, fact.branch))
        traced.events.append(Event(time, None, f"reward {fact.reward:g}{of}{_by(traced.session, fact.settled_by)}"))

    def _episode_submitted(self, time: datetime, fact: pb.EpisodeSubmitted) -> None:
        traced = self._groups[fact.group].open[fact.episode]
        traced.end = SUBMITTED
        words = ["submitted"]
        words += [f"reward {fact.reward:g}"] if fact.HasField("reward") else []
        words += ["cut off by the agent"] if fact.truncated else []
        words += ["a reward follows"] if fact.reward_follows else []
        traced.events.append(Event(time, None, ", ".join(words) + _by(traced.session, fact.settled_by)))

    def _episode_given_up(self, time: datetime, fact: pb.EpisodeGivenUp) -> None:
        traced = self._groups[fact.group].open.pop(fact.episode)
        traced.end = fact.reason
        then = "the episode is offered again" if fact.requeue else "the episode has ended"
        by = _by(traced.session, fact.settled_by)
        traced.events.append(Event(time, None, f"given up: {fact.reason}{by}; {then}"))

    # Trajectories.

    def _episodes_ended(self, time: datetime, fact: pb.EpisodesEnded) -> None:
        opened = self._groups[fact.group].open if fact.group in self._groups else {}
        for episode in fact.episodes:
            traced = opened.get(episode.episode)
            if traced is None:
                continue
            if episode.HasField("reward"):
                traced.events.append(Event(time, None, f"ended with reward {episode.reward:g}"))
            for each in traced.session.trajectory_ids:
                self.outcomes[each] = f"not trained: {episode.reason or 'nothing of it may be'}"
            self.outcomes |= {each.trajectory_id: "accepted, in no batch yet" for each in episode.trajectories}
            self.outcomes |= dict.fromkeys(episode.untrainable, f"not trained: {episode.reason}")

    def _group_dropped(self, time: datetime, fact: pb.GroupDropped) -> None:
        group = self._groups.pop(fact.group, None)
        for traced in () if group is None else group.open.values():
            if not traced.end:
                traced.end = GROUP_ENDED
            traced.events.append(Event(time, None, f"its group was dropped: {fact.reason}"))
            for each in traced.session.trajectory_ids:
                self.outcomes[each] = f"not trained: {fact.reason}"

    def _set_aside(self, _: datetime, fact: pb.TrajectoriesSetAside) -> None:
        for each in fact.trajectory_ids:
            if each in self.outcomes:
                self.outcomes[each] = f"not trained: {fact.reason}: {fact.problem}"

    def _batch_made(self, _: datetime, fact: pb.BatchMade) -> None:
        self._batches[fact.sequence_no] = [each for each in fact.trajectory_ids if each in self.outcomes]
        for each in self._batches[fact.sequence_no]:
            self.outcomes[each] = f"in batch {fact.sequence_no}, not trained yet"

    def _batch_applied(self, _: datetime, fact: pb.BatchApplied) -> None:
        made = self._batches.get(fact.sequence_no, ())
        version = Version.from_proto(fact.policy_version)
        for each in made:
            self.outcomes[each] = f"trained in step {fact.sequence_no}, which made version {version}"
            self._trained[each] = version
        for reason, dropped in fact.dropped.items():
            for each in dropped.trajectory_ids:
                if each in self.outcomes:
                    self.outcomes[each] = f"not trained: {reason}"
                    self._trained.pop(each, None)

    def _batch_unmade(self, _: datetime, fact: pb.BatchUnmade) -> None:
        for each in self._batches.pop(fact.sequence_no, ()):
            self.outcomes[each] = "accepted, in no batch yet"

    def _epoch_begun(self, _: datetime, fact: pb.EpochBegun) -> None:
        origin = Version.from_proto(fact.origin)
        taken_back = [each for each, version in self._trained.items() if version.number > origin.number]
        for each in taken_back:
            del self._trained[each]
            self.outcomes[each] = f"trained, and taken back when the trainer went back to version {origin}"


def _of(session: Session, target: Target) -> str:
    """Return what a reward belongs to, in words; empty for the whole episode."""
    if target == Target():
        return ""
    numbers = {request: number for number, request in enumerate(session.requests, 1)}
    name = target.generation_id or target.branch
    request, _, index = name.rpartition("/")
    what = "the turn" if target.generation_id else "the branch that ends with"
    return f" of {what} #{numbers.get(request, 0)}{f' sample {index}' if index != '0' else ''}"


def _by(session: Session, credential: common_pb2.Credential.ValueType) -> str:
    """Return by which credential an episode was settled, in words; empty if an earlier release did not record it."""
    words = {
        common_pb2.CREDENTIAL_PRINCIPAL: f", by principal {session.principal}",
        common_pb2.CREDENTIAL_SETTLING_KEY: ", by the settling key",
        common_pb2.CREDENTIAL_SESSION_KEY: ", by the session key",
        common_pb2.CREDENTIAL_NONE: ", by a caller without a key",
    }
    return words.get(credential, "")


class Following(NamedTuple):
    """How a request continues earlier requests of its session.

    Attributes:
        number: Number of the request whose tokens its prompt begins with, from 1; 0 if there is none.
        common: With how many tokens of that request the prompt begins.
        exact: Whether these are all its tokens, reply included: a continuation. Otherwise the prompt differs from there on: a fork.
        messages: The messages that are new.
    """

    number: int
    common: int
    exact: bool
    messages: Sequence[tokens_pb2.ChatMessage]


def following(made: session_pb2.RecordedGeneration, before: Mapping[int, session_pb2.RecordedGeneration]) -> Following:
    """Return which request this one continues; otherwise the one with the most tokens in common, and where the two differ.

    Args:
        made: What was sampled for it.
        before: What was sampled for earlier requests, by number. Those that are no longer kept may be missing.
    """
    messages = made.conversation.messages
    best = Following(0, 0, exact=False, messages=messages)
    prompt = as_ids(made.response.prompt_token_ids)
    for number, each in before.items():
        for index, sample in enumerate(each.response.samples):
            known = np.concatenate([as_ids(each.response.prompt_token_ids), as_ids(sample.token_ids)])
            length = min(len(known), len(prompt))
            differs = np.flatnonzero(known[:length] != prompt[:length])
            common = int(differs[0]) if len(differs) else length
            if made.parent == f"{each.request_id}/{index}":
                return Following(number, common, exact=True, messages=messages[len(each.conversation.messages) + 1 :])
            if common > best.common:
                best = Following(
                    number, common, exact=False, messages=messages[_shared(messages, each, sample.message) :]
                )
    return best


def _shared(
    messages: Sequence[tokens_pb2.ChatMessage], before: session_pb2.RecordedGeneration, reply: tokens_pb2.ChatMessage
) -> int:
    """Return how many messages a conversation has in common with another one and its reply."""
    count = 0
    for mine, other in zip(messages, [*before.conversation.messages, reply], strict=False):
        if mine != other:
            break
        count += 1
    return count
