"""Which trajectories a refusal names, which groups a batch leaves out, and when so much is set aside that a run pauses. Pure."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator_svc.journal.facts import Reason
from orchestrator_svc.journal.ledger import Group
from orchestrator_svc.journal.records import Beginning, SharedRecord
from orchestrator_svc.run import setting_aside
from orchestrator_svc.run.setting_aside import WINDOW, BatchRefusedError, SetAsideShare, refused, too_large
from orchestrator_svc.sessions.lending import MOST_KNOWN, MOST_PER_MINUTE, Refusals
from sluice.client import _batch_parts
from sluice.limits import MAX_MESSAGE_BYTES, MAX_TRAJECTORIES
from sluice.rows_at_fault import ROWS, numbers, ranges, rows_of
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2, orchestrator_pb2, tokens_pb2, trainer_pb2
from sluice.versions import BASE


@given(st.sets(st.integers(0, MAX_TRAJECTORIES)))
def test_places_are_written_and_read_again_up_to_a_length(rows: set[int]) -> None:
    text = ranges(rows)
    found = set(numbers(text))
    assert len(text) <= 500
    assert found == rows or (len(text) > 400 and found < rows and found == set(sorted(rows)[: len(found)]))


@given(st.text())
def test_no_text_is_read_as_more_places_than_a_batch_has(text: str) -> None:
    assert all(0 <= each <= 10**9 for each in numbers(text))
    assert len(set(numbers("0-999999999"))) == MAX_TRAJECTORIES + 1


def bad(**violations: str) -> SluiceError:
    return SluiceError(grpc.StatusCode.INVALID_ARGUMENT, "BAD_TRAJECTORY", "faults", violations=violations)


def test_a_refusal_names_rows_by_its_metadata_or_by_its_fields() -> None:
    fields = {"trajectories[3].mask_runs": "no", "trajectories[40].reward": "no"}
    assert BatchRefusedError.of(bad(**fields)).rows == {3, 40} == rows_of(fields)
    told = SluiceError(grpc.StatusCode.INVALID_ARGUMENT, "BAD_TRAJECTORY", "x", metadata={ROWS: "1-3,7"})
    assert BatchRefusedError.of(told).rows == {1, 2, 3, 7}
    assert BatchRefusedError.of(bad(**{"header.trajectory_count": "too many"})).rows == set()
    assert BatchRefusedError.of(bad(**{"header.advantage_estimator": "none"})) is None
    assert BatchRefusedError.of(SluiceError.unavailable("GONE", "x")) is None
    assert BatchRefusedError.of(SluiceError.resource_exhausted("QUEUE_FULL", "x", 1.0)) is None


def test_a_message_that_grpc_refuses_for_its_size_never_fits() -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        "CLIENT: Sent message larger than max (5242880 vs. 4194304)",
    )
    found = SluiceError.from_rpc(error)
    assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE")
    assert BatchRefusedError.of(found) is not None


def group(number: int, trajectories: int, tokens: int = 1) -> setting_aside.Found:
    made = Group(number, "e", "t", 0, 0, trajectories, 0, BASE, (BASE,), 0, size=trajectories)
    episodes = [
        journal_pb2.EndedEpisode(
            episode=each, trajectories=[journal_pb2.AcceptedTrajectory(trajectory_id=f"g{number}-{each}")]
        )
        for each in range(trajectories)
    ]
    made.ended = [journal_pb2.EpisodesEnded(group=number, episodes=episodes)]
    prompt = Beginning.of([1] * tokens, tokens_pb2.Conversation())  # each takes it whole into a batch
    records = [
        SharedRecord(
            orchestrator_pb2.TrajectoryRecord(trajectory=tokens_pb2.Trajectory(trajectory_id=f"g{number}-{each}")),
            prompt,
        )
        for each in range(trajectories)
    ]
    return made, records


def test_the_largest_groups_are_left_out_until_the_others_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group(1, 3), group(2, 9), group(3, 4), group(4, 2)]
    assert too_large(groups) == []
    monkeypatch.setattr(setting_aside, "MAX_TRAJECTORIES", 9)
    assert [each.number for each in too_large(groups)] == [2]
    monkeypatch.setattr(setting_aside, "MAX_TRAJECTORIES", 5)
    assert [each.number for each in too_large(groups)] == [2, 3]
    monkeypatch.setattr(setting_aside, "MAX_TRAJECTORIES", 100)
    monkeypatch.setattr(setting_aside, "MAX_BATCH_BYTES", 1000)
    assert [each.number for each in too_large([group(9, 3, tokens=2000), *groups])] == [9]
    monkeypatch.setattr(setting_aside, "MAX_BATCH_BYTES", 1 << 30)
    monkeypatch.setattr(setting_aside, "MAX_REPORT_BYTES", 10 * 70)
    assert [each.number for each in too_large(groups)] == [2]


@pytest.mark.parametrize(
    ("rows", "gone"),
    [
        ({0}, {1: ["g1-0"]}),
        ({1, 2, 3}, {1: ["g1-1"], 2: ["g2-0", "g2-1"]}),
        (set(), {1: ["g1-0", "g1-1"], 2: ["g2-0", "g2-1"]}),
        ({99}, {1: ["g1-0", "g1-1"], 2: ["g2-0", "g2-1"]}),
    ],
)
def test_a_refusal_sets_aside_its_rows_or_all_where_it_names_none(rows: set[int], gone: dict[int, list[str]]) -> None:
    facts = refused([group(1, 2), group(2, 2)], BatchRefusedError(frozenset(rows), "too long"))
    said = [each.trajectories_set_aside for each in facts]
    assert {each.group: list(each.trajectory_ids) for each in said} == gone
    assert {(each.reason, each.problem) for each in said} == {(Reason.TRAINER_REFUSES, "too long")}


def set_aside(count: int) -> journal_pb2.Fact:
    ids = [str(each) for each in range(count)]
    return journal_pb2.Fact(
        trajectories_set_aside=journal_pb2.TrajectoriesSetAside(trajectory_ids=ids, reason="R", problem="do this")
    )


def made(count: int) -> journal_pb2.Fact:
    return journal_pb2.Fact(batch_made=journal_pb2.BatchMade(trajectory_ids=[str(each) for each in range(count)]))


def test_one_odd_group_pauses_no_run_and_a_batch_worth_of_them_does() -> None:
    share = SetAsideShare(0.05, 16)
    share.apply_fact(set_aside(16))
    assert not share.exceeded
    share.apply_fact(set_aside(2))
    assert "R: do this" in share.exceeded
    assert "max_set_aside" in share.exceeded


def test_the_share_is_that_of_the_last_batches() -> None:
    share = SetAsideShare(0.05, 10)
    for _ in range(WINDOW):
        share.apply_fact(made(10))
    share.apply_fact(set_aside(11))
    assert share.exceeded
    share.apply_fact(made(10))  # it belongs to this batch
    for _ in range(WINDOW - 1):
        share.apply_fact(made(10))
        assert share.exceeded
    share.apply_fact(made(10))
    assert not share.exceeded


def test_a_batch_that_is_taken_apart_counts_once_and_an_operator_begins_anew() -> None:
    share = SetAsideShare(0.05, 10)
    share.apply_fact(set_aside(9))
    for _ in range(50):
        share.apply_fact(made(10))
        share.apply_fact(journal_pb2.Fact(batch_unmade=journal_pb2.BatchUnmade()))
    assert not share.exceeded
    share.apply_fact(set_aside(3))
    assert share.exceeded
    share.apply_fact(journal_pb2.Fact(run_resumed=journal_pb2.RunResumed(principal="ann")))
    assert not share.exceeded


def test_a_sender_of_bad_rewards_has_to_wait_and_another_has_not() -> None:
    refusals = Refusals()
    for each in range(MOST_PER_MINUTE):
        refusals.check_sender("ann", float(each) / 10)
        refusals.note("ann", "t", "REWARD_TOO_LARGE", float(each) / 10)
    refusals.check_sender("ben", 6.0)
    with pytest.raises(SluiceError) as wait:
        refusals.check_sender("ann", 6.0)
    assert (wait.value.reason, wait.value.retry_after_s) == ("REFUSED_TOO_OFTEN", 54.0)
    refusals.check_sender("ann", 60.0)
    assert [(each.principal, each.task_id, each.count) for each in refusals.describe()] == [("ann", "t", 60)]
    for each in range(2 * MOST_KNOWN):
        refusals.note(f"p{each}", "t", "R", 0.0)
    assert len(refusals.describe()) == MOST_KNOWN


def test_a_trajectory_larger_than_a_message_travels_in_parts_and_arrives_as_it_was() -> None:
    count = 262_144
    large = tokens_pb2.Trajectory(
        trajectory_id="large",
        group_id="g",
        reward=1.0,
        token_ids=range(count),
        mask_runs=[1, count - 1],
        logprobs=[-0.5] * (count - 1),
        advantages=[0.25] * (count - 1),
        token_rewards=[0.125] * (count - 1),
        ref_logprobs=[-1.0] * (count - 1),
        teacher_logprobs=[-2.0] * (count - 1),
        turn_rewards=[{"turn": 0, "reward": 1.0}],
        version_spans=[{"start": 0, "policy_version": {"epoch": 1}}],
    )
    assert large.ByteSize() > MAX_MESSAGE_BYTES
    small = tokens_pb2.Trajectory(trajectory_id="small", token_ids=[1, 2])
    came: list[tokens_pb2.Trajectory] = []
    for message in list(_batch_parts(trainer_pb2.BatchHeader(), [small, large, small]))[1:]:
        assert message.ByteSize() <= MAX_MESSAGE_BYTES
        part = list(message.trajectories.trajectories)
        if message.trajectories.continued:
            came[-1].MergeFrom(part.pop(0))
        came += part
    assert came == [small, large, small]
