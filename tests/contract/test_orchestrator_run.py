"""Whole runs of the orchestrator between a replica and a trainer that keep their contracts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchestrator_doubles import (
    RolloutDouble,
    TrainerDouble,
    common_settings,
    orchestrator_settings,
    serve_rollout,
    serve_trainer,
)
from prometheus_client import REGISTRY
from simulated_clock import SimulatedClock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from orchestrator_svc.app import SERVICE_NAME, only_writer, serve
from orchestrator_svc.commands.audit_compare import audit
from orchestrator_svc.config import DeadlinesConfig
from orchestrator_svc.journal import DATABASE, snapshot, store
from orchestrator_svc.journal.ledger import folded
from orchestrator_svc.journal.segments import JournalError, segment_path
from orchestrator_svc.journal.store import Journal, read_facts
from orchestrator_svc.run import evaluation as evaluation_module
from orchestrator_svc.run import training as training_module
from orchestrator_svc.run.evaluation import EvalResult, EvalSample
from orchestrator_svc.run.metrics import AppliedStep, read_metrics, summarise
from orchestrator_svc.run.recorder import Recorder
from orchestrator_svc.run.report import RunReporter
from orchestrator_svc.run.run import Run
from orchestrator_svc.run.task_stream import TaskStream
from orchestrator_svc.run.trainer_link import EpochLostError, TrainerLink
from orchestrator_svc.sessions.exchange import SESSIONS
from orchestrator_svc.sessions.servicer import EPISODES
from sluice.client import OrchestratorClient, TrainerClient
from sluice.clock import CLOCK, Clock
from sluice.config import ConfigError, FailedForGoodError, SecurityConfig, UnfinishedError
from sluice.environments.base import Task
from sluice.environments.processes import EnvironmentProcesses
from sluice.metric_names import OWN_LOSS, find
from sluice.rpc import SluiceError
from sluice.rpc.access import INFO_SERVICE
from sluice.rpc.channel import waits_of
from sluice.tasks import settle
from sluice.v1 import (
    common_pb2,
    common_pb2_grpc,
    episode_pb2,
    episode_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    rollout_pb2,
    session_pb2,
    session_pb2_grpc,
    tokens_pb2,
    trainer_pb2,
)
from sluice.versions import BASE, Lineage, Version

pytestmark = pytest.mark.slow

DEADLINE_S = 60

LIMIT_S = 30.0
"""A limit of the run under test, on the simulated clock."""

TICK_S = 0.001
"""Simulated seconds that pass between two looks, so that retries are made: no more than real time."""


class Scene:
    """Doubles that are served, and an orchestrator that can be started between them.

    Attributes:
        target: Where the orchestrator is served: a unix socket, which no other test can take.
    """

    def __init__(self, directory, trainer, replicas, addresses, target: str) -> None:
        self.directory, self.trainer, self.replicas = directory, trainer, replicas
        self.trainer_address, self.replica_addresses = addresses
        self.target = target
        self.run_dir = directory / "test"
        self._running: list[asyncio.Task[None]] = []

    def start(self, *, common: dict | None = None, clock: Clock = CLOCK, **settings) -> asyncio.Task[None]:
        """Begin a run; settings are those of the table [orchestrator]."""
        config = orchestrator_settings(self.directory, self.target, **settings)
        shared = common_settings(self.directory, self.trainer_address, self.replica_addresses, **(common or {}))
        running = asyncio.create_task(serve(shared, config, clock))
        self._running.append(running)
        return running

    async def close(self) -> None:
        """End what a test that failed has left running: gRPC aborts the process if its event loop ends before its servers."""
        left = [each for each in self._running if not each.done()]
        for each in left:
            each.cancel()
        await settle(*left, timeout_s=DEADLINE_S)

    async def run(self, **settings) -> dict:
        """Run to the end; gives the report."""
        async with asyncio.timeout(DEADLINE_S):
            await self.start(**settings)
        return self.report()

    def report(self) -> dict:
        return json.loads((self.run_dir / "report.json").read_text())

    def client(self) -> OrchestratorClient:
        return OrchestratorClient(self.target)

    async def until(self, condition) -> None:
        """Wait until something holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - any condition, of any double
                await asyncio.sleep(0.005)

    async def until_run(self, client: OrchestratorClient, condition) -> orchestrator_pb2.Run:
        """Wait until something holds of the run as GetRun gives it. It need not be served yet."""
        served = False
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    run = await client.run("test")
                except SluiceError as error:
                    if served or error.code is not grpc.StatusCode.UNAVAILABLE:
                        raise
                else:
                    served = True
                    if condition(run):
                        return run
                await asyncio.sleep(0.01)

    def watch(self, kind: str | None = None) -> asyncio.Task[list[orchestrator_pb2.RunEvent]]:
        """Collect all events of the run until it ends, which it cannot before it is watched."""
        self.trainer.saving.clear()
        return asyncio.create_task(self._events(kind))

    async def _events(self, kind: str | None) -> list[orchestrator_pb2.RunEvent]:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = []
                with contextlib.suppress(SluiceError):
                    async with self.client() as client:
                        async for answer in client.watch("test"):
                            found.append(answer.event)
                            self.trainer.saving.set()
                    return [event for event in found if kind in (None, event.WhichOneof("kind"))]
                await asyncio.sleep(0.02)

    async def terminate(self) -> None:
        """Send SIGTERM to this process, once the orchestrator takes it."""
        await self.until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture
async def scene(tmp_path):
    replicas = [RolloutDouble()]
    async with contextlib.AsyncExitStack() as stack:
        built = await make_scene(tmp_path, stack, replicas)
        yield built
        if (built.run_dir / DATABASE).exists() and built.trainer.keeps_record:
            assert not audit(read_facts(built.run_dir), built.trainer.record, Lineage()).differences


async def make_scene(directory, stack, replicas) -> Scene:
    trainer = TrainerDouble(replicas=replicas)
    address = await stack.enter_async_context(serve_trainer(trainer))
    targets = [await stack.enter_async_context(serve_rollout(each)) for each in replicas]
    socket = Path(tempfile.mkdtemp(prefix="sluice-"))  # a socket's path must be short
    stack.callback(shutil.rmtree, socket)
    scene = Scene(directory, trainer, replicas, (address, targets), f"unix:{socket}/orchestrator")
    stack.push_async_callback(scene.close)
    return scene


async def finished(run: asyncio.Task[None], clock: SimulatedClock) -> None:
    """Let a run go to its end while simulated time passes, as slowly as real time."""
    await clock.until(run.done, step_s=TICK_S)
    await run


def trained(scene: Scene) -> list[str]:
    return [each.trajectory_id for batch in scene.trainer.history.values() for each in batch]


async def test_counters_are_facts_once_a_batch_and_at_the_end(scene) -> None:
    report = await scene.run()
    facts = [fact for _, fact in read_facts(scene.run_dir)]
    kinds = Counter(fact.WhichOneof("kind") for fact in facts)
    assert kinds["group_accepted"] == 8
    assert kinds["counts_noted"] <= kinds["batch_made"] + 1 == 5
    generated = sum((Counter(dict(fact.counts_noted.generated)) for fact in facts), Counter())
    assert (generated["tokens"], generated["requests"]) == (report["tokens_generated"], report["requests"])


async def test_a_run_that_stays_is_served_and_scraped_after_its_end(scene) -> None:
    def value(metric: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"sluice_run_{metric}", labels)

    started = time.time()
    running = scene.start(serve_after_end=True)
    async with scene.client() as client:
        with contextlib.suppress(SluiceError):
            await scene.until_run(client, lambda run: run.state == orchestrator_pb2.RUN_STATE_SUCCEEDED)
        await scene.until_run(client, lambda run: run.state == orchestrator_pb2.RUN_STATE_SUCCEEDED)
        assert not running.done()
        assert (value("state", state="succeeded"), value("state", state="running")) == (1, 0)
        assert (value("policy_number"), value("max_steps"), value("trajectories_trained_total")) == (4, 4, 16)
        assert (value("replicas", state="fit"), value("live_groups"), value("queued_batches")) == (1, 0, 0)
        assert value("replica_lag", replica=scene.replicas[0].name) >= 0
        assert value("step_metric", name="reward/mean") == value("reward_mean")
        assert started <= value("last_step_timestamp_seconds") <= time.time()
        assert started <= value("checkpoint_timestamp_seconds") <= time.time()
        assert (value("checkpoint_number"), value("waits")) == (4, 0)
        assert value("tokens_total", kind="sampled") == 8 * (2 + 3)
        assert (value("journal_lag_seconds"), value("journal_behind")) == (0, 0)
        assert await waits_of(scene.target, SecurityConfig()) == []
        await scene.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await running
    assert value("policy_number") is None


