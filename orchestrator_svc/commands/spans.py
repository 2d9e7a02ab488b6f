"""The spans of a run: how long each part of the way took from the draw of a task to the weight version that it changed.

Pure: facts of the journal in, spans out. The services do nothing for it.

    task                        one trace for each group: draw -> trained or dropped
      episode                   of an external agent: opened -> submitted or given up
        sample
      sample                    one for each request: what came before it in its episodes -> answer kept
      environment               answer kept -> the environment's reply to the turn
      score                     last answer -> the episode has ended, with its reward
      wait for batch            group complete -> batch made
      train                     batch sent -> batch applied; links to the step
    batch                       one trace for each batch: made -> applied; links to its tasks
      wait for trainer          made -> sent
      train step                sent -> applied: the version that resulted

The ids are hashes of what a span describes, so that reading facts twice gives the same spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import xxhash

from sluice.v1 import journal_pb2 as pb
from sluice.versions import Version

Attribute: TypeAlias = str | bool | int | float | list[str] | list[int]


class SpanId(NamedTuple):
    """Name of a span.

    Attributes:
        trace: 128 bits.
        span: 64 bits, unique within the trace.
    """

    trace: int
    span: int


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time.

    Attributes:
        parent: The span that it is a part of; None for the root of a trace.
        start_ns: Unix time.
        end_ns: Unix time.
        links: Spans of other traces that belong to it.
        error: Why it failed; empty if it did not.
    """

    id: SpanId
    parent: SpanId | None
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    links: tuple[SpanId, ...] = ()
    error: str = ""


@dataclass(slots=True)
class _Opened:
    """An attempt of an external agent."""

    time: int
    attempt: int
    id: SpanId


@dataclass(slots=True)
class _Group:
    root: SpanId
    drawn: pb.TaskDrawn
    start: int
    """When it was drawn first."""
    since: int
    """When its present attempt was drawn."""
    last: dict[int, int] = field(default_factory=dict)
    """When something last happened in an episode."""
    opened: dict[int, _Opened] = field(default_factory=dict)
    accepted: int = 0
    """When it was complete; 0: not yet."""
    versions: list[str] = field(default_factory=list)
    trajectories: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Batch:
    made: int
    fact: pb.BatchMade
    root: SpanId
    tasks: dict[int, SpanId]
    """Root span of each of its groups, by number of the group."""
    sent: int = 0
    """When the trainer was first given it in `epoch`; 0: not yet."""
    epoch: int = 0
    applied: bool = False


