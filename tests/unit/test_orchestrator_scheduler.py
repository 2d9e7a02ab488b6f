"""The scheduler under a simulated run: any interleaving of replicas that lag, stragglers, failures, filters and crashes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator_svc.journal.facts import LedgerError, Reason, Stage
from orchestrator_svc.journal.ledger import Batch, Group, Ledger
from orchestrator_svc.run.scheduler import OnStale, Scheduler, StalenessBound
from sluice.v1 import journal_pb2 as pb
from sluice.versions import BASE, Lineage, Version

GROUP = 4


class Facts:
    """Facts of a run in few words; they change the ledger alone."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def record(self, **kind: object) -> None:
        self.ledger.apply_fact(self.ledger.last_seq + 1, pb.Fact(**kind))

    def draw(self, number: int, version: Version) -> Group:
        self.record(task_drawn=pb.TaskDrawn(group=number, position=number, policy_version=version.to_proto()))
        return self.ledger.groups[number]

    def accept(self, number: int, versions: Iterable[Version], trajectories: int) -> None:
        accepted = [pb.AcceptedTrajectory(trajectory_id=f"g{number}-{index}") for index in range(trajectories)]
        ended = pb.EndedEpisode(trajectories=accepted)
        self.record(episodes_ended=pb.EpisodesEnded(group=number, episodes=[ended]))
        sampled = [each.to_proto() for each in sorted(versions)]
        self.record(group_accepted=pb.GroupAccepted(group=number, policy_versions=sampled))

    def drop(self, number: int, reason: str) -> None:
        self.record(group_dropped=pb.GroupDropped(group=number, reason=reason))

    def filter(self, number: int, trajectories: int) -> None:
        names = [f"g{number}-{index}" for index in range(trajectories)]
        ended = pb.EndedEpisode(reason=Reason.NO_SIGNAL, untrainable=names)
        self.record(episodes_ended=pb.EpisodesEnded(group=number, episodes=[ended]))
        self.drop(number, Reason.NO_SIGNAL)

    def make_batch(self, groups: Iterable[Group], max_staleness: int | None = None) -> Batch:
        number, members = self.ledger.next_batch, [each.number for each in groups]
        self.record(batch_made=pb.BatchMade(sequence_no=number, groups=members, max_staleness=max_staleness))
        return self.ledger.batches[number]

    def unmake_unfit(self, scheduler: Scheduler) -> None:
        """Take the batches apart that are too old, as `Training` does at the begin of an epoch."""
        to_send = self.ledger.to_send
        for place, batch in enumerate(to_send):
            if not scheduler.is_fresh(batch):
                for each in reversed(to_send[place:]):
                    self.record(batch_unmade=pb.BatchUnmade(sequence_no=each.sequence_no))
                return

    def apply(self, number: int, trained: int, dropped: int = 0) -> None:
        """Note the outcome of a batch: `trained` trajectories were trained, `dropped` were too old."""
        late = {Reason.STALE: pb.DroppedTrajectories(trajectory_ids=map(str, range(dropped)))} if dropped else {}
        outcome = pb.BatchApplied(sequence_no=number, trained=map(str, range(trained)), dropped=late)
        self.record(batch_applied=outcome)

    def begin_epoch(self, scheduler: Scheduler, origin: Version) -> None:
        epoch = self.ledger.epoch + 1
        self.record(epoch_begun=pb.EpochBegun(epoch=epoch, origin=origin.to_proto()))
        self.unmake_unfit(scheduler)
        scheduler.is_open = True


@dataclass
class Running:
    """Tokens of a running group, by the versions that its replica has served while it ran."""

    replica: int
    versions: set[Version] = field(default_factory=set)


