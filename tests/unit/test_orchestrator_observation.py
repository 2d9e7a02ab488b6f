"""What people see of a run: events, recent trajectories, shares of waiting, summaries and the report."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from orchestrator_svc.journal.records import Beginning, SharedRecord
from orchestrator_svc.run import recorder as recorder_module
from orchestrator_svc.run import status as status_module
from orchestrator_svc.run.evaluation import EvalResult, EvalSample
from orchestrator_svc.run.metrics import build_report, read_metrics, summarise
from orchestrator_svc.run.recorder import Recorder, TrajectoryFiles
from orchestrator_svc.run.status import EventLog, HeldTime, ShareSince, TrajectoryHistory, bottleneck
from sluice.rpc import SluiceError
from sluice.sampling.addresses import check_address, resolve_targets
from sluice.v1 import journal_pb2, orchestrator_pb2, tokens_pb2, trainer_pb2
from sluice.versions import BASE, Lineage, Version


def event(step: int) -> orchestrator_pb2.RunEvent:
    return orchestrator_pb2.RunEvent(step_finished=orchestrator_pb2.StepFinished(step=step))


async def test_watchers_read_the_past_and_the_future_at_their_own_pace() -> None:
    log = EventLog()
    log.append(event(1))

    async def watch(start: int) -> list[int]:
        return [each.sequence_no async for each in log.follow(start)]

    early, late = asyncio.create_task(watch(0)), asyncio.create_task(watch(2))
    await asyncio.sleep(0)
    for step in (2, 3):
        log.append(event(step))
    assert not await log.all_read(0.0)
    log.end()
    assert await early == [1, 2, 3]
    assert await late == [2, 3]
    assert await log.all_read(1.0)
    assert [each.step_finished.step async for each in log.follow(0)] == [1, 2, 3], "an ended run can still be read"


async def test_a_watcher_of_a_long_run_gets_what_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(status_module, "KEPT", 3)
    log = EventLog()
    log._events = type(log._events)(maxlen=3)
    for step in range(1, 11):
        log.append(event(step))
    log.end()
    assert [each.sequence_no async for each in log.follow(2)] == [8, 9, 10]


async def test_a_watcher_that_reads_on_after_a_restart_misses_nothing() -> None:
    before, after = EventLog(start=1), EventLog(start=2)
    for log in (before, after):
        log.append(event(1))
        log.append(event(2))
        log.end()
    seen = [each.sequence_no async for each in before.follow(0)]
    assert seen == [1, 2]
    later = [each async for each in after.follow(seen[-1] + 1)]
    assert [each.step_finished.step for each in later] == [1, 2]
    assert later[0].sequence_no > seen[-1]


async def test_a_watcher_may_come_before_the_first_event_of_a_restarted_process() -> None:
    log = EventLog(start=2)

    async def watch() -> list[int]:
        return [each.step_finished.step async for each in log.follow(0)]

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    log.append(event(1))
    log.end()
    assert await watching == [1]


FIRST = Version(1, 0)


def record(name: str, step: int = 1, reward: float | None = 0.5, spans=((0, FIRST),), tokens: int = 4):
    trajectory = tokens_pb2.Trajectory(
        trajectory_id=name,
        group_id=name.partition("-")[0],
        token_ids=range(2 + tokens),
        mask_runs=[2, tokens],
        reward=reward,
        version_spans=[tokens_pb2.VersionSpan(start=start, policy_version=v.to_proto()) for start, v in spans],
    )
    return SharedRecord(orchestrator_pb2.TrajectoryRecord(trajectory=trajectory, step=step))


def names(answer: orchestrator_pb2.ListTrajectoriesResponse) -> list[str]:
    return [each.trajectory.trajectory_id for each in answer.trajectories]


def test_trajectories_are_listed_newest_first_in_pages() -> None:
    recent = TrajectoryHistory()
    for number in range(1, 8):
        recent.add(record(f"g{number}-0", step=number, reward=number / 10))
    request = orchestrator_pb2.ListTrajectoriesRequest(page_size=3)
    first = recent.page(request)
    assert names(first) == ["g7-0", "g6-0", "g5-0"]
    recent.add(record("g8-0"))
    request.page_token = first.next_page_token
    second = recent.page(request)
    assert names(second) == ["g4-0", "g3-0", "g2-0"], "new ones do not shift the pages"
    request.page_token = second.next_page_token
    last = recent.page(request)
    assert (names(last), last.next_page_token) == (["g1-0"], "")
    assert names(recent.page(orchestrator_pb2.ListTrajectoriesRequest(step=4))) == ["g4-0"]
    assert names(recent.page(orchestrator_pb2.ListTrajectoriesRequest(reward_below=0.25))) == ["g2-0", "g1-0"]
    with pytest.raises(SluiceError, match="empty one"):
        recent.page(orchestrator_pb2.ListTrajectoriesRequest(page_token="x"))


def test_old_trajectories_make_room_by_size() -> None:
    size = record("g1-0").own.ByteSize()
    recent = TrajectoryHistory(max_bytes=3 * size)
    for number in range(1, 6):
        recent.add(record(f"g{number}-0"))
    assert names(recent.page(orchestrator_pb2.ListTrajectoriesRequest())) == ["g5-0", "g4-0", "g3-0"]


def test_what_several_trajectories_begin_with_counts_once_and_is_shown_with_each() -> None:
    rest = record("g1-0").own
    prompt = tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="user", content="x" * 1000)])
    first, second = Beginning.of([1] * 1000, prompt), Beginning.of([2] * 1000, prompt)
    room = len(first.payload) + 3 * rest.ByteSize()
    recent = TrajectoryHistory(max_bytes=room)

    def shown() -> list[tuple[str, int]]:
        found = recent.page(orchestrator_pb2.ListTrajectoriesRequest()).trajectories
        assert all(each.conversation.messages[0].content == "x" * 1000 for each in found)
        return [(each.trajectory.trajectory_id, each.trajectory.token_ids[0]) for each in found]

    for number in range(1, 5):
        recent.add(SharedRecord(record(f"g1-{number}").own, first))
    assert [name for name, _ in shown()] == ["g1-4", "g1-3", "g1-2"]
    recent.add(SharedRecord(record("g2-0").own, second))
    assert shown() == [("g2-0", 2)], "the last that begins with the first prompt makes room for it"
    assert recent._holders == {id(second): 1}


def test_shares_of_waiting_add_up_for_each_who_looks() -> None:
    held = HeldTime(0.0)
    often, seldom = ShareSince(held, 0.0), ShareSince(held, 0.0)
    held.set(True, 1.0)
    assert often.take(2.0) == 0.5
    held.set(False, 3.0)
    assert often.take(4.0) == 0.5
    assert seldom.take(4.0) == 0.5
    assert often.take(5.0) == 0.0
    assert bottleneck(0.5, 0.2) == "rollout"
    assert bottleneck(0.1, 0.6) == "trainer"
    assert bottleneck(0.05, 0.05) == ""


async def test_a_step_is_summarised_by_the_age_of_each_token() -> None:
    lineage = Lineage()
    lineage = lineage.begin(1, BASE)
    records = [
        record("g1-0", spans=((0, Version(1, 1)), (1, Version(1, 3)))),
        record("g1-1", spans=((0, Version(1, 3)),)),
        record("g2-0", spans=((0, Version(1, 0)),)),
    ]
    trained, dropped = tokens_pb2.TRAJECTORY_OUTCOME_TRAINED, tokens_pb2.TRAJECTORY_OUTCOME_DROPPED
    step = trainer_pb2.StepReport(
        policy_version=Version(1, 4).to_proto(),
        sequence_no=4,
        metrics={"loss": 1.5, "weights/diff_s": 0.1},
        results=[
            trainer_pb2.TrajectoryResult(trajectory_id="g1-0", outcome=trained, trained_tokens=4),
            trainer_pb2.TrajectoryResult(trajectory_id="g1-1", outcome=trained, trained_tokens=4),
            trainer_pb2.TrajectoryResult(trajectory_id="g2-0", outcome=dropped, reason="STALE"),
        ],
    )
    late = journal_pb2.DroppedTrajectories(trajectory_ids=["g2-0"])
    applied = journal_pb2.BatchApplied(trained=["g1-0", "g1-1"], dropped={"STALE": late})
    summary = await summarise(step, applied, records, lineage, 2, is_solved=lambda _, reward: reward >= 1)
    assert (summary.trained, summary.dropped) == (2, {"STALE": 1})
    assert summary.metrics["staleness/tokens_at_0"] == 7
    assert summary.metrics["staleness/tokens_at_2"] == 1
    assert summary.metrics["staleness/share_ge_1"] == pytest.approx(1 / 8)
    assert summary.metrics["tokens/trained"] == 8
    assert summary.metrics["trainer/loss"] == 1.5
    assert summary.metrics["weights/diff_s"] == 0.1
    assert [each.own.reason for each in records] == ["", "", "STALE"]


def test_the_report_counts_a_step_that_was_trained_again_once(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "reward/mean": 0.1, "tokens/trained": 10.0, "staleness/tokens_at_0": 10.0},
        {"step": 2, "reward/mean": 0.2, "tokens/trained": 10.0, "staleness/tokens_at_2": 10.0},
        {"step": 2, "eval/reward_mean": 0.9},
        {
            "step": 2,
            "reward/mean": 0.3,
            "tokens/trained": 30.0,
            "staleness/tokens_at_1": 30.0,
            "trainer/mismatch_kl": 0.5,
        },
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "rew')
    report = build_report(read_metrics(path), {"steps": 2, "run": "r"})
    assert report["reward_curve"] == [[1, 0.1], [2, 0.3]]
    assert report["tokens_trained"] == 40
    assert report["max_staleness_seen"] == 1
    assert report["staleness_share_ge_1"] == 0.75
    assert report["mismatch_kl_mean"] == 0.5
    assert report["evaluations"] == [{"step": 2, "eval/reward_mean": 0.9}]


async def test_what_a_run_leaves_is_not_written_through_a_link(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.write_text("kept")
    written = tmp_path / "report.json", tmp_path / "trajectories" / "step_000001.jsonl"
    for path in written:
        path.parent.mkdir(exist_ok=True)
        path.with_name(f".{path.name}").symlink_to(stranger)
    recorder = Recorder(tmp_path, TrajectoryFiles(tmp_path / "trajectories", 0))
    await recorder.write_step(1, {"reward/mean": 0.5}, [record("g1-0")], Lineage())
    report = await recorder.write_report({"steps": 1, "run": "r"})
    await recorder.close()
    assert stranger.read_text() == "kept"
    assert not any(path.is_symlink() for path in written)
    assert json.loads(written[0].read_text()) == report
    assert json.loads(written[1].read_text())["trajectory_id"] == "g1-0"


async def test_a_step_is_written_although_whoever_recorded_it_was_cancelled(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recorder_module, "_WAITING", 0)
    recorder, disk = Recorder(tmp_path, None), threading.Event()
    recorder._thread.submit(disk.wait)
    recording = asyncio.create_task(recorder.write_step(1, {"reward/mean": 0.5}, [], Lineage()))
    await asyncio.sleep(0)
    recording.cancel()
    await asyncio.wait({recording})
    disk.set()
    await recorder.close()
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [1]


async def test_two_callers_wait_for_a_slow_disk_side_by_side(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recorder_module, "_WAITING", 0)
    recorder, first, second = Recorder(tmp_path, None), threading.Event(), threading.Event()
    recorder._waiting += [recorder._thread.submit(first.wait), recorder._thread.submit(second.wait)]
    callers = [
        asyncio.create_task(recorder.write_scalars(1, {"eval/reward_mean": 0.5})),
        asyncio.create_task(recorder.write_step(1, {"reward/mean": 0.5}, [], Lineage())),
    ]
    await asyncio.sleep(0)
    written = recorder._waiting[0]
    first.set()
    while not written.done():  # noqa: ASYNC110 - a future of a thread
        await asyncio.sleep(0.001)
    for _ in range(100):  # both callers come as far as they can
        await asyncio.sleep(0)
    assert not any(each.done() for each in callers)
    second.set()
    await asyncio.gather(*callers)
    await recorder.close()
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [1]


def test_an_evaluation_counts_what_is_missing_and_treats_a_task_as_one_observation() -> None:
    def sample(task: str, reward: float | None, *, greedy: bool = False) -> EvalSample:
        return EvalSample(task, "p", "c", reward, greedy, truncated=False)

    result = EvalResult([sample("a", 1.0), sample("a", 0.0), sample("b", 0.5), sample("b", None)])
    result.samples.append(sample("a", 1.0, greedy=True))
    metrics = result.metrics()
    assert metrics["reward_mean"] == 0.5
    assert metrics["exact_share"] == pytest.approx(1 / 3)
    assert metrics["reward_stderr"] == 0.0, "both tasks have the same mean"
    assert metrics["greedy_reward_mean"] == metrics["greedy_exact_share"] == 1.0
    assert metrics["missing_rewards"] == 1.0


async def test_a_name_stands_for_all_its_addresses_and_a_literal_for_itself() -> None:
    assert await resolve_targets(["127.0.0.1:7103", "unix:/tmp/x.sock", "[::1]:5"]) == [
        "127.0.0.1:7103",
        "unix:/tmp/x.sock",
        "[::1]:5",
    ]
    assert "127.0.0.1:7103" in await resolve_targets(["dns:///localhost:7103"])
    assert await resolve_targets(["no-such-host.invalid:7103"]) == []


@pytest.mark.parametrize(
    "address", [f"{'a' * 64}.example:7103", "..:7103", "127.0.0.1:99999", "127.0.0.1:0", "host", ":7103", "unix:", ""]
)
async def test_an_address_that_cannot_be_one_is_left_out_and_hides_no_other(address) -> None:
    with pytest.raises(ValueError, match="host:port"):
        check_address(address)
    assert await resolve_targets([address, "127.0.0.1:7103"]) == ["127.0.0.1:7103"]
