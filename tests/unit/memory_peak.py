"""The most bytes that PyTorch's allocator held during a training step on a CPU; run in a process of its own.

Arguments: directory for the model, its shape and the engine's settings as JSON, file for what was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from sluice.cli.init_model import ModelShape, init_model
from trainer_svc.batch.rows import Sequence, count_loss_tokens
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.engine import TrainEngine

ROW_TOKENS = 512


def row(seed: int, vocabulary: int) -> Sequence:
    """A sequence that is trained but for its first token."""
    ids = torch.randint(vocabulary, (ROW_TOKENS + 1,), generator=torch.Generator().manual_seed(seed))
    nothing = torch.zeros(len(ids))
    return Sequence(ids, torch.arange(len(ids)) > 0, nothing, nothing, trajectory_id=str(seed))


def peak_of_a_step(directory: Path, shape: dict[str, object], settings: dict[str, object]) -> dict[str, object]:
    """The peak of the second step, in which the optimizer's moments are there, and the model's configuration."""
    init_model(directory, ModelShape(**shape), seed=1)
    engine = TrainEngine(ComputeConfig(device="cpu", threads=1, **settings), directory)
    vocabulary = engine.network.vocabulary
    rows = [row(seed, vocabulary) for seed in range(2 * engine.config.token_budget // ROW_TOKENS)]

    def step(trained: list[Sequence]) -> None:
        engine.train_batch(trained, lambda outputs, _: (-outputs.logprobs.sum(), {}), count_loss_tokens)

    step(rows[:1])  # makes the moments
    parameters = list(engine.network.model.parameters())
    held = [*parameters, *(each.grad for each in parameters if each.grad is not None)]
    held += [each for name, each in engine.state_tensors().items() if name.startswith("optimizer.")]
    resident = sum(each.nbytes for each in held)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(rows)
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    peak = now = resident
    for _, change in sorted(changes, key=lambda each: each[0]):
        now += change
        peak = max(peak, now)
    return {
        "peak_bytes": peak,
        "resident_bytes": resident,
        "model": json.loads((directory / "config.json").read_text()),
    }


def main() -> None:
    directory, told, results = sys.argv[1:]
    given = json.loads(told)
    Path(results).write_text(json.dumps(peak_of_a_step(Path(directory), given["shape"], given["settings"])))
