"""Our side of `sluice bench trainer`: the trainer's engine as a library. Run as a program, this module is the side."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.children import PeakMemory
from benchmarks.trainer_workload import (
    ADAM_EPS,
    BETAS,
    CLIP,
    GRAD_CLIP,
    LEARNING_RATE,
    UPDATE_S,
    Commands,
    Row,
    UpdateBatch,
    side_arguments,
)
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.compute_config import ParallelConfig
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.parallel.balance import Cost, balance
from trainer_svc.parallel.mesh import Mesh, join
from trainer_svc.update.policy import PolicyUpdate


def main() -> None:
    """Update on command; under torchrun each process trains its share."""
    parser = side_arguments(__doc__)
    parser.add_argument("--no-folding", action="store_true", help="forward each sample's prompt separately")
    parser.add_argument("--replicate", type=int, default=1, help="copies of the model; processes beyond that share one")
    arguments = parser.parse_args()
    commands = Commands()
    memory = PeakMemory()
    settings = config(
        threads=arguments.threads,
        budget=arguments.micro_batch,
        fold=not arguments.no_folding,
        replicate=arguments.replicate,
    )
    mesh = join(settings.parallel, settings.device)
    objective = Objective.of(settings.objective)
    update = PolicyUpdate(TrainEngine(settings, arguments.model, mesh=mesh), objective)
    rows = [sequence(row) for row in UpdateBatch.load(arguments.batch).rows()]
    cost = Cost.of(update.engine.network.model.config)
    shares = balance(rows, mesh.dims.data_parallel, cost=cost, contributes=objective.contributes)
    share = [rows[place] for place in shares[mesh.dims.data_rank(mesh.rank)]]
    if mesh.rank != 0:
        while _follows(mesh):
            update.apply(share)
        return
    commands.answer(ready=True)

    def apply() -> dict[str, Any]:
        _lead(mesh, goes_on=True)
        metrics = update.apply(share).metrics
        return {
            "loss": metrics.loss,
            "forward_tokens": metrics.forward_tokens,
            "phases": {name: round(value, 3) for name, value in metrics.seconds.items()},
        }

    commands.serve(memory, apply)
    _lead(mesh, goes_on=False)


def _lead(mesh: Mesh, *, goes_on: bool) -> None:
    """Broadcast from rank 0 whether another update follows."""
    if mesh.everyone is not None:
        dist.broadcast(torch.tensor(int(goes_on)), 0, group=mesh.everyone)


def _follows(mesh: Mesh) -> bool:
    decided = torch.tensor(0)
    dist.broadcast(decided, 0, group=mesh.everyone)
    return bool(decided)


def config(*, threads: int, budget: int = 8192, fold: bool = True, replicate: int = 1) -> TrainerConfig:
    """Return GRPO with the hyper-parameters of the other sides; everything else is the default."""
    return TrainerConfig(
        objective=ObjectiveConfig(preset="grpo", eps_low=CLIP, eps_high=CLIP),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=ADAM_EPS,
        grad_clip=GRAD_CLIP,
        device="cpu",
        threads=threads,
        token_budget=budget,
        fold_prompts=fold,
        parallel=ParallelConfig(dp_replicate=replicate, timeout_s=UPDATE_S),
    )


def sequence(row: Row) -> TrainingRow:
    """Return a sample as the trainer takes it."""
    length = len(row.prompt) + len(row.completion)
    trained = torch.arange(length) >= len(row.prompt)
    return TrainingRow(
        input_ids=torch.cat([row.prompt, row.completion]),
        loss_mask=trained,
        behaviour_logprobs=torch.cat([torch.full((len(row.prompt),), torch.nan), row.behaviour]),
        advantages=torch.full((length,), row.advantage),
        group_id=str(row.group),
    )


if __name__ == "__main__":
    main()
