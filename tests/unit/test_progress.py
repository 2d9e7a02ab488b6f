"""When a replica hangs, with a simulated clock."""

from __future__ import annotations

import pytest

from orchestrator_svc.progress import ListeningClock, Loss, ReplicaProgress, StreamProgress
from sluice.v1 import rollout_pb2

SERVING, PAUSED = rollout_pb2.REPLICA_STATE_SERVING, rollout_pb2.REPLICA_STATE_PAUSED
QUEUED = rollout_pb2.REQUEST_STAGE_QUEUED
RUNNING = rollout_pb2.REQUEST_STAGE_RUNNING
STAGE_PAUSED = rollout_pb2.REQUEST_STAGE_PAUSED


def status(steps: int, running: int = 1, state: int = SERVING, queued: int = 0) -> rollout_pb2.GetStatusResponse:
    return rollout_pb2.GetStatusResponse(engine_steps=steps, running=running, queued=queued, state=state)


def chunk(stage: int, steps: int) -> rollout_pb2.StreamChunk:
    return rollout_pb2.StreamChunk(stage=stage, engine_steps=steps)


def progress() -> ReplicaProgress:
    return ReplicaProgress(5.0, heard_at=0.0, moved_at=0.0)


def test_silence_is_a_hang_after_the_limit_and_not_before() -> None:
    watched = progress()
    watched.polled(status(7), 10.0)
    assert watched.hang(15.0) is None
    assert watched.hang(15.01) is Loss.SILENT


def test_messages_of_a_stream_count_as_much_as_answers_to_polls() -> None:
    watched = progress()
    for second in range(1, 60):
        watched.received(chunk(RUNNING, second), float(second))
        assert watched.hang(second + 0.9) is None


@pytest.mark.parametrize("stage", [RUNNING, QUEUED])
def test_an_engine_without_a_step_while_a_request_runs_or_waits_is_stalled(stage: int) -> None:
    watched = progress()
    for second in range(1, 20):
        watched.received(chunk(stage, 100), float(second))
        assert watched.hang(float(second)) is (Loss.STALLED if second > 6 else None)


def test_polls_alone_show_a_stalled_engine() -> None:
    """The requests may be those of other callers, or all still wait in the queue."""
    watched = progress()
    for tick in range(1, 40):
        watched.polled(status(100, running=0, queued=3), tick * 0.5)
    assert watched.hang(19.5) is Loss.STALLED


def test_an_engine_that_steps_again_hangs_no_more() -> None:
    watched = progress()
    for second in range(1, 20):
        watched.received(chunk(RUNNING, 100), float(second))
    watched.polled(status(101), 20.0)
    assert watched.hang(20.0) is None


@pytest.mark.parametrize(
    "quiet",
    [status(100, running=0), status(100, state=PAUSED), status(0)],
    ids=["idle", "paused", "does not count steps"],
)
def test_without_work_in_a_pause_or_without_a_count_standing_steps_are_no_hang(quiet) -> None:
    watched = progress()
    for tick in range(1, 100):
        watched.polled(quiet, tick * 0.5)
        assert watched.hang(tick * 0.5) is None


def test_a_pause_begins_the_time_anew() -> None:
    watched = progress()
    for second in range(1, 31):
        watched.received(chunk(STAGE_PAUSED if second % 5 == 0 else RUNNING, 100), float(second))
        assert watched.hang(float(second)) is None


def test_the_opening_of_further_streams_does_not_hide_a_stalled_engine() -> None:
    watched = progress()
    for second in range(1, 10):
        watched.received(chunk(RUNNING, 100), float(second))
        watched.received(rollout_pb2.StreamChunk(), second + 0.5)
    assert watched.hang(9.5) is Loss.STALLED


def test_time_in_which_this_process_stood_still_is_nobodys_silence() -> None:
    clock, watched = ListeningClock(0.25, now=100.0), progress()
    watched.polled(status(1), clock.tick(100.25))
    assert watched.hang(clock.tick(160.0)) is None, "this process was stopped for a minute"
    for tick in range(20):
        now = clock.tick(160.25 + tick * 0.25)
    assert watched.hang(now) is Loss.SILENT


def test_a_stream_is_stuck_in_silence_or_after_a_long_pause() -> None:
    stream = StreamProgress(heard_at=0.0)
    for second in range(1, 120):
        stream.received(QUEUED, float(second))
        assert not stream.why_stuck(float(second), 5.0, 60.0), "a queue may be long"
    for second in range(120, 200):
        stream.received(STAGE_PAUSED, float(second))
        assert bool(stream.why_stuck(float(second), 5.0, 60.0)) == (second > 180)
    stream.received(RUNNING, 200.0)
    assert not stream.why_stuck(205.0, 5.0, 60.0)
    assert "nothing" in stream.why_stuck(205.1, 5.0, 60.0)
