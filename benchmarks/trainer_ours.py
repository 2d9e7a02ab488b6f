"""Our side of `sluice bench trainer`: the trainer's engine as a library; and, with `--gpu`, alone on one device.

Run as a program, this module is the side. `measure_gpu` trains a model of the shape of Qwen3-0.6B with random weights on long
sequences.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence as Rows
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

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
from sluice.config import ConfigError
from trainer_svc.batch.rows import Sequence
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


# On one GPU.


QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
}
"""As in the model's own config.json, with room for longer sequences."""

BATCH_TOKENS = 131_072
"""Tokens of a batch, at whatever length."""

PROMPT_SHARE = 16
"""One token in this many is part of the prompt, which is not trained."""

GIB = 1 << 30


def _long_rows(tokens: int, count: int, vocabulary: int) -> list[Sequence]:
    """Draw sequences without common prompts, so that neither prompt folding nor skipping helps; advantages have both signs."""
    generator = torch.Generator().manual_seed(0)
    trained = torch.arange(tokens) >= max(1, tokens // PROMPT_SHARE)
    behaviour = torch.full((tokens,), -float(torch.tensor(float(vocabulary)).log()))
    return [
        Sequence(
            input_ids=torch.randint(vocabulary, (tokens,), generator=generator),
            loss_mask=trained,
            behaviour_logprobs=behaviour,
            advantages=torch.full((tokens,), 1.0 if number % 2 else -1.0),
        )
        for number in range(count)
    ]


def measure_gpu(lengths: Rows[int], *, rounds: int, compiled: bool = False) -> dict[str, Any]:
    """Measure tokens per second, MFU and memory by length of the sequences, over so many counted updates of each.

    Raises:
        ConfigError: if there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "--gpu needs a CUDA device, and PyTorch finds none: run it where there is one, with `pip install -e .[gpu]`"
        )
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    found = measure_lengths(QWEN3_06B, lengths, rounds=rounds, batch_tokens=BATCH_TOKENS, compiled=compiled)
    return {"ratios": {}, "device": torch.cuda.get_device_name(), "by_tokens": found}


def measure_lengths(
    sizes: dict[str, Any],
    lengths: Rows[int],
    *,
    rounds: int,
    batch_tokens: int,
    device: str = "cuda",
    compiled: bool = False,
) -> dict[str, dict[str, Any]]:
    """Measure as `measure_gpu` does, for any Qwen3, batch size and device.

    Args:
        sizes: Of the model, as its configuration names them.
        lengths: Tokens per sequence.
        rounds: Counted updates at each length.
        batch_tokens: Tokens of a batch; a longer sequence makes one alone.
        device: Name of PyTorch.
        compiled: Compile the decoder layers.
    """
    logging.disable_progress_bar()
    found = {}
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        model = Path(scratch) / "model"
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(model)
        for tokens in lengths:
            rows = _long_rows(tokens, max(1, batch_tokens // tokens), sizes["vocab_size"])
            found[str(tokens)] = _without_recomputing(model, rows, rounds, device=device, compiled=compiled)
            print(f"{len(rows)} x {tokens} tokens: {found[str(tokens)]}", flush=True)
    return found


def _without_recomputing(
    model: Path, rows: list[Sequence], rounds: int, *, device: str, compiled: bool
) -> dict[str, Any]:
    """Keep all activations if they fit into memory, else use activation checkpointing."""
    measure = partial(_measure, model, rows, rounds, device=device, compiled=compiled)
    try:
        return measure(checkpointing=False)
    except torch.OutOfMemoryError:
        pass
    gc.collect()  # the engine that did not fit
    torch.cuda.empty_cache()
    return measure(checkpointing=True)


def _measure(
    model: Path, rows: list[Sequence], rounds: int, *, device: str, compiled: bool, checkpointing: bool
) -> dict[str, Any]:
    config = TrainerConfig(
        objective=ObjectiveConfig(preset="grpo"),
        device=device,
        token_budget=max(16_384, len(rows[0])),
        gradient_checkpointing=checkpointing,
        compile=compiled,
    )
    update = PolicyUpdate(TrainEngine(config, model), Objective.of(config.objective))
    update.apply(rows)  # compiles and allocates
    flat = [update.apply(rows).metrics.as_flat() for _ in range(rounds)]

    def middle(name: str) -> float | None:
        return median(each[name] for each in flat) if name in flat[0] else None

    speed, mfu = middle("tokens_per_s") or 0.0, middle("mfu")
    return {
        "tokens_per_s": round(speed),
        "mfu": None if mfu is None else round(mfu, 4),
        "peak_memory_gib": round((middle("peak_memory_bytes") or 0.0) / GIB, 1),
        "seconds": round(middle("seconds/total") or 0.0, 2),
        "activation_checkpointing": checkpointing,
    }


if __name__ == "__main__":
    main()
