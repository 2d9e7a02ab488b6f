"""Epochs, checkpoints and a weight service that comes and goes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from trainer_stack import (
    RUN,
    Stack,
    batch,
    settings,
    stack,
    tiny_model,
    trainer_config,
    trainer_service,
    weight_service,
)

from sluice.client import TrainerClient
from sluice.rpc import SluiceError
from sluice.v1 import trainer_pb2
from sluice.versions import Version
from trainer_svc.checkpoint import saver
from trainer_svc.checkpoint.state import write_slices

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


async def trained(running: Stack, *numbers: int, epoch: int = 1) -> None:
    for number in numbers:
        await running.submit(number, epoch=epoch)
        await running.report(number)


async def test_beginning_an_epoch_again_answers_as_before(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path) as running:
        first = await running.client.begin_epoch(RUN, 3)
        await trained(running, 1, epoch=3)
        assert await running.client.begin_epoch(RUN, 3) == first
        assert (await running.client.state(RUN)).policy_version.number == 1, "nothing was rolled back"
        for old in (1, 2):
            with pytest.raises(SluiceError, match="epoch 3") as refused:
                await running.client.begin_epoch(RUN, old)
            assert refused.value.reason == "OLD_EPOCH"


async def test_callers_at_the_same_time_open_an_epoch_once(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path) as running:
        one, two = await asyncio.gather(running.client.begin_epoch(RUN, 1), running.client.begin_epoch(RUN, 1))
        assert one == two


async def test_an_epoch_of_a_dead_process_is_never_used_again(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path) as running:
        await running.client.begin_epoch(RUN, 2)
    async with stack(model, tmp_path) as running:
        with pytest.raises(SluiceError) as refused:
            await running.client.begin_epoch(RUN, 2)
        assert refused.value.reason == "OLD_EPOCH"
        assert (await running.client.begin_epoch(RUN, 3)).policy_version.epoch == 3


async def test_a_restarted_trainer_goes_on_from_its_checkpoint_bit_for_bit(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path / "one") as running:
        await running.client.begin_epoch(RUN, 1)
        await trained(running, 1, 2, 3, 4)
        expected = running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype)

    async with stack(model, tmp_path / "two") as running:
        await running.client.begin_epoch(RUN, 1)
        await trained(running, 1, 2)
        saved = await running.client.save_checkpoint(RUN, journal_position=44)
        await trained(running, 3)
    assert (saved.checkpoint.name, saved.checkpoint.journal_position) == ("step_2", 44)
    async with stack(model, tmp_path / "two") as running:
        assert (await running.client.state(RUN)).newest_checkpoint.name == "step_2"
        begun = await running.client.begin_epoch(RUN, 2)
        assert Version.from_proto(begun.policy_version) == Version(2, 2)
        assert Version.from_proto(begun.restored_version) == Version(1, 2)
        assert (begun.last_batch_id, begun.next_sequence_no) == ("batch-2", 3)
        sent = batch(2, version=Version(1, 1))
        assert (await running.submit(2, sent, epoch=2)).duplicate, "the checkpoint holds it"
        with pytest.raises(SluiceError) as refused:
            await running.submit(2, epoch=2)
        assert refused.value.reason == "BATCH_CONTENT_DIFFERS"
        await resend(running, 3)
        await resend(running, 4)
        for name, tensor in running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype).items():
            assert torch.equal(tensor, expected[name]), name


async def test_a_learning_rate_in_a_header_holds_from_that_batch_on_and_is_saved(model: Path, tmp_path: Path) -> None:
    async def rates(running: Stack, *numbers: int) -> list[float]:
        return [(await running.report(number)).metrics["learning_rate"] for number in numbers]

    async with stack(model, tmp_path) as running:
        await running.client.begin_epoch(RUN, 1)
        with pytest.raises(SluiceError, match="is nan; give a finite number") as refused:
            await running.submit(1, learning_rate=float("nan"))
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        await trained(running, 1)
        await running.submit(2, learning_rate=1 / 3)
        assert await rates(running, 1, 2) == [pytest.approx(trainer_config().lr), 1 / 3]
        await running.client.save_checkpoint(RUN)
        await running.submit(3, learning_rate=0.0)
        assert await rates(running, 3) == [0.0]
    async with stack(model, tmp_path) as running:
        await running.client.begin_epoch(RUN, 2)
        await trained(running, 3, epoch=2)
        assert await rates(running, 3) == [1 / 3], "that of the checkpoint, not of the batch that it lacks"


async def test_a_learning_rate_that_the_weights_lack_is_forgotten_with_them(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path) as running:
        await running.client.begin_epoch(RUN, 1)
        stale = batch(1, version=Version(1, 0))
        for each in stale:
            each.ClearField("reward")  # nothing is left to train
        await running.submit(1, stale, learning_rate=0.5)
        await running.submit(2)
        assert (await running.report(2)).metrics["learning_rate"] == 0.5
        await running.client.begin_epoch(RUN, 2)
        await trained(running, 1, epoch=2)
        assert (await running.report(1)).metrics["learning_rate"] == pytest.approx(trainer_config().lr)


async def test_what_became_of_batches_is_told_by_a_trainer_that_died_since(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path) as running:
        await running.client.begin_epoch(RUN, 1)
        rows = batch(1, version=Version(1, 0))
        rows[3].ClearField("reward")
        await running.submit(1, rows)
        await trained(running, 2)
        told = [await running.report(number) for number in (1, 2)]
        await running.client.save_checkpoint(RUN)
        await trained(running, 3)
    async with stack(model, tmp_path) as running:
        await running.client.begin_epoch(RUN, 2)
        assert (await running.client.state(RUN)).oldest_reported_number == 1
        again = [await running.report(number) for number in (1, 2)]
        for before, after in zip(told, again, strict=True):
            assert list(after.results) == list(before.results)
            assert (after.batch_id, after.policy_version, after.sequence_no) == (
                before.batch_id,
                before.policy_version,
                before.sequence_no,
            )
            assert not after.metrics
        assert again[0].results[3].reason == "MISSING_REWARD"
        await trained(running, 3, epoch=2)
        assert (await running.report(3)).policy_version.epoch == 2, "the batch that no checkpoint held was sent again"


async def resend(running: Stack, number: int) -> None:
    """The very trajectories of the first epoch, as the orchestrator's journal would send them again."""
    await running.submit(number, batch(number, version=Version(1, number - 1)), epoch=2, max_staleness=9)
    report = await running.report(number)
    assert all(result.trained_tokens for result in report.results)


