"""A run with the real journal whose process dies at any write, beside a trainer that dies as well: nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import pytest
from crashing_disk import CrashedError, CrashingDisk, Inline
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator_svc.config import EnvironmentConfig
from orchestrator_svc.journal import snapshot, store
from orchestrator_svc.journal.episodes import JournaledEpisodes
from orchestrator_svc.journal.facts import Reason, Stage
from orchestrator_svc.journal.ledger import Batch, Group, Ledger, folded
from orchestrator_svc.journal.records import Beginning, SharedRecord, encode
from orchestrator_svc.journal.segments import JournalError
from orchestrator_svc.journal.snapshot import FILE, Snapshots
from orchestrator_svc.journal.store import Journal, JournalLimits, read_facts
from orchestrator_svc.run.curriculum import Curriculum
from orchestrator_svc.run.live_settings import ratio_key
from orchestrator_svc.run.scheduler import OnStale, Scheduler, StalenessBound, window_size
from orchestrator_svc.run.setting_aside import BatchRefusedError, refused
from orchestrator_svc.run.status import describe_environments
from sluice.digests import batch_digest, trajectory_digest
from sluice.environments.base import Task
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import orchestrator_pb2, rollout_pb2, tokens_pb2
from sluice.versions import BASE, Lineage, Version

GROUP = 2
STEPS = 10
MEMORY = Path("/dev/shm")


def new_curriculum() -> Curriculum:
    """Return a curriculum without facts: two environments at three to one, one of them with pools."""
    pooled = EnvironmentConfig(name="e", environment="m:E", ratio=3, quarantine_after=2, pools={"enabled": True})
    limited = EnvironmentConfig(name="f", environment="m:F", quarantine_after=2, max_running=3)
    tasks = [Task(f"t{number}") for number in range(24)]
    return Curriculum([(pooled, tasks), (limited, tasks)], seed=1)


def described(curriculum: Curriculum) -> list[orchestrator_pb2.RunEnvironment | pb.CurriculumNoted]:
    """All that facts say about the choice of tasks."""
    return [*describe_environments(curriculum), curriculum.noted()]


@dataclass
class Trainer:
    """Applies batches in order; keeps checkpoints and, as a real one, a record of what its weights hold."""

    version: Version = BASE
    lineage: Lineage = field(default_factory=Lineage)
    is_open: bool = False
    queue: list[tuple[int, int, list[tokens_pb2.Trajectory]]] = field(default_factory=list)
    record: dict[int, pb.BatchApplied] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    checkpoints: list[tuple[Version, int]] = field(default_factory=list)
    spare: bool = False

    def crash(self, *, damaged: bool = False) -> None:
        """Die. With `damaged`, the disk also damages the newest checkpoint, so that the next start takes the previous one."""
        self.is_open = False
        self.queue.clear()
        if damaged and self.spare:
            self.checkpoints.pop()
            self.spare = False

    def begin_epoch(self, epoch: int, last_seq: int) -> Version:
        usable = [version for version, position in self.checkpoints if position <= last_seq]
        assert len(usable) == len(self.checkpoints), "a checkpoint names a fact that was lost"
        origin = usable[-1] if usable else BASE
        self.version, self.is_open = Version(epoch, origin.number), True
        self.lineage = self.lineage.begin(epoch, origin)
        self.queue.clear()
        for number in [each for each in self.record if each > origin.number]:
            del self.record[number], self.digests[number]
        return origin

    @property
    def last_accepted(self) -> int:
        return self.version.number + len(self.queue)

    def submit(self, number: int, max_staleness: int, trajectories: list[tokens_pb2.Trajectory]) -> None:
        assert number == self.last_accepted + 1
        self.queue.append((number, max_staleness, trajectories))

    def apply(self, late: str) -> None:
        """Apply the oldest batch; `late` is a trajectory that it declares too old."""
        number, max_staleness, trajectories = self.queue.pop(0)
        for each in trajectories:
            for span in each.version_spans:
                staleness = self.lineage.staleness(Version.from_proto(span.policy_version), self.version)
                assert staleness <= max_staleness
        self.version = Version(self.version.epoch, number)
        outcome = pb.BatchApplied(sequence_no=number, policy_version=self.version.to_proto())
        for each in trajectories:
            if each.trajectory_id == late:
                outcome.dropped[Reason.STALE].trajectory_ids.append(late)
            else:
                outcome.trained.append(each.trajectory_id)
        self.record[number] = outcome
        self.digests[number] = batch_digest(map(trajectory_digest, trajectories))


class CrashingRun(RuleBasedStateMachine):
    """One run: its directory outlives the processes that die."""

    @initialize(
        staleness=st.integers(0, 2),
        batch=st.integers(1, 4),
        window=st.sampled_from([0.0, 0.3, 1.0]),
        seed=st.integers(0, 1 << 16),
    )
    def begin(self, staleness, batch, window, seed):
        self.chance = random.Random(seed)
        self.bound, self.first_staleness = StalenessBound(staleness, batch, 1000), staleness
        self.window_fraction, self.window = window, window_size(batch, window)
        self.home = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.directory = Path(self.home.name)
        self.loop = asyncio.Runner()
        self.trainer = Trainer()
        self.replica = BASE
        self.held: set[str] = set()
        self.changed: dict[str, str] = {}
        self.changing: dict[str, str] = {}
        self.durable_seq = 0
        self.disk = CrashingDisk(None, after=False, chance=self.chance)
        self.start()

    # The process.

    def start(self):
        """Start a process; one whose disk kills it at once is started again."""
        while True:
            try:
                with patch.object(store, "SerialThread", Inline), patch.object(snapshot, "_VALUES_PER_FACT", 1 << 30):
                    self.curriculum = new_curriculum()
                    self.journal = Journal(
                        self.directory,
                        {"run": "r"},
                        limits=JournalLimits(fsync_interval_s=0.0, segment_bytes=400),
                        follow=self.curriculum.apply_fact,
                        snapshots=Snapshots((self.curriculum,), (), least_facts=self.chance.choice((1, 5, 30))),
                        disk=self.disk,
                    )
            except CrashedError:
                self.disk.lose()
                self.disk = CrashingDisk(None, after=False, chance=self.chance)
            else:
                break
        self.ledger: Ledger = self.journal.ledger
        assert self.ledger == folded(read_facts(self.directory))
        assert self.ledger.last_seq > self.durable_seq, "what was durable is lost"
        assert self.held <= self.ledger.weight_policies.keys(), "a replica stays at its version, and nobody knows"
        for key, value in self.changed.items():
            later = self.changing.get(key)  # it was not answered yet, but the disk may have it
            assert self.ledger.settings[key] in {value, later}, "an operator was told that this is set"
        self.changed = dict(self.ledger.settings)
        self.bound = replace(self.bound, max_staleness=self.max_staleness())
        self.scheduler = Scheduler(
            self.ledger,
            self.bound,
            window_fraction=self.window_fraction,
            on_stale=OnStale.REQUEUE,
            max_steps=STEPS,
            max_running=1000,
        )
        self.unfinished = {n for n, group in self.ledger.groups.items() if group.stage is Stage.RUNNING}
        self.run(self.open_epoch())

    def max_staleness(self):
        """As `LiveSettings.restore` does."""
        return int(self.ledger.settings.get("max_staleness", self.first_staleness))

    def run(self, work):
        """Do some work of the process; it may die meanwhile."""
        try:
            return self.loop.run(work)
        except JournalError:
            assert self.disk.dead
            self.killed(None, after=False)

    def killed(self, calls, *, after):
        """End the process, lose unsynced writes, and start the next process, which dies at a call of its disk."""

        async def leave():
            if self.journal._flushing is not None:
                self.journal._flushing.cancel()
                await asyncio.wait({self.journal._flushing})
            self.journal._connection.close()

        self.loop.run(leave())
        self.disk.lose()
        written = self.directory / "journal" / FILE
        if written.exists() and self.chance.random() < 0.2:
            content = written.read_bytes()
            written.write_bytes(content[: self.chance.randrange(len(content))])
        self.disk = CrashingDisk(calls, after=after, chance=self.chance)
        self.start()

    async def durable(self):
        self.durable_seq = await self.journal.durable()
        if self.chance.random() < 0.2:
            assert folded(read_facts(self.directory)) == self.ledger
            again = new_curriculum()
            for _, fact in read_facts(self.directory):
                again.apply_fact(fact)
            assert described(again) == described(self.curriculum)
            assert again.choose_task(0.0, self.ledger.redraws) == self.curriculum.choose_task(0.0, self.ledger.redraws)

    def record(self, **kind):
        self.journal.record_fact(pb.Fact(**kind))

    async def open_epoch(self):
        """As `Training` does."""
        ledger, trainer = self.ledger, self.trainer
        self.scheduler.is_open = False
        lived_on = trainer.is_open and trainer.version.epoch == ledger.epoch > 0
        if not lived_on or trainer.version.number < ledger.applied:
            epoch = ledger.allotted + 1
            self.record(epoch_allotted=pb.EpochAllotted(epoch=epoch))
            await self.durable()
            origin = trainer.begin_epoch(epoch, ledger.last_seq)
            ledger.check_reach(origin.number)
            self.record(epoch_begun=pb.EpochBegun(epoch=epoch, origin=origin.to_proto()))
        to_send = [batch for batch in ledger.to_send if batch.sequence_no > trainer.last_accepted]
        for place, batch in enumerate(to_send):
            if not self.scheduler.is_fresh(batch):
                for each in reversed(to_send[place:]):
                    self.record(batch_unmade=pb.BatchUnmade(sequence_no=each.sequence_no))
                break
        await self.durable()
        for batch in ledger.unreported:
            self.take_in(trainer.record[batch.sequence_no])
        self.scheduler.is_open = True

    # What happens in a run.

    @rule(calls=st.integers(1, 24), after=st.booleans())
    def the_next_process_dies_at_a_write(self, calls, after):
        self.killed(calls, after=after)

    @rule()
    def the_process_is_killed(self):
        self.killed(None, after=False)

    @rule(damaged=st.booleans())
    def the_trainer_is_killed(self, damaged):
        self.trainer.crash(damaged=damaged)
        self.run(self.open_epoch())

    @rule(calls=st.integers(1, 24), after=st.booleans(), damaged=st.booleans())
    def both_are_killed(self, calls, after, damaged):
        self.trainer.crash(damaged=damaged)
        self.killed(calls, after=after)

    @rule()
    def the_replica_follows(self):
        self.replica = self.trainer.version

    @rule()
    def facts_reach_the_disk(self):
        self.run(self.durable())

    @rule(wanted=st.integers(1, 6))
    def dispatch(self, wanted):
        async def start():
            for _ in range(wanted):
                if self.unfinished:
                    self.continue_one()
                    continue
                version = self.scheduler.wanted_version()
                if version is None or self.replica < version:
                    return
                if (drawn := self.next_task()) is None:
                    return
                self.draw(drawn)

        self.run(start())

    def next_task(self):
        owed = self.ledger.redraws
        while owed and (reason := self.curriculum.why_not_again(owed[0])):
            first = owed[0]
            dropped = pb.RedrawDropped(environment=first.environment, task_id=first.task_id, position=first.position)
            dropped.redraw_reason, dropped.reason = first.reason, reason
            self.record(redraw_dropped=dropped)
        draw = self.curriculum.choose_task(0.0, self.ledger.redraws)
        if draw is None:
            return None
        return pb.TaskDrawn(
            environment=draw.environment,
            task_id=draw.task_id,
            group=self.ledger.next_group,
            position=draw.position,
            redraw_reason=draw.reason,
            draw=draw.draw,
            passed_over=draw.passed_over,
        )

    def draw(self, drawn):
        drawn.episodes = GROUP
        drawn.policy_version.CopyFrom(self.replica.to_proto())
        self.record(task_drawn=drawn)

    def continue_one(self):
        """As `Dispatcher` does."""
        group = self.ledger.groups[min(self.unfinished)]
        wanted = self.scheduler.wanted_version_of(group)
        if wanted is None or self.replica < wanted:
            return
        self.unfinished.discard(group.number)
        if not self.scheduler.goes_on(group):
            again = pb.TaskDrawn(group=group.number, attempt=group.attempt + 1, environment=group.environment)
            again.task_id, again.position = group.task_id, group.position
            self.draw(again)

    def running(self):
        return [g for n, g in self.ledger.groups.items() if g.stage is Stage.RUNNING and n not in self.unfinished]

    @precondition(lambda self: self.running())
    @rule(choice=st.integers(0, 100))
    def a_replica_answers(self, choice):
        async def answer():
            groups = self.running()
            self.sample(groups[choice % len(groups)])

        self.run(answer())

    def sample(self, group):
        if group.generations:
            return
        spans = [tokens_pb2.VersionSpan(policy_version=self.replica.to_proto())]
        samples = [rollout_pb2.GeneratedSample(index=i, version_spans=spans) for i in range(GROUP)]
        response = rollout_pb2.GenerateResponse(samples=samples)
        JournaledEpisodes(self.journal, group).keep_generation(group.attempt, 0, range(GROUP), "r", response)

    @precondition(lambda self: any(not each.lost for each in self.running()))
    @rule(choice=st.integers(0, 100))
    def an_episode_is_lost(self, choice):
        async def lose():
            groups = [each for each in self.running() if not each.lost]
            group = groups[choice % len(groups)]
            JournaledEpisodes(self.journal, group).keep_loss(choice % GROUP, Reason.EPISODE_DEADLINE)

        self.run(lose())

    @precondition(lambda self: self.running())
    @rule(choice=st.integers(0, 100), fails=st.sampled_from([False, False, False, True]))
    def a_group_ends(self, choice, fails):
        async def end():
            groups = self.running()
            await self.end(groups[choice % len(groups)], fails=fails)

        self.run(end())

    async def end(self, group: Group, *, fails: bool):
        if fails:
            reason = self.chance.choice([Reason.EPISODE_FAILED, Reason.EPISODE_DEADLINE, Reason.NO_SIGNAL])
            failures = self.curriculum.to_quarantine(group.number, reason)
            self.record(group_dropped=pb.GroupDropped(group=group.number, reason=reason))
            if failures:
                quarantined = pb.TaskQuarantined(
                    environment=group.environment, task_id=group.task_id, failures=failures
                )
                self.record(task_quarantined=quarantined)
            return
        self.sample(group)
        response = await JournaledEpisodes(self.journal, group).generation(group.attempt, 0, range(GROUP))
        assert response is not None
        shared = Beginning.of(range(group.number), tokens_pb2.Conversation()) if group.number % 2 else None
        records = [
            SharedRecord(
                orchestrator_pb2.TrajectoryRecord(
                    trajectory=tokens_pb2.Trajectory(
                        trajectory_id=f"g{group.number}-{each.index}",
                        token_ids=[each.index],
                        version_spans=each.version_spans,
                    )
                ),
                shared,
            )
            for each in response.samples
            if each.index not in group.lost
        ]
        kept = self.journal.keep_trajectories(group.number, encode(records))
        alive = [each for each in range(GROUP) if each not in group.lost]
        episodes = [
            pb.EndedEpisode(episode=index, reward=float((group.number + index) % 3 == 0), trajectories=[each])
            for index, each in zip(alive, kept.trajectories, strict=True)
        ]
        ended = pb.EpisodesEnded(group=group.number, episodes=episodes, beginnings=kept.beginnings)
        self.record(episodes_ended=ended)
        versions = {
            span.policy_version.SerializeToString(): span.policy_version for span in response.samples[0].version_spans
        }
        self.record(group_accepted=pb.GroupAccepted(group=group.number, policy_versions=versions.values()))

    @rule()
    def make_a_batch(self):
        self.run(self.make_batch())

    async def make_batch(self):
        for group in self.scheduler.stale_groups():
            dropped = pb.GroupDropped(group=group.number, reason=Reason.STALE, trajectories=group.size)
            dropped.redraw = not group.redrawn
            self.record(group_dropped=dropped)
        groups = self.scheduler.choose_batch()
        if groups is None:
            return
        trajectories = await self.trajectories(groups)
        digests = [trajectory_digest(each) for each in trajectories]
        number = self.ledger.next_batch
        made = pb.BatchMade(sequence_no=number, batch_id=f"b{number}", groups=[each.number for each in groups])
        made.trajectory_ids.extend(each.trajectory_id for each in trajectories)
        made.trajectory_digests.extend(digests)
        made.content_digest = batch_digest(digests)
        made.max_staleness = self.scheduler.bound.max_staleness
        self.record(batch_made=made)

    async def trajectories(self, groups):
        return [each.whole_trajectory() for group in groups for each in await self.journal.trajectories(group)]

    @precondition(lambda self: self.next_to_send() is not None)
    @rule()
    def send_a_batch(self):
        self.run(self.send())

    def next_to_send(self) -> Batch | None:
        waiting = [each for each in self.ledger.to_send if each.sequence_no > self.trainer.last_accepted]
        return waiting[0] if waiting and self.trainer.is_open and len(self.trainer.queue) < 2 else None

    async def send(self):
        batch = self.next_to_send()
        trajectories = await self.trajectories(batch.groups)
        assert batch.digests == tuple(trajectory_digest(each) for each in trajectories), "not the same bytes"
        await self.durable()
        self.trainer.submit(batch.sequence_no, self.scheduler.bound_of(batch), trajectories)
        self.record(batch_sent=pb.BatchSent(sequence_no=batch.sequence_no, epoch=self.ledger.epoch))

    @precondition(lambda self: self.next_to_send() is not None)
    @rule(rows=st.sets(st.integers(0, 9), max_size=3))
    def the_trainer_refuses_a_batch(self, rows):
        self.run(self.refuse(frozenset(rows)))

    async def refuse(self, rows):
        """Do as `Training` does: dissolve this batch and all later ones, and set the refused trajectories aside."""
        batch = self.next_to_send()
        found = [(group, await self.journal.trajectories(group)) for group in batch.groups]
        later = [each for each in self.ledger.to_send if each.sequence_no >= batch.sequence_no]
        for each in reversed(later):
            self.record(batch_unmade=pb.BatchUnmade(sequence_no=each.sequence_no))
        for fact in refused(found, BatchRefusedError(rows, "too long")):
            self.journal.record_fact(fact)

    @precondition(lambda self: self.trainer.queue)
    @rule(late=st.booleans())
    def the_trainer_applies_a_batch(self, late):
        self.trainer.apply(self.trainer.queue[0][2][0].trajectory_id if late else "")

    def may_report(self) -> bool:
        return self.ledger.applied < self.trainer.version.number and self.trainer.is_open

    @precondition(may_report)
    @rule()
    def a_report_arrives(self):
        async def report():
            self.take_in(self.trainer.record[self.ledger.applied + 1])

        self.run(report())

    def take_in(self, outcome):
        applied = pb.BatchApplied()
        applied.CopyFrom(outcome)
        late = {each for dropped in outcome.dropped.values() for each in dropped.trajectory_ids}
        for group in self.ledger.batches[outcome.sequence_no].groups:
            if not group.redrawn and any(each.trajectory_id in late for each in group.trajectories):
                applied.redrawn.append(group.number)
        self.record(batch_applied=applied)

    @precondition(lambda self: self.trainer.is_open)
    @rule()
    def a_checkpoint_is_written(self):
        async def save():
            self.record(curriculum_noted=self.curriculum.noted())
            await self.durable()
            position, version = self.durable_seq, self.trainer.version
            self.trainer.checkpoints.append((version, position))
            self.trainer.spare = True
            covered = pb.CheckpointCovered(name="c", policy_version=version.to_proto(), position=position)
            self.record(checkpoint_covered=covered)

        self.run(save())

    @rule(staleness=st.integers(0, 3), ratio=st.sampled_from([0.5, 3.0, 9.0]))
    def settings_are_changed(self, staleness, ratio):
        async def change():
            self.changing = values = {"max_staleness": str(staleness), ratio_key("e"): str(ratio)}
            for key, value in values.items():
                self.record(setting_changed=pb.SettingChanged(key=key, new_value=value))
            self.bound = replace(self.bound, max_staleness=staleness)
            self.scheduler.change_bound(self.bound)
            await self.durable()
            self.changed = values  # from here on the operator knows

        self.run(change())

    @rule(replica=st.sampled_from("ab"))
    def an_evaluation_holds_a_replica(self, replica):
        async def hold():
            noted = pb.WeightPolicyNoted(replica=replica, mode=rollout_pb2.WEIGHT_POLICY_MODE_HOLD)
            self.record(weight_policy_noted=noted)
            await self.durable()
            self.held.add(replica)

        self.run(hold())

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 1))
    def a_replica_follows_again(self, choice):
        async def follow():
            replica = sorted(self.held)[choice % len(self.held)]
            self.held.discard(replica)
            noted = pb.WeightPolicyNoted(replica=replica, mode=rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW)
            self.record(weight_policy_noted=noted)

        self.run(follow())

    @rule(rounds=st.integers(1, 3), late=st.booleans(), fails=st.integers(0, 3), waits=st.integers(0, 1))
    def a_stretch_of_the_run(self, rounds, late, fails, waits):
        """Play the normal course of a run for some rounds, so that a death at a write may hit it at any point."""
        for _ in range(rounds):
            self.a_round(late, fails, waits)

    def a_round(self, late, fails, waits):
        self.the_replica_follows()
        self.dispatch(8)
        for place in range(max(0, len(self.running()) - waits)):
            if self.running():
                self.a_group_ends(place, fails=place < fails)
        self.make_a_batch()
        if self.next_to_send() is not None:
            self.send_a_batch()
        if self.trainer.queue:
            self.the_trainer_applies_a_batch(late=late)
        if self.may_report():
            self.a_report_arrives()

    # What must be true.

    @invariant()
    def every_trajectory_is_accounted_for(self):
        if hasattr(self, "ledger"):
            ledger = self.ledger
            waiting = sum(group.size for group in ledger.groups.values() if group.stage is not Stage.RUNNING)
            assert ledger.accepted - ledger.trained - sum(ledger.dropped.values()) == waiting

    @invariant()
    def an_old_group_is_passed_by_few(self):
        if hasattr(self, "ledger") and self.ledger.epoch == 1:
            assert all(group.passed <= self.window - 1 for group in self.ledger.groups.values())

    def teardown(self):
        """Whatever happened, a run whose parts work from now on comes to its end, with every trajectory trained once or dropped."""
        if not hasattr(self, "ledger"):
            return
        self.killed(None, after=False)
        for _ in range(200):
            if self.ledger.applied >= STEPS:
                break
            self.the_replica_follows()
            self.dispatch(20)
            while self.running():
                self.a_group_ends(0, fails=False)
            self.make_a_batch()
            while self.next_to_send() is not None:
                self.send_a_batch()
            while self.trainer.queue:
                self.the_trainer_applies_a_batch(late=False)
            while self.may_report():
                self.a_report_arrives()
        self.facts_reach_the_disk()
        assert self.ledger.applied == STEPS
        self.check_the_end()
        self.loop.run(self.journal.close())
        self.loop.close()
        self.home.cleanup()

    def check_the_end(self):
        facts = [fact for _, fact in read_facts(self.directory)]
        applied, made, accepted, dropped = {}, {}, Counter(), Counter()
        redraws, redrawn = [], []
        names = defaultdict(set)
        for fact in facts:
            kind = fact.WhichOneof("kind")
            if kind == "episodes_ended":
                ended = fact.episodes_ended
                found = [each.trajectory_id for e in ended.episodes for each in e.trajectories]
                accepted.update(found)
                names[ended.group].update(found)
            elif kind == "batch_made":
                made[fact.batch_made.sequence_no] = fact.batch_made
            elif kind == "batch_applied":
                applied[fact.batch_applied.sequence_no] = fact.batch_applied
                redraws += fact.batch_applied.redrawn
            elif kind == "epoch_begun":
                applied = {n: each for n, each in applied.items() if n <= fact.epoch_begun.origin.number}
            elif kind == "task_drawn" and fact.task_drawn.redraw_reason == Reason.STALE:
                redrawn.append(fact.task_drawn.position)
            elif kind == "group_dropped" and fact.group_dropped.reason == Reason.STALE:
                redraws += [fact.group_dropped.group] * fact.group_dropped.redraw
                left = names[fact.group_dropped.group] - dropped.keys() if fact.group_dropped.trajectories else set()
                assert len(left) == fact.group_dropped.trajectories
                dropped.update(left)
            elif kind == "trajectories_set_aside":
                dropped.update(fact.trajectories_set_aside.trajectory_ids)
        trained = Counter(each for fact in applied.values() for each in fact.trained)
        late = Counter(each for fact in applied.values() for each in fact.dropped[Reason.STALE].trajectory_ids)
        left = Counter(each.trajectory_id for group in self.ledger.groups.values() for each in group.trajectories)
        assert accepted == trained + late + dropped + left
        assert set(accepted.values()) <= {1}
        assert self.ledger.lost_episodes == lost_for_good(facts)
        assert trained == Counter(each for fact in self.trainer.record.values() for each in fact.trained)
        assert {n: made[n].content_digest for n in applied} == self.trainer.digests
        settled = len(redrawn) + self.ledger.redraws_dropped.total()
        assert len(redraws) == len(set(redraws)) == settled + len(self.ledger.redraws)
        assert all(not self.curriculum.why_not_again(each) for each in self.ledger.redraws[:1])


def lost_for_good(facts: list[pb.Fact]) -> Counter[str]:
    """Count the episodes that accepted groups lack; an attempt at a group that begins again has them all."""
    lost, counted = defaultdict(list), Counter()
    for fact in facts:
        lost.pop(fact.task_drawn.group, None)
        ended = fact.episodes_ended
        lost[ended.group] += [each.reason for each in ended.episodes if not each.trajectories]
        counted.update(lost[fact.group_accepted.group] if fact.HasField("group_accepted") else ())
    return counted


CrashingRun.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestCrashingRun = pytest.mark.slow(CrashingRun.TestCase)


@pytest.mark.slow
@pytest.mark.soak
class TestManyCrashingRuns(CrashingRun.TestCase):
    """More of the same."""

    settings = settings(max_examples=200, stateful_step_count=40)
