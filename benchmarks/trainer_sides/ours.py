"""Our side: the trainer's engine as a library."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from benchmarks.trainer_sides.side import (
    ADAM_EPS,
    BETAS,
    CLIP,
    GRAD_CLIP,
    LEARNING_RATE,
    UPDATE_S,
    Commands,
    PeakMemory,
    side_arguments,
)
from benchmarks.trainer_sides.workload import Row, UpdateBatch
from trainer_svc.batch.rows import Sequence
from trainer_svc.compute_config import ParallelConfig
from trainer_svc.config import ObjectiveConfig, TrainerConfig
from trainer_svc.engine.engine import TrainEngine
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
    if mesh.rank == 0:
        commands.answer(ready=True)
    while _go(commands, mesh):
        memory.restart()
        start, busy = time.perf_counter(), time.process_time()
        metrics = update.apply(share).metrics
        if mesh.rank == 0:
            commands.answer(
                seconds=time.perf_counter() - start,
                cpu_seconds=time.process_time() - busy,
                loss=metrics.loss,
                forward_tokens=metrics.forward_tokens,
                peak_bytes=memory.bytes,
                phases={name: round(value, 3) for name, value in metrics.seconds.items()},
            )


def _go(commands: Commands, mesh: Mesh) -> bool:
    """Return whether to update: rank 0 reads the command and broadcasts it."""
    if mesh.everyone is None:
        return commands.wait()
    decided = torch.tensor(int(mesh.rank == 0 and commands.wait()))
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


def sequence(row: Row) -> Sequence:
    """Return a sample as the trainer takes it."""
    length = len(row.prompt) + len(row.completion)
    trained = torch.arange(length) >= len(row.prompt)
    return Sequence(
        input_ids=torch.cat([row.prompt, row.completion]),
        loss_mask=trained,
        behaviour_logprobs=torch.cat([torch.full((len(row.prompt),), torch.nan), row.behaviour]),
        advantages=torch.full((length,), row.advantage),
        group_id=str(row.group),
    )


if __name__ == "__main__":
    main()
