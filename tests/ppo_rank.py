"""One rank of a PPO update on several processes, as a program: compares with one process and writes down the differences.

Arguments: directory of the model, file for the results of rank 0. Rank, count and meeting point come from the environment, as
torchrun gives them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_policy import ragged_batch

from trainer_svc.compute_config import ParallelConfig, ParallelDims
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.metrics import StepMetrics
from trainer_svc.parallel.balance import balance
from trainer_svc.parallel.mesh import SINGLE, Mesh, join, make_mesh
from trainer_svc.update.policy import PolicyUpdate, load_frozen

TIMEOUT = timedelta(seconds=60)

ROWS = [
    replace(each, reward=float(i % 3), truncated=i % 4 == 0, reference_logprobs=None)
    for i, each in enumerate(ragged_batch(seed=4, groups=5))
]

CASES = {
    "own critic": {"critic": {"lr": 1e-3}},
    "critic's warm-up": {"critic": {"lr": 1e-3, "freeze_policy_steps": 1}},
    "shared trunk": {"critic": {"shared": True}},
    "reference": {"objective": {"preset": "reinforce_pp", "kl_coef": 0.1}},
    "selection": {"objective": {"preset": "m2po", "tau": 0.5}},
}

SHARDED, CUT = ParallelDims(dp_shard=2), ParallelDims(tp=2)
RUNS = (
    ("own critic", SHARDED),
    ("critic's warm-up", SHARDED),
    ("reference", SHARDED),
    ("selection", SHARDED),
    ("shared trunk", CUT),
)


def settings(case: str) -> TrainerConfig:
    common = {
        "lr": 1e-3,
        "eps": 1e-6,
        "device": "cpu",
        "threads": 1,
        "token_budget": 150,
        "epochs": 2,
        "minibatches": 3,
    }
    reference = {"model": "base"} if "reference" in case else {}
    return TrainerConfig(
        **{"objective": {"preset": "ppo", "gae_lambda": 0.9}, "reference": reference} | common | CASES[case]
    )


def train(case: str, model: str, mesh: Mesh) -> tuple[StepMetrics, dict[str, torch.Tensor]]:
    config = settings(case)
    update = PolicyUpdate.load(config, model, seed=1, mesh=mesh, frozen=load_frozen(config, model, mesh=mesh))
    share = balance(ROWS, mesh.dims.data_parallel)[mesh.dims.data_rank(mesh.rank)]
    metrics = update.apply([ROWS[place] for place in share]).metrics
    weights = {
        f"{name}.{key}": tensor for name, each in update.engines.items() for key, tensor in each.named_tensors().items()
    }
    return metrics, weights


def compare(case: str, model: str, mesh: Mesh) -> dict[str, float]:
    """Largest relative differences from one process."""
    metrics, weights = train(case, model, mesh)
    if mesh.rank:
        return {}
    alone, expected = train(case, model, SINGLE)
    facts, wanted = metrics.as_flat(), alone.as_flat()
    names = [
        name for name in wanted if name.startswith(("loss", "critic/", "optimizer_steps", "kl", "mismatch", "deselect"))
    ]
    return {
        "weights": max(
            float((weights[key] - each).norm() / each.norm().clamp(min=1e-9)) for key, each in expected.items()
        ),
        **{name: abs(facts[name] - wanted[name]) / max(abs(wanted[name]), 1e-3) for name in names},
    }


def main() -> None:
    model, results = sys.argv[1:]
    torch.set_num_threads(1)
    join(ParallelConfig(dp_shard=2, timeout_s=TIMEOUT.total_seconds()), "cpu")
    meshes = {dims: make_mesh(dims, torch.device("cpu"), TIMEOUT) for dims in (SHARDED, CUT)}
    found = {f"{case}, {dims}": compare(case, model, meshes[dims]) for case, dims in RUNS}
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