async def test_a_run_goes_to_its_end_and_leaves_what_people_need(scene) -> None:
    scene.run_dir.mkdir(parents=True)
    (scene.run_dir / "config.toml").write_text("[trainer]\nlr = 0.5\n")
    events = scene.watch()
    report = await scene.run()
    assert (report["state"], report["steps"], report["seed"]) == ("succeeded", 4, 0)
    assert report["trajectories_trained"] == report["trajectories_accepted"] == 16
    assert len(trained(scene)) == len(set(trained(scene))) == 16
    assert report["mismatch_kl_mean"] == 0.5
    assert len(report["reward_curve"]) == 4
    assert report["tokens_trained"] == report["tokens_generated"] == 8 * (2 + 3)
    rows = [
        json.loads(line) for line in (scene.run_dir / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 4
    assert {(row["completion"], row["reward"]) for row in rows} == {("ab", 0.5), ("aab", 2 / 3)}
    assert {(row["completion"], row["advantage"] > 0) for row in rows} == {("ab", False), ("aab", True)}
    shown = EventAccumulator(str(scene.run_dir / "tensorboard" / scene.run_dir.name))
    shown.Reload()
    (samples,) = shown.Tensors("samples")
    text = samples.tensor_proto.string_val[0].decode()
    assert samples.step == 1
    assert re.findall(r"#### reward (\S+),", text) == ["0.5", "0.5", "0.6667", "0.6667"]
    assert "<pre>\naab</pre>" in text
    session = shown.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    settings = parse_session_start_info_plugin_data(session).hparams
    assert settings["orchestrator.group_size"].number_value == 2
    assert settings["trainer.lr"].number_value == 0.5, "sluice rl wrote it beside the run"
    metrics = [json.loads(line) for line in (scene.run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {name for values in metrics for name in values} - {"step", "time"}
    assert set(shown.Tags()["scalars"]) == names
    assert {name for name in names if find(name) in (None, OWN_LOSS)} == set(), "each has a row in metric_names.py"
    assert scene.trainer.checkpoints == [4]
    kinds = [event.WhichOneof("kind") for event in await events]
    assert kinds.count("step_finished") == 4
    assert kinds.count("group_scored") == 8
    assert kinds.count("checkpoint_written") == 1
    last = [event for event in await events if event.WhichOneof("kind") == "state_changed"][-1]
    assert last.state_changed.state == orchestrator_pb2.RUN_STATE_SUCCEEDED


async def test_advantages_are_those_of_each_group(scene) -> None:
    await scene.run(advantage="centered")
    for batch in scene.trainer.history.values():
        for group in {each.group_id for each in batch}:
            members = [each for each in batch if each.group_id == group]
            mean = sum(each.reward for each in members) / len(members)
            assert len(members) == 2
            for each in members:
                assert each.advantages == pytest.approx([each.reward - mean])


async def test_without_staleness_every_batch_is_exactly_on_policy(scene) -> None:
    scene.trainer.publishes = False
    task = scene.start(common={"max_staleness": 0})
    for number in range(4):
        await scene.until(lambda number=number: scene.trainer.version.number == number + 1 or number == 4)
        calls = len(scene.replicas[0].calls)
        assert calls == 2 * (number + 1), "nothing is sampled before the replica serves the new version"
        scene.trainer.publish()
    await task
    for number, batch in scene.trainer.history.items():
        versions = {Version.from_proto(s.policy_version) for each in batch for s in each.version_spans}
        assert versions == {Version(1, number - 1)}


async def test_no_more_is_sampled_ahead_than_the_bound_allows(scene) -> None:
    scene.trainer.automatic = False
    task = scene.start(common={"max_staleness": 1}, max_steps=6)
    for applied in range(6):
        await scene.until(lambda: scene.trainer.waiting)
        expected = min(12, (applied + 2) * 2)
        await scene.until(lambda expected=expected: len(scene.replicas[0].calls) == expected)
        scene.trainer.apply()
    await task
    assert scene.report()["max_staleness_seen"] == 1


async def test_groups_start_just_in_time_for_a_slow_trainer(scene) -> None:
    trainer, clock = scene.trainer, SimulatedClock()
    trainer.automatic = False

    gauges = [f"sluice_run_{name}" for name in ("policy_number", "running_episodes", "queued_batches", "ready_groups")]

    def settled() -> bool:
        """Whether nothing will happen before time passes: no episode runs, and the trainer has the batches that it has room for."""
        if not trainer.waiting:
            return False
        metrics = [metric for metric in REGISTRY.collect() if metric.name in gauges]
        values = {sample.name: sample.value for metric in metrics for sample in metric.samples}
        number, running, queued, groups = (values.get(name) for name in gauges)
        if (number, running) != (trainer.version.number, 0):
            return False
        return queued == len(trainer.waiting) and (groups < 2 or len(trainer.waiting) == 2)

    pacing = {"batches": 4, "reserve": 0.0}
    task = scene.start(common={"max_staleness": 3}, max_steps=12, pacing=pacing, clock=clock)
    for _ in range(12):
        for _ in range(8):
            await scene.until(settled)
            await clock.advance(0.05)
        await scene.until(settled)
        trainer.apply()
    await task
    staleness = [row["staleness/mean"] for _, row in sorted(read_metrics(scene.run_dir / "metrics.jsonl").items())]
    assert staleness[3:5] == [3.0, 3.0]  # nothing was measured when these batches were sampled
    assert min(staleness[-3:]) < 3.0


async def test_a_reward_that_fails_is_missing_and_its_group_goes_on_without_it(scene) -> None:
    scene.replicas[0].text = lambda request, index: "abx" if index == 0 else "aaa"
    report = await scene.run(environment_args={"fail": "x"}, group_size=3, max_steps=2)
    assert report["trajectories_dropped"] == {"MISSING_REWARD": 4}
    assert report["trajectories_trained"] == 8
    assert all(each.reward == 1.0 for batch in scene.trainer.history.values() for each in batch)


async def test_what_the_trainer_found_too_old_is_counted_and_its_task_drawn_again(scene) -> None:
    scene.trainer.verdict = lambda trajectory: "STALE" if trajectory.group_id == "g1" else ""
    events = scene.watch("group_scored")
    report = await scene.run(on_stale="requeue", common={"max_staleness": 0})
    assert report["trajectories_dropped"] == {"STALE": 2}
    assert report["trajectories_trained"] == 14
    tasks = [event.group_scored.task_id for event in await events]
    assert tasks.count(tasks[0]) == 2


async def test_groups_that_say_nothing_can_be_drawn_anew(scene) -> None:
    answers = iter(["same", "same"] + ["ab", "aab"] * 100)
    scene.replicas[0].text = lambda request, index: next(answers)
    report = await scene.run(filter={"drop_degenerate": True}, max_running=1)
    assert report["trajectories_dropped"] == {"NO_SIGNAL": 2}
    assert report["steps"] == 4


async def test_work_of_a_failing_replica_goes_to_another(tmp_path) -> None:
    replicas = [RolloutDouble("bad"), RolloutDouble("good")]
    replicas[0].failures = [SluiceError.unavailable("ENGINE_FAILED", "broken")]
    async with contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, replicas)
        report = await scene.run()
    assert report["state"] == "succeeded"
    assert report["generation_retries"] > 0
    assert len(replicas[1].calls) == 8


async def test_an_interrupted_sample_goes_on_from_its_tokens(scene) -> None:
    replica = scene.replicas[0]
    replica.finish = lambda request: (
        tokens_pb2.FINISH_REASON_STOP if request.token_ids.ids else tokens_pb2.FINISH_REASON_ABORT
    )
    report = await scene.run(max_steps=1, sampling={"max_tokens": 10})
    assert report["samples_continued"] == 4
    assert (report["tokens_kept"], report["tokens_lost"]) == (2 * (2 + 3), 0)
    step = read_metrics(scene.run_dir / "metrics.jsonl")[1]
    assert (step["rollout/continued"], step["rollout/evicted"], report["replicas_evicted"]) == (4, 0, {})
    for each in scene.trainer.history[1]:
        assert each.mask_runs[1] == len(each.logprobs)
        assert sum(each.mask_runs) == len(each.token_ids)
    continued = [call.request for call in replica.calls if call.request.token_ids.ids]
    assert all(request.n == 1 and request.sampling.max_tokens < 10 for request in continued)


async def test_a_trainer_that_comes_back_gets_what_its_checkpoint_lacks(scene) -> None:
    trainer = scene.trainer
    trainer.automatic = False
    task = scene.start(common={"max_staleness": 3}, checkpoint={"every_steps": 2}, max_steps=6)
    for number in range(1, 4):
        await scene.until(lambda: trainer.waiting)
        trainer.apply()
        if number == 2:
            await scene.until(lambda: trainer.checkpoints == [2])
    ids = {header.batch_id for header in trainer.headers if header.sequence_no == 3}
    trainer.crash()
    await scene.until(lambda: len(trainer.epochs) == 2)
    trainer.run_freely()
    await task
    assert {header.batch_id for header in trainer.headers if header.sequence_no == 3} == ids, "the same batch again"
    report = scene.report()
    assert (report["steps"], report["epochs"]) == (6, 2)
    assert report["trajectories_trained"] == len(trained(scene)) == len(set(trained(scene))) == 24


async def test_an_orchestrator_that_comes_back_rejoins_the_epoch(scene) -> None:
    trainer = scene.trainer
    trainer.automatic = False
    first = scene.start(common={"max_staleness": 3}, max_steps=5)
    await scene.until(lambda: len(trainer.waiting) == 2)
    trainer.apply()
    first.cancel()
    await asyncio.wait({first})
    assert scene.report()["state"] == "stopped"
    trainer.run_freely()
    events = scene.watch()
    async with asyncio.timeout(DEADLINE_S):
        await scene.start(common={"max_staleness": 3}, max_steps=5)
    assert min(event.sequence_no for event in await events) > 1_000_000, "above all numbers of the process before"
    report = scene.report()
    assert trainer.epochs == [1], "the trainer's weights were not thrown away"
    assert (report["state"], report["steps"]) == ("succeeded", 5)
    assert report["trajectories_trained"] == len(trained(scene)) == len(set(trained(scene))) == 20
    assert report["trajectories_accepted"] == 20


async def test_a_group_that_is_drawn_again_gets_request_ids_of_its_own(scene) -> None:
    trainer, replica = scene.trainer, scene.replicas[0]
    trainer.automatic = False
    first = scene.start(common={"max_staleness": 1})
    await scene.until(lambda: len(trainer.waiting) == 2)
    replica.gate.clear()
    trainer.apply()
    await scene.until(lambda: len(replica.calls) > 4)
    begun = {call.request.request_id for call in replica.calls[4:]}
    first.cancel()
    await asyncio.wait({first})
    replica.gate.set()
    # The replica remembers what it was asked; the second process asks under a newer version.
    for request_id in begun:
        with contextlib.suppress(SluiceError):
            async for _ in replica.repeats.once("GenerateStream", request_id, b"asked before", _nothing):
                pass
    trainer.run_freely()
    async with asyncio.timeout(DEADLINE_S):
        await scene.start(common={"max_staleness": 1})
    report = scene.report()
    assert (report["state"], report["groups_failed"]) == ("succeeded", {})
    assert report["trajectories_trained"] == 16


async def _nothing():
    yield rollout_pb2.GenerateResponse()


async def test_a_start_scores_a_group_again_from_the_answer_that_is_recorded(scene, monkeypatch) -> None:
    replica, score = scene.replicas[0], EnvironmentProcesses.score

    async def hang(*_arguments):
        await asyncio.Event().wait()

    monkeypatch.setattr(EnvironmentProcesses, "score", hang)
    first = scene.start(common={"max_staleness": 1})
    await scene.until(lambda: kinds_on_disk(scene).count("generation_recorded") == 4)
    first.cancel()
    await asyncio.wait({first})
    monkeypatch.setattr(EnvironmentProcesses, "score", score)
    report = await restarted(scene, common={"max_staleness": 1})
    assert (report["state"], report["trajectories_trained"]) == ("succeeded", 16)
    assert len(replica.calls) == 8, "no group was sampled twice"
    assert folded(read_facts(scene.run_dir)).trained == 16


def kinds_on_disk(scene: Scene) -> list[str | None]:
    try:
        return [fact.WhichOneof("kind") for _, fact in read_facts(scene.run_dir)]
    except JournalError:
        return []  # not there yet


async def test_a_trainer_that_is_lost_again_and_again_while_it_skips_every_batch_ends_the_run(scene) -> None:
    trainer = scene.trainer
    trainer.automatic, trainer.skips = False, True
    task = scene.start(common={"max_staleness": 3}, checkpoint={"every_steps": 1}, max_steps=9, max_lost_epochs=2)
    for number in (1, 2, 3):
        await scene.until(lambda: trainer.waiting)
        trainer.apply()
        await scene.until(lambda number=number: trainer.checkpoints == list(range(1, number + 1)))
        trainer.crash()
    with pytest.raises(FailedForGoodError, match="lost 3 times without one new batch"):
        async with asyncio.timeout(DEADLINE_S):
            await task


async def test_an_epoch_begins_from_the_newest_checkpoint_that_the_journal_has_reached(scene) -> None:
    trainer = scene.trainer
    trainer.automatic = False
    task = scene.start(common={"max_staleness": 3}, checkpoint={"every_steps": 1})
    for number in (1, 2):
        await scene.until(lambda: trainer.waiting)
        trainer.apply()
        await scene.until(lambda number=number: trainer.checkpoints == list(range(1, number + 1)))
    assert trainer.restored == [""], "there was none"
    ahead = trainer_pb2.Checkpoint(name="step_9", journal_position=1 << 40)
    trainer.saved.append(ahead)
    trainer.crash()
    trainer.run_freely()
    async with asyncio.timeout(DEADLINE_S):
        await task
    assert trainer.restored == ["", "step_2"], "step_9 belongs to facts that this journal does not have"
    assert all(each.journal_position for each in trainer.saved)
    assert scene.report()["trajectories_trained"] == 16


async def test_a_journal_that_lost_its_end_ends_the_run_instead_of_training_from_elsewhere(scene) -> None:
    scene.trainer.saved.append(trainer_pb2.Checkpoint(name="step_4", journal_position=1 << 40))
    with pytest.raises(FailedForGoodError, match=r"step_4.*put the run's journal back"):
        await scene.run()


async def test_a_run_whose_checkpoints_were_removed_ends_with_the_reason(scene) -> None:
    trainer = scene.trainer
    trainer.automatic = False
    task = scene.start(common={"max_staleness": 3}, checkpoint={"every_steps": 1})
    for number in (1, 2):
        await scene.until(lambda: trainer.waiting)
        trainer.apply()
        await scene.until(lambda number=number: trainer.checkpoints == list(range(1, number + 1)))
    trainer.saved.clear()
    trainer.checkpoint = BASE
    trainer.crash()
    with pytest.raises(
        FailedForGoodError, match=r"NO_CHECKPOINT: .*no longer holds batch 1: put the newer checkpoint back"
    ):
        async with asyncio.timeout(DEADLINE_S):
            await task


async def test_a_batch_that_would_be_sent_as_other_bytes_is_made_again_and_named(scene) -> None:
    scene.trainer.busy = True
    first = scene.start(common={"max_staleness": 1})
    await scene.until(lambda: scene.trainer.headers)
    first.cancel()
    await asyncio.wait({first})
    names = {header.batch_id for header in scene.trainer.headers}
    scene.trainer.busy = False
    report = await restarted(scene, common={"max_staleness": 1}, advantage="grpo")
    assert (report["state"], report["trajectories_trained"]) == ("succeeded", 16)
    applied = [header.batch_id for header in scene.trainer.headers if header.batch_id not in names]
    assert len(set(applied)) == 4, "the first batch has another name, because it has another content"
    unmade = [fact.batch_unmade for _, fact in read_facts(scene.run_dir) if fact.HasField("batch_unmade")]
    assert "not the same bytes" in unmade[0].reason


@pytest.mark.parametrize("keeps_record", [True, False])
async def test_batches_that_a_checkpoint_holds_are_accounted_for_when_both_sides_died(scene, keeps_record) -> None:
    trainer = scene.trainer
    trainer.automatic, trainer.keeps_record = False, keeps_record
    trainer.verdict = lambda trajectory: "STALE" if trajectory.trajectory_id == "g1-0" else ""
    settings = {"common": {"max_staleness": 3}}
    first = scene.start(**settings)
    await scene.until(lambda: len(trainer.waiting) == 2)
    first.cancel()
    await asyncio.wait({first})
    trainer.apply()
    trainer.checkpoint = trainer.version
    trainer.crash()
    trainer.run_freely()
    events = scene.watch("step_finished")
    report = await restarted(scene, **settings)
    assert (report["state"], report["steps"], report["epochs"]) == ("succeeded", 4, 2)
    if keeps_record:
        assert (report["trajectories_trained"], report["trajectories_dropped"]) == (15, {"STALE": 1})
        assert [event.step_finished.step for event in await events] == [1, 2, 3, 4]
    else:
        assert (report["trajectories_trained"], report["trajectories_dropped"]) == (12, {"REPORT_LOST": 4})


@pytest.mark.parametrize("trainer_lives", [True, False])
async def test_steps_that_were_killed_before_they_were_written_are_written_once_by_the_next_process(
    scene, trainer_lives
) -> None:
    trainer, settings = scene.trainer, {"common": {"max_staleness": 3}}
    trainer.automatic = False
    first = scene.start(**settings)
    await scene.until(lambda: len(trainer.waiting) == 2)
    trainer.apply()
    trainer.apply()
    await scene.until(lambda: len(step_lines(scene)) == 2)
    first.cancel()
    await asyncio.wait({first})
    path = scene.run_dir / "metrics.jsonl"
    whole = step_lines(scene)
    path.write_text(path.read_text().splitlines(keepends=True)[0] + '{"step": 2, "time": 17')  # what a SIGKILL left
    if not trainer_lives:
        trainer.checkpoint, trainer.keeps_record = trainer.version, False
        trainer.crash()
        trainer.reports.clear()
    trainer.run_freely()
    report = await restarted(scene, **settings)
    assert (report["state"], report["steps"]) == ("succeeded", 4)
    lines = step_lines(scene)
    assert [(line["step"], line["policy/epoch"]) for line in lines] == [
        *[(1, 1), (2, 1)],
        *[(step, 1 if trainer_lives else 2) for step in (3, 4)],
    ]
    lost = {name for name in whole[1] if name.startswith(("reward/", "completion/", "groups/", "staleness/"))}
    assert {name: lines[1][name] for name in lost} == {name: whole[1][name] for name in lost}
    assert ("trainer/loss" in lines[1]) is trainer_lives
    again = await restarted(scene, **settings)
    assert (again["steps"], step_lines(scene)) == (4, lines), "nothing is written a second time"


async def test_a_trainer_that_loses_the_first_epoch_of_a_process_makes_no_step_appear_twice(scene) -> None:
    trainer = scene.trainer
    trainer.automatic = False
    task = scene.start(common={"max_staleness": 3})
    await scene.until(lambda: len(trainer.waiting) == 2)
    trainer.apply()
    trainer.apply()
    await scene.until(lambda: len(step_lines(scene)) == 2)
    trainer.checkpoint = trainer.version
    trainer.crash()
    trainer.run_freely()
    async with asyncio.timeout(DEADLINE_S):
        await task
    assert [(line["step"], line["policy/epoch"]) for line in step_lines(scene)] == [(1, 1), (2, 1), (3, 2), (4, 2)]


class SlowReading:
    """Holds the reading of a journal until `go_on` is set, in the thread that reads."""

    def __init__(self, monkeypatch) -> None:
        self.reads, self.go_on = threading.Event(), threading.Event()
        fold = Journal._fold

        def slow(journal: Journal) -> object:
            self.reads.set()
            assert self.go_on.wait(DEADLINE_S)
            return fold(journal)

        monkeypatch.setattr(Journal, "_fold", slow)


async def test_the_port_is_open_while_the_journal_is_read_and_calls_are_told_to_wait(scene, monkeypatch) -> None:
    reading = SlowReading(monkeypatch)
    task = scene.start()
    await scene.until(reading.reads.is_set)
    statuses = health_pb2.HealthCheckResponse
    async with grpc.aio.insecure_channel(scene.target) as channel, asyncio.timeout(DEADLINE_S):
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", SERVICE_NAME, SESSIONS, EPISODES):
            assert (await check(health_pb2.HealthCheckRequest(service=name))).status == statuses.NOT_SERVING
        assert (await check(health_pb2.HealthCheckRequest(service=INFO_SERVICE))).status == statuses.SERVING

        run = orchestrator_pb2.GetRunRequest(run="runs/test")
        calls = [
            orchestrator_pb2_grpc.OrchestratorServiceStub(channel).GetRun(run),
            session_pb2_grpc.SessionServiceStub(channel).FindSession(session_pb2.FindSessionRequest()),
            episode_pb2_grpc.EpisodeServiceStub(channel).LeaseTasks(episode_pb2.LeaseTasksRequest(run="runs/test")),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = SluiceError.from_rpc(caught.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STARTING")
            assert error.retry_after_s == 1.0
        stream = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).WatchRun(
            orchestrator_pb2.WatchRunRequest(run="runs/test")
        )
        with pytest.raises(grpc.aio.AioRpcError, match="reads its journal"):
            await stream.read()
        info = await common_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(common_pb2.GetServerInfoRequest())
        assert list(info.unimplemented_rpcs) == [f"{EPISODES}/Generate", f"{EPISODES}/GenerateStream"]

        reading.go_on.set()
        async with scene.client() as client:
            scene.trainer.saving.clear()
            await scene.until_run(client, lambda run: run.step)
        assert (await check(health_pb2.HealthCheckRequest())).status == statuses.SERVING
        scene.trainer.saving.set()
        await task


async def test_a_start_that_a_signal_ends_while_it_reads_its_journal_writes_nothing(scene, monkeypatch) -> None:
    reading = SlowReading(monkeypatch)
    task = scene.start()
    await scene.until(reading.reads.is_set)
    task.cancel()  # as the first signal does before the service handles signals itself
    asyncio.get_running_loop().call_soon(reading.go_on.set)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not list(read_facts(scene.run_dir))
    with only_writer(scene.run_dir):
        pass


def step_lines(scene: Scene) -> list[dict[str, float]]:
    path = scene.run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def damage(scene: Scene, group: int) -> None:
    """Flip a bit in the first trajectory of a group, as a bad disk does."""
    ledger = folded(read_facts(scene.run_dir))
    place = ledger.groups[group].trajectories[0].place
    path = segment_path(scene.run_dir / "journal", place.segment)
    content = bytearray(path.read_bytes())
    content[place.offset + 20] ^= 1
    path.write_bytes(content)


async def killed_with_a_damaged_group(scene: Scene, run: asyncio.Task[None], group: int) -> None:
    run.cancel()
    await asyncio.wait({run})
    damage(scene, group)


async def restarted(scene: Scene, **settings) -> dict:
    async with asyncio.timeout(DEADLINE_S):
        await scene.start(**settings)
    report = scene.report()
    dropped = sum(report["trajectories_dropped"].values())
    assert report["trajectories_accepted"] == report["trajectories_trained"] + dropped
    return report


async def test_a_damaged_group_of_a_batch_that_was_never_sent_is_dropped_and_its_task_drawn_again(scene) -> None:
    settings = {"common": {"max_staleness": 3}}
    scene.trainer.busy = True
    first = scene.start(**settings)
    await scene.until(lambda: len(scene.replicas[0].calls) == 8 and scene.trainer.headers)
    await killed_with_a_damaged_group(scene, first, 1)
    again = scene.start(**settings)
    await scene.until(lambda: len(scene.replicas[0].calls) > 8)
    again.cancel()
    await asyncio.wait({again})
    scene.trainer.busy = False
    report = await restarted(scene, **settings)
    assert (report["state"], report["steps"], report["epochs"]) == ("succeeded", 4, 1)
    assert report["trajectories_dropped"] == {"JOURNAL_DAMAGED": 2}
    sent = [each for batch in scene.trainer.history.values() for each in batch]
    assert "g1" not in {each.group_id for each in sent}
    stream = TaskStream([Task(f"train-{index}") for index in range(40)], seed=0)
    assert {each.task_id for each in sent} == {stream.at(position) for position in range(8)}, "none is left out"


async def test_a_damaged_group_of_a_batch_that_the_trainer_holds_is_trained_all_the_same(scene) -> None:
    settings = {"common": {"max_staleness": 3}}
    scene.trainer.automatic = False
    first = scene.start(**settings)
    await scene.until(lambda: len(scene.trainer.waiting) == 2)
    await killed_with_a_damaged_group(scene, first, 1)
    scene.trainer.run_freely()
    report = await restarted(scene, **settings)
    assert (report["state"], report["steps"], report["epochs"]) == ("succeeded", 4, 1)
    assert (report["trajectories_trained"], report["trajectories_dropped"]) == (16, {})


async def test_a_damaged_group_of_a_batch_that_a_new_trainer_lacks_is_dropped(scene) -> None:
    settings = {"common": {"max_staleness": 3}}
    scene.trainer.automatic = False
    first = scene.start(**settings)
    await scene.until(lambda: len(scene.trainer.waiting) == 2)
    scene.trainer.crash()
    await killed_with_a_damaged_group(scene, first, 1)
    scene.trainer.run_freely()
    report = await restarted(scene, **settings)
    assert (report["state"], report["steps"]) == ("succeeded", 4)
    assert report["trajectories_dropped"] == {"JOURNAL_DAMAGED": 2}
    assert report["trajectories_trained"] == 16


async def test_a_signal_ends_the_run_without_a_failure_and_says_that_it_is_unfinished(scene) -> None:
    scene.trainer.automatic = False
    task = scene.start(common={"max_staleness": 1})
    await scene.until(lambda: scene.trainer.waiting)
    await scene.terminate()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(UnfinishedError):
            await task
    assert scene.report()["state"] == "stopped"


async def test_a_signal_while_a_step_is_summarised_loses_nothing_of_it(scene, monkeypatch) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*arguments, **options) -> AppliedStep:
        begun.set()
        await go_on.wait()
        return await summarise(*arguments, **options)

    monkeypatch.setattr(training_module, "summarise", slow)
    task = scene.start(server={"host": scene.target, "drain_s": DEADLINE_S})
    await begun.wait()
    await scene.terminate()
    await scene.until(lambda: any(each.get_name() == "run" and each.cancelling() for each in asyncio.all_tasks()))
    go_on.set()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(UnfinishedError):
            await task
    assert read_metrics(scene.run_dir / "metrics.jsonl").keys() == {1}
    assert (scene.run_dir / "trajectories" / "step_000001.jsonl").exists()


@pytest.mark.parametrize("write", [(Journal, "_commit"), (Recorder, "_metrics")], ids=["journal", "files"])
async def test_a_dead_disk_does_not_keep_a_run_from_ending_in_its_drain_time(scene, monkeypatch, write) -> None:
    answer, hangs = threading.Event(), threading.Event()

    def hang(*_arguments) -> None:
        hangs.set()
        answer.wait()

    scene.trainer.automatic = False
    task = scene.start(common={"max_staleness": 1}, server={"host": scene.target, "drain_s": 1.0})
    await scene.until(lambda: scene.trainer.waiting)
    monkeypatch.setattr(*write, hang)
    scene.trainer.apply()
    try:
        await scene.until(hangs.is_set)
        await scene.terminate()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(UnfinishedError):
                await task
    finally:
        answer.set()


@pytest.mark.parametrize(("every_mb", "saves"), [(4, True), (0, False)])
async def test_a_journal_that_grows_large_makes_a_checkpoint_due_which_releases_it(scene, every_mb, saves) -> None:
    scene.replicas[0].text = lambda request, index: "a" * (20_000 + index)
    checkpoint = {"every_steps": 0, "every_s": 0, "final": False, "every_mb": every_mb}
    await scene.run(max_steps=16, checkpoint=checkpoint, sampling={"max_tokens": 30_000}, journal={"segment_mb": 1})
    assert bool(scene.trainer.checkpoints) == saves
    size = sum(path.stat().st_size for path in (scene.run_dir / "journal").iterdir())
    assert (size < 8 << 20) == saves
    facts = [fact.WhichOneof("kind") for _, fact in read_facts(scene.run_dir)]
    assert facts.count("checkpoint_covered") == len(scene.trainer.checkpoints) < 16


async def test_a_run_continues_from_a_snapshot_of_its_state(scene, monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "LEAST_FACTS", 1)
    read, stored = [], store._stored_facts

    def counted(connection, last=0):
        read.append(last)
        return stored(connection, last)

    monkeypatch.setattr(store, "_stored_facts", counted)
    await scene.run(max_steps=2)
    after_two = max(seq for seq, _ in read_facts(scene.run_dir))
    read.clear()
    report = await scene.run(max_steps=4)
    assert read[0] == after_two, "the start reads what came after the snapshot alone"
    assert (report["state"], report["steps"], report["trajectories_trained"]) == ("succeeded", 4, 16)
    drawn = [fact.task_drawn for _, fact in read_facts(scene.run_dir) if fact.HasField("task_drawn")]
    positions = [each.position for each in drawn if not each.attempt and not each.redraw_reason]
    assert positions == list(range(len(positions))), "the curriculum goes on where it was"


async def test_an_existing_run_is_refused_when_told_to(scene) -> None:
    await scene.run()
    with pytest.raises(ConfigError, match="exists"):
        await scene.run(existing_run="refuse")


async def test_a_second_orchestrator_does_not_write_the_run_of_a_first_one(scene) -> None:
    first = scene.start(max_steps=10_000)
    await scene.until(lambda: scene.trainer.record)
    with pytest.raises(SluiceError, match="RUN_IN_USE"):
        await scene.start()
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await scene.run(max_steps=2)


async def test_a_run_of_another_seed_does_not_continue_this_one(scene) -> None:
    await scene.run()
    with pytest.raises(ConfigError, match="seed"):
        await scene.run(common={"seed": 1})


PATIENT = {"call_s": 1e5, "score_s": 1e5}
"""Limits of the environment that simulated time which passes fast does not reach."""


async def failing(scene: Scene, **settings) -> None:
    """Run while time passes fast."""
    clock, limits = SimulatedClock(), {"outage_s": LIMIT_S, "start_s": 1e5, "lost_s": 1e5}
    task = scene.start(**settings, deadlines=limits, environment_processes=PATIENT, clock=clock)
    await clock.until(task.done, step_s=1000 * TICK_S)
    assert clock.now >= SimulatedClock().now + LIMIT_S, "a judge or a fleet that is down may come back"
    await task


async def test_a_judge_that_is_down_pauses_the_run_and_puts_no_task_in_quarantine(scene) -> None:
    judge_is_up = False
    scene.replicas[0].text = lambda request, index: "a" * (index + 1) + ("b" if judge_is_up else "x")
    clock, limits = SimulatedClock(), {"start_s": 1e5, "lost_s": 1e5}
    events = scene.watch("state_changed")
    task = scene.start(
        environment_args={"fail": "x"},
        environment_processes=PATIENT,
        max_failed_tasks=3,
        max_failed_groups=4,
        quarantine_after=1,
        deadlines=limits,
        clock=clock,
    )
    async with scene.client() as client:

        async def failed() -> int:
            with contextlib.suppress(SluiceError):  # it may not be served yet
                run = await client.run("test")
                return sum(run.groups_failed.values()) if run.state == orchestrator_pb2.RUN_STATE_PAUSED else 0
            return 0

        async with asyncio.timeout(DEADLINE_S):
            while (count := await failed()) < 12:
                await clock.advance(100 * TICK_S)
                await asyncio.sleep(0.001)
        run = await client.run("test")
        assert "MISSING_REWARD" in run.waits_for[0]
        assert "sluice resume" in run.waits_for[0]
        assert clock.now > SimulatedClock().now + 1.0 + 2.0 + 4.0, f"{count} groups failed, the last ones one at a time"
        judge_is_up = True
    await clock.until(task.done, step_s=10 * TICK_S)
    await task
    report = scene.report()
    assert (report["state"], report["environments"][0]["quarantined_count"]) == ("succeeded", 0)
    states = [each.state_changed.state for each in await events]
    names = ["RUNNING", "PAUSED", "RUNNING", "STOPPING"]
    assert states[-5:-1] == [orchestrator_pb2.RunState.Value(f"RUN_STATE_{name}") for name in names]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SluiceError.failed_precondition("WEIGHTS_FIXED", "out of order"), r"outage_s.*out of order"),
        (
            SluiceError.invalid_argument("prompt", "too long"),
            r"^(?!.*outage_s).*3 groups in a row.*too long",
        ),  # for good
    ],
)
async def test_groups_that_all_fail_end_the_run_with_the_reason(scene, error: SluiceError, told: str) -> None:
    scene.replicas[0].failures = [error]
    with pytest.raises(FailedForGoodError, match=told):
        await failing(scene, max_failed_groups=3)
    report = scene.report()
    assert report["state"] == "failed"
    assert error.message in report["error"]


