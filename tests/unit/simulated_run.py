"""A run without a model: the facts that an orchestrator notes and the batches that a trainer records, through crashes of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.digests import batch_digest, trajectory_digest
from sluice.v1 import checkpoint_pb2, journal_pb2, tokens_pb2, trainer_pb2
from sluice.versions import BASE, Lineage, Version

EPISODES = 3
BATCH_GROUPS = 2


@dataclass
class MadeBatch:
    """A batch as the journal holds it: digest of each trajectory by id, in order."""

    number: int
    batch_id: str
    groups: list[int]
    digests: dict[str, bytes]


@dataclass
class SimulatedRun:
    """Notes facts and records batches as the two services do. Each public method is something that may happen."""

    facts: list[journal_pb2.Fact] = field(default_factory=list)
    records: list[checkpoint_pb2.BatchRecord] = field(default_factory=list)
    checkpoints: list[checkpoint_pb2.CheckpointManifest] = field(default_factory=list)
    lineage: Lineage = field(default_factory=Lineage)
    ready: list[int] = field(default_factory=list)
    batches: dict[int, MadeBatch] = field(default_factory=dict)
    trajectories: dict[int, list[str]] = field(default_factory=dict)
    epoch: int = 0
    applied: int = 0
    heard: int = 0
    origin: Version = BASE
    accepted: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        self.note(process_started=journal_pb2.ProcessStarted(start=1))
        self._begin_epoch()

    def note(self, **kind: object) -> None:
        """Note one fact."""
        self.facts.append(journal_pb2.Fact(**kind))  # type: ignore[arg-type]

    def place(self, _trajectory: str) -> journal_pb2.PayloadPlace | None:
        """Write the payload of a trajectory, and return its place."""
        return None

    def record(self, record: checkpoint_pb2.BatchRecord) -> None:
        """Record a batch."""
        self.records.append(record)

    # Groups.

    def _draw(self) -> int:
        group = len(self.trajectories) + 1
        self.trajectories[group] = []
        self.note(
            task_drawn=journal_pb2.TaskDrawn(environment="e", task_id=f"t{group}", group=group, episodes=EPISODES)
        )
        return group

    def _end_episodes(self, group: int, attempt: int = 0) -> None:
        names = [f"g{group}-{episode}" for episode in range(EPISODES)]
        self.note(
            episodes_ended=journal_pb2.EpisodesEnded(
                group=group,
                attempt=attempt,
                episodes=[
                    journal_pb2.EndedEpisode(
                        episode=episode,
                        reward=1.0,
                        trajectories=[journal_pb2.AcceptedTrajectory(trajectory_id=name, place=self.place(name))],
                    )
                    for episode, name in enumerate(names)
                ],
            )
        )
        self.trajectories[group] = names

    def group_is_accepted(self) -> None:
        """A group ends, and may be trained."""
        group = self._draw()
        self._end_episodes(group)
        self._accept(group)

    def group_is_accepted_after_a_restart(self) -> None:
        """A process ends while a group runs; the next one begins it again."""
        group = self._draw()
        self.note(process_started=journal_pb2.ProcessStarted(start=2))
        self.note(task_drawn=journal_pb2.TaskDrawn(environment="e", task_id=f"t{group}", group=group, attempt=1))
        self._end_episodes(group, attempt=1)
        self._accept(group)

    def _accept(self, group: int) -> None:
        self.note(group_accepted=journal_pb2.GroupAccepted(group=group))
        self.accepted += EPISODES
        self.ready.append(group)

    def group_fails(self) -> None:
        """A group ends without a trajectory."""
        self.note(group_dropped=journal_pb2.GroupDropped(group=self._draw(), reason="EPISODE_FAILED"))

    def group_is_filtered(self) -> None:
        """A group ends, and no batch may have it."""
        group = self._draw()
        self._end_episodes(group)
        self._drop(group, "NO_SIGNAL")
        self.accepted += EPISODES

    def group_grows_stale(self, reason: str = "STALE") -> None:
        """A group that waits for a batch is given up."""
        if self.ready:
            self._drop(self.ready.pop(0), reason)

    def _drop(self, group: int, reason: str) -> None:
        count = len(self.trajectories[group])
        self.dropped += count
        self.note(group_dropped=journal_pb2.GroupDropped(group=group, reason=reason, trajectories=count))

    def trajectories_are_set_aside(self, count: int = 1) -> None:
        """The first trajectories of a group that waits for a batch can never be trained."""
        if not self.ready:
            return
        group = self.ready[0]
        gone, self.trajectories[group] = self.trajectories[group][:count], self.trajectories[group][count:]
        if not self.trajectories[group]:
            self.ready.pop(0)
        self.dropped += len(gone)
        self.note(
            trajectories_set_aside=journal_pb2.TrajectoriesSetAside(
                group=group, reason="TRAINER_REFUSES", trajectory_ids=gone, problem="too long"
            )
        )

    def group_is_set_aside(self) -> None:
        """A group that waits for a batch can never be trained."""
        self.trajectories_are_set_aside(EPISODES)

    def batch_is_refused(self) -> None:
        """The trainer refuses a trajectory of the newest batch, which is taken apart."""
        if max(self.batches, default=0) > self.applied:
            self.batch_is_unmade()
            self.trajectories_are_set_aside()

    # Batches.

    def batch_is_made(self) -> None:
        """The groups that wait longest become a batch."""
        if len(self.ready) < BATCH_GROUPS:
            return
        groups, self.ready = self.ready[:BATCH_GROUPS], self.ready[BATCH_GROUPS:]
        names = [name for group in groups for name in self.trajectories[group]]
        digests = {name: trajectory_digest(tokens_pb2.Trajectory(trajectory_id=name)) for name in names}
        number = max(self.batches, default=0) + 1
        batch = self.batches[number] = MadeBatch(number, f"run-{number}-{len(self.facts)}", groups, digests)
        self.note(
            batch_made=journal_pb2.BatchMade(
                sequence_no=number,
                batch_id=batch.batch_id,
                groups=groups,
                trajectory_ids=names,
                trajectory_digests=digests.values(),
                content_digest=batch_digest(digests.values()),
            )
        )
        self.note(batch_sent=journal_pb2.BatchSent(sequence_no=number, epoch=self.epoch))

    def batch_is_unmade(self) -> None:
        """The newest batch is taken apart, unless it was applied."""
        if (number := max(self.batches, default=0)) > self.applied:
            self.note(batch_unmade=journal_pb2.BatchUnmade(sequence_no=number))
            self.ready = self.batches.pop(number).groups + self.ready

    def group_of_a_batch_is_damaged(self) -> None:
        """The disk damaged a group of the newest batch, which is taken apart for that."""
        if max(self.batches, default=0) > self.applied:
            self.batch_is_unmade()
            self.group_grows_stale("JOURNAL_DAMAGED")

    def trainer_applies(self) -> None:
        """The trainer applies the next batch; its last trajectory is too old."""
        if self.applied + 1 not in self.batches:
            return
        self.applied += 1
        batch = self.batches[self.applied]
        self.record(
            checkpoint_pb2.BatchRecord(
                policy_version=Version(self.epoch, self.applied).to_proto(),
                batch_id=batch.batch_id,
                sequence_no=self.applied,
                content_digest=batch_digest(batch.digests.values()),
                results=[
                    trainer_pb2.TrajectoryResult(
                        trajectory_id=name,
                        outcome=tokens_pb2.TRAJECTORY_OUTCOME_DROPPED
                        if last
                        else tokens_pb2.TRAJECTORY_OUTCOME_TRAINED,
                        reason="STALE" if last else "",
                        digest=digest,
                    )
                    for (name, digest), last in zip(
                        batch.digests.items(), [*[False] * (len(batch.digests) - 1), True], strict=True
                    )
                ],
            )
        )

    def orchestrator_hears(self) -> None:
        """The orchestrator learns of the next applied batch."""
        if self.heard == self.applied:
            return
        self.heard += 1
        record = next(each for each in reversed(self.records) if each.sequence_no == self.heard)
        names = [each.trajectory_id for each in record.results]
        self.note(
            batch_applied=journal_pb2.BatchApplied(
                sequence_no=self.heard,
                policy_version=record.policy_version,
                trained=names[:-1],
                dropped={"STALE": journal_pb2.DroppedTrajectories(trajectory_ids=names[-1:])},
            )
        )

    # Crashes.

    def checkpoint_is_written(self) -> None:
        """The trainer writes a checkpoint."""
        if not self.applied or any(each.checkpoint.policy_version.number == self.applied for each in self.checkpoints):
            return
        version = next(each for each in reversed(self.records) if each.sequence_no == self.applied).policy_version
        self.checkpoints.append(
            checkpoint_pb2.CheckpointManifest(
                checkpoint=trainer_pb2.Checkpoint(
                    name=f"step_{self.applied}",
                    policy_version=version,
                    last_batch_id=self.batches[self.applied].batch_id,
                    journal_position=len(self.facts),
                )
            )
        )
        self.origin = Version.from_proto(version)
        self.note(
            checkpoint_covered=journal_pb2.CheckpointCovered(
                name=f"step_{self.applied}", policy_version=version, position=len(self.facts)
            )
        )

    def trainer_is_killed(self) -> None:
        """The trainer starts again from its newest checkpoint; the orchestrator learns what that holds."""
        self._begin_epoch()
        self.applied = self.origin.number
        self.heard = min(self.heard, self.applied)
        while self.heard < self.applied:
            self.orchestrator_hears()

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.lineage = self.lineage.begin(self.epoch, self.origin)
        self.note(epoch_allotted=journal_pb2.EpochAllotted(epoch=self.epoch))
        self.note(epoch_begun=journal_pb2.EpochBegun(epoch=self.epoch, origin=self.origin.to_proto()))

    def happens(self) -> list[Callable[[], None]]:
        """Return all that may happen."""
        return [
            self.group_is_accepted,
            self.group_is_accepted_after_a_restart,
            self.group_fails,
            self.group_is_filtered,
            self.group_grows_stale,
            self.batch_is_made,
            self.batch_is_unmade,
            self.group_of_a_batch_is_damaged,
            self.trajectories_are_set_aside,
            self.group_is_set_aside,
            self.batch_is_refused,
            self.trainer_applies,
            self.orchestrator_hears,
            self.checkpoint_is_written,
            self.trainer_is_killed,
        ]

    def play(self, numbers: list[int]) -> None:
        """Let things happen, each named by its place in `happens`."""
        events = self.happens()
        for number in numbers:
            events[number % len(events)]()

    def trains(self, batches: int) -> None:
        """Make, apply and hear of some batches."""
        for _ in range(batches):
            for event in [*[self.group_is_accepted] * BATCH_GROUPS, self.batch_is_made, self.trainer_applies]:
                event()
            self.orchestrator_hears()
