"""Fine-tune a model on a few sentences, on as many processes as torchrun starts.

torchrun --nproc-per-node 4 examples/parallel/train.py MODEL OUTPUT --tp 2
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

from trainer_svc.batch.rows import TrainingRow, count_loss_tokens
from trainer_svc.compute_config import ParallelConfig
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.parallel.balance import balance
from trainer_svc.parallel.mesh import join

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("output", type=Path)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--cp", type=int, default=1)
arguments = parser.parse_args()

parallel = ParallelConfig(tp=arguments.tp, cp=arguments.cp)  # dp_shard takes the processes that are left
mesh = join(parallel)
engine = TrainEngine(TrainerConfig(lr=1e-3, parallel=parallel), arguments.model, mesh=mesh)

tokenizer = AutoTokenizer.from_pretrained(arguments.model)
rows = []
for sentence in ("the quick brown fox", "jumps over the lazy dog", "and sleeps", "until the morning"):
    ids = torch.tensor(tokenizer(sentence)["input_ids"])
    nothing = torch.full(ids.shape, torch.nan)  # no behaviour, no advantages: every token but the first is learned
    rows.append(TrainingRow(ids, torch.arange(len(ids)) > 0, behaviour_logprobs=nothing, advantages=nothing))
share = balance(rows, mesh.dims.data_parallel)[mesh.dims.data_rank(mesh.rank)]

for step in range(20):
    metrics = engine.train_batch(
        [rows[place] for place in share], lambda outputs, batch: (-outputs.logprobs.sum(), {}), count_loss_tokens
    )
    if mesh.rank == 0:
        print(f"step {step}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}")
engine.export_hf(arguments.output)
mesh.leave()
