"""How long a checkpoint stops training (while the state is copied), and how long it is written beside the next steps.

`python -m benchmarks.checkpoint` prints both, for the weights and moments of a model of a given shape, on the disk of the
temporary directory.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from sluice.cli.init_model import ModelShape, init_model
from trainer_svc.checkpoint.saver import EngineCheckpoints
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.engine import TrainEngine

SHAPE = ModelShape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, mlp=1536)
"""About 25 million parameters, 304 MB of state."""


def measure_checkpoint(rounds: int = 3, shape: ModelShape = SHAPE, threads: int = 1) -> dict[str, Any]:
    """Write checkpoints of a model, and one more than is timed.

    Args:
        rounds: Checkpoints that count.
        shape: The model.
        threads: Compute threads.

    Returns:
        `ratios.checkpoint_held_share` (seconds that training is held, per second until the checkpoint is on disk, the Hugging
        Face directory included), and the medians of both with the bytes of the state.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        model = Path(scratch) / "model"
        init_model(model, shape, seed=0)
        engine = TrainEngine(ComputeConfig(device="cpu", threads=threads), model)
        for parameter in engine.network.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine.optimizer.step(0)  # the moments are there from now on
        checkpoints = EngineCheckpoints(engine)
        times = [_checkpoint(checkpoints, Path(scratch) / "step") for _ in range(1 + rounds)][1:]
        size = sum(tensor.nbytes for tensor in engine.state_tensors().values())
    held, written = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "ratios": {"checkpoint_held_share": held / written},
        "held_s": held,
        "written_s": written,
        "state_bytes": size,
    }


def _checkpoint(checkpoints: EngineCheckpoints, directory: Path) -> tuple[float, float]:
    start = perf_counter()
    writing = checkpoints.begin_save(directory)
    held = perf_counter() - start
    writing.result()
    return held, perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(measure_checkpoint()))
