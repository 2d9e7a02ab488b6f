"""Writes as JSON how often the host waits for the device: in single operations, and in updates of few and of many micro-batches by preset.

Run in a process of its own, with the directory of a model and the file to write.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from fake_device import DEVICE, fake_device, to_fake_device
from tiny_policy import ragged_batch

from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.optimizers import build_optimizers
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.update.policy import Passes, PolicyUpdate

OBJECTIVES = {
    "every mask": ObjectiveConfig(
        preset="gspo",
        aggregation="prompt",
        correction={"kind": "k3_mask", "veto": 1e-4, "off_policy_sequence_mask": 0.5},
        kl_coef=0.1,
        kl_kind="k2",
    ),
    "grpo": ObjectiveConfig(preset="grpo", kl_coef=0.1, entropy_coef=0.01),
    "aipo": ObjectiveConfig(preset="aipo", kl_coef=0.1),
    "recomputed": ObjectiveConfig(
        preset="grpo", kl_coef=0.1, proximal="recompute", correction={"kind": "token_tis"}
    ),  # log-probabilities are read before the steps
}


def update_on_device(model_dir: str, budget: int, objective: ObjectiveConfig) -> PolicyUpdate:
    """An update whose model lies on the fake device."""
    config = TrainerConfig(device="cpu", token_budget=budget, objective=objective, reference={"model": "batch"})
    engine = TrainEngine(config, model_dir)
    to_fake_device(engine.network.model)
    engine.device = DEVICE
    engine.network = replace(engine.network, device=DEVICE)
    engine.optimizer = build_optimizers(config, engine.network.model, DEVICE)
    return PolicyUpdate(engine, Objective.of(objective), Passes(epochs=2))


def waits_of_updates(model_dir: str, preset: str) -> list[dict[str, object]]:
    """Micro-batches and waits of an update with one micro-batch an epoch, and of the same with many."""
    found = []
    for budget in (100_000, 64):
        with fake_device() as waits:
            update = update_on_device(model_dir, budget, OBJECTIVES[preset])
            waits.clear()
            metrics = update.apply(ragged_batch(seed=3, groups=2)).metrics
        found.append({"skipped": metrics.skipped, "micro_batches": metrics.micro_batches, "waits": dict(waits)})
    return found


def waits_of_single_operations() -> dict[str, int]:
    """Waits of operations that are known to make one each, after some that make none."""
    with fake_device() as waits:
        there = torch.arange(6.0).pin_memory().to(DEVICE, non_blocking=True)
        doubled = there * 2
        assert not waits, waits
        torch.arange(6.0).to(DEVICE)
        float(doubled.sum())
        bool((doubled > 3).any())
        doubled[doubled > 3]
        doubled.nonzero()
        doubled.cpu()
    return dict(waits)


def main() -> None:
    model, file = sys.argv[1:]
    updates = {preset: waits_of_updates(model, preset) for preset in OBJECTIVES}
    Path(file).write_text(json.dumps({"operations": waits_of_single_operations(), "updates": updates}))
