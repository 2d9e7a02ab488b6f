"""The comparison of the journal with the trainer's record: silent about every run that could be, and about no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from simulated_run import EPISODES, SimulatedRun

from orchestrator_svc.commands.audit_compare import JOURNAL, RECORD, AuditResult, audit
from orchestrator_svc.journal.ledger import folded
from sluice.digests import batch_digest
from sluice.v1 import checkpoint_pb2, journal_pb2, tokens_pb2
from sluice.versions import BASE, Lineage, Version

EVENTS = st.lists(st.integers(0, len(SimulatedRun().happens()) - 1), max_size=60)

WATCHED = {
    "group_accepted",
    "group_dropped",
    "batch_made",
    "batch_applied",
    "batch_unmade",
    "epoch_begun",
    "task_drawn",
    "episodes_ended",
}


def numbered(facts: list[journal_pb2.Fact]) -> list[tuple[int, journal_pb2.Fact]]:
    return list(enumerate(facts, 1))


def audited(run: SimulatedRun) -> AuditResult:
    return audit(numbered(run.facts), run.records, run.lineage, run.checkpoints)


def trained_run() -> SimulatedRun:
    """Make three batches, the last of which was rolled back and trained again."""
    run = SimulatedRun()
    run.trains(2)
    run.checkpoint_is_written()
    run.trains(1)
    run.trainer_is_killed()
    run.trainer_applies()
    run.orchestrator_hears()
    return run


def problems(result: AuditResult) -> str:
    return "\n".join(f"{each.side}: {each.batch} {each.trajectory} {each.problem}" for each in result.differences)


@given(EVENTS)
@example([0, 0, 5, 8, 11, 6, 5])  # a batch that was applied, rolled back, unmade, and made again under another name
def test_no_run_differs_from_its_record_whoever_was_killed_when(events: list[int]) -> None:
    run = SimulatedRun()
    run.play(events)
    result = audited(run)
    assert not result.differences, problems(result)
    assert result.accepted == run.accepted
    assert result.accepted == result.trained + sum(result.dropped.values()) + result.in_flight + result.unheard
    live = {
        each.sequence_no: each for each in run.records if each.sequence_no <= run.applied
    }  # the last of each number
    heard = [each for each in live.values() if each.sequence_no <= run.heard]
    assert result.trained == sum(len(each.results) - 1 for each in heard)
    assert sum(result.dropped.values()) == run.dropped + len(heard)
    assert len(result.unheard_batches) == run.applied - run.heard
    assert result.version.number == run.applied
    ledger = folded(numbered(run.facts))
    assert (ledger.accepted, ledger.trained, ledger.dropped) == (result.accepted, result.trained, result.dropped)


def test_a_batch_that_the_orchestrator_did_not_hear_of_is_told_and_is_no_difference() -> None:
    run = trained_run()
    for event in (run.group_is_accepted, run.group_is_accepted, run.batch_is_made, run.trainer_applies):
        event()
    result = audited(run)
    assert not result.differences
    assert result.unheard_batches == (run.batches[4].batch_id,)
    assert (result.trained, result.unheard, result.in_flight) == (3 * (2 * EPISODES - 1), 2 * EPISODES, 0)


def test_what_was_rolled_back_is_counted_apart() -> None:
    result = audited(trained_run())
    assert not result.differences
    assert (result.rolled_back, result.trained_again, result.batches) == (2 * EPISODES, 2 * EPISODES - 1, 3)
    assert result.version == Version(2, 3)


def test_an_epoch_that_only_the_trainer_has_begun_takes_its_batches_back() -> None:
    """Both were killed between the trainer's note of the epoch and the orchestrator's."""
    run = SimulatedRun()
    run.trains(2)
    run.note(epoch_allotted=journal_pb2.EpochAllotted(epoch=2))
    run.lineage = run.lineage.begin(2, BASE)
    result = audited(run)
    assert not result.differences
    assert (result.trained, result.in_flight, result.rolled_back) == (0, 4 * EPISODES, 4 * EPISODES)


# Tampering. A fact that is taken out leaves a gap in the numbers; these tests number the facts again, as a careful hand would.


@given(EVENTS, st.data())
def test_a_fact_that_was_removed_is_missed(events: list[int], data: st.DataObject) -> None:
    run = SimulatedRun()
    run.play(events)
    run.trains(1)
    gone = data.draw(st.integers(0, len(run.facts) - 2))
    kept = [each for seq, each in enumerate(numbered(run.facts)) if seq != gone]
    assert audit(kept, run.records, run.lineage, run.checkpoints).differences


@given(EVENTS, st.data())
def test_a_fact_that_was_removed_is_missed_though_the_others_are_numbered_again(
    events: list[int], data: st.DataObject
) -> None:
    """Only facts of trained batches are missed: without a fact of another group, the run looks like one that was killed before it."""
    run = SimulatedRun()
    run.play(events)
    run.trains(1)
    trained = {group for number in range(1, run.heard + 1) for group in run.batches[number].groups}
    begun_again = {each.task_drawn.group for each in run.facts if each.task_drawn.attempt}
    relevant = [
        at
        for at, fact in enumerate(run.facts)
        if fact.group_accepted.group in trained
        or fact.batch_made.batch_id in {run.batches[number].batch_id for number in range(1, run.heard + 1)}
        or {fact.task_drawn.group, fact.episodes_ended.group} & (trained - begun_again)
    ]
    gone = data.draw(st.sampled_from(relevant))
    fact = run.facts.pop(gone)
    assert audited(run).differences, fact


def test_an_outcome_that_was_removed_between_others_is_missed() -> None:
    run = trained_run()
    gone = next(at for at, fact in enumerate(run.facts) if fact.HasField("batch_applied"))
    name = run.batches[1].batch_id
    del run.facts[gone]
    assert any("later ones were" in each.problem for each in audited(run).differences), name


@given(EVENTS, st.data())
def test_a_fact_that_was_doubled_is_found(events: list[int], data: st.DataObject) -> None:
    run = SimulatedRun()
    run.play(events)
    run.trains(1)
    relevant = [at for at, fact in enumerate(run.facts) if fact.WhichOneof("kind") in WATCHED]
    twice = data.draw(st.sampled_from(relevant))
    run.facts.insert(twice, run.facts[twice])
    assert audited(run).differences, run.facts[twice]


@given(EVENTS, st.data())
def test_a_record_that_was_removed_or_doubled_is_found(events: list[int], data: st.DataObject) -> None:
    run = SimulatedRun()
    run.play(events)
    run.trains(1)
    at = data.draw(st.integers(0, len(run.records) - 1))
    record = run.records.pop(at)
    told = any(each.batch_applied.policy_version == record.policy_version for each in run.facts)
    later = any(each.policy_version.epoch == record.policy_version.epoch for each in run.records[at:])
    if told or later:  # the last one of an epoch that nobody heard of was never recorded, for all that the files tell
        assert audited(run).differences
    run.records[at:at] = [record, record]
    assert any(each.side == RECORD and "twice" in each.problem for each in audited(run).differences)


Edit = Callable[[checkpoint_pb2.BatchRecord], None]


def _digest(record: checkpoint_pb2.BatchRecord) -> None:
    record.results[1].digest = bytes(16)


def _digest_and_sum(record: checkpoint_pb2.BatchRecord) -> None:
    _digest(record)
    record.content_digest = batch_digest(each.digest for each in record.results)


def _outcome(record: checkpoint_pb2.BatchRecord) -> None:
    record.results[1].outcome = tokens_pb2.TRAJECTORY_OUTCOME_DROPPED
    record.results[1].reason = "STALE"


def _reason(record: checkpoint_pb2.BatchRecord) -> None:
    record.results[-1].reason = "MISSING_REWARD"


def _name(record: checkpoint_pb2.BatchRecord) -> None:
    record.results[1].trajectory_id = "g9-9"


def _remove(record: checkpoint_pb2.BatchRecord) -> None:
    del record.results[1]
    record.content_digest = batch_digest(each.digest for each in record.results)


def _double(record: checkpoint_pb2.BatchRecord) -> None:
    record.results.add().CopyFrom(record.results[1])
    record.content_digest = batch_digest(each.digest for each in record.results)


def _swap(record: checkpoint_pb2.BatchRecord) -> None:
    results = list(record.results)
    del record.results[:]
    record.results.extend([results[1], results[0], *results[2:]])
    record.content_digest = batch_digest(each.digest for each in record.results)


def _version(record: checkpoint_pb2.BatchRecord) -> None:
    record.policy_version.number = 7


@pytest.mark.parametrize(
    "edit", [_digest, _digest_and_sum, _outcome, _reason, _name, _remove, _double, _swap, _version]
)
@pytest.mark.parametrize("place", [0, 2, 3])  # live, rolled back, the newest
def test_a_record_that_was_altered_is_found_and_named(edit: Edit, place: int) -> None:
    run = trained_run()
    edit(run.records[place])
    result = audited(run)
    assert any(each.batch == run.records[place].batch_id for each in result.differences), problems(result)
    if edit in (_digest, _digest_and_sum, _outcome, _reason):
        named = run.records[place].results[-1 if edit is _reason else 1].trajectory_id
        assert any(each.trajectory == named for each in result.differences), problems(result)


def _change_made(facts: list[journal_pb2.Fact], change: Callable[[journal_pb2.BatchMade], None]) -> None:
    change(next(each.batch_made for each in facts if each.HasField("batch_made")))


def _made_digest(facts: list[journal_pb2.Fact]) -> None:
    def change(made: journal_pb2.BatchMade) -> None:
        made.trajectory_digests[1] = bytes(16)
        made.content_digest = batch_digest(made.trajectory_digests)

    _change_made(facts, change)


def _made_without_digests(facts: list[journal_pb2.Fact]) -> None:
    _change_made(facts, lambda made: made.ClearField("trajectory_digests"))


def _made_without_one(facts: list[journal_pb2.Fact]) -> None:
    def change(made: journal_pb2.BatchMade) -> None:
        del made.trajectory_ids[1], made.trajectory_digests[1]
        made.content_digest = batch_digest(made.trajectory_digests)

    _change_made(facts, change)


def _trained_as_dropped(facts: list[journal_pb2.Fact]) -> None:
    applied = next(each.batch_applied for each in facts if each.HasField("batch_applied"))
    applied.dropped["STALE"].trajectory_ids.append(applied.trained.pop())


def _untold(facts: list[journal_pb2.Fact]) -> None:
    next(each.batch_applied for each in facts if each.HasField("batch_applied")).trained.pop()


def _renamed(facts: list[journal_pb2.Fact]) -> None:
    ended = next(each.episodes_ended for each in facts if each.HasField("episodes_ended"))
    ended.episodes[0].trajectories[0].trajectory_id = "g9-9"


def _in_two_groups(facts: list[journal_pb2.Fact]) -> None:
    one, two = [each.episodes_ended for each in facts if each.HasField("episodes_ended")][:2]
    two.episodes[0].CopyFrom(one.episodes[0])


def _other_origin(facts: list[journal_pb2.Fact]) -> None:
    begun = [each.epoch_begun for each in facts if each.HasField("epoch_begun")][1]
    begun.origin.number = 1


@pytest.mark.parametrize(
    "edit",
    [
        _made_digest,
        _made_without_digests,
        _made_without_one,
        _trained_as_dropped,
        _untold,
        _renamed,
        _in_two_groups,
        _other_origin,
    ],
)
def test_a_fact_that_was_altered_is_found(edit: Callable[[list[journal_pb2.Fact]], None]) -> None:
    run = trained_run()
    assert not audited(run).differences
    edit(run.facts)
    assert audited(run).differences


def test_a_checkpoint_bears_witness_to_facts_and_batches_that_were_cut_off() -> None:
    run = trained_run()
    run.checkpoint_is_written()
    facts, records = run.facts[:-6], run.records[:-1]
    sides = {each.side for each in audit(numbered(facts), run.records, run.lineage, run.checkpoints).differences}
    assert JOURNAL in sides
    result = audit(numbered(run.facts), records, run.lineage, run.checkpoints)
    assert any("step_3" in each.problem for each in result.differences)


def test_a_run_that_did_nothing_is_exact() -> None:
    result = audit([], [], Lineage())
    assert (result.accepted, result.version, result.differences) == (0, BASE, ())