async def test_a_run_of_which_no_group_ever_succeeds_ends_after_a_short_pause(scene) -> None:
    clock, limits = SimulatedClock(), {"first_outage_s": LIMIT_S, "start_s": 1e5, "lost_s": 1e5}
    task = scene.start(
        environment_args={"fail": "b"}, max_failed_tasks=3, deadlines=limits, environment_processes=PATIENT, clock=clock
    )
    await clock.until(task.done, step_s=100 * TICK_S)
    with pytest.raises(FailedForGoodError, match=rf"a pause of {LIMIT_S:g} s \(orchestrator.deadlines.first_outage_s"):
        await task
    assert clock.now < SimulatedClock().now + 3600.0, "what never worked is not waited for as long as what did"


async def test_a_question_that_hangs_costs_its_group_and_is_not_taken_for_a_late_episode(scene) -> None:
    first, clock = TaskStream([Task(f"train-{index}") for index in range(40)], seed=0).at(0), SimulatedClock()
    scene.trainer.automatic = False
    limits = {"call_s": LIMIT_S, "score_s": 10 * LIMIT_S}
    task = scene.start(environment_args={"slow": first}, environment_processes=limits, clock=clock)
    # All other questions of the first batches are answered, so the one that hangs is the only call that can be late.
    await clock.until(lambda: len(scene.replicas[0].calls) == 5, step_s=TICK_S)
    await clock.advance(LIMIT_S)
    scene.trainer.run_freely()
    await finished(task, clock)
    report = scene.report()
    assert (report["state"], report["steps"]) == ("succeeded", 4)
    assert report["groups_failed"] == {"ENVIRONMENT_HUNG": 1}
    (environment,) = report["environments"]
    assert environment["failed_calls"] == {"ENVIRONMENT_HUNG": 1}
    assert environment["processes_ended"] == {"ENVIRONMENT_HUNG": 1}


