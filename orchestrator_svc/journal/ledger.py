"""The state of a run as it follows from its facts: groups, batches, counts, epochs.

`Ledger.apply_fact` takes one fact after the other and does nothing else: no clock, no I/O, no settings. The running process and
a start use the same class, so that both have the same state. Nothing else changes it.

    drawn -> RUNNING -> accepted -> READY -> in a batch -> BATCHED -> applied: no longer live
                |                     |          ^            |
                +------- dropped -----+          +- unmade ---+

A batch that was applied is kept until a checkpoint covers it: a trainer that returns to an older checkpoint gets it again.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from orchestrator_svc.journal.external import EndedSession, ExternalEpisodes
from orchestrator_svc.journal.facts import (
    Accepted,
    Checkpoint,
    EndedTurn,
    Generation,
    LedgerError,
    Outcome,
    Part,
    Place,
    Reason,
    Redraw,
    SetAside,
    Stage,
    place_of,
)
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import orchestrator_pb2, rollout_pb2
from sluice.versions import Lineage, Version

KEPT_CHECKPOINTS = 2
"""How many checkpoints a trainer may return to. The payloads of batches that the older one covers are not needed any more."""

KEPT_SETTING_CHANGES = 100
"""Changes of settings that the ledger keeps, as Run.changed_settings says."""

_OF_OTHERS = frozenset({"run_resumed", "evaluation_recorded", "curriculum_noted", "task_quarantined", "task_released"})
"""Kinds of facts that the ledger leaves to the curriculum, to the evaluations, and to what watches how much is set aside."""

KEPT_SESSIONS = 16_384
"""How many of the last ended sessions the ledger keeps, so that an agent that repeats a call gets the same answer again."""


@dataclass(slots=True)
class Group:
    """A group of episodes of one task.

    Attributes:
        number: Order of dispatch; also its name.
        draw: How often the task was drawn before in this run.
        position: Place of the task in the stream of its environment.
        episodes: Episodes wanted.
        attempt: Attempt of the whole group.
        floor: Oldest version that may sample it.
        versions: Versions that sampled its tokens; while it runs: only the floor.
        oldest: Number that the oldest of `versions` counts as in the present epoch.
        ended: Its episodes that ended.
        size: Trajectories that may be trained.
        generations: Answers of replicas, while it runs.
        turns: Answers of the environment by episode, attempt and turn, while it runs.
        external: What external agents do with its episodes, while it runs; None if no agent has any of them.
        passed: Younger groups that were batched while it was running.
        redrawn: Whether its task has to be, or was, drawn again.
        set_aside: Its trajectories that can never be trained.
        drawn_s: When it was drawn first, in seconds since 1970; 0: not known.
    """

    number: int
    environment: str
    task_id: str
    draw: int
    position: int
    episodes: int
    attempt: int
    floor: Version
    versions: tuple[Version, ...]
    oldest: int
    stage: Stage = Stage.RUNNING
    ended: list[pb.EpisodesEnded] = field(default_factory=list)
    size: int = 0
    generations: list[Generation] = field(default_factory=list)
    turns: dict[tuple[int, int, int], EndedTurn] = field(default_factory=dict)
    external: ExternalEpisodes | None = None
    passed: int = 0
    redrawn: bool = False
    set_aside: frozenset[str] = frozenset()
    drawn_s: float = 0.0

    @property
    def name(self) -> str:
        """The name that it has in messages."""
        return f"g{self.number}"

    @property
    def trajectories(self) -> list[Accepted]:
        """The trajectories that may be trained, in order."""
        # Read from the facts only on demand: a start folds many groups whose trajectories nobody asks for.
        found, before = list[Accepted](), 0
        for fact in self.ended:
            for each in chain.from_iterable(episode.trajectories for episode in fact.episodes):
                if each.trajectory_id not in self.set_aside:
                    after = before + each.rest.after if each.rest.after else 0
                    found.append(Accepted(each.trajectory_id, Place.from_proto(place_of(each)), after))
            before += len(fact.beginnings)
        return found

    @property
    def beginnings(self) -> list[Part]:
        """Parts that several of its trajectories begin with. Each comes after the part that it follows."""
        found = list[Part]()
        for fact in self.ended:
            before = len(found)
            for each in fact.beginnings:
                found.append(Part(Place.from_proto(each.place), before + each.after if each.after else 0))
        return found

    @property
    def lost(self) -> dict[int, str]:
        """Why episodes ended without a trajectory, by number of the episode."""
        return {
            episode.episode: episode.reason
            for fact in self.ended
            for episode in fact.episodes
            if not (episode.trajectories or episode.untrainable)
        }

    @property
    def sampled(self) -> list[Place]:
        """Places of the replicas' answers that it needs, unordered. Empty once it is accepted."""
        sessions = () if self.external is None else self.external.requests
        return [*(each.place for each in self.generations), *(each.place for each in sessions)]

    @property
    def first_segment(self) -> int | None:
        """The first segment that holds a payload of it; None if none does."""
        if sampled := self.sampled:
            return min(each.segment for each in sampled)
        # Beginnings were written first.
        places = (
            place.segment
            for fact in self.ended
            for place in chain(
                (each.place for each in fact.beginnings),
                (place_of(each) for episode in fact.episodes for each in episode.trajectories),
            )
        )
        return next(places, None)


