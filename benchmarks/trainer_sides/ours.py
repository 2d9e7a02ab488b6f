"""Our side: the trainer's engine as a library."""

from __future__ import annotations

import time

import torch

from benchmarks.trainer_sides.hyper import ADAM_EPS, BETAS, CLIP, GRAD_CLIP, LEARNING_RATE, side_arguments
from benchmarks.trainer_sides.memory import PeakMemory
from benchmarks.trainer_sides.orders import Orders
from benchmarks.trainer_sides.workload import Row, UpdateBatch
from trainer_svc.config import ObjectiveConfig, TrainerConfig
from trainer_svc.engine.batch import Sequence
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.objectives.objective import Objective
from trainer_svc.update.policy import PolicyUpdate


def main() -> None:
    """Update on order."""
    parser = side_arguments(__doc__)
    parser.add_argument("--no-folding", action="store_true", help="forward each sample's prompt apart")
    arguments = parser.parse_args()
    orders = Orders()
    memory = PeakMemory()
    settings = config(threads=arguments.threads, fold=not arguments.no_folding)
    update = PolicyUpdate(TrainEngine(settings, arguments.model), Objective.of(settings.objective))
    sequences = [sequence(row) for row in UpdateBatch.load(arguments.batch).rows()]
    orders.answer(ready=True)
    while orders.wait():
        memory.restart()
        start = time.perf_counter()
        metrics = update.apply(sequences)
        orders.answer(
            seconds=time.perf_counter() - start,
            loss=metrics.loss,
            forward_tokens=metrics.forward_tokens,
            peak_bytes=memory.bytes,
            phases={name: round(value, 3) for name, value in metrics.seconds.items()},
        )


def config(*, threads: int, fold: bool = True) -> TrainerConfig:
    """GRPO with the hyper-parameters of the other sides; all else as it comes."""
    return TrainerConfig(
        objective=ObjectiveConfig(preset="grpo", eps_low=CLIP, eps_high=CLIP),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=ADAM_EPS,
        grad_clip=GRAD_CLIP,
        device="cpu",
        threads=threads,
        fold_prompts=fold,
    )


def sequence(row: Row) -> Sequence:
    """A sample as the trainer takes it."""
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
