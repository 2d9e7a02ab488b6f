"""A policy small enough to start in a second, and rows to train it on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from sluice.cli.init_model import ModelShape, init_model
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.metrics import StepMetrics
from trainer_svc.objectives.objective import Objective
from trainer_svc.update.policy import PolicyUpdate

TINY = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=512)


def tiny_model(directory: Path, *, tie: bool = False) -> Path:
    """Write the tiny model and return its directory."""
    path = directory / "tiny"
    shape = ModelShape(**{**{name: getattr(TINY, name) for name in TINY.__slots__}, "tie": tie})
    init_model(path, shape, seed=3)
    return path


def row(
    prompt: list[int],
    completion: list[int],
    *,
    advantage: float = 1.0,
    behaviour: float | torch.Tensor = -4.0,
    temperature: float = 1.0,
    group: str = "",
    name: str = "t",
    reference: float | None = None,
) -> TrainingRow:
    """A prompt that is not trained and a completion that is."""
    length = len(prompt) + len(completion)
    mask = torch.zeros(length, dtype=torch.bool)
    mask[len(prompt) :] = True
    logprobs = torch.full((length,), torch.nan)
    logprobs[mask] = behaviour
    return TrainingRow(
        input_ids=torch.tensor([*prompt, *completion]),
        loss_mask=mask,
        behaviour_logprobs=logprobs,
        advantages=torch.full((length,), advantage),
        reference_logprobs=None if reference is None else torch.full((length,), reference),
        temperature=temperature,
        group_id=group,
        trajectory_id=name,
    )


def ragged_batch(seed: int = 0, groups: int = 5, vocabulary: int = 128) -> list[TrainingRow]:
    """Groups of 1 to 4 samples of one prompt, with random lengths, temperatures, advantages and behaviour."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows = []
    for group in range(groups):
        prompt = torch.randint(vocabulary, (integer(1, 40),), generator=generator).tolist()
        for member in range(integer(1, 5)):
            completion = torch.randint(vocabulary, (integer(1, 50),), generator=generator).tolist()
            rows.append(
                row(
                    prompt,
                    completion,
                    advantage=float(torch.randn((), generator=generator)),
                    behaviour=-5.0 + torch.randn(len(completion), generator=generator),
                    temperature=(0.7, 1.0, 1.3)[integer(0, 3)],
                    group=f"g{group}",
                    name=f"g{group}/{member}",
                    reference=-4.5,
                )
            )
    return rows


def policy_step(engine: TrainEngine, rows: list[TrainingRow], objective: Objective | None = None) -> StepMetrics:
    """One step with the objective that the engine's settings name, or another."""
    return PolicyUpdate(engine, objective or Objective.of(engine.config.objective)).apply(rows).metrics


def load_state(engine: TrainEngine, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int]) -> None:
    """Put back what `state_tensors` and `state_scalars` gave, as a checkpoint does."""
    for name, tensor in engine.state_room({name: tensor.shape for name, tensor in tensors.items()}).items():
        tensor.copy_(tensors[name])
    engine.restore_scalars(scalars)
