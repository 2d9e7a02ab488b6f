"""The batch of `sluice bench trainer`, and that its sides compute the same loss."""

from __future__ import annotations

import pytest
import torch
from tiny_policy import tiny_model
from transformers import AutoModelForCausalLM

from benchmarks.trainer_ours import config, sequence
from benchmarks.trainer_plain import _loss
from benchmarks.trainer_workload import GROUP_SIZE, Row, UpdateBatch, Workload
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.objectives.objective import Objective
from trainer_svc.update.policy import PolicyUpdate


def test_the_batch_has_the_stated_share_of_groups_without_a_signal(tmp_path):
    batch = UpdateBatch.draw(Workload(groups=8, degenerate=0.25), seed=1)
    assert batch.degenerate == 0.25
    silent = batch.advantages.view(-1, GROUP_SIZE).abs().sum(1) == 0
    assert silent.tolist() == [True] * 2 + [False] * 6
    again = UpdateBatch.load(batch.save(tmp_path / "batch"))
    assert again.tokens == batch.tokens == sum(len(row.prompt) + len(row.completion) for row in again.rows())


def test_without_groups_that_have_no_signal_the_tokens_are_the_same():
    batch = UpdateBatch.draw(Workload(groups=8, degenerate=0.5), seed=1)
    other = batch.without_degenerate()
    assert other.degenerate == 0
    assert torch.equal(other.completions, batch.completions)
    assert torch.equal(other.rewards[-GROUP_SIZE:], batch.rewards[-GROUP_SIZE:])


def test_the_plain_loop_and_the_engine_have_the_same_loss(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = [
        Row(
            group=number // 2,
            prompt=torch.arange(3 + number // 2),
            completion=torch.randint(128, (length,), generator=generator),
            behaviour=-5 + 0.3 * torch.randn(length, generator=generator),
            reward=0.0,
            advantage=advantage,
        )
        for number, (length, advantage) in enumerate([(4, 1.0), (11, -1.0), (7, 0.5), (2, -0.5)])
    ]
    model = tiny_model(tmp_path)
    settings = config(threads=0)
    ours = (
        PolicyUpdate(TrainEngine(settings, model), Objective.of(settings.objective)).apply(map_rows(rows)).metrics.loss
    )
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parts = [_loss(plain, rows[start : start + 2], len(rows)) for start in (0, 2)]
    assert ours == pytest.approx(sum(loss.item() for loss, _ in parts), abs=1e-6)
    assert abs(ours) > 1e-3
    assert [cells for _, cells in parts] == [2 * (3 + 11), 2 * (4 + 7)]


def map_rows(rows: list[Row]) -> list:
    """The rows as the trainer takes them."""
    return [sequence(row) for row in rows]
