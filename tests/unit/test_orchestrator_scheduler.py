"""The scheduler under a simulated run: any interleaving of replicas that lag, stragglers, failures, filters and crashes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator_svc.scheduler import Batch, OnStale, Reason, Scheduler, Stage, StalenessBound
from sluice.versions import BASE, Lineage, Version

GROUP = 4


@dataclass
class Running:
    """Tokens of a running group, by the versions that its replica has served while it ran."""

    replica: int
    versions: set[Version] = field(default_factory=set)


class SimulatedRun(RuleBasedStateMachine):
    """Replicas follow the trainer as late as they like; the trainer applies batches one by one."""

    @initialize(
        staleness=st.integers(0, 3),
        batch=st.integers(1, 6),
        replicas=st.integers(1, 3),
        window=st.sampled_from([0.0, 0.3, 1.0]),
        on_stale=st.sampled_from([OnStale.DROP, OnStale.REQUEUE]),
    )
    def begin(self, staleness, batch, replicas, window, on_stale):
        self.max_steps = 12
        self.scheduler = Scheduler(
            StalenessBound(staleness, batch, 1000),
            window_fraction=window,
            on_stale=on_stale,
            max_steps=self.max_steps,
            max_running=1000,
        )
        self.replicas = [BASE] * replicas
        self.lineage = Lineage()
        self.running: dict[int, Running] = {}
        self.tokens: dict[int, set[Version]] = {}
        self.made: dict[int, tuple[Batch, list]] = {}
        self.next_group = 1
        self.trained: list[int] = []
        self.history: dict[int, list[int]] = {}
        self.checkpoint = BASE
        self.epoch = 0
        self.open_epoch()

    def open_epoch(self):
        self.epoch += 1
        self.lineage = self.lineage.begin(self.epoch, self.checkpoint)
        lost = [pair for number, pair in self.made.items() if number > self.checkpoint.number]
        for number in [each for each in self.history if each > self.checkpoint.number]:
            del self.history[number]
        self.scheduler.open_epoch(self.epoch, self.checkpoint, lost)
        self.made = {
            n: pair for n, pair in self.made.items() if n <= self.checkpoint.number or n in self.scheduler.batches
        }

    @property
    def trainer(self) -> Version:
        return Version(self.scheduler.epoch, self.scheduler.applied)

    @rule(data=st.data())
    def replica_follows(self, data):
        index = data.draw(st.integers(0, len(self.replicas) - 1))
        oldest = self.replicas[index].number if self.replicas[index].epoch == self.epoch else self.checkpoint.number
        self.serve(index, Version(self.epoch, data.draw(st.integers(oldest, max(oldest, self.trainer.number)))))

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
            self.scheduler.start(self.next_group, self.next_group, self.replicas[index])
            self.running[self.next_group] = Running(index, {self.replicas[index]})
            self.next_group += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fate=st.sampled_from(["scored", "scored", "scored", "failed", "filtered"]))
    def episode_ends(self, data, fate):
        self.end(data.draw(st.sampled_from(sorted(self.running))), fate)

    def end(self, number, fate):
        group = self.running.pop(number)
        if fate == "failed":
            self.scheduler.drop(number, Reason.EPISODE_FAILED)
        elif fate == "filtered":
            self.scheduler.drop_trajectories(Reason.FILTERED, GROUP)
            self.scheduler.drop(number, Reason.FILTERED)
        else:
            self.tokens[number] = group.versions
            self.scheduler.finish(number, group.versions, GROUP)

    @rule()
    def make_batch(self):
        waiting = [g.number for g in self.scheduler.groups.values() if g.stage is Stage.RUNNING]
        self.scheduler.drop_stale()
        batch = self.scheduler.make_batch()
        if batch is None:
            return
        assert len(batch.groups) == self.scheduler.bound.batch_groups
        self.made[batch.sequence_no] = (batch, [self.scheduler.groups[n] for n in batch.groups])
        assert not set(waiting) & set(batch.groups)

    @precondition(lambda self: self.scheduler.batches)
    @rule()
    def train(self):
        number = self.scheduler.applied + 1
        batch = self.scheduler.batches[number]
        for group in batch.groups:
            for version in self.tokens[group]:
                staleness = number - 1 - self.lineage.number(version)
                assert staleness <= self.scheduler.bound.max_staleness
        self.scheduler.apply(number, GROUP * len(batch.groups), {})
        self.history[number] = list(batch.groups)

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
        rolled_back = self.epoch > 1
        assert rolled_back or len(self.scheduler.groups) <= self.scheduler.bound.capacity

    @invariant()
    def each_group_is_trained_once(self):
        if hasattr(self, "scheduler"):
            trained = [group for groups in self.history.values() for group in groups]
            assert len(trained) == len(set(trained))
            assert self.scheduler.accounting.trained == GROUP * len(trained)

    @invariant()
    def every_trajectory_is_accounted_for(self):
        if hasattr(self, "scheduler"):
            waiting = sum(g.trajectories for g in self.scheduler.groups.values() if g.stage is not Stage.RUNNING)
            counts = self.scheduler.accounting
            assert counts.accepted - counts.trained - sum(counts.dropped.values()) == waiting

    def teardown(self):
        """Whatever happened, a run whose parts work from now on comes to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(1000):
            if self.scheduler.applied >= self.max_steps:
                break
            for index in range(len(self.replicas)):
                self.serve(index, self.trainer)
            while (version := self.scheduler.wanted_version()) is not None:
                assert version <= self.trainer
                self.scheduler.start(self.next_group, self.next_group, self.trainer)
                self.running[self.next_group] = Running(0, {self.trainer})
                self.next_group += 1
            for number in sorted(self.running):
                self.end(number, "scored")
            self.make_batch()
            if self.scheduler.batches:
                self.train()
        assert self.scheduler.applied == self.max_steps