async def test_a_score_that_always_fails_ends_the_run_instead_of_drawing_tasks_for_ever(scene) -> None:
    with pytest.raises(FailedForGoodError, match="MISSING_REWARD"):
        await failing(scene, environment_args={"fail": "b"}, max_failed_groups=3)
    report = scene.report()
    assert (report["state"], report["steps"]) == ("failed", 0)
    assert report["trajectories_dropped"]["MISSING_REWARD"] >= 6


async def test_a_filter_that_lets_nothing_through_ends_the_run(scene) -> None:
    with pytest.raises(FailedForGoodError, match="max_refills"):
        await scene.run(filter={"min_reward_mean": 5.0}, max_refills=3)
    assert scene.report()["state"] == "failed"


async def test_a_split_without_tasks_is_a_wrong_setting(scene) -> None:
    (scene.directory / "empty.py").write_text(
        "class Empty:\n    name = 'empty'\n    def tasks(self, split, seed):\n        return []\n"
        "    def messages(self, task):\n        return []\n    def score(self, task, completion):\n        return 0.0\n"
    )
    with pytest.raises(ConfigError, match="has no tasks"):
        await scene.run(environment=f"{scene.directory / 'empty.py'}:Empty")


async def test_an_environment_that_never_lists_its_tasks_ends_the_run_at_its_start(scene) -> None:
    (scene.directory / "endless.py").write_text(
        "import threading\n"
        "import pathlib\n"
        "class Endless:\n    name = 'endless'\n    def tasks(self, split, seed):\n"
        "        pathlib.Path(__file__).with_name('listing').touch()\n        threading.Event().wait()\n"
        "    def messages(self, task):\n        return []\n    def score(self, task, completion):\n        return 0.0\n"
    )
    clock = SimulatedClock()
    environment = f"{scene.directory / 'endless.py'}:Endless"
    task = scene.start(environment=environment, deadlines={"start_s": LIMIT_S}, clock=clock)
    await scene.until((scene.directory / "listing").exists)
    await clock.advance(LIMIT_S)
    with pytest.raises(ConfigError, match=r"tasks of split train.*start_s"):
        await finished(task, clock)


