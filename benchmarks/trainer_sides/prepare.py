"""Makes the model and the batch that all sides get. Run in a process of its own, so that the contest starts clean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.trainer_sides.hyper import BATCH, NO_DEGENERATE
from benchmarks.trainer_sides.workload import MODEL, UpdateBatch, Workload
from sluice.cli.init_model import init_model

__all__ = ["prepare"]

DRIFT = 0.1
"""The behaviour policy is the model with this share of each tensor's standard deviation added as noise: an older policy,
whose ratios spread around 1 and leave the clipping bounds now and then."""


def prepare(directory: Path, workload: Workload, seed: int) -> dict[str, float]:
    """Write ``model/``, ``batch.safetensors`` and ``no_degenerate.safetensors``; returns what the batch is like."""
    path = directory / "model"
    parameters = init_model(path, MODEL, seed=seed)
    batch = UpdateBatch.draw(workload, seed)
    batch = replace(batch, behaviour=_behaviour(path, batch, seed))
    batch.save(directory / BATCH)
    batch.without_degenerate().save(directory / NO_DEGENERATE)
    padded = int(batch.prompt_lengths.max() + batch.completion_lengths.max()) * len(batch.groups)
    return {
        "parameters": float(parameters),
        "sequences": float(len(batch.groups)),
        "tokens": float(batch.tokens),
        "prompt_tokens_mean": float(batch.prompt_lengths.float().mean()),
        "completion_tokens_mean": float(batch.completion_lengths.float().mean()),
        "completion_tokens_max": float(batch.completion_lengths.max()),
        "degenerate_groups": batch.degenerate,
        "real_share_of_padded": batch.tokens / padded,
    }


def _behaviour(path: Path, batch: UpdateBatch, seed: int) -> torch.Tensor:
    """Log-probability of each completion token under a policy close to the model."""
    with torch.no_grad():
        return _logprobs(_older_policy(path, seed), batch)


def _older_policy(path: Path, seed: int) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * DRIFT)
    return model


def _logprobs(model: torch.nn.Module, batch: UpdateBatch) -> torch.Tensor:
    found = []
    for row in batch.rows():
        ids = torch.cat([row.prompt, row.completion]).unsqueeze(0)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(row.completion) + 1).logits[0, :-1]
        found.append(torch.log_softmax(logits, -1).gather(1, row.completion.unsqueeze(1)).squeeze(1))
    return torch.cat(found)
