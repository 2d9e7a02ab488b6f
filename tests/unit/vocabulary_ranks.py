"""Processes that each hold a slice of the vocabulary, and how far their results are from a single process's.

As a program, with a directory: one of these processes.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from rank_programs import RankPrograms
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer_svc.engine.logprob import VocabularyShard, fused_logprobs, logprobs_of_states
from trainer_svc.parallel.sharding import local_slice

RANKS = 3
DEADLINE_S = 60.0
TOKENS, WIDTH, VOCABULARY = 23, 8, 31
CUTS = {"two": (0, 12, 31), "three": (0, 5, 6, 31), "layer": (0, 16, 31)}
"""Where the slices begin and end: uneven, one with a single id; and as DTensor cuts a layer for two."""


def outcome(start: int, end: int, group: dist.ProcessGroup | None, *, layer: bool = False) -> dict[str, torch.Tensor]:
    """Return values and gradients as one slice sees them. The gradients of weight and bias are those of the slice.

    Args:
        start: First token id of the slice.
        end: Its last token id plus one.
        group: The ranks with the other slices.
        layer: Whether a linear layer with DTensors holds the slice, as tensor parallelism makes it.
    """
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = normal(TOKENS, WIDTH), normal(VOCABULARY, WIDTH), normal(VOCABULARY)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    arriving, temperatures = normal(2, TOKENS), normal(TOKENS).exp()
    arriving[:, ::4] = 0
    if layer:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        weight, bias = (distribute_tensor(each, mesh, [Shard(0)]) for each in (weight, bias))
    else:
        weight, bias = weight[start:end].clone(), bias[start:end].clone()
    head = torch.nn.Linear(WIDTH, end - start)
    head.weight, head.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    learning = (hidden.requires_grad_(), head.weight, head.bias)
    fixed = {"entropy": "train", "cells": 150}
    if layer:
        results = logprobs_of_states(head, hidden, targets, temperatures, vocabulary=VOCABULARY, **fixed)
    else:
        results = fused_logprobs(
            hidden,
            head.weight,
            targets,
            temperatures,
            bias=head.bias,
            shard=VocabularyShard(group, start) if group else None,
            **fixed,
        )
    gradients = torch.autograd.grad((torch.stack(results) * arriving).sum(), learning)
    values = (*(each.detach() for each in results), *gradients)
    found = dict(zip(("logprobs", "entropy", "hidden", "weight", "bias"), values, strict=True))
    return {name: local_slice(each)[0].contiguous() for name, each in found.items()}


def main() -> None:
    """Take part with 2 and with 3 ranks, and write down what came of it."""
    (directory,) = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    rank = dist.get_rank()
    for name, cuts in CUTS.items():
        group = dist.new_group(list(range(len(cuts) - 1)))
        if rank < len(cuts) - 1:
            found = outcome(cuts[rank], cuts[rank + 1], group, layer=name == "layer")
            save_file(found, f"{directory}/{name}-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def largest_difference(directory: Path, programs: RankPrograms) -> float:
    """Start the ranks, and compare every value and gradient of every rank with the single process's."""
    with programs.group(RANKS, "vocabulary_ranks", str(directory)) as ranks:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0] * RANKS
    alone = outcome(0, VOCABULARY, None)
    worst = 0.0
    for cut, cuts in CUTS.items():
        for rank, (start, end) in enumerate(pairwise(cuts)):
            for name, found in load_file(directory / f"{cut}-{rank}.safetensors").items():
                expected = alone[name][start:end] if name in ("weight", "bias") else alone[name]
                worst = max(worst, float((found - expected).abs().max()))
    return worst