async def test_an_episode_beyond_its_deadline_is_dropped_and_counted(scene) -> None:
    replica, clock = scene.replicas[0], SimulatedClock()
    replica.works = True
    replica.gate.clear()
    limits = {"episode_s": LIMIT_S, "start_s": 10 * LIMIT_S, "lost_s": 10 * LIMIT_S}
    task = scene.start(deadlines=limits, max_failed_groups=1000, max_steps=1, clock=clock)
    await scene.until(lambda: len(replica.calls) == 2)
    # The message that the replica has begun a request takes a while to arrive.
    await clock.until(lambda: len(replica.calls) == 4, step_s=TICK_S * LIMIT_S)
    replica.gate.set()
    await finished(task, clock)
    assert scene.report()["groups_failed"] == {"EPISODE_DEADLINE": 2}


@pytest.mark.parametrize(
    ("advantage", "episodes", "keeps"), [("centered", 3, True), ("centered", 2, False), ("none", 2, True)]
)
async def test_a_group_that_loses_a_late_episode_keeps_the_others_if_they_can_be_trained(
    scene, advantage, episodes, keeps
) -> None:
    replica, clock = scene.replicas[0], SimulatedClock()
    replica.works = True
    replica.gate.clear()
    replica.gated = lambda request: request.request_id.endswith("g1/0/1.1")
    limits = {"episode_s": LIMIT_S, "start_s": 10 * LIMIT_S, "lost_s": 10 * LIMIT_S}
    task = scene.start(
        environment=f"{Path(__file__).parent / 'dialogue_environment.py'}:Dialogue",
        advantage=advantage,
        group_size=episodes,
        batch_size=1,
        max_steps=2,
        pacing={"enabled": False},
        deadlines=limits,
        clock=clock,
    )
    await scene.until(lambda: any(each.request.request_id.endswith("g1/0/1.1") for each in replica.calls))
    await clock.until(task.done, step_s=TICK_S * LIMIT_S)
    await task
    report = scene.report()
    of_first = {name for name in trained(scene) if name.startswith("g1-")}
    assert of_first == ({f"g1-{each}" for each in range(episodes)} - {"g1-1"} if keeps else set())
    assert report["episodes_lost"] == ({"EPISODE_DEADLINE": 1} if keeps else {})
    assert report["groups_failed"] == ({} if keeps else {"EPISODE_DEADLINE": 1})
    ended = [fact.episodes_ended.episodes for _, fact in read_facts(scene.run_dir) if fact.episodes_ended.group == 1]
    lost = [(each.episode, each.reason) for episodes in ended for each in episodes if not each.trajectories]
    assert lost == [(1, "EPISODE_DEADLINE")]


