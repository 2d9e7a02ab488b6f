"""What the sides of `sluice bench trainer` share: model, batch, hyper-parameters, command line and commands.

A side is a program: it loads the model and the batch, and makes one update for each command. Prompts are shared by groups,
completions are ragged, and the rewards of some groups are all equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.children import PeakMemory
from sluice.cli.init_model import SPECIAL_TOKENS, ModelShape, init_model

LEARNING_RATE = 1e-5
BETAS = (0.9, 0.95)
ADAM_EPS = 1e-8
CLIP = 0.2
"""The ratio is clipped to [1 - CLIP, 1 + CLIP]."""
GRAD_CLIP = 1.0

BATCH = "batch.safetensors"
NO_DEGENERATE = "no_degenerate.safetensors"
"""The two files that `prepare` writes: the batch, and the same tokens with rewards that differ within every group."""

UPDATE = "update"
UPDATE_S = 300.0
"""Seconds that an update may take."""

GROUP_SIZE = 8
"""Samples of one prompt."""

ADVANTAGE_EPS = 1e-4
"""TRL adds this to a group's standard deviation. We do the same here, so that both sides train on the same advantages."""

DRIFT = 0.1
"""The policy that sampled is the model with this share of each tensor's standard deviation added as noise. It stands for an
older policy, whose ratios spread around 1 and leave the clipping bounds now and then."""

VOCABULARY = 4096
FIRST_ID = len(SPECIAL_TOKENS)
END_ID = SPECIAL_TOKENS.index("<|end|>")