@dataclass(slots=True)
class Batch:
    """A batch that was made.

    Attributes:
        sequence_no: Its place in the order of batches, from 1.
        groups: Its groups, in the order in which the trainer gets them.
        trajectory_ids: Its trajectories in that order.
        digests: Digest of each trajectory as the trainer gets it; empty if they are not known.
        content_digest: Digest of the batch; empty if it is not known.
        max_staleness: The bound that it was made under; None: the bound of the settings.
        learning_rate: The learning rate that it changes to; None: as before.
        sent_in: The last epoch in which the trainer took it; 0 if none did.
    """

    sequence_no: int
    batch_id: str
    groups: tuple[Group, ...]
    trajectory_ids: tuple[str, ...]
    digests: tuple[bytes, ...] = ()
    content_digest: str = ""
    max_staleness: int | None = None
    learning_rate: float | None = None
    sent_in: int = 0


@dataclass
class Ledger:
    """The state of a run after the facts so far.

    Attributes:
        last_seq: Number of the last fact.
        start: Number of the process that opened the journal last.
        identity: Settings that must not change within the run.
        groups: Live groups by number: dispatched, and neither applied nor dropped.
        batches: Batches that were made and whose outcome is not known, ascending.
        applied_batches: Batches that were applied and that a rollback can still reach, ascending.
        applied: Batches that the weights hold.
        epoch: The epoch that a trainer began last; 0 if none did.
        allotted: The last epoch whose number was given away.
        accepted: Trajectories that were generated and scored.
        trained: Trajectories that took part in an optimizer step of the present weights' history.
        failed_groups: Groups that ended without a trajectory, by reason.
        lost_episodes: Episodes without a trajectory in groups that were accepted without them, by reason.
        set_aside: Trajectories of accepted groups that can never be trained, by reason.
        redraws: Tasks that have to be drawn again, in order.
        redraws_dropped: Tasks that had to be drawn again and will not be, by reason.
        checkpoints: The last checkpoints, to which a trainer may return.
        batches_made: Batches that were made so far, unmade ones included.
        generated: What was generated, by name of the counter.
        elapsed_s: Seconds that the run had lasted at its last step.
        settings: Settings of the live run that were changed, as TOML.
        last_segment: Number of the last segment that a fact names.
        setting_changes: The last changes of settings, oldest first.
        weight_policies: Replicas that were told to stay at a version and not yet to follow the trainer again, by name.
        ended_sessions: The last sessions of external agents that ended, by name.
        session_ends: How many sessions have ended so far, by how they ended.
        changed: Groups that changed since the scheduler last looked. The scheduler empties this set.
    """

    last_seq: int = 0
    start: int = 0
    identity: dict[str, str] = field(default_factory=dict)
    forked_from: str = ""
    groups: dict[int, Group] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    applied_batches: dict[int, Batch] = field(default_factory=dict)
    applied: int = 0
    lineage: Lineage = field(default_factory=Lineage)
    epoch: int = 0
    allotted: int = 0
    accepted: int = 0
    trained: int = 0
    failed_groups: Counter[str] = field(default_factory=Counter)
    lost_episodes: Counter[str] = field(default_factory=Counter)
    set_aside: dict[str, SetAside] = field(default_factory=dict)
    redraws: list[Redraw] = field(default_factory=list)
    redraws_dropped: Counter[str] = field(default_factory=Counter)
    next_group: int = 1
    checkpoints: list[Checkpoint] = field(default_factory=list)
    batches_made: int = 0
    generated: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0
    settings: dict[str, str] = field(default_factory=dict)
    setting_changes: list[orchestrator_pb2.ChangedSetting] = field(default_factory=list)
    weight_policies: dict[str, pb.WeightPolicyNoted] = field(default_factory=dict)
    last_segment: int = 0
    ended_sessions: dict[str, EndedSession] = field(default_factory=dict)
    session_ends: Counter[str] = field(default_factory=Counter)
    changed: set[int] = field(default_factory=set, compare=False)
    # Outcomes of the batches that a rollback can still reach, and the last batch that no rollback can reach.
    _outcomes: dict[int, Outcome] = field(default_factory=dict)
    _covered: int = 0
    # Numbers of the live groups, ascending.
    _order: list[int] = field(default_factory=list)
    _dropped: Counter[str] = field(default_factory=Counter)
    _stages: Counter[Stage] = field(default_factory=Counter)
    _numbers: dict[Version, int] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Find the method of each kind of fact."""
        # Bound once: a start applies a million facts.
        self._kinds: dict[str, Callable[[Any], None]] = {
            each.name: partial(self._external, each.name)
            if hasattr(ExternalEpisodes, each.name)
            else getattr(self, f"_{each.name}")
            for each in pb.Fact.DESCRIPTOR.oneofs_by_name["kind"].fields
            if each.name not in _OF_OTHERS
        }

    # What others read.

    @property
    def next_batch(self) -> int:
        """Sequence number of the next batch to make."""
        return max(self.applied, next(reversed(self.batches), 0)) + 1

    @property
    def to_send(self) -> list[Batch]:
        """Batches that the weights lack, ascending."""
        return [batch for number, batch in self.batches.items() if number > self.applied]

    @property
    def unreported(self) -> list[Batch]:
        """Batches that the weights hold and whose outcome is not known, ascending."""
        return [batch for number, batch in self.batches.items() if number <= self.applied]

    @property
    def dropped(self) -> Counter[str]:
        """Trajectories that were accepted and not trained, by reason."""
        return +self._dropped

    def count(self, stage: Stage) -> int:
        """Return the number of live groups in a stage."""
        return self._stages[stage]

    def older(self, number: int) -> int:
        """Return how many live groups have a number below this one."""
        return bisect.bisect_left(self._order, number)

    def first_needed_segment(self) -> int | None:
        """Return the number of the oldest segment with a payload that is still needed; None if none is."""
        kept = [group for batch in self.applied_batches.values() for group in batch.groups]
        found = [group.first_segment for group in (*self.groups.values(), *kept)]
        return min((each for each in found if each is not None), default=None)

    def check_reach(self, number: int) -> None:
        """Check that the batches after version `number` can be sent again.

        Raises:
            LedgerError: if a checkpoint has covered the first of them, and its payloads are gone.
        """
        last = max(self._outcomes, default=self._covered)
        if last > number and number + 1 not in self.applied_batches and number + 1 not in self.batches:
            raise LedgerError(
                f"the trainer restored version {number}, but the journal no longer holds batch {number + 1}:"
                " put the newer checkpoint back, or begin a new run (--run NAME)"
            )

    # The fold.

    def apply_fact(self, seq: int, fact: pb.Fact) -> None:
        """Take one fact.

        Raises:
            LedgerError: if it does not follow from the facts before it; the state stays as it was.
        """
        if seq <= self.last_seq:
            raise LedgerError(f"fact {seq} comes after fact {self.last_seq}")
        kind = fact.WhichOneof("kind")
        if kind is None:
            raise LedgerError(f"fact {seq} is of a kind that this release does not know: use the one that wrote it")
        try:
            if kind not in _OF_OTHERS:
                self._kinds[kind](getattr(fact, kind))
            if kind == "task_drawn" and not (group := self.groups[fact.task_drawn.group]).drawn_s:
                group.drawn_s = fact.time.seconds + fact.time.nanos / 1e9
        except LookupError as error:
            raise LedgerError(
                f"fact {seq} ({kind}) is about {error}, which no fact before it has named: the journal is damaged"
            ) from error
        self.last_seq = seq

    def _process_started(self, fact: pb.ProcessStarted) -> None:
        self.start = fact.start
        self.identity.update(fact.identity)
        self.forked_from = fact.forked_from or self.forked_from

    def _task_drawn(self, fact: pb.TaskDrawn) -> None:
        floor = Version.from_proto(fact.policy_version)
        group = Group(
            fact.group,
            fact.environment,
            fact.task_id,
            fact.draw,
            fact.position,
            fact.episodes,
            fact.attempt,
            floor,
            (floor,),
            self._number(floor),
        )
        before = self.groups.get(fact.group)
        if before is not None:
            if before.stage is not Stage.RUNNING or fact.attempt <= before.attempt:
                raise LedgerError(f"group {fact.group} is drawn twice")
            group.passed, group.external, group.drawn_s = before.passed, before.external, before.drawn_s
            self._remove(before)
        else:
            self.next_group = max(self.next_group, fact.group + 1)
            if fact.redraw_reason:
                self._take_redraw(fact)
        self._add(group)

    def _take_redraw(self, fact: pb.TaskDrawn | pb.RedrawDropped) -> bool:
        """Remove the task of a fact from those that have to be drawn again; return whether it was among them."""
        wanted = (fact.environment, fact.position, fact.redraw_reason)
        for index, each in enumerate(self.redraws):
            if (each.environment, each.position, each.reason) == wanted:
                del self.redraws[index]
                return True
        return False

    def _redraw_dropped(self, fact: pb.RedrawDropped) -> None:
        if not self._take_redraw(fact):
            raise LedgerError(f"task {fact.task_id} of environment {fact.environment} had not to be drawn again")
        self.redraws_dropped[fact.reason] += 1

    def _generation_recorded(self, fact: pb.GenerationRecorded) -> None:
        group = self._running(fact.group)
        place = Place.from_proto(fact.place)
        self.last_segment = max(self.last_segment, place.segment)
        group.generations.append(Generation(fact.attempt, fact.turn, tuple(fact.episodes), place))

    def _turn_ended(self, fact: pb.TurnEnded) -> None:
        reward = fact.reward if fact.HasField("reward") else None
        turns = self._running(fact.group).turns
        turns[fact.episode, fact.attempt, fact.turn] = EndedTurn(reward, fact.messages_digest)

    def _external(self, kind: str, fact: Any) -> None:  # noqa: ANN401 - one of the kinds of a fact
        """Take a fact of an episode that an external agent runs."""
        group = self._running(fact.group)
        external = group.external or ExternalEpisodes.of(group.number, group.episodes)
        ended = getattr(external, kind)(fact)
        group.external = external
        if isinstance(fact, pb.SessionGenerationRecorded):
            self.last_segment = max(self.last_segment, fact.place.segment)
        self._keep_sessions(ended or {})

    def _keep_sessions(self, ended: Mapping[str, EndedSession]) -> None:
        self.ended_sessions |= ended
        self.session_ends.update(each.reason for each in ended.values())
        while len(self.ended_sessions) > KEPT_SESSIONS:
            del self.ended_sessions[next(iter(self.ended_sessions))]

    def _forget_external(self, group: Group) -> None:
        """Of the sessions of a group that no longer runs, keep only how they ended."""
        if group.external is not None:
            self._keep_sessions(group.external.retired())
            group.external = None

    def _episodes_ended(self, fact: pb.EpisodesEnded) -> None:
        group = self._running(fact.group)
        group.ended.append(fact)
        kept, last = 0, None
        for episode in fact.episodes:
            if count := len(episode.trajectories):
                kept, last = kept + count, episode
            if lost := len(episode.untrainable):
                self.accepted += lost
                self._dropped[episode.reason] += lost
        if last is not None:  # they were written in this order
            self.last_segment = max(self.last_segment, place_of(last.trajectories[-1]).segment)
        group.size += kept
        self.accepted += kept

    def _group_accepted(self, fact: pb.GroupAccepted) -> None:
        group = self._running(fact.group)
        group.versions = tuple(sorted({Version.from_proto(each) for each in fact.policy_versions})) or group.versions
        group.oldest = self._oldest(group)
        self.lost_episodes.update(group.lost.values())
        group.generations, group.turns = [], {}
        self._forget_external(group)
        self._move(group, Stage.READY)

    def _group_dropped(self, fact: pb.GroupDropped) -> None:
        group = self.groups.get(fact.group)
        if group is None or group.stage is Stage.BATCHED:
            raise LedgerError(f"group {fact.group} is in a batch or not live: it cannot be dropped")
        if group.stage is Stage.RUNNING and fact.reason != Reason.NO_AGENT:
            self.failed_groups[fact.reason] += 1
        if group.size:
            self._dropped[fact.reason] += group.size
        self._forget_external(group)
        self._remove(group)
        if fact.redraw:
            self._draw_again(group, fact.reason)

    def _trajectories_set_aside(self, fact: pb.TrajectoriesSetAside) -> None:
        group = self.groups.get(fact.group)
        if group is None or group.stage is not Stage.READY:
            raise LedgerError(f"group {fact.group} is in a batch or not complete: nothing of it can be set aside")
        count = len(fact.trajectory_ids)
        group.set_aside |= frozenset(fact.trajectory_ids)
        group.size -= count
        self._dropped[fact.reason] += count
        before = self.set_aside.get(fact.reason)
        self.set_aside[fact.reason] = SetAside((before.trajectories if before else 0) + count, fact.problem)
        if not group.size:
            self._remove(group)

    def _batch_made(self, fact: pb.BatchMade) -> None:
        groups = [self.groups.get(number) for number in fact.groups]
        wrong = fact.sequence_no != self.next_batch or not groups
        if wrong or any(each is None or each.stage is not Stage.READY for each in groups):
            raise LedgerError(
                f"batch {fact.sequence_no} cannot be made: next is {self.next_batch}, of groups that are ready"
            )
        members = tuple(each for each in groups if each is not None)
        self.batches[fact.sequence_no] = Batch(
            fact.sequence_no,
            fact.batch_id,
            members,
            tuple(fact.trajectory_ids),
            tuple(fact.trajectory_digests),
            fact.content_digest,
            fact.max_staleness if fact.HasField("max_staleness") else None,
            fact.learning_rate if fact.HasField("learning_rate") else None,
        )
        self.batches_made += 1
        for group in members:
            self._move(group, Stage.BATCHED)
        self._count_passed([group.number for group in members])

    def _count_passed(self, batched: Sequence[int]) -> None:
        order = sorted(batched)
        for group in self.groups.values():
            if group.stage is Stage.RUNNING and group.number < order[-1]:
                group.passed += len(order) - bisect.bisect(order, group.number)
                self.changed.add(group.number)

    def _batch_sent(self, fact: pb.BatchSent) -> None:
        batch = self.batches.get(fact.sequence_no)
        if batch is not None:  # its report may have come before the answer
            batch.sent_in = fact.epoch

    def _batch_applied(self, fact: pb.BatchApplied) -> None:
        batch = self.batches.get(fact.sequence_no)
        if batch is None or fact.sequence_no > self.applied + 1:
            raise LedgerError(f"batch {fact.sequence_no} was applied, but {self.applied + 1} is due")
        del self.batches[fact.sequence_no]
        redrawn = set(fact.redrawn)
        for group in batch.groups:
            self._remove(group)
            if group.number in redrawn:
                self._draw_again(group, Reason.STALE)
        self.applied_batches[fact.sequence_no] = batch
        self.applied = max(self.applied, fact.sequence_no)
        dropped = {reason: len(each.trajectory_ids) for reason, each in fact.dropped.items()}
        self._note_outcome(fact.sequence_no, Outcome(len(fact.trained), dropped))
        self.elapsed_s = max(self.elapsed_s, fact.elapsed_s)

    def _note_outcome(self, number: int, outcome: Outcome) -> None:
        self._outcomes[number] = outcome
        self.trained += outcome.trained
        self._dropped.update(outcome.dropped)

    def _batch_unmade(self, fact: pb.BatchUnmade) -> None:
        if fact.sequence_no != next(reversed(self.batches), 0):
            raise LedgerError(f"batch {fact.sequence_no} is not the last one: those after it have to be unmade before")
        for group in self.batches.pop(fact.sequence_no).groups:
            self._move(group, Stage.READY)

    def _epoch_allotted(self, fact: pb.EpochAllotted) -> None:
        if fact.epoch <= self.allotted:
            raise LedgerError(f"epoch {fact.epoch} was given away before; the last one was {self.allotted}")
        self.allotted = fact.epoch

    def _epoch_begun(self, fact: pb.EpochBegun) -> None:
        origin = Version.from_proto(fact.origin)
        try:
            self.lineage = self.lineage.begin(fact.epoch, origin)
        except ValueError as error:
            raise LedgerError(str(error)) from error
        self._numbers.clear()
        self.epoch, self.applied = fact.epoch, origin.number
        for number in [each for each in self._outcomes if each > origin.number]:
            outcome = self._outcomes.pop(number)
            self.trained -= outcome.trained
            self._dropped.subtract(outcome.dropped)
        lost = {number: batch for number, batch in self.applied_batches.items() if number > origin.number}
        for number, batch in lost.items():
            del self.applied_batches[number]
            for group in batch.groups:
                self._add(group)
        self.batches = dict(sorted({**lost, **self.batches}.items()))
        self.checkpoints = [each for each in self.checkpoints if each.version.number <= origin.number]
        if not self.checkpoints or self.checkpoints[-1].version.number < origin.number:
            self.checkpoints.append(Checkpoint("", origin, 0))  # the base model, or an unrecorded checkpoint
        for group in self.groups.values():
            group.oldest = self._oldest(group)
        self.changed.update(self.groups)

    def _checkpoint_covered(self, fact: pb.CheckpointCovered) -> None:
        made = Checkpoint(fact.name, Version.from_proto(fact.policy_version), fact.position)
        if self.checkpoints and self.checkpoints[-1].version.number == made.version.number:
            self.checkpoints[-1] = made  # the same weights again, such as the periodic checkpoint and the final one
            return
        self.checkpoints = [*self.checkpoints, made][-KEPT_CHECKPOINTS:]
        self._numbers.clear()  # most versions in it are history by now
        if len(self.checkpoints) < KEPT_CHECKPOINTS:
            return
        covered = self.checkpoints[0].version.number
        for number in [each for each in self.applied_batches if each <= covered]:
            del self.applied_batches[number]
        for number in [each for each in self._outcomes if each <= covered]:
            del self._outcomes[number]
        self._covered = max(self._covered, covered)

    def _setting_changed(self, fact: pb.SettingChanged) -> None:
        self.settings[fact.key] = fact.new_value
        change = orchestrator_pb2.ChangedSetting(
            key=fact.key,
            old_value=fact.old_value,
            new_value=fact.new_value,
            from_sequence_no=self.next_batch,
            principal=fact.principal,
        )
        self.setting_changes = [*self.setting_changes, change][-KEPT_SETTING_CHANGES:]

    def _weight_policy_noted(self, fact: pb.WeightPolicyNoted) -> None:
        if fact.mode == rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW:
            self.weight_policies.pop(fact.replica, None)
        else:
            self.weight_policies[fact.replica] = fact

    def _counts_noted(self, fact: pb.CountsNoted) -> None:
        self.generated.update(fact.generated)

    def _history_imported(self, fact: pb.HistoryImported) -> None:
        self.accepted += fact.accepted
        self._dropped.update(fact.dropped)
        self.failed_groups.update(fact.failed_groups)
        self.generated.update(fact.generated)
        self.next_group = max(self.next_group, fact.next_group)
        self.elapsed_s = fact.elapsed_s
        for each in fact.batches:
            groups = tuple(self.groups[number] for number in each.groups)
            batch = Batch(each.sequence_no, each.batch_id, groups, tuple(each.trajectory_ids))
            if not each.applied:
                self.batches[each.sequence_no] = batch
                for group in groups:
                    self._move(group, Stage.BATCHED)
                continue
            self._note_outcome(each.sequence_no, Outcome(each.trained, dict(each.dropped)))
            self.applied = max(self.applied, each.sequence_no)
            if groups:
                self.applied_batches[each.sequence_no] = batch
                for group in groups:
                    self._remove(group)

    # Live groups.

    def _running(self, number: int) -> Group:
        group = self.groups.get(number)
        if group is None or group.stage is not Stage.RUNNING:
            raise LedgerError(f"group {number} is not running")
        return group

    def _draw_again(self, group: Group, reason: str) -> None:
        # Only once: a rollback may bring back a group whose task was drawn again, and the group may be lost a second time.
        if not group.redrawn:
            group.redrawn = True
            self.redraws.append(Redraw(group.environment, group.task_id, group.position, reason))

    def _oldest(self, group: Group) -> int:
        return min(map(self._number, group.versions))

    def _number(self, version: Version) -> int:
        """Return the number that a version counts as in the present epoch."""
        number = self._numbers.get(version)
        if number is None:
            number = self._numbers[version] = self.lineage.number(version)
        return number

    def _add(self, group: Group) -> None:
        self.groups[group.number] = group
        bisect.insort(self._order, group.number)
        self._stages[group.stage] += 1
        self.changed.add(group.number)

    def _remove(self, group: Group) -> None:
        del self.groups[group.number]
        del self._order[bisect.bisect_left(self._order, group.number)]
        self._stages[group.stage] -= 1
        self.changed.add(group.number)

    def _move(self, group: Group, stage: Stage) -> None:
        self._stages[group.stage] -= 1
        self._stages[stage] += 1
        group.stage = stage
        self.changed.add(group.number)


def folded(facts: Iterable[tuple[int, pb.Fact]]) -> Ledger:
    """Return the state after some facts, such as those of `store.read_facts`."""
    ledger = Ledger()
    for seq, fact in facts:
        ledger.apply_fact(seq, fact)
    return ledger
