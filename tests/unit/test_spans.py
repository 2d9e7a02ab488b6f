"""The spans of a run: what they say, and that any run gives each of them once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from session_facts import given_up, granted, opened, submitted
from simulated_run import SimulatedRun

from orchestrator_svc.commands.spans import Span, Spans
from sluice.v1 import journal_pb2 as pb
from sluice.versions import Version

SECOND = 10**9
BEGIN = 1_000_000
EVENTS = st.lists(st.integers(0, len(SimulatedRun().happens()) - 1), max_size=60)


def spans(facts: Iterable[pb.Fact]) -> list[Span]:
    """Return the spans of facts that come a second apart."""
    told, found = Spans("demo"), []
    for second, fact in enumerate(facts):
        fact.time.FromSeconds(BEGIN + second)
        found += told.take_fact(fact)
    return found


def timed(found: Iterable[Span], *names: str) -> list[tuple[str, int, int]]:
    """Return name, start and end of spans, in seconds since the first fact."""
    return [
        (each.name, each.start_ns // SECOND - BEGIN, each.end_ns // SECOND - BEGIN)
        for each in found
        if not names or each.name in names
    ]


def fact(**kind: Any) -> pb.Fact:
    return pb.Fact(**kind)


def drawn(episodes: int = 1, attempt: int = 0) -> pb.Fact:
    return fact(
        task_drawn=pb.TaskDrawn(environment="sums", task_id="7", group=1, episodes=episodes, attempt=attempt, draw=2)
    )


def sampled(turn: int) -> pb.Fact:
    return fact(
        generation_recorded=pb.GenerationRecorded(group=1, episodes=[0], turn=turn, request_id=f"demo/g1/{turn}")
    )


def ended(reason: str = "") -> pb.Fact:
    made = [] if reason else [pb.AcceptedTrajectory(trajectory_id="g1-0")]
    episode = pb.EndedEpisode(episode=0, reward=None if reason else 0.5, trajectories=made, reason=reason)
    return fact(episodes_ended=pb.EpisodesEnded(group=1, episodes=[episode]))


ACCEPTED = fact(group_accepted=pb.GroupAccepted(group=1, policy_versions=[Version(1, 3).to_proto()]))
MADE = fact(batch_made=pb.BatchMade(sequence_no=5, batch_id="batch-5-5", groups=[1], trajectory_ids=["g1-0"]))


def sent(epoch: int = 1) -> pb.Fact:
    return fact(batch_sent=pb.BatchSent(sequence_no=5, epoch=epoch))


def applied(epoch: int = 1, **dropped: list[str]) -> pb.Fact:
    return fact(
        batch_applied=pb.BatchApplied(
            sequence_no=5,
            policy_version=Version(epoch, 5).to_proto(),
            trained=[] if dropped else ["g1-0"],
            dropped={reason: pb.DroppedTrajectories(trajectory_ids=ids) for reason, ids in dropped.items()},
        )
    )


def test_a_task_is_told_from_its_draw_to_the_version_that_it_changed() -> None:
    turn = fact(turn_ended=pb.TurnEnded(group=1, turn=0, reward=0.25))
    found = spans([drawn(), sampled(0), turn, sampled(1), ended(), ACCEPTED, MADE, sent(), applied()])
    assert timed(found) == [
        ("sample", 0, 1),
        ("environment", 1, 2),
        ("sample", 2, 3),
        ("score", 3, 4),
        ("wait for batch", 5, 6),
        ("wait for trainer", 6, 7),
        ("train step", 7, 8),
        ("batch", 6, 8),
        ("train", 7, 8),
        ("task", 0, 8),
    ]
    task, batch = found[-1], found[-3]
    assert (task.parent, batch.parent) == (None, None)
    assert {
        each.name: each.parent for each in found if each.id.trace == task.id.trace and each is not task
    } == dict.fromkeys(("sample", "environment", "score", "wait for batch", "train"), task.id)
    step, train = found[-4], found[-2]
    assert (step.parent, train.links, batch.links) == (batch.id, (step.id,), (task.id,))
    assert dict(task.attributes) == {
        "sluice.environment": "sums",
        "sluice.task_id": "7",
        "sluice.draw": 2,
        "sluice.group": "g1",
        "sluice.attempt": 0,
        "sluice.versions_sampled": ["1.3"],
        "sluice.outcome": "trained",
        "sluice.version": "1.5",
        "sluice.batch_id": "batch-5-5",
        "sluice.sequence_no": 5,
    }
    assert found[1].attributes["sluice.reward"] == 0.25


def test_a_task_that_trained_nothing_says_why() -> None:
    dropped = fact(group_dropped=pb.GroupDropped(group=1, reason="NO_SIGNAL"))
    assert spans([drawn(), ended(), dropped])[-1].attributes["sluice.outcome"] == "NO_SIGNAL"
    stale = spans([drawn(), ended(), ACCEPTED, MADE, sent(), applied(STALE=["g1-0"])])[-1]
    assert stale.attributes["sluice.outcome"] == "STALE"
    score = spans([drawn(), ended("EPISODE_FAILED")])[0]
    assert (score.error, score.attributes["sluice.reason"]) == ("EPISODE_FAILED", "EPISODE_FAILED")


def test_a_task_that_a_restart_draws_again_begins_where_it_was_drawn_first() -> None:
    found = spans(
        [drawn(), sampled(0), drawn(attempt=1), sampled(0), ended(), fact(group_dropped=pb.GroupDropped(group=1))]
    )
    assert timed(found, "sample", "task") == [("sample", 0, 1), ("sample", 2, 3), ("task", 0, 5)]
    assert found[-1].attributes["sluice.attempt"] == 1


def test_a_batch_that_is_trained_again_after_the_trainer_went_back_has_a_second_step() -> None:
    again = [sent(epoch=2), applied(epoch=2)]
    found = spans([drawn(), ended(), ACCEPTED, MADE, sent(), applied(), *again])
    assert [each.attributes["sluice.version"] for each in found if each.name == "train step"] == ["1.5", "2.5"]
    assert [each.attributes["sluice.version"] for each in found if each.name == "train"] == ["1.5", "2.5"]
    assert Counter(each.name for each in found)["batch"] == Counter(each.name for each in found)["task"] == 1


def test_a_batch_that_is_sent_twice_in_an_epoch_waits_once() -> None:
    found = spans([drawn(), ended(), ACCEPTED, MADE, sent(), sent(), applied()])
    assert timed(found, "wait for trainer", "train step") == [("wait for trainer", 3, 4), ("train step", 4, 6)]


def test_an_episode_of_an_external_agent_has_its_requests_below_it() -> None:
    request = pb.SessionGenerationRecorded(group=1, request_id="r-1", samples=[pb.SessionSample(tokens=9)])
    lost = [opened(1, 0), given_up(1, 0)]
    kept = [opened(1, 0, attempt=1), fact(session_generation_recorded=request), submitted(1, 0, attempt=1)]
    found = spans([drawn(), granted(1, 1, [0]), *lost, *kept, ended()])
    assert timed(found) == [("episode", 2, 3), ("sample", 4, 5), ("episode", 4, 6), ("score", 6, 7)]
    idle, sample, episode, _ = found
    assert (idle.error, episode.error) == ("IDLE", "")
    assert sample.parent == episode.id != idle.id
    assert (sample.attributes["sluice.request_id"], sample.attributes["sluice.tokens"]) == ("r-1", [9])


def test_facts_of_groups_that_are_not_known_are_left_out() -> None:
    assert spans([sampled(0), ended(), ACCEPTED, sent(), applied()]) == []


@given(EVENTS)
@example([0, 0, 5, 8, 11, 6, 5])  # a batch that was applied, rolled back, unmade, and made again under another name
def test_any_run_gives_each_span_once_whoever_was_killed_when(events: list[int]) -> None:
    run = SimulatedRun()
    run.play(events)
    found = spans(run.facts)
    assert found == spans(run.facts), "facts that are read twice give the same spans"
    assert len({each.id for each in found}) == len(found)
    assert all(each.start_ns <= each.end_ns for each in found)
    batches = {each.batch_made.batch_id: each.batch_made for each in run.facts if each.HasField("batch_made")}
    applied_facts = [each.batch_applied for each in run.facts if each.HasField("batch_applied")]
    steps = [each for each in found if each.name == "train step"]
    assert [each.attributes["sluice.version"] for each in steps] == [
        str(Version.from_proto(each.policy_version)) for each in applied_facts
    ]
    trained = Counter(each.links[0] for each in found if each.name == "train")
    assert trained == {each.id: len(batches[str(each.attributes["sluice.batch_id"])].groups) for each in steps}
    tasks = Counter(each.attributes["sluice.group"] for each in found if each.name == "task")
    assert set(tasks.values()) <= {1}
    roots = {each.id for each in found if each.parent is None}
    under_way = {each.parent for each in found if each.parent and each.parent not in roots}
    assert len(under_way) <= len(run.ready) + len(run.batches) * 3, "all others have their root"
