"""TrainerService over real gRPC, with a real weight service behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.torch import load_file
from trainer_stack import RUN, Stack, batch, settings, stack, tiny_model, trainer_config, trainer_service, trajectory

from sluice.batch_record import read_record_file
from sluice.client import TrainerClient
from sluice.config import SecurityConfig
from sluice.digests import batch_digest, trajectory_digest
from sluice.metric_names import OWN_LOSS, find
from sluice.rpc import SluiceError, connect
from sluice.v1 import tokens_pb2, trainer_pb2, trainer_pb2_grpc
from sluice.versions import BASE, Version

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def running(model: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(model, tmp_path) as running:
        await running.client.begin_epoch(RUN, 1)
        yield running


@asynccontextmanager
async def held(running: Stack) -> AsyncIterator[None]:
    """Keep the compute thread busy, so that batches stay where they are."""
    release = threading.Event()
    job = asyncio.create_task(running.trainer._compute.run(lambda: release.wait(30), deadline_s=30, what="the test"))
    try:
        yield
    finally:
        release.set()
        await job


def reasons(report: trainer_pb2.StepReport) -> list[str]:
    return [result.reason or tokens_pb2.TrajectoryOutcome.Name(result.outcome)[19:] for result in report.results]


async def test_a_batch_becomes_a_version_that_weight_sync_serves(running: Stack) -> None:
    before = running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype)
    accepted = await running.submit(1)
    report = await running.report(1)
    assert (accepted.batch_id, accepted.duplicate, accepted.queued_batches) == ("batch-1", False, 1)
    assert Version.from_proto(report.policy_version) == Version(1, 1)
    assert (report.batch_id, report.sequence_no, report.skipped) == ("batch-1", 1, False)
    assert reasons(report) == ["TRAINED"] * 8
    await running.submit(2)
    await running.report(2)
    await running.submit(3)  # the step after the next begins when the first version is out
    await running.report(3)
    served = load_file(running.output_dir / RUN / "weights" / "v1.1" / "model.safetensors")
    assert served.keys() == before.keys()
    assert any(not torch.equal(served[name], tensor) for name, tensor in before.items())


async def test_the_first_version_of_an_epoch_is_the_base_model(running: Stack) -> None:
    served = load_file(running.output_dir / RUN / "weights" / "v1.0" / "model.safetensors")
    for name, tensor in running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype).items():
        assert torch.equal(served[name], tensor)


async def test_small_steps_travel_as_differences_and_arrive_bit_for_bit(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path, lr=1e-6, publish_dtype="bfloat16") as running:
        await running.client.begin_epoch(RUN, 1)
        for number in range(1, 4):
            await running.submit(number)
            metrics = (await running.report(number)).metrics
        assert metrics["weights/delta"] == 1
        assert 0 < metrics["weights/bytes_sent"] < metrics["weights/dense_bytes"] / 2
        assert 0 < metrics["weights/changed_fraction"] < 0.5
        assert {"weights/diff_s", "weights/push_s", "weights/commit_s"} <= set(metrics)
        directory = running.output_dir / RUN / "weights" / "v1.3"
        async with asyncio.timeout(30):
            while not (directory / "manifest.json").exists():  # noqa: ASYNC110 - a directory of another service
                await asyncio.sleep(0.02)
        served = load_file(directory / "model.safetensors")
        weights = running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype)
        assert served.keys() == weights.keys()
        assert all(torch.equal(served[name], tensor) for name, tensor in weights.items())


async def test_reports_carry_what_objectives_md_lists(running: Stack) -> None:
    await running.submit(1)
    metrics = (await running.report(1)).metrics
    expected = {
        *("loss", "grad_norm", "learning_rate", "skipped_steps", "entropy", "mismatch_kl", "max_abs_log_difference"),
        *("advantage_positive", "advantage_negative", "truncate_fraction", "trajectories", "missing_rewards"),
        *("effective_sample_size", "chi_square", "packing_efficiency", "tokens", "loss_tokens"),
        *("wait_batch_seconds", "wait_push_seconds", "tokens_per_s"),
        *("weights/diff_s", "weights/push_s", "weights/commit_s", "weights/bytes_sent", "weights/dense_bytes"),
    }
    assert expected <= set(metrics)
    named = {name if name.startswith("weights/") else f"trainer/{name}" for name in metrics}
    assert {name for name in named if find(name) in (None, OWN_LOSS)} == set(), (
        "each has a row in sluice/metric_names.py"
    )


async def test_steps_and_checkpoints_are_shown_to_prometheus(running: Stack) -> None:
    def value(metric: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"sluice_trainer_{metric}", labels) or 0.0

    started, tokens, steps = (
        time.time(),
        value("tokens_total", kind="all"),
        value("phase_seconds_count", phase="forward"),
    )
    await running.submit(1)
    metrics = (await running.report(1)).metrics
    await running.client.save_checkpoint(RUN)  # after the step, whatever of it comes behind its report
    assert value("tokens_total", kind="all") - tokens == metrics["tokens"]
    assert value("phase_seconds_count", phase="forward") - steps == 1
    assert value("phase_seconds_count", phase="wait_batch") >= 1
    assert value("grad_norm") == pytest.approx(metrics["grad_norm"])
    assert value("peak_memory_bytes") == metrics["peak_memory_bytes"] > 1 << 20
    assert started <= value("last_step_timestamp_seconds") <= value("checkpoint_timestamp_seconds") <= time.time()
    assert value("checkpoints_total", outcome="written") >= 1


async def test_a_repeated_batch_is_answered_and_trained_once(running: Stack) -> None:
    await running.submit(1)
    again = await running.submit(1)
    await running.report(1)
    later = await running.submit(1)
    assert again.duplicate
    assert later.duplicate
    state = await running.client.state(RUN)
    assert (state.policy_version.number, state.next_sequence_no, state.optimizer_steps) == (1, 2, 1)


async def test_two_streams_with_the_same_batch_enter_once(running: Stack) -> None:
    answers = await asyncio.gather(running.submit(1), running.submit(1))
    assert sorted(answer.duplicate for answer in answers) == [False, True]


async def test_a_full_queue_says_when_to_retry(running: Stack) -> None:
    async with held(running):
        for number in (1, 2, 3):
            await running.submit(number)
        with pytest.raises(SluiceError) as full:
            await running.submit(4)
        assert (full.value.code, full.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert full.value.retry_after_s
        assert (await running.client.state(RUN)).queued_batches == 3
    await running.report(3)
    assert not (await running.submit(4)).duplicate


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "runs/other"}, "WRONG_RUN"),
        ({"target_version": Version(2, 1).to_proto()}, "WRONG_EPOCH"),
        ({"target_version": Version(1, 2).to_proto()}, "WRONG_TARGET_VERSION"),
        ({"sequence_no": 2}, "WRONG_SEQUENCE_NO"),
        ({"tokenizer_digest": "0" * 64}, "WRONG_TOKENIZER"),
    ],
)
async def test_a_batch_for_another_state_is_refused(running: Stack, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SluiceError) as refused:
        await running.submit(1, **changes)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    assert not (await running.submit(1)).duplicate, "the refusal changed nothing"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"batch_id": ""}, "header.batch_id"),
        ({"on_stale": trainer_pb2.STALE_POLICY_UNSPECIFIED}, "header.on_stale"),
        ({"trajectory_count": 0}, "header.trajectory_count"),
        ({"trajectory_count": 3}, "header.trajectory_count"),
        ({"advantage_estimator": "magic"}, "header.advantage_estimator"),
    ],
)
async def test_a_malformed_header_is_named(running: Stack, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SluiceError) as refused:
        await running.submit(1, **changes)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(refused.value.violations) == [field]


async def test_a_malformed_trajectory_is_named_by_index(running: Stack) -> None:
    rows = [trajectory("a"), trajectory("b", logprobs=[-1.0]), trajectory("c", temperature=0)]
    with pytest.raises(SluiceError) as refused:
        await running.submit(1, rows)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert set(refused.value.violations) == {"trajectories[1].logprobs", "trajectories[2].temperature"}


async def test_a_token_from_the_future_is_refused(running: Stack) -> None:
    with pytest.raises(SluiceError) as refused:
        await running.submit(1, [trajectory("a", versions=[(0, Version(1, 1))])])
    assert list(refused.value.violations) == ["trajectories[0].version_spans"]


async def test_a_token_id_outside_of_the_vocabulary_is_refused_before_it_reaches_the_model(running: Stack) -> None:
    with pytest.raises(SluiceError) as refused:
        await running.submit(1, [trajectory("a", token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 70_000])])
    assert list(refused.value.violations) == ["trajectories[0].token_ids"]


async def test_fewer_trajectories_than_announced_are_a_loss(running: Stack) -> None:
    with pytest.raises(SluiceError) as lost:
        await running.submit(1, trajectory_count=9)
    assert (lost.value.code, lost.value.reason) == (grpc.StatusCode.DATA_LOSS, "BATCH_INCOMPLETE")
    await running.submit(1)
    await running.report(1)


async def test_trajectories_without_a_header_are_refused(running: Stack) -> None:
    async with connect(running.target, SecurityConfig()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        part = trainer_pb2.SubmitBatchRequest(trajectories=trainer_pb2.TrajectoryPart())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.SubmitBatch(iter([part]))
    assert list(SluiceError.from_rpc(refused.value).violations) == ["header"]


async def test_a_batch_larger_than_a_message_arrives_in_parts(running: Stack) -> None:
    rows = [
        trajectory(
            f"t{index}",
            prompt=100,
            sampled=150,
            seed=index,
            versions=[(0, Version(1, 0))],
            reward=index % 2,
            task_id="x" * 60_000,
        )
        for index in range(100)
    ]
    assert sum(row.ByteSize() for row in rows) > 5 << 20
    await running.submit(1, rows)
    assert reasons(await running.report(1)) == ["TRAINED"] * 100


async def test_stale_trajectories_are_dropped_and_answered(running: Stack) -> None:
    for number in (1, 2, 3):
        await running.submit(number)
        await running.report(number)
    old = trajectory("old", versions=[(0, Version(1, 0))], reward=5.0)
    mixed = trajectory("mixed", versions=[(0, Version(1, 0)), (2, Version(1, 3))], reward=1.0)
    fresh = [
        trajectory(f"fresh{index}", versions=[(0, Version(1, 3))], reward=float(index), seed=index) for index in (0, 1)
    ]
    await running.submit(4, [old, mixed, *fresh], max_staleness=1)
    report = await running.report(4)
    assert reasons(report) == ["STALE", "STALE", "TRAINED", "TRAINED"]
    assert [result.max_staleness for result in report.results] == [3, 3, 0, 0]
    await running.submit(5, [mixed, *fresh], max_staleness=1, on_stale=trainer_pb2.STALE_POLICY_TRUNCATE)
    report = await running.report(5)
    assert reasons(report) == ["TRAINED"] * 3
    assert [result.trained_tokens for result in report.results] == [4, 6, 6]


async def test_on_policy_training_takes_only_tokens_of_the_present_weights(running: Stack) -> None:
    await running.submit(1, max_staleness=0)
    assert reasons(await running.report(1)) == ["TRAINED"] * 8
    await running.submit(2, batch(2, version=Version(1, 0)), max_staleness=0)
    report = await running.report(2)
    assert reasons(report) == ["STALE"] * 8
    assert Version.from_proto(report.policy_version) == Version(1, 2), "the version advances, so that the order holds"
    assert (await running.client.state(RUN)).optimizer_steps == 1


async def test_a_step_that_is_not_finite_is_skipped_and_counted(running: Stack) -> None:
    before = running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype)
    poisoned = [trajectory(f"t{index}", seed=index, advantages=[3e38]) for index in range(4)]
    await running.submit(1, poisoned, advantage_estimator="")
    report = await running.report(1)
    assert report.skipped
    assert reasons(report) == ["NON_FINITE_STEP"] * 4
    assert report.metrics["skipped_steps"] == 1
    for name, tensor in running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype).items():
        assert torch.equal(tensor, before[name])
    state = await running.client.state(RUN)
    assert (state.policy_version.number, state.optimizer_steps) == (1, 0)
    await running.submit(2)
    assert reasons(await running.report(2)) == ["TRAINED"] * 8


async def test_a_minibatch_that_succeeds_hides_neither_the_skipped_one_nor_their_number(
    model: Path, tmp_path: Path
) -> None:
    async with stack(model, tmp_path, minibatches=2, max_skipped_steps=2) as running:
        await running.client.begin_epoch(RUN, 1)
        for number in (1, 2):
            rows = [
                trajectory(f"{number}.good", group="good", advantages=[0.5]),
                trajectory(f"{number}.bad", group="bad", advantages=[3e38]),
            ]
            await running.submit(number, rows, advantage_estimator="")
            report = await running.report(number)
            assert reasons(report) == ["TRAINED", "NON_FINITE_STEP"]
            assert not report.skipped
        with pytest.raises(SluiceError, match="2 batches in a row"):
            await running.report(3)


async def test_too_many_skipped_steps_in_a_row_end_the_training(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path, max_skipped_steps=2) as running:
        await running.client.begin_epoch(RUN, 1)
        for number in (1, 2):
            poisoned = [trajectory(f"{number}.{index}", seed=index, advantages=[3e38]) for index in range(2)]
            await running.submit(number, poisoned, advantage_estimator="")
            assert (await running.report(number)).skipped
        with pytest.raises(SluiceError, match="2 batches in a row") as ended:
            await running.report(3)
        assert ended.value.reason == "TRAINER_FAILED"
        state = await running.client.state(RUN)
        assert state.phase == trainer_pb2.TRAINER_PHASE_FAILED
        assert "NON_FINITE_STEPS" in state.last_error
        with pytest.raises(SluiceError, match="begin a newer epoch") as refused:
            await running.submit(3)
        assert refused.value.reason == "TRAINER_FAILED"
        assert (await running.client.begin_epoch(RUN, 2)).policy_version.number == 0
        await running.submit(1, epoch=2)
        assert reasons(await running.report(1)) == ["TRAINED"] * 8


async def test_a_watcher_sees_past_steps_first_and_new_ones_as_they_come(running: Stack) -> None:
    for number in (1, 2):
        await running.submit(number)
        await running.report(number)
    seen: list[int] = []
    async with aclosing(running.client.watch_steps(RUN, 1, timeout_s=60)) as watch:
        async for response in watch:
            seen.append(response.step.sequence_no)
            if seen[-1] == 2:
                await running.submit(3)
            if seen[-1] == 3:
                break
    assert seen == [1, 2, 3]


async def test_a_client_that_leaves_half_way_leaves_nothing_behind(running: Stack) -> None:
    async with connect(running.target, SecurityConfig()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        call = stub.SubmitBatch(timeout=60)
        await call.write(trainer_pb2.SubmitBatchRequest(header=running.header(1, 8)))
        call.cancel()
    assert not (await running.submit(1)).duplicate
    await running.report(1)


async def test_a_stream_that_stalls_ends_by_its_deadline(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path, deadlines={"submit_s": 1.0}) as running:
        await running.client.begin_epoch(RUN, 1)
        async with connect(running.target, SecurityConfig()) as channel:
            call = trainer_pb2_grpc.TrainerServiceStub(channel).SubmitBatch(timeout=60)
            await call.write(trainer_pb2.SubmitBatchRequest(header=running.header(1, 8)))
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await call
    assert SluiceError.from_rpc(late.value).reason == "SUBMIT_DEADLINE"


async def test_a_batch_leaves_its_outcome_on_disk_and_not_its_payload(running: Stack) -> None:
    async with held(running):
        await running.submit(1)
        assert not [path for path in running.output_dir.rglob("*") if path.suffix in (".binpb", ".record")][1:], (
            "epochs"
        )
    report = await running.report(1)
    (path,) = (running.output_dir / RUN / "trainer" / "batches").iterdir()
    (record,) = read_record_file(path).records
    assert list(record.results) == list(report.results)
    digests = [trajectory_digest(each) for each in batch(1, version=Version(1, 0))]
    assert [each.digest for each in record.results] == digests
    assert record.content_digest == report.content_digest == batch_digest(digests)
    assert path.stat().st_size < 64 * len(report.results) + 200


async def test_a_known_id_with_other_trajectories_is_refused_whether_queued_or_applied(running: Stack) -> None:
    other = batch(7, version=Version(1, 0))
    async with held(running):
        await running.submit(1)
        with pytest.raises(SluiceError, match="other trajectories") as refused:
            await running.submit(1, other)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.ALREADY_EXISTS, "BATCH_CONTENT_DIFFERS")
        assert (await running.submit(1)).duplicate
    await running.report(1)
    with pytest.raises(SluiceError, match="other trajectories"):
        await running.submit(1, other)
    assert (await running.submit(1)).duplicate


async def test_nothing_is_accepted_before_an_epoch(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path) as running:
        for call in (running.submit(1), running.report(1), running.client.save_checkpoint(RUN)):
            with pytest.raises(SluiceError, match="call BeginEpoch first") as refused:
                await call
            assert refused.value.reason == "NO_EPOCH"
        state = await running.client.state(RUN)
        assert state.phase == trainer_pb2.TRAINER_PHASE_READY
        assert state.tokenizer_digest == running.digest


async def test_while_the_model_loads_only_the_state_is_answered(model: Path, tmp_path: Path) -> None:
    common = settings(model, tmp_path, "127.0.0.1:1")
    async with trainer_service(common, trainer_config(), load=False) as (_, target), TrainerClient(target) as client:
        assert (await client.state(RUN)).phase == trainer_pb2.TRAINER_PHASE_STARTING
        with pytest.raises(SluiceError) as starting:
            await client.submit_batch(trainer_pb2.BatchHeader(run=f"runs/{RUN}"), [])
        assert (starting.value.code, starting.value.reason) == (grpc.StatusCode.UNAVAILABLE, "STARTING")


async def test_another_runs_calls_are_refused(running: Stack) -> None:
    for call in (
        running.client.state("other"),
        running.client.begin_epoch("other", 2),
        running.client.save_checkpoint("other"),
        anext(aiter(running.client.watch_steps("other", timeout_s=10))),
    ):
        with pytest.raises(SluiceError) as refused:
            await call
        assert refused.value.reason == "WRONG_RUN"


async def test_the_state_names_version_and_queue(running: Stack) -> None:
    state = await running.client.state(RUN)
    assert Version.from_proto(state.policy_version) == Version(1, 0) == Version.from_proto(state.published_version)
    assert (state.phase, state.next_sequence_no, state.last_error) == (trainer_pb2.TRAINER_PHASE_WAITING, 1, "")
    assert not state.HasField("newest_checkpoint")
    assert BASE.to_proto() != state.policy_version