async def test_a_live_trainer_rolls_back_when_a_new_epoch_begins(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path) as running:
        await running.client.begin_epoch(RUN, 1)
        fresh = running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype)
        watch = running.client.watch_steps(RUN, 2, timeout_s=60)
        await trained(running, 1)
        waiting = asyncio.ensure_future(anext(watch))
        begun = await running.client.begin_epoch(RUN, 2)
        assert Version.from_proto(begun.policy_version) == Version(2, 0)
        with pytest.raises(SluiceError) as ended:
            await waiting
        assert ended.value.reason == "EPOCH_CHANGED"
        for name, tensor in running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype).items():
            assert torch.equal(tensor, fresh[name]), name


async def test_a_step_in_progress_is_abandoned_when_a_new_epoch_begins(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path, token_budget=16) as running:
        await running.client.begin_epoch(RUN, 1)
        fresh = running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype)
        passes: list[str] = []
        entered, release = threading.Event(), threading.Event()

        def hold(*_: object) -> None:
            passes.append("forward")
            entered.set()
            release.wait(30)

        with running.trainer.learner.engine.network.model.base_model.register_forward_pre_hook(hold):
            await running.submit(1)
            assert await asyncio.to_thread(entered.wait, 30)
            opening = asyncio.create_task(running.client.begin_epoch(RUN, 2))
            with pytest.raises(SluiceError, match="another epoch begins"):
                await running.report(1)
            release.set()
            assert (await opening).next_sequence_no == 1
        assert passes == ["forward"], "the batch has several micro-batches, but no second one was forwarded"
        for name, tensor in running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype).items():
            assert torch.equal(tensor, fresh[name]), name
        await trained(running, 1, epoch=2)


async def test_checkpoints_are_written_on_schedule_and_listed_newest_first(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path, checkpoint={"every_steps": 2, "keep": 3}) as running:
        await running.client.begin_epoch(RUN, 1)
        await trained(running, 1, 2, 3, 4, 5, 6, 7)
        await running.trainer.checkpoints.settled(30.0)
        stub = running.client._stub
        listed = await stub.ListCheckpoints(trainer_pb2.ListCheckpointsRequest(run=f"runs/{RUN}", page_size=2))
        assert [each.name for each in listed.checkpoints] == ["step_6", "step_4"]
        rest = await stub.ListCheckpoints(
            trainer_pb2.ListCheckpointsRequest(run=f"runs/{RUN}", page_token=listed.next_page_token)
        )
        assert [each.name for each in rest.checkpoints] == ["step_2"]
        assert not rest.next_page_token
        assert all(each.size_bytes > 0 and each.last_batch_id for each in listed.checkpoints)


