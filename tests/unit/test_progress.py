"""When a replica hangs, with a simulated clock."""

from __future__ import annotations

import pytest

from sluice.sampling.progress import ListeningClock, Loss, Patience, ReplicaProgress, StreamProgress
from sluice.v1 import rollout_pb2

SERVING, PAUSED = rollout_pb2.REPLICA_STATE_SERVING, rollout_pb2.REPLICA_STATE_PAUSED
SWITCHING = rollout_pb2.REPLICA_STATE_SWITCHING
QUEUED = rollout_pb2.REQUEST_STAGE_QUEUED
RUNNING = rollout_pb2.REQUEST_STAGE_RUNNING
STAGE_PAUSED = rollout_pb2.REQUEST_STAGE_PAUSED
STAGE_SWITCHING = rollout_pb2.REQUEST_STAGE_SWITCHING
PATIENCE = Patience(progress_s=5.0, switch_s=20.0, paused_s=60.0)


def status(steps: int, running: int = 1, state: int = SERVING, queued: int = 0) -> rollout_pb2.GetStatusResponse:
    return rollout_pb2.GetStatusResponse(engine_steps=steps, running=running, queued=queued, state=state)


def chunk(stage: int, steps: int) -> rollout_pb2.StreamChunk:
    return rollout_pb2.StreamChunk(stage=stage, engine_steps=steps)


class Watched(ReplicaProgress):
    def after(self, now: float, step_s: float = 5.0) -> Loss | None:
        return self.hang(now, PATIENCE, step_s)


def progress() -> Watched:
    return Watched(heard_at=0.0, moved_at=0.0)


def test_silence_is_a_hang_after_the_limit_and_not_before() -> None:
    watched = progress()
    watched.polled(status(7), 10.0)
    assert watched.after(15.0) is None
    assert watched.after(15.01) is Loss.SILENT


def test_messages_of_a_stream_count_as_much_as_answers_to_polls() -> None:
    watched = progress()
    for second in range(1, 60):
        watched.received(chunk(RUNNING, second), float(second))
        assert watched.after(second + 0.9) is None


@pytest.mark.parametrize("stage", [RUNNING, QUEUED])
def test_an_engine_without_a_step_while_a_request_runs_or_waits_is_stalled(stage: int) -> None:
    watched = progress()
    for second in range(1, 20):
        watched.received(chunk(stage, 100), float(second))
        assert watched.after(float(second)) is (Loss.STALLED if second > 6 else None)


def test_polls_alone_show_a_stalled_engine() -> None:
    """The requests may belong to other callers, or may all still wait in the queue."""
    watched = progress()
    for tick in range(1, 40):
        watched.polled(status(100, running=0, queued=3), tick * 0.5)
    assert watched.after(19.5) is Loss.STALLED


def test_an_engine_that_steps_again_hangs_no_more() -> None:
    watched = progress()
    for second in range(1, 20):
        watched.received(chunk(RUNNING, 100), float(second))
    watched.polled(status(101), 20.0)
    assert watched.after(20.0) is None


@pytest.mark.parametrize(
    "quiet",
    [status(100, running=0), status(100, state=PAUSED), status(0)],
    ids=["idle", "paused", "does not count steps"],
)
def test_without_work_in_a_pause_or_without_a_count_standing_steps_are_no_hang(quiet) -> None:
    watched = progress()
    for tick in range(1, 100):
        watched.polled(quiet, tick * 0.5)
        assert watched.after(tick * 0.5) is None


def test_a_pause_begins_the_time_anew() -> None:
    watched = progress()
    for second in range(1, 31):
        watched.received(chunk(STAGE_PAUSED if second % 5 == 0 else RUNNING, 100), float(second))
        assert watched.after(float(second)) is None


def test_the_opening_of_further_streams_does_not_hide_a_stalled_engine() -> None:
    watched = progress()
    for second in range(1, 10):
        watched.received(chunk(RUNNING, 100), float(second))
        watched.received(rollout_pb2.StreamChunk(), second + 0.5)
    assert watched.after(9.5) is Loss.STALLED


def test_time_in_which_this_process_stood_still_is_nobodys_silence() -> None:
    clock, watched = ListeningClock(0.25, now=100.0), progress()
    watched.polled(status(1), clock.tick(100.25))
    assert watched.after(clock.tick(160.0)) is None, "this process was stopped for a minute"
    for tick in range(20):
        now = clock.tick(160.25 + tick * 0.25)
    assert watched.after(now) is Loss.SILENT


def test_a_switch_of_weights_has_its_own_limit() -> None:
    """Polls say it of an engine without requests, streams of one with requests; both stand for the same switch."""
    watched = progress()
    for second in range(1, 40):
        watched.polled(status(100, state=SWITCHING), second - 0.5)
        watched.received(chunk(STAGE_SWITCHING, 100), float(second))
        assert watched.after(float(second)) is (Loss.SWITCHING if second > 20 else None)
    watched.polled(status(101), 40.0)
    assert watched.after(40.0) is None
    for second in range(41, 50):
        watched.received(chunk(RUNNING, 101), float(second))
        assert watched.after(float(second)) is (Loss.STALLED if second > 45 else None), "its steps count again"


@pytest.mark.parametrize(("engine", "loss"), [(SWITCHING, Loss.SWITCHING), (PAUSED, None), (SERVING, Loss.STALLED)])
def test_a_replica_that_drains_may_switch_or_pause_meanwhile(engine: int, loss: Loss | None) -> None:
    watched = progress()
    answer = status(100, state=rollout_pb2.REPLICA_STATE_DRAINING)
    answer.engine_state = engine
    for second in range(1, 40):
        watched.polled(answer, float(second))
        stalls = second > 6 and loss is Loss.STALLED
        switches = second > 21 and loss is Loss.SWITCHING
        assert watched.after(float(second)) is (loss if stalls or switches else None)


def test_switches_with_steps_between_them_are_no_long_switch() -> None:
    watched = progress()
    for second in range(1, 100):
        watched.polled(status(second // 10, state=SWITCHING), float(second))
        assert watched.after(float(second)) is None


def test_a_step_may_take_longer_than_silence() -> None:
    watched = progress()
    for second in range(1, 20):
        watched.received(chunk(RUNNING, 100), float(second))
        assert watched.after(float(second), step_s=10.0) is (Loss.STALLED if second > 11 else None)
    assert watched.after(25.0, step_s=10.0) is Loss.SILENT


def test_a_stream_is_better_made_elsewhere_in_silence_or_after_a_long_pause_or_switch() -> None:
    stream = StreamProgress(heard_at=0.0)
    for second in range(1, 120):
        stream.received(QUEUED, float(second))
        assert not stream.silent(float(second), PATIENCE)
        assert not stream.waits(float(second), PATIENCE), "a queue may be long"
    for stage, limit_s in ((STAGE_PAUSED, 60.0), (STAGE_SWITCHING, 20.0)):
        stream.received(RUNNING, 199.0)
        for second in range(200, 300):
            stream.received(stage, float(second))
            assert stream.waits(float(second), PATIENCE) == (second - 200 > limit_s)
    stream.received(RUNNING, 300.0)
    assert not stream.waits(305.0, PATIENCE)
    assert not stream.silent(305.0, PATIENCE)
    assert stream.silent(305.1, PATIENCE)