async def test_episodes_that_a_workflow_leaves_out_are_counted(scene) -> None:
    (scene.directory / "halves.py").write_text(
        "from orchestrator_svc.run.workflows import SingleTurn\n"
        "class Halves(SingleTurn):\n"
        "    def __init__(self, environment, config):\n        super().__init__(environment)\n"
        "    async def arun_episode(self, engine, data):\n"
        "        return (await super().arun_episode(engine, data))[::2]\n"
    )
    report = await scene.run(workflow=f"{scene.directory / 'halves.py'}:Halves", group_size=4, max_steps=1)
    assert report["episodes_lost"] == {"EPISODE_FAILED": 4}


async def test_time_in_which_a_group_waits_for_a_replica_does_not_count_against_its_task(scene) -> None:
    """The replica answers polls and samples nothing: it is paused, held or full."""
    replica, clock = scene.replicas[0], SimulatedClock()
    replica.gate.clear()
    limits = {"episode_s": LIMIT_S, "start_s": 100 * LIMIT_S, "lost_s": 100 * LIMIT_S}
    alone = {"max_staleness": 0}  # no other group is posed while the time passes
    task = scene.start(common=alone, environment_args={"count": 4}, deadlines=limits, clock=clock)
    await scene.until(lambda: len(replica.calls) == 2)
    for _ in range(4):
        await clock.advance(LIMIT_S)
    replica.gate.set()
    await finished(task, clock)
    report = scene.report()
    assert (report["state"], report["groups_failed"]) == ("succeeded", {})
    assert report["environments"][0]["quarantined_count"] == 0


@pytest.mark.parametrize(
    "how", [{"workflow": "single_turn"}, {"workflow": "retry", "group_size": 1, "batch_size": 1, "advantage": "none"}]
)
async def test_scoring_has_limits_of_its_own(scene, how) -> None:
    scored = scene.directory / "scored"
    (scene.directory / "slow.py").write_text(f"""
import pathlib, time
from sluice.environments.base import Task

class Slow:
    name = "slow"

    def tasks(self, split, seed):
        return [Task(str(index), {{}}) for index in range(4)]

    def messages(self, task):
        return [{{"role": "user", "content": "hello"}}]

    def score(self, task, completion):
        pathlib.Path({str(scene.directory / "scoring")!r}).touch()
        while not pathlib.Path({str(scored)!r}).exists():
            time.sleep(0.01)
        return float(len(completion))
""")
    clock = SimulatedClock()
    limits = {"episode_s": LIMIT_S, "start_s": 100 * LIMIT_S, "lost_s": 100 * LIMIT_S}
    processes = {"score_s": 100 * LIMIT_S}
    environment = f"{scene.directory / 'slow.py'}:Slow"
    task = scene.start(
        common={"max_staleness": 0},
        environment=environment,
        environment_processes=processes,
        deadlines=limits,
        max_steps=1,
        clock=clock,
        **how,
    )
    await scene.until((scene.directory / "scoring").exists)
    for _ in range(4):
        await clock.advance(LIMIT_S)
    scored.touch()
    await finished(task, clock)
    report = scene.report()
    assert (report["state"], report["groups_failed"]) == ("succeeded", {})


async def test_groups_under_way_that_no_replica_takes_end_the_run_by_the_deadline_for_that(scene) -> None:
    """All groups that may be are under way, so that nothing but they waits for a replica."""
    replica, clock = scene.replicas[0], SimulatedClock()

    def drains(request, index) -> str:
        replica.state = rollout_pb2.REPLICA_STATE_DRAINING
        raise SluiceError.unavailable("DRAINING", "it ends")

    replica.text = drains
    limits = {"episode_s": LIMIT_S, "start_s": 100 * LIMIT_S, "lost_s": 10 * LIMIT_S}
    task = scene.start(common={"max_staleness": 0}, batch_size=1, deadlines=limits, clock=clock)
    await scene.until(lambda: replica.calls)
    await clock.until(task.done, step_s=1.0)
    with pytest.raises(FailedForGoodError, match="lost_s"):
        await task


async def test_pause_stops_dispatch_and_resume_begins_it_again(scene) -> None:
    trainer, replica = scene.trainer, scene.replicas[0]
    trainer.automatic = False
    task = scene.start(common={"max_staleness": 0})
    await scene.until(lambda: trainer.waiting)
    async with scene.client() as client:
        assert (await client.pause("test")).state == orchestrator_pb2.RUN_STATE_PAUSED
        trainer.apply()
        await scene.until_run(client, lambda run: run.step == 1)
        assert len(replica.calls) == 2
        trainer.run_freely()
        assert (await client.resume("test")).state == orchestrator_pb2.RUN_STATE_RUNNING
    await task
    assert scene.report()["steps"] == 4


async def test_stop_trains_what_is_made_and_writes_checkpoint_and_report(scene) -> None:
    trainer = scene.trainer
    trainer.automatic = False
    task = scene.start(common={"max_staleness": 3}, max_steps=50)
    await scene.until(lambda: len(trainer.waiting) == 2)
    async with scene.client() as client:
        assert (await client.stop("test", "enough")).state == orchestrator_pb2.RUN_STATE_STOPPING
    trainer.apply()
    trainer.apply()
    await task
    report = scene.report()
    assert (report["state"], report["steps"], report["stop_reason"]) == ("stopped", 2, "enough")
    assert trainer.checkpoints == [2]


async def test_evaluation_holds_a_replica_at_one_version(scene) -> None:
    replica = scene.replicas[0]
    events = scene.watch("evaluation_finished")
    report = await scene.run(
        evaluation={"every_steps": 4, "prompts": 5, "samples": 2, "greedy": True}, common={"max_staleness": 1}
    )
    hold, follow = replica.policies
    assert hold.mode == rollout_pb2.WEIGHT_POLICY_MODE_HOLD
    assert hold.ttl.seconds > 0
    assert follow.mode == rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW
    assert hold.owner == follow.owner
    greedy = [call for call in replica.calls if call.request.sampling.temperature == 0]
    assert len(greedy) == 5
    assert all(call.request.request_id.startswith("test/1/eval-") for call in greedy), "named by run and process"
    (event,) = await events
    assert event.evaluation_finished.metrics["reward_mean"] == pytest.approx((0.5 + 2 / 3) / 2)
    assert report["evaluations"][0]["eval/greedy_reward_mean"] == 0.5
    assert report["evaluation_held_all_replicas"] is True


async def test_a_replica_that_a_killed_process_held_follows_the_trainer_again(scene, monkeypatch) -> None:
    """The journal knows which one it is; the hold itself would last for `hold_s`."""
    begun = asyncio.Event()

    async def endless(*_arguments) -> EvalResult:
        begun.set()
        return await asyncio.Event().wait()

    async def killed(_self) -> None:
        """A process that is killed releases nothing."""

    monkeypatch.setattr(evaluation_module, "evaluate", endless)
    monkeypatch.setattr(evaluation_module._Hold, "end", killed)
    run = scene.start(evaluation={"every_steps": 2}, max_steps=50)
    async with asyncio.timeout(DEADLINE_S):
        await begun.wait()
    run.cancel()
    await asyncio.wait({run})
    (held,) = folded(read_facts(scene.run_dir)).weight_policies.values()
    assert held.mode == rollout_pb2.WEIGHT_POLICY_MODE_HOLD
    monkeypatch.undo()
    replica = scene.replicas[0]
    replica.policies.clear()
    steps = folded(read_facts(scene.run_dir)).applied + 3
    report = await restarted(scene, max_steps=steps)
    assert (report["state"], report["steps"]) == ("succeeded", steps)
    assert [each.mode for each in replica.policies] == [rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW]
    assert not folded(read_facts(scene.run_dir)).weight_policies


async def test_a_hold_is_renewed_while_an_evaluation_needs_it(scene, monkeypatch) -> None:
    replica, evaluate, clock = scene.replicas[0], evaluation_module.evaluate, SimulatedClock()
    ask, answered = evaluation_module._Hold._ask, []

    async def noted(self, version) -> Version:
        answered.append(await ask(self, version))
        return answered[-1]

    async def slow(*arguments):
        for renewed in (1, 2, 3):
            await clock.advance(LIMIT_S / 4)
            await scene.until(lambda renewed=renewed: len(answered) == 1 + renewed)
        return await evaluate(*arguments)

    monkeypatch.setattr(evaluation_module._Hold, "_ask", noted)
    monkeypatch.setattr(evaluation_module, "evaluate", slow)
    report = await scene.run(evaluation={"every_steps": 4, "prompts": 2}, deadlines={"hold_s": LIMIT_S}, clock=clock)
    *holds, follow = replica.policies
    assert len(holds) == 4
    assert {each.owner for each in holds} == {follow.owner}
    assert {each.version.number for each in holds[1:]} == {4}, "later ones name the version"
    assert follow.mode == rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW
    assert report["evaluations_failed"] == 0