async def test_training_does_not_wait_for_a_checkpoint_on_schedule_but_the_next_checkpoint_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()

    def slow(*arguments: Any) -> list[Path]:
        assert disk.wait(30.0)
        return write_slices(*arguments)

    monkeypatch.setattr(saver, "write_slices", slow)
    async with stack(model, tmp_path, checkpoint={"every_steps": 2}) as running:
        await running.client.begin_epoch(RUN, 1)
        await trained(running, 1, 2, 3, 4)
        asked = asyncio.create_task(running.client.save_checkpoint(RUN))
        state = await running.client.state(RUN)
        assert (state.policy_version.number, state.newest_checkpoint.name) == (4, "")
        disk.set()
        assert (await asked).checkpoint.name == "step_4"
        await running.trainer.checkpoints.settled(30.0)
        listed = await running.client._stub.ListCheckpoints(trainer_pb2.ListCheckpointsRequest(run=f"runs/{RUN}"))
        assert [each.name for each in listed.checkpoints] == ["step_4", "step_2"]


async def test_an_unknown_checkpoint_is_not_found_and_the_next_call_may_do_better(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path) as running:
        with pytest.raises(SluiceError) as missing:
            await running.client.begin_epoch(RUN, 1, checkpoint="step_5")
        assert missing.value.code is grpc.StatusCode.NOT_FOUND
        assert (await running.client.begin_epoch(RUN, 1)).next_sequence_no == 1


async def test_a_checkpoint_that_cannot_be_written_leaves_the_training_alone(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path, checkpoint={"every_steps": 1}) as running:
        await running.client.begin_epoch(RUN, 1)
        (tmp_path / RUN / "checkpoints").write_text("in the way")
        with pytest.raises(SluiceError) as full:
            await running.client.save_checkpoint(RUN)
        assert full.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.trainer.checkpoints.last_error = ""
        await trained(running, 1, 2)
        assert "CHECKPOINT_NOT_WRITTEN" in (await running.client.state(RUN)).last_error


async def test_an_epoch_does_not_begin_without_weight_sync(model: Path, tmp_path: Path) -> None:
    common = settings(model, tmp_path, "127.0.0.1:1")
    config = trainer_config(deadlines={"push_s": 1.0})
    async with trainer_service(common, config) as (_, target), TrainerClient(target) as client:
        with pytest.raises(SluiceError, match="could not be published") as failed:
            await client.begin_epoch(RUN, 1, timeout_s=20)
        assert failed.value.code is grpc.StatusCode.UNAVAILABLE
        assert (await client.state(RUN)).phase == trainer_pb2.TRAINER_PHASE_READY


async def test_steps_go_on_while_a_version_waits_but_not_beyond_the_next(model: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as services:
        first = AsyncExitStack()
        address = await first.enter_async_context(weight_service(settings(model, tmp_path)))
        common = settings(model, tmp_path, address)
        trainer, target = await services.enter_async_context(trainer_service(common, trainer_config()))
        client = await services.enter_async_context(TrainerClient(target))
        running = Stack(trainer, client, target, trainer.learner.tokenizer_digest, tmp_path)
        await client.begin_epoch(RUN, 1)
        await first.aclose()  # the weight service is gone

        await trained(running, 1, 2)
        await running.submit(3)
        state = await client.state(RUN)
        assert (state.phase, state.queued_batches) == (trainer_pb2.TRAINER_PHASE_PUBLISHING, 1)
        assert Version.from_proto(state.published_version) == Version(1, 0)

        port = int(address.rpartition(":")[2])
        await services.enter_async_context(weight_service(settings(model, tmp_path), port))  # and is back
        assert (await running.report(3)).metrics["wait_push_seconds"] > 0


async def test_a_version_that_cannot_be_published_ends_the_training_with_a_reason(model: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as services:
        first = AsyncExitStack()
        address = await first.enter_async_context(weight_service(settings(model, tmp_path)))
        common = settings(model, tmp_path, address)
        config = trainer_config(deadlines={"push_s": 5.0})
        trainer, target = await services.enter_async_context(trainer_service(common, config))
        client = await services.enter_async_context(TrainerClient(target))
        running = Stack(trainer, client, target, trainer.learner.tokenizer_digest, tmp_path)
        await client.begin_epoch(RUN, 1)
        await first.aclose()

        await trained(running, 1)
        with pytest.raises(SluiceError, match=r"version 1\.1 could not be published") as ended:
            await running.report(2)
        assert ended.value.reason == "TRAINER_FAILED"
        state = await client.state(RUN)
        assert state.phase == trainer_pb2.TRAINER_PHASE_FAILED
        assert "could not be published" in state.last_error
        with pytest.raises(SluiceError) as same:
            await client.begin_epoch(RUN, 1)
        assert same.value.reason == "TRAINER_FAILED", "its versions may be half published: a new epoch is needed"

        port = int(address.rpartition(":")[2])
        await services.enter_async_context(weight_service(settings(model, tmp_path), port))
        assert (await client.begin_epoch(RUN, 2)).next_sequence_no == 1
        await trained(running, 1, epoch=2)
        assert (await client.state(RUN)).last_error == ""