SimulatedRun.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestSimulatedRun = SimulatedRun.TestCase


def scheduler(staleness: int, batch: int = 2, *, window: float = 0.3, steps: int = 10) -> Scheduler:
    made = Scheduler(
        StalenessBound(staleness, batch, 100),
        window_fraction=window,
        on_stale=OnStale.DROP,
        max_steps=steps,
        max_running=100,
    )
    made.open_epoch(1, BASE, [])
    return made


def run_batch(each: Scheduler, first: int, version: Version) -> Batch:
    """Dispatch, finish and batch as many groups as a batch has."""
    numbers = range(first, first + each.bound.batch_groups)
    for number in numbers:
        each.start(number, number, version)
    for number in numbers:
        each.finish(number, [version], 1)
    batch = each.make_batch()
    assert batch is not None
    return batch


def test_without_staleness_generation_waits_for_the_version_of_the_last_batch() -> None:
    each = scheduler(0)
    run_batch(each, 1, Version(1, 0))
    assert each.wanted_version() is None, "the batch is not applied yet"
    each.apply(1, 2, {})
    assert each.wanted_version() == Version(1, 1), "replicas have to serve what the batch produced"
    with pytest.raises(ValueError, match="wanted"):
        each.start(3, 3, Version(1, 0))


def test_staleness_lets_generation_run_ahead_by_that_many_batches() -> None:
    each = scheduler(2)
    for first in (1, 3, 5):
        run_batch(each, first, Version(1, 0))
    assert each.wanted_version() is None
    each.apply(1, 2, {})
    assert each.wanted_version() == Version(1, 1)


def test_a_replica_that_lags_may_fill_batches_that_are_near() -> None:
    each = scheduler(1)
    run_batch(each, 1, Version(1, 0))
    each.apply(1, 2, {})
    for number in (3, 4):
        assert each.wanted_version() == Version(1, 0)
        each.start(number, number, Version(1, 0))
    assert each.wanted_version() == Version(1, 1)


def test_no_more_groups_are_started_than_the_last_batch_needs() -> None:
    each = scheduler(5, batch=2, steps=1)
    each.start(1, 1, Version(1, 0))
    each.start(2, 2, Version(1, 0))
    assert each.satisfied
    assert each.wanted_version() is None
    each.drop(1, Reason.EPISODE_FAILED)
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
    each = scheduler(2)
    batch = run_batch(each, 1, Version(1, 0))
    groups = [each.groups[number] for number in batch.groups]
    each.apply(1, 2, {})
    assert each.accounting.trained == 2
    each.open_epoch(2, BASE, [(batch, groups)])
    assert each.accounting.trained == 0
    assert each.batches == {1: batch}
    each.apply(1, 1, {"STALE": 1})
    assert (each.accounting.trained, each.accounting.dropped) == (1, {"STALE": 1})


def test_a_batch_that_a_rollback_made_too_old_is_taken_apart() -> None:
    each = scheduler(0)
    run_batch(each, 1, Version(1, 0))
    each.apply(1, 2, {})
    batch = run_batch(each, 3, Version(1, 1))
    groups = [each.groups[number] for number in batch.groups]
    each.open_epoch(2, BASE, [(batch, groups)])
    assert not each.batches
    assert [group.number for group in each.drop_stale()] == [3, 4]
    assert each.make_batch() is None
    assert each.accounting.dropped == {Reason.STALE: 2}


def test_an_unexpected_report_is_refused() -> None:
    each = scheduler(2)
    run_batch(each, 1, Version(1, 0))
    with pytest.raises(ValueError, match="1 is due"):
        each.apply(2, 2, {})