async def test_an_evaluation_whose_hold_is_lost_fails(scene, monkeypatch) -> None:
    replica, clock = scene.replicas[0], SimulatedClock()

    async def endless(*_arguments):
        replica.refuses_holds = True
        await clock.until(lambda: False, step_s=LIMIT_S / 100)

    monkeypatch.setattr(evaluation_module, "evaluate", endless)
    report = await scene.run(evaluation={"every_steps": 4}, deadlines={"hold_s": LIMIT_S}, clock=clock)
    assert report["evaluations_failed"] == 1
    assert report["state"] == "succeeded"


async def test_the_best_checkpoint_is_kept_and_a_run_that_stands_still_ends(scene, monkeypatch) -> None:
    rewards = {1: 0.2, 2: 0.7, 3: 0.6, 4: 0.7}

    async def known(_runner, _tasks, _settings, _sampling, version):
        reward = rewards.get(version.number, 0.0)
        return EvalResult([EvalSample("t", "", "", reward, greedy=False, truncated=False)])

    trainer = scene.trainer
    trainer.automatic = False
    ended, evaluate_step = [], Run._evaluate

    async def noted(self: Run, evaluations, version) -> None:
        await evaluate_step(self, evaluations, version)
        ended.append(version)

    monkeypatch.setattr(evaluation_module, "evaluate", known)
    monkeypatch.setattr(Run, "_evaluate", noted)
    run = scene.start(
        evaluation={"every_steps": 1, "keep_best": True, "patience": 2}, max_steps=50, checkpoint={"every_steps": 0}
    )
    for number in (1, 2, 3, 4):
        await scene.until(lambda: trainer.waiting)
        trainer.apply()
        await scene.until(lambda at=number: len(ended) == at)
    while not run.done():  # the batches that are made are still trained
        if trainer.waiting:
            trainer.apply()
        await asyncio.sleep(0.01)
    await run
    report = scene.report()
    assert trainer.kept[:4] == ["step_1", "step_2", "step_2", "step_2"], "said again, since a call may be lost"
    assert report["best_evaluation"] == {"metric": "reward_mean", "value": 0.7, "version": "1.2"}
    assert report["state"] == "stopped"
    assert "2 evaluations brought nothing better than reward_mean 0.7 of version 1.2" in report["stop_reason"]
    targets = [each for each in scene.replicas[0].policies if each.mode == rollout_pb2.WEIGHT_POLICY_MODE_TARGET]
    assert [each.version.number for each in targets][:4] == [1, 2, 3, 4]


async def test_an_environment_that_breaks_in_the_last_evaluation_costs_its_tasks_not_the_checkpoint(scene) -> None:
    events = scene.watch("evaluation_finished")
    report = await scene.run(
        environment_args={"broken_split": "eval"}, evaluation={"every_steps": 4, "prompts": 5}, max_steps=4
    )
    assert report["state"] == "succeeded"
    assert scene.trainer.checkpoints == [4]
    (event,) = await events
    assert event.evaluation_finished.metrics["failed_tasks"] == 5


async def test_an_evaluation_that_breaks_last_is_counted_and_the_checkpoint_written(scene, monkeypatch) -> None:
    async def broken(*_arguments):
        raise RuntimeError("no evaluation today")

    monkeypatch.setattr("orchestrator_svc.run.evaluation.evaluate", broken)
    report = await scene.run(evaluation={"every_steps": 4})
    assert (report["state"], report["evaluations_failed"]) == ("succeeded", 1)
    assert scene.trainer.checkpoints == [4]


async def test_a_change_while_the_last_step_is_reported_does_not_cut_its_report_off(scene, monkeypatch) -> None:
    report_step = RunReporter.show_step

    async def interrupted(self: RunReporter, step: AppliedStep) -> None:
        if step.version.number == 4:
            self._engine.pool._on_change(self._engine.pool.replicas[0])
            for _ in range(10):
                await asyncio.sleep(0)
        await report_step(self, step)

    monkeypatch.setattr(RunReporter, "show_step", interrupted)
    report = await scene.run(evaluation={"every_steps": 4, "prompts": 2})
    assert [step for step, _ in report["reward_curve"]] == [1, 2, 3, 4]
    assert len(report["evaluations"]) == 1


async def test_operators_can_look_into_a_run(scene) -> None:
    trainer = scene.trainer
    trainer.automatic = False
    task = scene.start(common={"max_staleness": 1})
    await scene.until(lambda: trainer.waiting)
    trainer.apply()
    async with scene.client() as client:
        run = await scene.until_run(client, lambda run: run.step == 1)
        assert run.max_steps == 4
        assert run.replicas[0].eligible
        assert run.policy_version.epoch == 1
        records = await client.trajectories("test", step=1)
        assert len(records) == 4
        assert records[0].conversation.messages[-1].role == "assistant"
        assert len(await client.trajectories("test", reward_below=0.6)) == 2
        with pytest.raises(SluiceError) as refused:
            await client.run("another")
        assert refused.value.code is grpc.StatusCode.NOT_FOUND
        trainer.run_freely()
    await task


async def test_a_replica_may_announce_itself_and_leave(tmp_path) -> None:
    replicas = [RolloutDouble("known"), RolloutDouble("late")]
    replicas[0].gate.clear()
    async with contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, replicas)
        late = scene.replica_addresses.pop()
        task = scene.start(replicas={"resolve_s": 0.05, "poll_s": 2.0}, max_steps=2)
        await scene.until(lambda: replicas[0].calls)
        async with scene.client() as client:
            stub = client._stub
            request = orchestrator_pb2.RegisterReplicaRequest(run="runs/test", replica="late", address=late)
            assert (await stub.RegisterReplica(request)).lease.seconds == 30
            await stub.Heartbeat(orchestrator_pb2.HeartbeatRequest(run="runs/test", replica="late"))
            with pytest.raises(grpc.aio.AioRpcError, match="RegisterReplica"):
                await stub.Heartbeat(orchestrator_pb2.HeartbeatRequest(run="runs/test", replica="nobody"))
            await scene.until_run(client, lambda run: [each.eligible for each in run.replicas] == [True, True])
            replicas[1].state = rollout_pb2.REPLICA_STATE_DRAINING
            leaving = orchestrator_pb2.HeartbeatRequest(run="runs/test", replica="late", leaving=True)
            assert not (await stub.Heartbeat(leaving)).HasField("lease")
            run = await client.run("test")
            assert [each.reason for each in run.replicas] == ["", "is draining"]
        replicas[0].gate.set()
        await task


async def test_a_replica_cannot_announce_an_address_that_is_none(scene) -> None:
    scene.trainer.automatic = False
    task = scene.start(replicas={"resolve_s": 0.05})
    await scene.until(lambda: scene.trainer.waiting)
    async with scene.client() as client:
        for address in ("127.0.0.1:99999", f"{'a' * 64}.example:7103"):
            request = orchestrator_pb2.RegisterReplicaRequest(run="runs/test", replica="odd", address=address)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client._stub.RegisterReplica(request)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    scene.trainer.run_freely()
    await task


async def test_a_checkpoint_that_a_rollback_left_behind_is_not_taken_again(scene) -> None:
    """The newest one cannot be read for a while; the run goes back to the one before it, and stays on that line."""
    trainer = scene.trainer
    trainer.automatic = False
    task = scene.start(checkpoint={"every_steps": 1}, common={"max_staleness": 1})
    for number in (1, 2):
        await scene.until(lambda: trainer.waiting)
        trainer.apply()
        await scene.until(lambda number=number: trainer.checkpoints == list(range(1, number + 1)))
    trainer.damaged = {"step_2"}
    trainer.crash()
    await scene.until(lambda: trainer.version == Version(2, 1))
    trainer.damaged = set()
    trainer.crash()
    await scene.until(lambda: trainer.version == Version(3, 1))
    assert trainer.restored == ["", "step_1", "step_1"]
    trainer.run_freely()
    await task
    assert scene.report()["steps"] == 4


async def test_a_configured_address_that_is_none_is_skipped(scene) -> None:
    scene.replica_addresses.insert(0, f"{'a' * 64}.example:7103")
    assert (await scene.run(max_steps=1))["state"] == "succeeded"


async def test_a_search_for_replicas_that_breaks_ends_the_run_with_its_reason(scene, monkeypatch) -> None:
    async def broken(addresses):
        raise RuntimeError("the search broke")

    monkeypatch.setattr("sluice.sampling.pool.resolve_targets", broken)
    with pytest.raises(RuntimeError, match="the search broke"):
        await scene.run()
    report = scene.report()
    assert (report["state"], report["error"]) == ("failed", "the search broke")


async def test_a_paused_run_trains_what_it_has_while_its_replicas_are_away(scene) -> None:
    (replica,) = scene.replicas
    clock = SimulatedClock()
    replica.gate.clear()
    deadlines = {"lost_s": LIMIT_S}
    task = scene.start(common={"max_staleness": 0}, replicas={"poll_s": 0.02}, deadlines=deadlines, clock=clock)
    await scene.until(lambda: len(replica.calls) == 2)
    async with scene.client() as client:
        await client.pause("test")
        replica.status_failure = SluiceError.aborted("BROKEN", "out of order")
        await scene.until_run(client, lambda run: not run.replicas[0].eligible)
        await clock.advance(2 * LIMIT_S)
        replica.gate.set()
        await scene.until(lambda: scene.trainer.version.number == 1 or task.done())
        assert [header.sampler_dtype for header in scene.trainer.headers] == ["bfloat16"]
        replica.status_failure = None
        await scene.until_run(client, lambda run: run.replicas[0].eligible)
        await client.resume("test")
    await finished(task, clock)
    assert scene.report()["state"] == "succeeded"


