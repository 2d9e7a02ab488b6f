"""Processes that each hold a slice of the vocabulary, and how far their results are from a single process's."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import multiprocessing

from trainer_svc.engine.fused_logprob import fused_logprobs

RANKS = 3
DEADLINE_S = 60.0
TOKENS, WIDTH, VOCABULARY = 23, 8, 31
CUTS = {2: (0, 12, 31), 3: (0, 5, 6, 31)}
"""Where the slices begin and end, by number of ranks: uneven, one with a single id."""


def outcome(start: int, end: int, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Values and gradients as one slice sees them; those of weight and bias are the slice's."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = normal(TOKENS, WIDTH), normal(VOCABULARY, WIDTH), normal(VOCABULARY)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    arriving, temperatures = normal(2, TOKENS), normal(TOKENS).exp()
    arriving[:, ::4] = 0
    learning = [hidden, weight[start:end].clone(), bias[start:end].clone()]
    for each in learning:
        each.requires_grad_()
    logprobs, spread = fused_logprobs(
        learning[0],
        learning[1],
        targets,
        temperatures,
        bias=learning[2],
        entropy="train",
        cells=150,
        group=group,
        vocabulary_start=start,
    )
    assert spread is not None
    gradients = torch.autograd.grad((torch.stack([logprobs, spread]) * arriving).sum(), learning)
    names = ("logprobs", "entropy", "hidden", "weight", "bias")
    values = (logprobs.detach(), spread.detach(), *gradients)
    return {name: value.contiguous() for name, value in zip(names, values, strict=True)}


def rank_main(rank: int, directory: str) -> None:
    """Take part with 2 and with 3 ranks, and write down what came of it."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=DEADLINE_S))
    for ranks, cuts in CUTS.items():
        group = dist.new_group(list(range(ranks)))
        if rank < ranks:
            save_file(outcome(cuts[rank], cuts[rank + 1], group), f"{directory}/{ranks}-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def largest_difference(directory: Path) -> float:
    """Start the ranks, and compare every value and gradient of every rank with the single process's."""
    multiprocessing.spawn(rank_main, (str(directory),), nprocs=RANKS)
    alone = outcome(0, VOCABULARY, None)
    worst = 0.0
    for ranks, cuts in CUTS.items():
        for rank in range(ranks):
            own = slice(cuts[rank], cuts[rank + 1])
            for name, found in load_file(directory / f"{ranks}-{rank}.safetensors").items():
                expected = alone[name][own] if name in ("weight", "bias") else alone[name]
                worst = max(worst, float((found - expected).abs().max()))
    return worst
