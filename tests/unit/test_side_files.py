"""``trajectories/dropped.jsonl`` and ``events.jsonl``."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator_svc.journal.records import SharedRecord
from orchestrator_svc.run.metrics import read_metrics
from orchestrator_svc.run.recorder import BoundedLines, Dropped, DroppedFile, EventFile, Recorder, event_row
from orchestrator_svc.run.status import EventLog
from sluice.v1 import orchestrator_pb2, tokens_pb2
from sluice.versions import Lineage, Version


def lines_of(*paths: Path) -> list[dict]:
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def both(directory: Path) -> list[dict]:
    """The rows of both files, oldest first."""
    return lines_of(directory / "dropped.1.jsonl", directory / "dropped.jsonl")


def row(name: str, text: str = "") -> dict:
    return {"step": None, "trajectory_id": name, "completion": text, "reason": "STALE"}


def record(name: str, text: str = "said") -> SharedRecord:
    trajectory = tokens_pb2.Trajectory(
        trajectory_id=name,
        group_id="g1",
        task_id="t",
        token_ids=[1, 2, 3],
        mask_runs=[1, 2],
        version_spans=[tokens_pb2.VersionSpan(policy_version=Version(1, 1).to_proto())],
    )
    asked, said = tokens_pb2.ChatMessage(role="user"), tokens_pb2.ChatMessage(role="assistant", content=text)
    conversation = tokens_pb2.Conversation(messages=[asked, said])
    return SharedRecord(orchestrator_pb2.TrajectoryRecord(trajectory=trajectory, conversation=conversation))


def load(seconds: float, groups: int = 0) -> orchestrator_pb2.RunEvent:
    event = orchestrator_pb2.RunEvent(sequence_no=1, load=orchestrator_pb2.LoadReport(live_groups=groups))
    event.time.FromMicroseconds(round(seconds * 1e6))
    return event


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=40))
def test_two_files_are_bounded_and_hold_the_last_rows_each_once_also_over_restarts(drops) -> None:
    most = 400
    with tempfile.TemporaryDirectory() as directory:
        file, written = DroppedFile(Path(directory), most), list[str]()
        for number, restarts in drops:
            if restarts:
                file = DroppedFile(Path(directory), most)
            name = f"g{number}-0"
            had = {each["trajectory_id"] for each in both(Path(directory))}
            file.write([row(name, "x" * number)])
            written += [name] if name not in had else []
        found = [each["trajectory_id"] for each in both(Path(directory))]
        assert len(found) == len(set(found))
        assert found == written[len(written) - len(found) :]
        assert all(path.stat().st_size <= most for path in Path(directory).iterdir())


def test_a_text_that_looks_like_the_name_of_a_trajectory_is_not_taken_for_one(tmp_path: Path) -> None:
    DroppedFile(tmp_path, 1 << 20).write([row("g1-0", '"trajectory_id": "g2-0"')])
    DroppedFile(tmp_path, 1 << 20).write([row("g2-0")])
    assert [each["trajectory_id"] for each in both(tmp_path)] == ["g1-0", "g2-0"]


def test_what_a_kill_left_of_a_line_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "dropped.jsonl").write_text(
        json.dumps(row("g1-0")) + "\n" + '{"step": null, "trajectory_id": "g2-0", "comp'
    )
    DroppedFile(tmp_path, 1 << 20).write([row("g1-0"), row("g2-0")])
    assert [each["trajectory_id"] for each in both(tmp_path)] == ["g1-0", "g2-0"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.write_text("kept")
    (tmp_path / "events.jsonl").symlink_to(stranger)
    with pytest.raises(OSError, match="symbolic link"):
        BoundedLines(tmp_path / "events.jsonl", 100).append(["line\n"])
    assert stranger.read_text() == "kept"


def test_the_load_is_written_at_most_once_in_ten_seconds_and_scored_groups_never(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    taken = [file.takes(load(1000.0 + second)) for second in range(25)]
    assert [second for second, each in enumerate(taken) if each] == [0, 10, 20]
    assert not file.takes(orchestrator_pb2.RunEvent(group_scored=orchestrator_pb2.GroupScored()))
    assert file.takes(orchestrator_pb2.RunEvent(state_changed=orchestrator_pb2.RunStateChanged()))


def test_an_event_has_names_numbers_and_what_is_zero() -> None:
    replica = orchestrator_pb2.Replica(replica="r0", policy_version=Version(1, 7).to_proto())
    event = orchestrator_pb2.RunEvent(sequence_no=3, replica_changed=orchestrator_pb2.ReplicaChanged(replica=replica))
    event.time.FromMilliseconds(1500)
    assert event_row(event) == {
        "sequence_no": 3,
        "time": 1.5,
        "kind": "replica_changed",
        "replica": {
            "replica": "r0",
            "address": "",
            "policy_version": "1.7",
            "eligible": False,
            "reason": "",
            "running": 0,
            "generated_tokens": 0,
            "sample_seconds": 0.0,
        },
    }
    running = orchestrator_pb2.RunStateChanged(state=orchestrator_pb2.RUN_STATE_RUNNING)
    assert event_row(orchestrator_pb2.RunEvent(state_changed=running))["state"] == "running"
    finished = orchestrator_pb2.StepFinished(
        step=4, policy_version=Version(2, 4).to_proto(), metrics={"reward/mean": 0.5}
    )
    found = event_row(orchestrator_pb2.RunEvent(sequence_no=9, step_finished=finished))
    assert found == {"sequence_no": 9, "time": 0.0, "kind": "step_finished", "step": 4, "policy_version": "2.4"}
    newer = orchestrator_pb2.RunEvent(
        setting_changed=orchestrator_pb2.ChangedSetting(key="trainer.lr", old_value="0.1", new_value="0.2")
    )
    assert event_row(newer)["key"] == "trainer.lr"
    environment = orchestrator_pb2.RunEnvironment(name="a", pools={"new": 3})
    described = event_row(
        orchestrator_pb2.RunEvent(load=orchestrator_pb2.LoadReport(trainer_idle=0.5, environments=[environment]))
    )
    assert (described["trainer_idle"], described["environments"][0]["pools"]) == (0.5, {"new": 3})
    json.dumps([found, described])


async def test_events_are_appended_over_restarts_with_rising_numbers(tmp_path: Path) -> None:
    for start in (1, 2):
        recorder = Recorder(tmp_path, None)
        events = EventLog(start, recorder.write_event)
        for state in (orchestrator_pb2.RUN_STATE_STARTING, orchestrator_pb2.RUN_STATE_RUNNING):
            changed = orchestrator_pb2.RunStateChanged(state=state)
            events.append(orchestrator_pb2.RunEvent(state_changed=changed))
        await recorder.close()
    found = lines_of(tmp_path / "events.jsonl")
    assert [each["state"] for each in found] == ["starting", "running"] * 2
    numbers = [each["sequence_no"] for each in found]
    assert numbers == sorted(set(numbers))
    assert all(each["time"] > 1e9 for each in found)


@pytest.mark.slow
async def test_the_run_waits_for_no_disk_with_what_is_written_beside_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, None, DroppedFile(tmp_path / "trajectories", 1 << 30))
    disk = threading.Event()
    recorder._thread.submit(disk.wait)
    large = "x" * (20 << 20)
    for number in range(5):  # the disk does not answer: each returns at once, and the last two have no room
        recorder.write_dropped([Dropped(record(f"g{number}-0", large), "STALE")])
    disk.set()
    await recorder.close()
    found = [each["trajectory_id"] for each in both(tmp_path / "trajectories")]
    assert found == ["g0-0", "g1-0", "g2-0"]


async def test_a_disk_that_refuses_events_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    recorder = Recorder(tmp_path, None)
    recorder.write_event(load(1000.0))
    await recorder.write_step(1, {"reward/mean": 0.5}, [], Lineage())
    await recorder.recorded_steps()
    (tmp_path / "events.jsonl").rmdir()
    recorder.write_event(load(1020.0, groups=7))
    await recorder.close()
    recorder.write_event(load(1040.0))  # a replica may come or go while the files are closed
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [1]
    assert [each["live_groups"] for each in lines_of(tmp_path / "events.jsonl")] == [7]


async def test_a_dropped_trajectory_has_the_row_of_any_other(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, None, DroppedFile(tmp_path / "trajectories", 1 << 20))
    recorder.write_dropped([Dropped(record("g1-0"), "NO_SIGNAL")])
    await recorder.close()
    (found,) = both(tmp_path / "trajectories")
    assert (found["step"], found["outcome"], found["reason"], found["staleness"]) == (
        None,
        "dropped",
        "NO_SIGNAL",
        None,
    )
    assert (found["completion"], found["tokens"], found["versions"]) == ("said", 2, [[0, "1.1"]])
