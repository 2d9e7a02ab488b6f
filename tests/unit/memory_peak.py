"""The most bytes that PyTorch's allocator held during training steps on a CPU; run in a process of its own.

Arguments: directory of the model, a list of cases as JSON, file for what the first rank measured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from statistics import median_low

import torch
from torch.profiler import ProfilerActivity, profile

from trainer_svc.batch.rows import TrainingRow, count_loss_tokens
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.parallel.mesh import join
from trainer_svc.parallel.sharding import local_slice

STEPS = 7
"""Steps that are measured of several ranks; of one, all take the same."""


def row(seed: int, tokens: int, vocabulary: int) -> TrainingRow:
    """A sequence that is trained but for its first token."""
    ids = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))
    nothing = torch.zeros(len(ids))
    return TrainingRow(ids, torch.arange(len(ids)) > 0, nothing, nothing, trajectory_id=str(seed))


def peak_of_a_step(model: str, settings: dict[str, object], lengths: list[int]) -> dict[str, int]:
    """Bytes that stay from step to step, and the most that a later step takes, in which the optimizer's moments are there.

    `lengths` are the tokens of the rows, which are different from each other. Of several ranks it depends on chance when a gathered weight
    is freed: one step in ten takes a fifth more. The median of the steps counts.
    """
    config = ComputeConfig(device="cpu", threads=1, **settings)
    engine = TrainEngine(config, model, mesh=join(config.parallel, "cpu"))
    rows = [row(seed, tokens, engine.network.vocabulary) for seed, tokens in enumerate(lengths)]

    def step(trained: list[TrainingRow]) -> None:
        engine.train_batch(trained, lambda outputs, _: (-outputs.logprobs.sum(), {}), count_loss_tokens)

    step([row(0, 16, engine.network.vocabulary)])  # makes the moments
    weights = held(engine.network.model.parameters())
    moments = held(each for name, each in engine.state_tensors().items() if name.startswith("optimizer."))
    peaks = []
    for _ in range(STEPS if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 1):
        engine.optimizer.zero_grad(set_to_none=True)  # the profiler misses the end of older objects
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step(rows)
        changes = [
            (event.start_ns(), event.nbytes())
            for event in profiled.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        sizes = (change for _, change in sorted(changes, key=lambda each: each[0]))
        peaks.append(weights + moments + max(accumulate(sizes)))
    return {"weights": weights, "moments": moments, "peak": median_low(peaks)}


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the slices that this process has."""
    return sum(local_slice(each)[0].nbytes for each in tensors)


def main() -> None:
    model, cases, results = sys.argv[1:]
    measured = [peak_of_a_step(model, case["settings"], case["lengths"]) for case in json.loads(cases)]
    if os.environ.get("RANK", "0") == "0":
        Path(results).write_text(json.dumps(measured))
