"""A learner of a tiny policy, batches for it, and its state to compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_policy import ragged_batch

from sluice.config import CommonConfig
from sluice.v1 import trainer_pb2
from sluice.versions import BASE, Version, VersionSpan
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.config import TrainerConfig
from trainer_svc.service.batches import Batch, Sample, judge
from trainer_svc.service.learner import Learner


def learner(model: Path, output_dir: Path, *, common: Mapping[str, Any] | None = None, **settings: object) -> Learner:
    config = TrainerConfig(**({"lr": 1e-2, "warmup_steps": 3, "device": "cpu", "threads": 1} | settings))
    built = Learner(CommonConfig(run="test", output_dir=output_dir, model=str(model), **common or {}), config)
    built.load()
    return built


def train(policy: Learner, *numbers: int) -> None:
    for number in numbers:
        policy.apply(batch(policy, number, ragged_batch(seed=number, groups=3)))


def batch(
    policy: Learner, number: int, rows: Iterable[TrainingRow], *, has_advantages: bool = True, **header: object
) -> Batch:
    """A batch of the policy's present epoch, as the trainer accepts it."""
    values = {
        "batch_id": f"b{number}",
        "target_version": Version(policy.version.epoch, number).to_proto(),
        "max_staleness": 9,
    }
    samples = [Sample(row, (VersionSpan(0, BASE),), int(row.loss_mask.sum()), has_advantages) for row in rows]
    return judge(
        samples,
        trainer_pb2.BatchHeader(sequence_no=number, on_stale=trainer_pb2.STALE_POLICY_DROP, **values | header),
        policy.checkpoints.lineage,
        policy.update.objective.resolved,
        [each.sequence.trajectory_id.encode() for each in samples],
    )


def state(policy: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.engine.state_tensors().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def names(policy: Learner) -> list[str]:
    return [manifest.checkpoint.name for manifest in policy.checkpoints.complete()]
