"""A trainer whose memory does not hold a batch answers for it: over gRPC, with a real weight service."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from short_memory import hold, run_out
from trainer_stack import RUN, Stack, stack, tiny_model, trajectory

from sluice.rows_at_fault import ROWS
from sluice.rpc import SluiceError
from sluice.v1 import tokens_pb2
from sluice.versions import BASE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def rows(*lengths: int) -> list[tokens_pb2.Trajectory]:
    return [
        trajectory(f"t{place}", reward=float(place % 2), sampled=length, seed=place, versions=[(0, BASE)])
        for place, length in enumerate(lengths)
    ]


async def fails(running: Stack, number: int, sent: list[tokens_pb2.Trajectory]) -> str:
    """Submit a batch that ends the epoch. Return what those who watch it are told."""
    await running.submit(number, sent)
    with pytest.raises(SluiceError) as ended:
        await running.report(number)
    assert ended.value.reason == "TRAINER_FAILED"
    return ended.value.message


async def test_a_row_that_does_not_fit_alone_is_named_in_the_next_epoch(model: Path, tmp_path: Path) -> None:
    sent = rows(8, 40, 9, 10)
    async with stack(model, tmp_path, token_budget=60) as running:
        await running.client.begin_epoch(RUN, 1)
        hold(running.trainer.learner.engine, 30)
        assert "memory ran out with micro-batches of up to 30 tokens" in await fails(running, 1, sent)
        assert "OUT_OF_MEMORY" in (await running.client.state(RUN)).last_error
        await running.client.begin_epoch(RUN, 2)
        hold(running.trainer.learner.engine, 30)  # the base model was loaded again
        with pytest.raises(SluiceError, match=r"lower token_budget.*max_model_len") as refused:
            await running.submit(1, sent, epoch=2)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_MEMORY")
        assert refused.value.metadata[ROWS] == "1"
        await running.submit(1, [sent[0], *sent[2:]], epoch=2, batch_id="made again")
        report = await running.report(1)
        assert report.metrics["token_budget_halved"] == 1.0
        assert [each.reason for each in report.results] == [""] * 3


async def test_half_an_optimizer_step_costs_an_epoch_and_the_next_one_trains_the_batch(
    model: Path, tmp_path: Path
) -> None:
    sent = rows(8, 7, 9, 10)
    async with stack(model, tmp_path) as running:
        await running.client.begin_epoch(RUN, 1)
        run_out(running.trainer.learner.engine, "optimizer", lambda: True)
        assert "in the middle of an optimizer step" in await fails(running, 1, sent)
        await running.client.begin_epoch(RUN, 2)
        await running.submit(1, sent, epoch=2)
        assert (await running.report(1)).metrics["token_budget_halved"] == 1.0