MODEL = ModelShape(
    hidden=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp=768,
    vocabulary_characters="".join(chr(0x4E00 + index) for index in range(VOCABULARY - FIRST_ID)),
    max_positions=4096,
)
"""A Qwen3 of 5.2 million parameters."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a batch. Lengths, in tokens, are log-normal: their median, the spread of their logarithm, and where they are cut."""

    groups: int = 8
    prompt_median: int = 224
    prompt_sigma: float = 0.35
    prompt_limit: int = 600
    completion_median: int = 200
    completion_sigma: float = 0.7
    completion_limit: int = 768
    degenerate: float = 0.25
    """Share of groups whose rewards are all equal."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample."""

    group: int
    prompt: torch.Tensor
    completion: torch.Tensor
    behaviour: torch.Tensor
    """Log-probability of each completion token when it was sampled, in nats."""
    reward: float
    """0 or 1."""
    advantage: float
    """Advantage of the whole completion, from its group's rewards."""


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """Rows as flat tensors, which travel between processes in one safetensors file."""

    prompts: torch.Tensor
    prompt_lengths: torch.Tensor
    completions: torch.Tensor
    completion_lengths: torch.Tensor
    behaviour: torch.Tensor
    groups: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor

    @classmethod
    def draw(cls, workload: Workload, seed: int) -> Self:
        """Draw random tokens of the workload's lengths; behaviour log-probabilities are still 0."""
        random = np.random.default_rng(seed)

        def lengths(count: int, median: int, sigma: float, limit: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            drawn = np.exp(random.normal(np.log(median), sigma, count)).astype(np.int64)
            return drawn.clip(8, limit)

        samples = workload.groups * GROUP_SIZE
        prompt_lengths = lengths(workload.groups, workload.prompt_median, workload.prompt_sigma, workload.prompt_limit)
        sizes = lengths(samples, workload.completion_median, workload.completion_sigma, workload.completion_limit)
        completions = random.integers(FIRST_ID, VOCABULARY, sizes.sum())
        completions[(sizes.cumsum() - 1)[sizes < workload.completion_limit]] = END_ID
        rewards = _rewards(workload, random)
        return cls(
            prompts=torch.from_numpy(random.integers(FIRST_ID, VOCABULARY, prompt_lengths.sum())),
            prompt_lengths=torch.from_numpy(prompt_lengths),
            completions=torch.from_numpy(completions),
            completion_lengths=torch.from_numpy(sizes),
            behaviour=torch.zeros(len(completions)),
            groups=torch.arange(workload.groups).repeat_interleave(GROUP_SIZE),
            rewards=rewards.flatten(),
            advantages=_advantages(rewards).flatten(),
        )

    def without_degenerate(self) -> Self:
        """Return the same tokens with other rewards: each group has successes and failures."""
        rewards = self.rewards.view(-1, GROUP_SIZE).clone()
        equal = rewards.std(dim=1) == 0
        rewards[equal, : GROUP_SIZE // 2] = 1.0 - rewards[equal, : GROUP_SIZE // 2]
        return replace(self, rewards=rewards.flatten(), advantages=_advantages(rewards).flatten())

    @property
    def tokens(self) -> int:
        """Real tokens of the batch: each sample counts with its prompt and its completion."""
        return int(self.prompt_lengths[self.groups].sum() + self.completion_lengths.sum())

    @property
    def degenerate(self) -> float:
        """Share of groups whose rewards are all equal."""
        return float((self.rewards.view(-1, GROUP_SIZE).std(dim=1) == 0).float().mean())

    def rows(self) -> Iterator[Row]:
        """The samples, group by group."""
        prompts = self.prompts.split(self.prompt_lengths.tolist())
        completions = self.completions.split(self.completion_lengths.tolist())
        behaviour = self.behaviour.split(self.completion_lengths.tolist())
        for index, group in enumerate(self.groups.tolist()):
            yield Row(
                group,
                prompts[group],
                completions[index],
                behaviour[index],
                float(self.rewards[index]),
                float(self.advantages[index]),
            )

    def save(self, path: Path) -> Path:
        """Write the tensors."""
        save_file({field.name: getattr(self, field.name).contiguous() for field in fields(self)}, path)
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        return cls(**load_file(path))


def _rewards(workload: Workload, random: np.random.Generator) -> torch.Tensor:
    """Draw 0 or 1 per sample, shape [groups, samples]; the first groups are degenerate, half of them solved, half failed."""
    rewards = (random.random((workload.groups, GROUP_SIZE)) < 0.5).astype(np.float32)
    rewards[:, 0], rewards[:, 1] = 1.0, 0.0
    equal = round(workload.degenerate * workload.groups)
    rewards[:equal] = (np.arange(equal) % 2)[:, None]
    return torch.from_numpy(rewards)


def _advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return group-relative advantages (arXiv 2402.03300) with TRL's epsilon."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + ADVANTAGE_EPS)


def prepare(directory: Path, workload: Workload, seed: int) -> dict[str, float]:
    """Write ``model/``, ``batch.safetensors`` and ``no_degenerate.safetensors``, and return facts about the batch."""
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
    """Return the log-probability of each completion token under a policy close to the model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * DRIFT)
    found = []
    for row in batch.rows():
        ids = torch.cat([row.prompt, row.completion]).unsqueeze(0)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(row.completion) + 1).logits[0, :-1]
        found.append(torch.log_softmax(logits, -1).gather(1, row.completion.unsqueeze(1)).squeeze(1))
    return torch.cat(found)


# The programs.


def side_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the command line that every side takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--batch", type=Path, required=True, help="file of an UpdateBatch")
    parser.add_argument("--threads", type=int, required=True, help="compute threads")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences per forward pass; ours: tokens")
    return parser


class Commands:
    """A side's end of the pipe: commands come on standard input, answers go to standard output, one JSON object a line.

    What libraries print goes to standard error from now on.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        sys.stdout.flush()
        os.dup2(2, 1)

    def serve(self, memory: PeakMemory, update: Callable[[], dict[str, Any]]) -> None:
        """Make an update for each command, and answer with what it returns, its seconds and its peak memory."""
        while self.wait():
            memory.restart()
            start, busy = time.perf_counter(), time.process_time()
            facts = update()
            self.answer(
                seconds=time.perf_counter() - start,
                cpu_seconds=time.process_time() - busy,
                peak_bytes=memory.bytes,
                **facts,
            )

    def wait(self) -> bool:
        """Block until the next command to update; return False when no more will come."""
        return sys.stdin.readline().strip() == UPDATE

    def answer(self, **measured: Any) -> None:  # noqa: ANN401 - numbers and strings
        """Send one line."""
        self._answers.write(json.dumps(measured) + "\n")