async def test_replicas_that_live_and_take_no_new_version_end_the_run_instead_of_hanging_it(scene) -> None:
    clock = SimulatedClock()
    scene.trainer.publishes = False
    deadlines = {"update_s": LIMIT_S}
    task = scene.start(common={"max_staleness": 0}, replicas={"poll_s": 0.02}, deadlines=deadlines, clock=clock)
    await scene.until(lambda: len(step_lines(scene)) == 1)
    await clock.until(task.done, step_s=LIMIT_S / 10)
    with pytest.raises(
        FailedForGoodError, match=r"has taken version \S+ or a newer one for 30 s .*update_s.*replica-0"
    ):
        await task
    assert scene.report()["steps"] == 1


async def test_replicas_that_leave_before_a_batch_is_sent_end_the_run_instead_of_hanging_it(scene) -> None:
    (replica,) = scene.replicas
    clock = SimulatedClock()
    replica.gate.clear()
    deadlines = {"lost_s": LIMIT_S}
    task = scene.start(common={"max_staleness": 0}, replicas={"poll_s": 0.02}, deadlines=deadlines, clock=clock)
    await scene.until(lambda: len(replica.calls) == 2)
    replica.status_failure = SluiceError.aborted("BROKEN", "out of order")
    async with scene.client() as client:
        await scene.until_run(client, lambda run: not run.replicas[0].eligible)
    replica.gate.set()
    await clock.until(task.done, step_s=LIMIT_S / 10)
    with pytest.raises(FailedForGoodError, match=r"no rollout replica for 30 s.*start one"):
        await task
    assert scene.report()["state"] == "failed"


async def test_a_batch_waits_for_the_first_digest_of_a_tokenizer_only_until_its_deadline(scene) -> None:
    (replica,) = scene.replicas
    clock = SimulatedClock()
    replica.digest = ""
    task = scene.start(deadlines={"lost_s": LIMIT_S}, clock=clock)
    await scene.until(lambda: "batch_made" in kinds_on_disk(scene))
    await clock.until(task.done, step_s=LIMIT_S / 10)
    with pytest.raises(FailedForGoodError, match=r"no rollout replica for 30 s .*lost_s"):
        await task
    assert not scene.trainer.headers
    assert scene.report()["state"] == "failed"


async def test_replicas_of_different_tokenizers_end_the_run_with_the_remedy(tmp_path) -> None:
    other = RolloutDouble("other")
    other.digest = "another-tokenizer"
    async with contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [RolloutDouble(), other])
        with pytest.raises(FailedForGoodError, match="give all the same --model"):
            await scene.run()


async def test_a_run_none_of_whose_rewards_the_estimator_takes_pauses_and_says_why(scene) -> None:
    rewards = "    def score(self, task, completion):\n        return -float(len(completion))\n"
    (scene.directory / "negative.py").write_text(
        "from letters_env import Letters\nclass Negative(Letters):\n" + rewards
    )
    running = scene.start(environment=f"{scene.directory}/negative.py:Negative", advantage="maxrl")
    async with scene.client() as client:
        with contextlib.suppress(SluiceError):
            await scene.until_run(client, lambda run: run.state == orchestrator_pb2.RUN_STATE_PAUSED)
        run = await scene.until_run(client, lambda run: run.state == orchestrator_pb2.RUN_STATE_PAUSED)
    assert "another estimator" in run.set_aside[0].problem
    await scene.terminate()
    with pytest.raises(UnfinishedError):
        await running


async def test_a_trainer_that_never_reports_an_old_batch_has_lost_its_epoch() -> None:
    trainer = TrainerDouble(version=Version(1, 1), automatic=False)
    trainer.reports[1] = trainer_pb2.StepReport(policy_version=Version(1, 1).to_proto(), sequence_no=1)
    trainer.phase = trainer_pb2.TRAINER_PHASE_TRAINING
    async with serve_trainer(trainer) as address, TrainerClient(address) as client:
        link = TrainerLink(client, "test", DeadlinesConfig(lost_s=1.0))
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(EpochLostError):
                await link.past_steps(1, 2)


@pytest.mark.parametrize("hangs_in", ["step", "queue"])
async def test_a_trainer_that_never_ends_a_step_ends_the_run_which_can_be_continued(scene, hangs_in) -> None:
    clock = SimulatedClock()
    scene.trainer.automatic, scene.trainer.busy = False, hangs_in == "queue"
    task = scene.start(common={"max_staleness": 1}, deadlines={"step_s": LIMIT_S}, clock=clock)
    await scene.until(lambda: scene.trainer.headers)
    await clock.until(task.done, step_s=LIMIT_S / 10)
    with pytest.raises(FailedForGoodError, match=r"no step for 30 s .*step_s.*start the run again"):
        await task
    report = scene.report()
    assert (report["state"], report["steps"]) == ("failed", 0)
    assert "batch 1" in report["error"]
    scene.trainer.busy = False
    scene.trainer.run_freely()
    report = await restarted(scene, common={"max_staleness": 1})
    assert (report["state"], report["steps"], report["trajectories_trained"]) == ("succeeded", 4, 16)


async def test_the_deadline_of_a_step_does_not_run_while_the_trainer_has_no_batch(scene) -> None:
    (replica,) = scene.replicas
    clock = SimulatedClock()
    replica.gate.clear()
    task = scene.start(deadlines={"step_s": LIMIT_S}, clock=clock)
    await scene.until(lambda: replica.calls)
    await clock.advance(2 * LIMIT_S)
    replica.gate.set()
    await finished(task, clock)
    assert scene.report()["state"] == "succeeded"


async def test_the_deadline_of_a_step_does_not_run_while_the_trainer_is_away(scene, monkeypatch) -> None:
    trainer, watch, clock, gone = scene.trainer, TrainerLink.steps, SimulatedClock(), asyncio.Event()
    trainer.automatic = False

    async def broken(self: TrainerLink, epoch: int, from_number: int):
        if from_number == 1:
            await scene.until(lambda: trainer.waiting)
            trainer.phase = trainer_pb2.TRAINER_PHASE_STARTING
            gone.set()
            await self._explain(SluiceError.unavailable("GONE", "the connection broke"), epoch)
        async for step in watch(self, epoch, from_number):
            yield step

    monkeypatch.setattr(TrainerLink, "steps", broken)
    task = scene.start(deadlines={"step_s": LIMIT_S, "lost_s": 10 * LIMIT_S}, clock=clock)
    await gone.wait()
    await clock.advance(2 * LIMIT_S)
    trainer.phase = trainer_pb2.TRAINER_PHASE_TRAINING
    trainer.run_freely()
    await finished(task, clock)
    assert scene.report()["state"] == "succeeded"


async def test_a_trainer_that_is_lost_while_a_step_is_reported_does_not_cut_the_report_off(scene, monkeypatch) -> None:
    scene.trainer.automatic = False
    report_step, submit, gone = RunReporter.show_step, TrainerLink.submit_batch, asyncio.Event()
    reported: list[int] = []

    async def slow(self: RunReporter, step: AppliedStep) -> None:
        if step.version.number == 1:
            self._engine.pool._on_change(self._engine.pool.replicas[0])
            await gone.wait()
            for _ in range(20):
                await asyncio.sleep(0)
        await report_step(self, step)
        reported.append(step.version.number)

    async def lost(self: TrainerLink, header, trajectories) -> None:
        if header.sequence_no == 3 and not gone.is_set():
            gone.set()
            scene.trainer.run_freely()
            raise EpochLostError("the trainer went away")
        await submit(self, header, trajectories)

    monkeypatch.setattr(RunReporter, "show_step", slow)
    monkeypatch.setattr(TrainerLink, "submit_batch", lost)
    task = scene.start(common={"max_staleness": 3})
    await scene.until(lambda: len(scene.trainer.waiting) == 2 and len(scene.replicas[0].calls) == 8)
    scene.trainer.apply()
    async with asyncio.timeout(DEADLINE_S):
        await task
    assert reported == [1, 2, 3, 4]
    assert [step for step, _ in scene.report()["reward_curve"]] == [1, 2, 3, 4]


async def test_batches_name_the_precision_of_the_weights_that_sampled(scene) -> None:
    await scene.run()
    assert {header.sampler_dtype for header in scene.trainer.headers} == {"bfloat16"}


async def test_where_the_trainer_estimates_rewards_travel_without_advantages(scene) -> None:
    scene.trainer.estimator = "gae"
    await scene.run(advantage="gae", group_size=1, batch_size=4)
    assert {header.advantage_estimator for header in scene.trainer.headers} == {"gae"}
    sent = [each for batch in scene.trainer.history.values() for each in batch]
    assert len(sent) == 16
    assert all(each.HasField("reward") and not each.advantages for each in sent)


@pytest.mark.parametrize(("advantage", "own"), [("centered", "gae"), ("gae", "")])
async def test_a_trainer_that_estimates_something_else_ends_the_run_at_its_start(scene, advantage, own) -> None:
    scene.trainer.estimator = own
    with pytest.raises(FailedForGoodError, match=r"orchestrator\.advantage"):
        await scene.run(advantage=advantage)
    assert not scene.trainer.epochs