class SimulatedRun(RuleBasedStateMachine):
    """Replicas follow the trainer as late as they like; the trainer applies batches one by one; limits change at any moment."""

    @initialize(
        staleness=st.integers(0, 3),
        batch=st.integers(1, 6),
        replicas=st.integers(1, 3),
        window=st.sampled_from([0.0, 0.3, 1.0]),
        on_stale=st.sampled_from([OnStale.DROP, OnStale.REQUEUE]),
    )
    def begin(self, staleness, batch, replicas, window, on_stale):
        self.max_steps = 12
        self.ledger = Ledger()
        self.facts = Facts(self.ledger)
        self.scheduler = Scheduler(
            self.ledger,
            StalenessBound(staleness, batch, 1000),
            window_fraction=window,
            on_stale=on_stale,
            max_steps=self.max_steps,
            max_running=1000,
        )
        self.largest_capacity = self.scheduler.bound.capacity
        self.window = max(1, int(window * batch))
        self.replicas = [BASE] * replicas
        self.running: dict[int, Running] = {}
        self.tokens: dict[int, set[Version]] = {}
        self.history: dict[int, list[int]] = {}
        self.checkpoint = BASE
        self.open_epoch()

    def open_epoch(self):
        for number in [each for each in self.history if each > self.checkpoint.number]:
            del self.history[number]
        self.facts.begin_epoch(self.scheduler, self.checkpoint)

    @property
    def trainer(self) -> Version:
        return Version(self.ledger.epoch, self.ledger.applied)

    @rule(data=st.data())
    def replica_follows(self, data):
        index = data.draw(st.integers(0, len(self.replicas) - 1))
        same_epoch = self.replicas[index].epoch == self.ledger.epoch
        oldest = self.replicas[index].number if same_epoch else self.checkpoint.number
        newest = max(oldest, self.trainer.number)
        self.serve(index, Version(self.ledger.epoch, data.draw(st.integers(oldest, newest))))

    def serve(self, index, version):
        self.replicas[index] = version
        for group in self.running.values():
            if group.replica == index:
                group.versions.add(version)

    @rule(data=st.data(), wanted=st.integers(1, 8))
    def dispatch(self, data, wanted):
        for _ in range(wanted):
            version = self.scheduler.wanted_version()
            fit = [i for i, each in enumerate(self.replicas) if version is not None and each >= version]
            if not fit:
                return
            index = data.draw(st.sampled_from(fit))
            number = self.ledger.next_group
            self.facts.draw(number, self.replicas[index])
            self.running[number] = Running(index, {self.replicas[index]})
            assert len(self.ledger.groups) <= self.scheduler.bound.capacity

    @rule(staleness=st.integers(0, 4), spare=st.integers(0, 8), running=st.integers(1, 20))
    def limits_are_changed(self, staleness, spare, running):
        batch = self.scheduler.bound.batch_groups
        self.scheduler.change_bound(StalenessBound(staleness, batch, batch + spare))
        self.scheduler.max_running = running
        self.largest_capacity = max(self.largest_capacity, self.scheduler.bound.capacity)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fate=st.sampled_from(["scored", "scored", "scored", "failed", "filtered"]))
    def episode_ends(self, data, fate):
        self.end(data.draw(st.sampled_from(sorted(self.running))), fate)

    def end(self, number, fate):
        group = self.running.pop(number)
        if fate == "failed":
            self.facts.drop(number, Reason.EPISODE_FAILED)
        elif fate == "filtered":
            self.facts.filter(number, GROUP)
        else:
            self.tokens[number] = group.versions
            self.facts.accept(number, group.versions, GROUP)

    @rule()
    def make_batch(self):
        for group in self.scheduler.stale_groups():
            self.facts.drop(group.number, Reason.STALE)
        groups = self.scheduler.choose_batch()
        if groups is None:
            return
        assert len(groups) == self.scheduler.bound.batch_groups
        assert all(group.stage is Stage.READY for group in groups)
        self.facts.make_batch(groups, self.scheduler.bound.max_staleness)

    @precondition(lambda self: self.ledger.batches)
    @rule()
    def train(self):
        number = self.ledger.applied + 1
        batch = self.ledger.batches[number]
        for group in batch.groups:
            for version in self.tokens[group.number]:
                staleness = number - 1 - self.ledger.lineage.number(version)
                assert staleness <= self.scheduler.bound_of(batch)
        self.facts.apply(number, GROUP * len(batch.groups))
        self.history[number] = [group.number for group in batch.groups]

    @rule()
    def save_checkpoint(self):
        self.checkpoint = self.trainer

    @rule()
    def trainer_crashes(self):
        self.open_epoch()

    @invariant()
    def live_groups_are_bounded(self):
        if not hasattr(self, "scheduler"):
            return
        rolled_back = self.ledger.epoch > 1
        assert rolled_back or len(self.ledger.groups) <= self.largest_capacity

    @invariant()
    def an_old_group_is_passed_by_few(self):
        if hasattr(self, "scheduler") and self.ledger.epoch == 1:
            assert all(group.passed <= self.window - 1 for group in self.ledger.groups.values())

    @invariant()
    def each_group_is_trained_once(self):
        if hasattr(self, "scheduler"):
            trained = [group for groups in self.history.values() for group in groups]
            assert len(trained) == len(set(trained))
            assert self.ledger.trained == GROUP * len(trained)

    @invariant()
    def every_trajectory_is_accounted_for(self):
        if hasattr(self, "scheduler"):
            ledger = self.ledger
            waiting = sum(len(g.trajectories) for g in ledger.groups.values() if g.stage is not Stage.RUNNING)
            assert ledger.accepted - ledger.trained - sum(ledger.dropped.values()) == waiting

    def teardown(self):
        """Whatever happened, a run whose parts work from now on comes to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(1000):
            if self.ledger.applied >= self.max_steps:
                break
            for index in range(len(self.replicas)):
                self.serve(index, self.trainer)
            while (version := self.scheduler.wanted_version()) is not None:
                assert version <= self.trainer
                number = self.ledger.next_group
                self.facts.draw(number, self.trainer)
                self.running[number] = Running(0, {self.trainer})
            for number in sorted(self.running):
                self.end(number, "scored")
            self.make_batch()
            if self.ledger.batches:
                self.train()
        assert self.ledger.applied == self.max_steps


SimulatedRun.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestSimulatedRun = pytest.mark.slow(SimulatedRun.TestCase)


def scheduler(staleness: int, batch: int = 2, *, window: float = 0.3, steps: int = 10) -> tuple[Scheduler, Facts]:
    ledger = Ledger()
    made = Scheduler(
        ledger,
        StalenessBound(staleness, batch, 100),
        window_fraction=window,
        on_stale=OnStale.DROP,
        max_steps=steps,
        max_running=100,
    )
    facts = Facts(ledger)
    facts.begin_epoch(made, BASE)
    return made, facts


def run_batch(each: Scheduler, facts: Facts, first: int, version: Version) -> Batch:
    """Dispatch, finish and batch the groups of one batch."""
    numbers = range(first, first + each.bound.batch_groups)
    for number in numbers:
        facts.draw(number, version)
    for number in numbers:
        facts.accept(number, [version], 1)
    groups = each.choose_batch()
    assert groups is not None
    return facts.make_batch(groups)


def test_without_staleness_generation_waits_for_the_version_of_the_last_batch() -> None:
    each, facts = scheduler(0)
    run_batch(each, facts, 1, Version(1, 0))
    assert each.wanted_version() is None, "the batch is not applied yet"
    facts.apply(1, 2)
    assert each.wanted_version() == Version(1, 1), "replicas have to serve what the batch produced"


def test_staleness_lets_generation_run_ahead_by_that_many_batches() -> None:
    each, facts = scheduler(2)
    for first in (1, 3, 5):
        run_batch(each, facts, first, Version(1, 0))
    assert each.wanted_version() is None
    facts.apply(1, 2)
    assert each.wanted_version() == Version(1, 1)


def test_a_replica_that_lags_may_fill_batches_that_are_near() -> None:
    each, facts = scheduler(1)
    run_batch(each, facts, 1, Version(1, 0))
    facts.apply(1, 2)
    for number in (3, 4):
        assert each.wanted_version() == Version(1, 0)
        facts.draw(number, Version(1, 0))
    assert each.wanted_version() == Version(1, 1)


def test_an_unfinished_group_may_be_sampled_by_what_was_good_enough_when_it_was_drawn() -> None:
    each, facts = scheduler(1)
    for number in (1, 2, 3, 4):
        facts.draw(number, Version(1, 0))
    wanted = [each.wanted_version_of(facts.ledger.groups[number]) for number in (1, 2, 3, 4)]
    assert wanted == [Version(1, 0)] * 4
    each.is_open = False
    assert each.wanted_version_of(facts.ledger.groups[1]) is None


def test_after_a_stricter_bound_no_unfinished_group_waits_for_a_version_that_waits_for_it() -> None:
    each, facts = scheduler(2, batch=1)
    groups = [facts.draw(number, Version(1, 0)) for number in (1, 2, 3)]
    each.change_bound(StalenessBound(1, 1, 1000))
    facts.accept(1, [Version(1, 0)], GROUP)
    facts.accept(2, [Version(1, 0)], GROUP)
    assert each.choose_batch() is None, "three groups are due within two batches: the choice waits for the third"
    assert each.wanted_version_of(groups[2]) <= Version(1, 0)


def test_a_stricter_bound_makes_ready_groups_too_old() -> None:
    each, facts = scheduler(2)
    run_batch(each, facts, 1, Version(1, 0))
    facts.apply(1, 2)
    facts.draw(3, Version(1, 0))
    facts.accept(3, [Version(1, 0)], 1)
    assert each.stale_groups() == []
    each.change_bound(StalenessBound(0, 2, 100))
    assert each.stale_groups() == [facts.ledger.groups[3]]


def test_a_choice_stands_while_its_batch_is_prepared_unless_the_limits_change() -> None:
    each, facts = scheduler(2, window=1.0)
    for number in (1, 2, 3):
        facts.draw(number, Version(1, 0))
    for number in (1, 3):
        facts.accept(number, [Version(1, 0)], 1)
    chosen = each.choose_batch()
    assert chosen == [facts.ledger.groups[1], facts.ledger.groups[3]]
    facts.accept(2, [Version(1, 0)], 1)
    assert each.choose_batch() != chosen, "an older group is ready by now"
    assert each.may_batch(chosen)
    each.max_steps = 0
    assert not each.may_batch(chosen), "the run was stopped"
    each.max_steps = 10
    facts.make_batch([chosen[0], facts.ledger.groups[2]])
    assert not each.may_batch(chosen), "one of them is in a batch"


def test_a_choice_falls_when_the_bound_becomes_too_strict_for_it() -> None:
    each, facts = scheduler(2)
    run_batch(each, facts, 1, Version(1, 0))
    for number in (3, 4):
        facts.draw(number, Version(1, 0))
        facts.accept(number, [Version(1, 0)], 1)
    chosen = each.choose_batch()
    assert chosen is not None
    assert each.may_batch(chosen)
    each.change_bound(StalenessBound(0, 2, 100))
    assert not each.may_batch(chosen)


def test_a_batch_keeps_the_bound_that_it_was_made_under() -> None:
    each, facts = scheduler(2)
    run_batch(each, facts, 1, Version(1, 0))
    for number in (3, 4):
        facts.draw(number, Version(1, 0))
        facts.accept(number, [Version(1, 0)], 1)
    groups = each.choose_batch()
    assert groups is not None
    batch = facts.make_batch(groups, each.bound.max_staleness)
    each.change_bound(StalenessBound(0, 2, 100))
    assert each.is_fresh(batch)
    assert each.bound_of(batch) == 2
    facts.begin_epoch(each, BASE)
    assert list(facts.ledger.batches) == [1, 2], "it is sent again as it was made"


def test_no_more_groups_are_started_than_the_last_batch_needs() -> None:
    each, facts = scheduler(5, batch=2, steps=1)
    facts.draw(1, Version(1, 0))
    facts.draw(2, Version(1, 0))
    assert each.satisfied
    assert each.wanted_version() is None
    facts.drop(1, Reason.EPISODE_FAILED)
    assert each.wanted_version() is not None


def test_versions_that_the_weights_never_contained_count_as_older() -> None:
    lineage = Lineage()
    lineage = lineage.begin(1, BASE)
    lineage = lineage.begin(2, Version(1, 4))
    assert lineage.number(Version(1, 3)) == 3
    assert lineage.number(Version(1, 6)) == 2
    assert lineage.number(Version(2, 6)) == 6
    assert min(map(lineage.number, [Version(1, 4), Version(1, 6)])) == 2
    lineage = lineage.begin(3, Version(1, 3))
    assert lineage.number(Version(1, 6)) == 0, "the distance is counted from where the ways part now"
    assert lineage.number(Version(2, 5)) == 1


def test_a_rolled_back_batch_is_sent_again_and_counted_once() -> None:
    each, facts = scheduler(2)
    batch = run_batch(each, facts, 1, Version(1, 0))
    facts.apply(1, 2)
    assert facts.ledger.trained == 2
    facts.begin_epoch(each, BASE)
    assert facts.ledger.trained == 0
    assert facts.ledger.to_send == [batch]
    facts.apply(1, 1, dropped=1)
    assert (facts.ledger.trained, facts.ledger.dropped) == (1, {"STALE": 1})


def test_a_batch_that_a_rollback_made_too_old_is_taken_apart() -> None:
    each, facts = scheduler(0)
    run_batch(each, facts, 1, Version(1, 0))
    facts.apply(1, 2)
    run_batch(each, facts, 3, Version(1, 1))
    facts.begin_epoch(each, BASE)
    assert [batch.sequence_no for batch in facts.ledger.to_send] == [1]
    facts.apply(1, 2)
    assert [group.number for group in each.stale_groups()] == [3, 4]


def test_an_unexpected_report_is_refused() -> None:
    each, facts = scheduler(2)
    run_batch(each, facts, 1, Version(1, 0))
    with pytest.raises(LedgerError, match="1 is due"):
        facts.apply(2, 2)