class Spans:
    """Turns the facts of a run into spans, each as soon as it has ended.

    Args:
        run: Name of the run.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._groups: dict[int, _Group] = {}
        self._batches: dict[int, _Batch] = {}
        self._taken_back: dict[int, SpanId] = {}
        """Root spans of trained tasks whose batch was unmade when the trainer went back to an older version, by group."""
        self._kinds: dict[str, Callable[[int, Any], Iterable[Span]]] = {
            "task_drawn": self._task_drawn,
            "generation_recorded": self._generation_recorded,
            "turn_ended": self._turn_ended,
            "episodes_ended": self._episodes_ended,
            "episode_opened": self._episode_opened,
            "session_generation_recorded": self._session_generation_recorded,
            "episode_submitted": self._episode_submitted,
            "episode_given_up": self._episode_given_up,
            "group_accepted": self._group_accepted,
            "group_dropped": self._group_dropped,
            "trajectories_set_aside": self._set_aside,
            "batch_made": self._batch_made,
            "batch_sent": self._batch_sent,
            "batch_applied": self._batch_applied,
            "batch_unmade": self._batch_unmade,
            "checkpoint_covered": self._checkpoint_covered,
        }

    def take_fact(self, fact: pb.Fact) -> list[Span]:
        """Take the next fact; return the spans that it ends."""
        kind = fact.WhichOneof("kind") or ""
        if kind not in self._kinds:
            return []
        return list(self._kinds[kind](fact.time.ToNanoseconds(), getattr(fact, kind)))

    # Tasks.

    def _task_drawn(self, time: int, fact: pb.TaskDrawn) -> Iterable[Span]:
        known = self._groups.get(fact.group)
        if known is None:
            root = self._root("task", fact.group, time)
            self._groups[fact.group] = _Group(root, fact, time, time)
        else:  # a restart found it unfinished
            self._groups[fact.group] = _Group(known.root, fact, known.start, time)
        return ()

    def _generation_recorded(self, time: int, fact: pb.GenerationRecorded) -> Iterable[Span]:
        if group := self._groups.get(fact.group):
            start = max(group.last.get(each, group.since) for each in fact.episodes or [0])
            group.last.update(dict.fromkeys(fact.episodes, time))
            about: dict[str, Attribute] = {
                "request_id": fact.request_id,
                "episodes": list(fact.episodes),
                "turn": fact.turn,
                "attempt": fact.attempt,
            }
            yield self._part(group, "sample", f"{fact.request_id}/{time}", (start, time), about)

    def _turn_ended(self, time: int, fact: pb.TurnEnded) -> Iterable[Span]:
        if group := self._groups.get(fact.group):
            about: dict[str, Attribute] = {"episode": fact.episode, "turn": fact.turn, "attempt": fact.attempt}
            about |= {"reward": fact.reward} if fact.HasField("reward") else {}
            start = group.last.get(fact.episode, group.since)
            group.last[fact.episode] = time
            yield self._part(group, "environment", f"{fact.episode}/{fact.attempt}/{fact.turn}", (start, time), about)

    def _episodes_ended(self, time: int, fact: pb.EpisodesEnded) -> Iterable[Span]:
        group = self._groups.get(fact.group)
        if group is None:
            return
        for each in fact.episodes:
            about: dict[str, Attribute] = {"episode": each.episode, "attempt": fact.attempt}
            about |= {"reward": each.reward} if each.HasField("reward") else {}
            about |= {"reason": each.reason} if each.reason else {}
            group.trajectories.update(made.trajectory_id for made in each.trajectories)
            start = group.last.get(each.episode, group.since)
            yield self._part(group, "score", f"{each.episode}/{fact.attempt}", (start, time), about, error=each.reason)

    # Episodes of external agents.

    def _episode_opened(self, time: int, fact: pb.EpisodeOpened) -> Iterable[Span]:
        if group := self._groups.get(fact.group):
            name = _within(group.root, "episode", f"{fact.episode}/{fact.attempt}")
            group.opened[fact.episode] = _Opened(time, fact.attempt, name)
            group.last[fact.episode] = time
        return ()

    def _session_generation_recorded(self, time: int, fact: pb.SessionGenerationRecorded) -> Iterable[Span]:
        group = self._groups.get(fact.group)
        opened = group.opened.get(fact.episode) if group else None
        if group and opened:
            start = group.last.get(fact.episode, opened.time)
            group.last[fact.episode] = time
            about: dict[str, Attribute] = {
                "request_id": fact.request_id,
                "episode": fact.episode,
                "attempt": fact.attempt,
            }
            about |= {"tokens": [each.tokens for each in fact.samples]}
            yield self._part(group, "sample", f"{fact.request_id}/{time}", (start, time), about, parent=opened.id)

    def _episode_submitted(self, time: int, fact: pb.EpisodeSubmitted) -> Iterable[Span]:
        return self._episode_closed(time, fact, {})

    def _episode_given_up(self, time: int, fact: pb.EpisodeGivenUp) -> Iterable[Span]:
        return self._episode_closed(time, fact, {"reason": fact.reason}, error=fact.reason)

    def _episode_closed(
        self, time: int, fact: pb.EpisodeSubmitted | pb.EpisodeGivenUp, about: dict[str, Attribute], error: str = ""
    ) -> Iterable[Span]:
        group = self._groups.get(fact.group)
        opened = group.opened.pop(fact.episode, None) if group else None
        if group and opened:
            group.last[fact.episode] = time
            about |= {"episode": fact.episode, "attempt": opened.attempt}
            yield self._part(
                group, "episode", f"{fact.episode}/{opened.attempt}", (opened.time, time), about, error=error
            )

    # What becomes of a group.

    def _group_accepted(self, time: int, fact: pb.GroupAccepted) -> Iterable[Span]:
        if group := self._groups.get(fact.group):
            group.accepted = time
            group.versions = [str(Version.from_proto(each)) for each in fact.policy_versions]
        return ()

    def _group_dropped(self, time: int, fact: pb.GroupDropped) -> Iterable[Span]:
        if group := self._groups.pop(fact.group, None):
            yield self._task(group, time, {"outcome": fact.reason})

    def _set_aside(self, time: int, fact: pb.TrajectoriesSetAside) -> Iterable[Span]:
        if group := self._groups.get(fact.group):
            group.trajectories.difference_update(fact.trajectory_ids)
            if not group.trajectories:
                del self._groups[fact.group]
                yield self._task(group, time, {"outcome": fact.reason})

    # Batches.

    def _batch_made(self, time: int, fact: pb.BatchMade) -> Iterable[Span]:
        groups = {each: self._groups[each] for each in fact.groups if each in self._groups}
        again = {each: self._taken_back.pop(each) for each in fact.groups if each in self._taken_back}
        tasks = again | {number: each.root for number, each in groups.items()}
        self._batches[fact.sequence_no] = _Batch(time, fact, self._root("batch", fact.batch_id, time), tasks)
        for group in groups.values():
            about: dict[str, Attribute] = {"batch_id": fact.batch_id}
            yield self._part(group, "wait for batch", fact.batch_id, (group.accepted or time, time), about)

    def _batch_sent(self, time: int, fact: pb.BatchSent) -> Iterable[Span]:
        batch = self._batches.get(fact.sequence_no)
        if batch and (not batch.sent or batch.epoch != fact.epoch):
            start, batch.sent, batch.epoch = batch.sent or batch.made, time, fact.epoch
            about: dict[str, Attribute] = {"epoch": fact.epoch}
            yield self._of_batch(batch, "wait for trainer", str(fact.epoch), (start, time), about)

    def _batch_applied(self, time: int, fact: pb.BatchApplied) -> Iterable[Span]:
        batch = self._batches.get(fact.sequence_no)
        if batch is None:
            return
        version = str(Version.from_proto(fact.policy_version))
        trained = frozenset(fact.trained)
        reasons = {each: reason for reason, dropped in fact.dropped.items() for each in dropped.trajectory_ids}
        sent, detail = batch.sent or batch.made, version
        about: dict[str, Attribute] = {"version": version, "trained": len(trained), "dropped": len(reasons)}
        step = self._of_batch(batch, "train step", detail, (sent, time), about)
        yield step
        if not batch.applied:
            yield self._root_of(batch, time, about)
        batch.applied = True
        for number, root in batch.tasks.items():
            name = _within(root, "train", detail)
            yield _span(name, root, "train", (sent, time), {"version": version, **_name(batch)}, links=(step.id,))
            # A group is gone if its batch was applied before, in an epoch that was rolled back.
            if group := self._groups.pop(number, None):
                why = next((reasons[each] for each in sorted(group.trajectories) if each in reasons), "")
                outcome = "trained" if trained & group.trajectories or not why else why
                yield self._task(group, time, {"outcome": outcome, "version": version, **_name(batch)})

    def _batch_unmade(self, time: int, fact: pb.BatchUnmade) -> Iterable[Span]:
        batch = self._batches.pop(fact.sequence_no, None)
        if batch and batch.applied:
            self._taken_back |= {number: root for number, root in batch.tasks.items() if number not in self._groups}
        elif batch:
            yield self._root_of(batch, time, {}, fact.reason or "unmade")

    def _checkpoint_covered(self, _: int, fact: pb.CheckpointCovered) -> Iterable[Span]:
        # No trainer goes back to a version before this one. Batch n makes version n.
        covered = fact.policy_version.number
        self._batches = {number: each for number, each in self._batches.items() if number > covered}
        return ()

    # Spans.

    def _root(self, kind: str, name: object, time: int) -> SpanId:
        # The time tells apart runs that have the same name, one after the other.
        seed = f"{self._run}/{kind}/{name}/{time}".encode()
        return SpanId(xxhash.xxh3_128_intdigest(seed) or 1, xxhash.xxh3_64_intdigest(seed) or 1)

    def _name(self, batch: _Batch) -> dict[str, Attribute]:
        return {"batch_id": batch.fact.batch_id, "sequence_no": batch.fact.sequence_no}

    def _task(self, group: _Group, end: int, about: Mapping[str, Attribute]) -> Span:
        drawn = group.drawn
        task: dict[str, Attribute] = {"environment": drawn.environment, "task_id": drawn.task_id, "draw": drawn.draw}
        task |= {"group": f"g{drawn.group}", "attempt": drawn.attempt, "versions_sampled": group.versions, **about}
        return _span(group.root, None, "task", (group.start, end), task)

    def _part(
        self,
        group: _Group,
        name: str,
        detail: str,
        when: tuple[int, int],
        about: Mapping[str, Attribute],
        *,
        parent: SpanId | None = None,
        error: str = "",
    ) -> Span:
        """Return a span within a task; `detail` distinguishes spans of the same name."""
        about = {"group": f"g{group.drawn.group}", **about}
        return _span(_within(group.root, name, detail), parent or group.root, name, when, about, error=error)

    def _root_of(self, batch: _Batch, end: int, about: Mapping[str, Attribute], error: str = "") -> Span:
        tasks = tuple(batch.tasks.values())
        return _span(batch.root, None, "batch", (batch.made, end), {**_name(batch), **about}, links=tasks, error=error)

    def _of_batch(
        self, batch: _Batch, name: str, detail: str, when: tuple[int, int], about: Mapping[str, Attribute]
    ) -> Span:
        return _span(_within(batch.root, name, detail), batch.root, name, when, {**_name(batch), **about})


def _span(
    name: SpanId,
    parent: SpanId | None,
    what: str,
    when: tuple[int, int],
    about: Mapping[str, Attribute],
    *,
    links: tuple[SpanId, ...] = (),
    error: str = "",
) -> Span:
    start, end = when
    attributes = {f"sluice.{key}": value for key, value in about.items()}
    # A clock that was set back must not give a span of negative length.
    return Span(name, parent, what, start, max(start, end), attributes, links, error)


def _name(batch: _Batch) -> dict[str, Attribute]:
    return {"batch_id": batch.fact.batch_id, "sequence_no": batch.fact.sequence_no}


def _within(root: SpanId, name: str, detail: str) -> SpanId:
    """Return the name of a span in the trace of another one."""
    return SpanId(root.trace, xxhash.xxh3_64_intdigest(f"{root.span}/{name}/{detail}".encode()) or 1)
